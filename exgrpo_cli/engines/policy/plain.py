"""The reference policy: any causal language model of transformers, AdamW, every rank with all weights and state.

Under several ranks each computes the gradient of its share of the rows, and all step with the same sum.

Axes: tokens = response tokens of a micro-batch, one row after the other.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel

from exgrpo_cli.algo.batching import MiniBatch, TrainingRow, packed_batches, rank_shares
from exgrpo_cli.algo.diagnostics import ObjectiveSums
from exgrpo_cli.algo.logprobs import token_logprobs
from exgrpo_cli.algo.objective import Denominators
from exgrpo_cli.config.sections.objective import ObjectiveSettings
from exgrpo_cli.engines.model.attention import PACKED_CAUSAL, use_attention
from exgrpo_cli.engines.model.causal_lm import CausalLM, split_causal_lm, use_products
from exgrpo_cli.engines.policy.files import PolicyState, load_policy, save_policy
from exgrpo_cli.engines.policy.master_weights import MasterWeights
from exgrpo_cli.engines.policy.optimizer import OptimizerSettings, build_adamw, learning_rate_at, skip_reason
from exgrpo_cli.engines.policy.packing import pack, prove_packing, response_hidden
from exgrpo_cli.engines.policy.training_steps import (
    batch_denominators,
    frozen_copy,
    gather_scores,
    gather_sums,
    loss_and_sums,
    rows_with_gradient,
    split_scores,
)
from exgrpo_cli.engines.protocols import UpdateReport
from exgrpo_cli.ranks.ranks import ALONE, Ranks
from exgrpo_cli.types import TokenScores, TokenSequence


class TorchPolicy:
    """Implements `protocols.Policy`.

    A float32 model is trained as it is; a bfloat16 one computes in bfloat16 and keeps float32 master weights beside it.
    With a KL coefficient above 0 the reference is a frozen copy of `model` as given here: build the policy from the
    initial weights, then `load` a checkpoint.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        temperature: float,
        objective: ObjectiveSettings,
        optimizer: OptimizerSettings,
        micro_batch_tokens: int = 16_384,
        gradient_checkpointing: bool = False,
        ranks: Ranks = ALONE,
    ) -> None:
        self.model = model
        self.is_sharded = False
        self.weight_version = 0
        self.num_updates = 0
        self.consecutive_skips = 0
        use_products(model)
        self._parts = split_causal_lm(model)
        prove_packing(self._parts)
        self._temperature = temperature
        self._objective = objective
        self._settings = optimizer
        self._micro_batch_tokens = micro_batch_tokens
        self._masters = MasterWeights(model)
        self._optimizer = build_adamw(self._masters.tensors(), optimizer)
        self._ranks = ranks
        self._reference = frozen_copy(model) if objective.kl_coefficient else None
        self._checkpointing = gradient_checkpointing
        model.eval()
        if gradient_checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})

    @torch.no_grad()
    def score(self, sequences: Sequence[TokenSequence]) -> list[TokenScores]:
        shares = rank_shares(sequences, self._ranks.world_size)
        own = [sequences[index] for index in shares[self._ranks.rank]]
        scores: dict[int, TokenScores] = {}
        for batch in packed_batches(own, self._micro_batch_tokens):
            rows = [own[index] for index in batch]
            counts = [len(row.response_ids) for row in rows]
            scores.update(zip(batch, split_scores(*self._evaluate(self._parts, rows), counts), strict=True))
        return gather_scores(self._ranks, shares, [scores[index] for index in range(len(own))])

    def update(self, batch: MiniBatch) -> UpdateReport:
        rows = rows_with_gradient(batch, self._objective)
        share = rank_shares([row.sequence for row in rows], self._ranks.world_size)[self._ranks.rank]
        self._optimizer.zero_grad(set_to_none=True)
        # transformers checkpoints a layer in training mode only; dropout is 0, so nothing else changes with it.
        self.model.train(self._checkpointing)
        totals = batch_denominators(batch, self._objective)
        loss, sums = self._accumulate([rows[index] for index in share], batch.clip, totals)
        self.model.eval()
        loss, sums = gather_sums(self._ranks, loss, sums)
        return self._apply(loss, sums, num_tokens=sum(row.num_tokens for row in rows))

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        yield from self.model.state_dict().items()

    def save(self, folder: Path) -> None:
        if not self._ranks.is_main:
            return
        state = PolicyState(
            weight_version=self.weight_version, num_updates=self.num_updates, consecutive_skips=self.consecutive_skips
        )
        save_policy(folder, self.model, self._masters, self._optimizer, state)

    def load(self, folder: Path) -> None:
        state = load_policy(folder, self.model, self._masters, self._optimizer)
        self.weight_version = state.weight_version
        self.num_updates = state.num_updates
        self.consecutive_skips = state.consecutive_skips

    def _evaluate(
        self, parts: CausalLM, rows: Sequence[TokenSequence]
    ) -> tuple[Float[Tensor, " tokens"], Float[Tensor, " tokens"]]:
        """Log-probs and entropies: the one code path of scoring, training and the reference."""
        batch = pack(rows, parts.device)
        hidden = response_hidden(parts, batch)
        return token_logprobs(hidden, parts.head.weight, batch.targets, temperature=self._temperature)

    def _accumulate(
        self, rows: list[TrainingRow], clip: bool, totals: Denominators
    ) -> tuple[float, ObjectiveSums | None]:
        loss, sums = torch.zeros((), device=self._parts.device), None
        for micro in packed_batches([row.sequence for row in rows], self._micro_batch_tokens):
            part, part_sums = self._micro_step([rows[index] for index in micro], clip, totals)
            loss = loss + part
            sums = part_sums if sums is None else sums + part_sums
        return float(loss), sums

    def _micro_step(
        self, rows: list[TrainingRow], clip: bool, totals: Denominators
    ) -> tuple[Float[Tensor, ""], ObjectiveSums]:
        sequences = [row.sequence for row in rows]
        logprobs, entropies = self._evaluate(self._parts, sequences)
        reference_logprobs = None
        if self._reference is not None:
            with torch.no_grad():
                reference_logprobs, _ = self._evaluate(self._reference, sequences)
        loss, sums = loss_and_sums(
            rows, logprobs, entropies, reference_logprobs, clip=clip, objective=self._objective, totals=totals
        )
        # Gradient checkpointing runs the layers once more in here, with whatever attention is set.
        with use_attention(self._parts, PACKED_CAUSAL):
            loss.backward()
        return loss.detach(), sums

    def _apply(self, loss: float, sums: ObjectiveSums | None, *, num_tokens: int) -> UpdateReport:
        learning_rate = learning_rate_at(self._settings, self.num_updates)
        tensors = self._masters.tensors()
        for tensor in tensors:
            # A mini-batch of zero advantages alone still moves weights by Adam's momentum, forward pass or not.
            tensor.grad = torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
        self._ranks.sum([tensor.grad for tensor in tensors if tensor.grad is not None])
        grad_norm = float(torch.nn.utils.clip_grad_norm_(tensors, self._settings.max_grad_norm))
        reason = skip_reason(grad_norm, self._settings)
        self.num_updates += 1
        if reason:
            self.consecutive_skips += 1
        else:
            self.consecutive_skips = 0
            self.weight_version += 1
            for group in self._optimizer.param_groups:
                group["lr"] = learning_rate
            self._optimizer.step()
            self._masters.publish()
        self._optimizer.zero_grad(set_to_none=True)
        return UpdateReport(
            applied=not reason,
            skip_reason=reason,
            grad_norm=grad_norm,
            loss=loss,
            num_tokens=num_tokens,
            metrics={"optim/learning_rate": learning_rate, **(sums.metrics() if sums else {})},
        )

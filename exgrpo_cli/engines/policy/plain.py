"""The reference policy: any causal language model of transformers, AdamW, every rank with all weights and state.

Under several ranks each computes the gradient of its share of the rows, and all step with the same sum.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from exgrpo_cli.algo.batching import MiniBatch
from exgrpo_cli.base.types import TokenScores, TokenSequence
from exgrpo_cli.config.sections.objective import ObjectiveSettings
from exgrpo_cli.config.sections.run import OptimSettings
from exgrpo_cli.engines.model.causal_lm import split_causal_lm
from exgrpo_cli.engines.model.fused_norm import use_fused_norms
from exgrpo_cli.engines.model.product_linear import use_products
from exgrpo_cli.engines.policy.counters import UpdateCounters
from exgrpo_cli.engines.policy.files import load_policy, save_policy
from exgrpo_cli.engines.policy.master_weights import MasterWeights
from exgrpo_cli.engines.policy.micro_batches import Accumulated, MicroBatches, frozen_copy
from exgrpo_cli.engines.policy.optimizer import build_adamw
from exgrpo_cli.engines.policy.packing import packed_scores, prove_packing
from exgrpo_cli.engines.policy.resting import RestingTensors
from exgrpo_cli.engines.protocols import UpdateReport
from exgrpo_cli.ranks.ranks import ALONE, Ranks


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
        optim: OptimSettings,
        gradient_checkpointing: bool = False,
        ranks: Ranks = ALONE,
    ) -> None:
        """Raises InputError where the model is unsuitable (`split_causal_lm`, `prove_packing`)."""
        self.model = model
        self.is_sharded = False
        self.counters = UpdateCounters(optim)
        use_products(model)
        use_fused_norms(model)
        parts = split_causal_lm(model)
        prove_packing(parts)
        self._optim = optim
        self._masters = MasterWeights(model)
        self._optimizer = build_adamw(self._masters.tensors(), optim)
        self._between_updates = RestingTensors(self._update_state, parts.device)
        self._ranks = ranks
        self._micro_batches = MicroBatches(
            parts=parts,
            reference=frozen_copy(model) if objective.kl_coefficient else None,
            objective=objective,
            temperature=temperature,
            token_budget=optim.microbatch_tokens,
            forward=lambda batch: packed_scores(parts, batch, temperature),
            backward=torch.Tensor.backward,
            device=parts.device,
            ranks=ranks,
            lockstep=False,
        )
        self._checkpointing = gradient_checkpointing
        model.eval()
        if gradient_checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})

    @property
    def weight_version(self) -> int:
        """See `protocols.Policy`: updates applied so far."""
        return self.counters.weight_version

    @property
    def consecutive_skips(self) -> int:
        """Updates skipped since the last applied one."""
        return self.counters.consecutive_skips

    def score(self, sequences: Sequence[TokenSequence]) -> list[TokenScores]:
        """See `protocols.Policy.score`."""
        return self._micro_batches.score(sequences)

    def update(self, batch: MiniBatch) -> UpdateReport:
        """See `protocols.Policy.update`."""
        self.counters.progress = batch.progress
        self._between_updates.wake()
        self._optimizer.zero_grad(set_to_none=True)
        # transformers checkpoints a layer in training mode only; dropout is 0, so nothing else changes with it.
        self.model.train(self._checkpointing)
        accumulated = self._micro_batches.accumulate(batch)
        self.model.eval()
        return self._apply(accumulated)

    def rest(self) -> None:
        """See `protocols.Policy.rest`: optimizer state and masters, where `optim.offload_during_rollouts` says so."""
        if self._optim.offload_during_rollouts:
            self._between_updates.rest()

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """See `protocols.Policy.named_weights`."""
        yield from self.model.state_dict().items()

    def save(self, folder: Path) -> None:
        """See `protocols.Policy.save`; rank 0 writes."""
        if self._ranks.is_main:
            save_policy(folder, self.model, self._masters, self._optimizer)
            self.counters.save(folder)

    def load(self, folder: Path) -> None:
        """Raises RunError when `folder` was written for another model."""
        self._between_updates.wake()
        load_policy(folder, self.model, self._masters, self._optimizer)
        self.counters.load(folder)

    def _update_state(self) -> list[Tensor]:
        """Masters of narrower weights, then Adam's moments once the first update has made them."""
        states = [
            self._optimizer.state[tensor] for tensor in self._masters.tensors() if tensor in self._optimizer.state
        ]
        moments = [state[name] for state in states for name in ("exp_avg", "exp_avg_sq")]
        return [*self._masters.copies(), *moments]

    def _apply(self, accumulated: Accumulated) -> UpdateReport:
        tensors = self._masters.tensors()
        for tensor in tensors:
            # A mini-batch of zero advantages alone still moves weights by Adam's momentum, forward pass or not.
            tensor.grad = torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
        self._ranks.sum([tensor.grad for tensor in tensors if tensor.grad is not None])
        grad_norm = float(torch.nn.utils.clip_grad_norm_(tensors, self._optim.grad_clip))
        skipped = self.counters.skip_reason(grad_norm)
        if not skipped:
            for group in self._optimizer.param_groups:
                group["lr"] = self.counters.learning_rate
            self._optimizer.step()
            self._masters.publish()
        self._optimizer.zero_grad(set_to_none=True)
        return self.counters.count(accumulated, grad_norm=grad_norm, skipped=skipped)

"""Scores and accumulated gradients of any number of rows, micro-batch by micro-batch, for every `policy.Stepper`.

Under several ranks each takes its share of the rows, and the results are put together again.

Axes: tokens = response tokens of a micro-batch, one row after the other.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from exgrpo_cli.algo.batching import MiniBatch, TrainingRow, packed_batches, rank_shares
from exgrpo_cli.algo.diagnostics import ObjectiveSums, objective_sums
from exgrpo_cli.algo.objective import Denominators, TokenTargets, denominators, micro_batch_loss
from exgrpo_cli.base.types import TokenScores, TokenSequence
from exgrpo_cli.config.sections.objective import ObjectiveSettings
from exgrpo_cli.engines.causal_lm import CausalLM, to_device, use_attention
from exgrpo_cli.engines.policy.attention import PACKED_CAUSAL, takes_segments
from exgrpo_cli.engines.policy.packing import PackedBatch, pack, packed_scores
from exgrpo_cli.ranks import Ranks

Forward = Callable[[PackedBatch], tuple[Float[Tensor, " tokens"], Float[Tensor, " tokens"]]]
"""Log-probs and entropies of the response tokens of a micro-batch: the one code path of scoring and training."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatches:
    """Runs rows through a policy's model in micro-batches, for scores or for gradients."""

    parts: CausalLM
    reference: CausalLM | None
    """The frozen model of the KL penalty."""
    objective: ObjectiveSettings
    temperature: float
    token_budget: int
    """Most inputs of a micro-batch; a longer row is a micro-batch of its own."""
    forward: Forward
    backward: Callable[[Float[Tensor, ""]], None]
    """Adds the gradient of a micro-batch's share of the loss to those of the weights."""
    ranks: Ranks
    lockstep: bool
    """Whether a pass is a collective, as under ZeRO-3: every rank then runs as many as the busiest, the added ones with
    gradient zero."""

    @torch.no_grad()
    def score(self, sequences: Sequence[TokenSequence]) -> list[TokenScores]:
        """Log-probs and entropies of all rows in their order, on every rank."""
        share = rank_shares(sequences, self.ranks.world_size)[self.ranks.rank]
        own: dict[int, TokenScores] = {}
        for batch in self._passes([sequences[index] for index in share]):
            rows = [sequences[share[index]] for index in batch] or [sequences[0]]
            scores = split_scores(*self.forward(self._pack(rows)), [len(row.response_ids) for row in rows])
            own.update(zip((share[index] for index in batch), scores, strict=False))
        whole = {index: score for part in self.ranks.gather(own) for index, score in part.items()}
        return [whole[index] for index in range(len(sequences))]

    def accumulate(self, batch: MiniBatch) -> tuple[float, int, dict[str, float]]:
        """Add up the gradient of this rank's share of `batch`.

        Returns the loss, the number of response tokens with a gradient, and diagnostics, all over all ranks.
        """
        rows = rows_with_gradient(batch, self.objective)
        share = rank_shares([row.sequence for row in rows], self.ranks.world_size)[self.ranks.rank]
        own = [rows[index] for index in share]
        totals = denominators(self.objective, batch)
        loss, sums = torch.zeros((), device=self.parts.device), None
        # In lockstep with no gradient in any row, one empty pass makes zeros: Adam's momentum still moves the weights.
        for micro in self._passes([row.sequence for row in own], at_least=1):
            if micro:
                part, part_sums = self._loss([own[index] for index in micro], totals, clip=batch.clip)
                sums = part_sums if sums is None else sums + part_sums
                loss = loss + part.detach()
            else:
                part = self._zero_loss(batch)
            # Gradient checkpointing runs the layers once more in here, with whatever attention is set.
            with use_attention(self.parts.body, PACKED_CAUSAL):
                self.backward(part)
        losses, parts = zip(*self.ranks.gather((float(loss), None if sums is None else sums.on_host())), strict=True)
        found = [part for part in parts if part is not None]
        metrics = reduce(add, found).metrics() if found else {}
        return reduce(add, losses), sum(row.num_tokens for row in rows), metrics

    def _passes(self, own: Sequence[TokenSequence], at_least: int = 0) -> list[list[int]]:
        """The micro-batches of this rank's rows; in lockstep with empty ones behind, as many on every rank."""
        batches = packed_batches(own, self.token_budget)
        if not self.lockstep:
            return batches
        busiest = max([at_least, *self.ranks.gather(len(batches))])
        return batches + [[] for _ in range(busiest - len(batches))]

    def _pack(self, rows: Sequence[TokenSequence]) -> PackedBatch:
        return pack(rows, self.parts.device, by_segments=takes_segments(self.parts))

    def _loss(
        self, rows: Sequence[TrainingRow], totals: Denominators, *, clip: bool
    ) -> tuple[Float[Tensor, ""], ObjectiveSums]:
        """A micro-batch's part of the loss of its mini-batch, and of the diagnostics."""
        packed = self._pack([row.sequence for row in rows])
        logprobs, entropies = self.forward(packed)
        reference = None
        if self.reference is not None:
            with torch.no_grad():
                reference, _ = packed_scores(self.reference, packed, self.temperature)
        targets = token_targets(rows, logprobs)
        loss = micro_batch_loss(
            logprobs, entropies, reference, targets, clip=clip, settings=self.objective, denominators=totals
        )
        return loss, objective_sums(logprobs, entropies, reference, targets, clip=clip, settings=self.objective)

    def _zero_loss(self, batch: MiniBatch) -> Float[Tensor, ""]:
        """A pass beside another rank's: every weight takes part, with gradient zero."""
        shortest = min((row.sequence for row in batch.rows), key=lambda sequence: len(sequence.response_ids))
        logprobs, _ = self.forward(self._pack([shortest]))
        return logprobs.sum() * 0.0


def rows_with_gradient(batch: MiniBatch, objective: ObjectiveSettings) -> list[TrainingRow]:
    """All rows, or only those of non-zero advantage where no other term of the loss reads the rest."""
    if objective.entropy_coefficient or objective.kl_coefficient:
        return list(batch.rows)
    imitated = objective.surrogate == "likelihood"
    return [row for row in batch.rows if row.advantage != 0 or (row.replayed and imitated)]


def token_targets(rows: Sequence[TrainingRow], logprobs: Float[Tensor, " tokens"]) -> TokenTargets:
    """Advantage, behaviour log-prob and kind of every token, where and as precise as `logprobs`."""
    counts = [row.num_tokens for row in rows]
    device, dtype = logprobs.device, logprobs.dtype
    return TokenTargets(
        advantages=to_device(np.concatenate([row.token_advantages for row in rows]), device, dtype),
        behaviour_logprobs=to_device(np.concatenate([row.behaviour_logprobs for row in rows]), device, dtype),
        replayed=to_device(np.repeat([row.replayed for row in rows], counts), device),
    )


def split_scores(
    logprobs: Float[Tensor, " tokens"], entropies: Float[Tensor, " tokens"], counts: Sequence[int]
) -> list[TokenScores]:
    """The scores of each row, `counts` tokens long."""
    ends = np.cumsum(counts)[:-1]
    # Both in one copy: each copy to the host waits for the device.
    parts = (np.split(values, ends) for values in torch.stack([logprobs.float(), entropies.float()]).cpu().numpy())
    return [TokenScores(logprobs=own.copy(), entropies=entropy.copy()) for own, entropy in zip(*parts, strict=True)]

"""What every training engine does between a mini-batch and its loss, whatever then steps the optimizer.

Axes: tokens = response tokens of a micro-batch, one row after the other.
"""

import copy
from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel

from exgrpo_cli.algo.batching import MiniBatch, TrainingRow
from exgrpo_cli.algo.diagnostics import ObjectiveSums
from exgrpo_cli.algo.objective import (
    Denominators,
    TokenTargets,
    denominators,
    micro_batch_loss,
    objective_sums,
)
from exgrpo_cli.config.sections.objective import ObjectiveSettings
from exgrpo_cli.engines.model.causal_lm import CausalLM, split_causal_lm
from exgrpo_cli.ranks.ranks import Ranks
from exgrpo_cli.types import TokenScores


def rows_with_gradient(batch: MiniBatch, objective: ObjectiveSettings) -> list[TrainingRow]:
    """All rows, or only those of non-zero advantage where no other term of the loss reads the rest."""
    if objective.entropy_coefficient or objective.kl_coefficient:
        return list(batch.rows)
    return [row for row in batch.rows if row.advantage != 0]


def batch_denominators(batch: MiniBatch, objective: ObjectiveSettings) -> Denominators:
    """Denominators over the whole mini-batch, whichever rank and micro-batch a row goes to."""
    return denominators(
        objective,
        num_rollouts=batch.num_rollouts,
        max_response_tokens=batch.max_response_tokens,
        num_tokens=batch.num_tokens,
        num_fresh_tokens=sum(row.num_tokens for row in batch.rows if not row.replayed),
    )


def token_targets(rows: Sequence[TrainingRow], logprobs: Float[Tensor, " tokens"]) -> TokenTargets:
    """Advantage, behaviour log-prob and kind of every token, where and as precise as `logprobs`."""
    counts = [row.num_tokens for row in rows]
    device, dtype = logprobs.device, logprobs.dtype
    return TokenTargets(
        advantages=torch.from_numpy(np.concatenate([row.token_advantages for row in rows])).to(device, dtype),
        behaviour_logprobs=torch.from_numpy(np.concatenate([row.behaviour_logprobs for row in rows])).to(device, dtype),
        replayed=torch.from_numpy(np.repeat([row.replayed for row in rows], counts)).to(device),
    )


def loss_and_sums(
    rows: Sequence[TrainingRow],
    logprobs: Float[Tensor, " tokens"],
    entropies: Float[Tensor, " tokens"],
    reference_logprobs: Float[Tensor, " tokens"] | None,
    *,
    clip: bool,
    objective: ObjectiveSettings,
    totals: Denominators,
) -> tuple[Float[Tensor, ""], ObjectiveSums]:
    """A micro-batch's part of the loss of its mini-batch, and of the diagnostics."""
    targets = token_targets(rows, logprobs)
    loss = micro_batch_loss(
        logprobs, entropies, reference_logprobs, targets, clip=clip, settings=objective, denominators=totals
    )
    return loss, objective_sums(logprobs, entropies, reference_logprobs, targets, clip=clip, settings=objective)


def split_scores(
    logprobs: Float[Tensor, " tokens"], entropies: Float[Tensor, " tokens"], counts: Sequence[int]
) -> list[TokenScores]:
    """The scores of each row, `counts` tokens long."""
    ends = np.cumsum(counts)[:-1]
    parts = (np.split(values.float().cpu().numpy(), ends) for values in (logprobs, entropies))
    return [TokenScores(logprobs=own.copy(), entropies=entropy.copy()) for own, entropy in zip(*parts, strict=True)]


def gather_scores(ranks: Ranks, shares: Sequence[Sequence[int]], own: Sequence[TokenScores]) -> list[TokenScores]:
    """Scores of all rows in their order, from each rank's scores of its share."""
    scores: dict[int, TokenScores] = {}
    for share, part in zip(shares, ranks.gather(list(own)), strict=True):
        scores.update(zip(share, part, strict=True))
    return [scores[index] for index in range(len(scores))]


def gather_sums(ranks: Ranks, loss: float, sums: ObjectiveSums | None) -> tuple[float, ObjectiveSums | None]:
    """Loss and diagnostics of the whole mini-batch, added in the order of ranks."""
    if ranks.world_size == 1:
        return loss, sums
    total, whole = 0.0, None
    for part, own in ranks.gather((loss, sums.on_host() if sums is not None else None)):
        total += part
        if own is not None:
            whole = own if whole is None else whole + own
    return total, whole


def frozen_copy(model: PreTrainedModel) -> CausalLM:
    """The reference of the KL penalty: the weights as they are now."""
    return split_causal_lm(copy.deepcopy(model).eval().requires_grad_(False))

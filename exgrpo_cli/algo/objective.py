"""The ExGRPO loss, token by token: one function per equation, the sums they are reduced with, and diagnostics.

Axes: tokens = valid (response) tokens of a micro-batch, all rows one after the other; sums = parts of diagnostics that
add up, by name; maxima = largest ratios, fresh and replayed.

With w = pi_theta / pi_behaviour, and w* that of a replayed token (`objective.importance`), to be minimised are:

    fresh token, clipped      -min(w A, clip(w, 1 - eps_low, 1 + eps_high) A)
    ... with a dual clip c    at most c |A| where A < 0
    fresh token, unclipped    -w A
    replayed token, shaped    -f(w*) A,  f(x) = x / (x + beta)
    replayed token, raw       -w* A
    replayed token, clipped   as a fresh one, clipped
    replayed token, likelihood    -log pi_theta
    replayed token, m2po          -w* A, without a gradient where `second_moment_mask` has it

The policy term is S_fresh / D_fresh + c S_replay / D_replay, S the sums of these terms. `joint`: both D count all rows
of the mini-batch, fresh and replayed. `own`: each counts the rows of its own kind.

Source: arXiv 2510.02245, section 4.2; clipping 1707.06347, eq. 7; dual clip 1912.09729; m2po 2510.01161, section 5.2.
Differences to the authors' code: the entropy bonus is taken once per mini-batch, not once per micro-batch, and the
constant denominator counts rollouts, so that `loss_scale` restates the scale on which their clip norm and entropy
coefficient were tuned.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Bool, Float, Float32, Float64
from torch import Tensor

from exgrpo_cli.algo.batching import MiniBatch, TrainingRow
from exgrpo_cli.config.sections.objective import ObjectiveSettings


@dataclass(frozen=True, kw_only=True, slots=True)
class Denominators:
    """Divisors of the sums of a mini-batch: known before its first micro-batch, the same on every rank."""

    policy: float
    """D_fresh: N * max_response_tokens, or the number of valid tokens for "token-mean"; N and tokens of all rows, or
    with "own" of the fresh ones."""
    replayed: float
    """D_replay: the same of all rows, or with "own" of the replayed ones."""
    num_tokens: int
    """Valid tokens of the mini-batch over all ranks: divides the entropy bonus."""
    num_fresh_tokens: int
    """Valid fresh tokens of the mini-batch over all ranks: divides the KL penalty."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenTargets:
    """Constants of each token, known before the update."""

    advantages: Float[Tensor, " tokens"]
    behaviour_logprobs: Float[Tensor, " tokens"]
    replayed: Bool[Tensor, " tokens"]


def denominators(settings: ObjectiveSettings, batch: MiniBatch) -> Denominators:
    """The denominators of a whole mini-batch, whichever rank and micro-batch a row goes to.

    Without rows or tokens the denominator is 1, under a sum of 0.
    """

    def of(rows: int, tokens: int) -> float:
        return max(1.0, float(rows * batch.max_response_tokens if settings.aggregation == "constant" else tokens))

    num_fresh_tokens = sum(row.num_tokens for row in batch.rows if not row.replayed)
    joint = of(batch.num_rollouts, batch.num_tokens)
    own = settings.replay_denominator == "own"
    return Denominators(
        policy=of(batch.num_rollouts - batch.num_replayed, num_fresh_tokens) if own else joint,
        replayed=of(batch.num_replayed, batch.num_tokens - num_fresh_tokens) if own else joint,
        num_tokens=max(1, batch.num_tokens),
        num_fresh_tokens=max(1, num_fresh_tokens),
    )


def clipped_surrogate(
    log_ratio: Float[Tensor, " tokens"], advantages: Float[Tensor, " tokens"], settings: ObjectiveSettings
) -> Float[Tensor, " tokens"]:
    """-min(w A, clip(w, 1 - eps_low, 1 + eps_high) A); with a dual clip c, of no more than w = c where A < 0."""
    clip_low, clip_high = settings.clip_low, settings.clip_high
    if settings.dual_clip:
        # Cut before exp: what has overflowed has no gradient of 0.
        log_ratio = torch.where(advantages < 0, log_ratio.clamp(max=math.log(settings.dual_clip)), log_ratio)
    ratio = log_ratio.exp()
    return -torch.minimum(ratio * advantages, ratio.clamp(1 - clip_low, 1 + clip_high) * advantages)


def unclipped_surrogate(
    log_ratio: Float[Tensor, " tokens"], advantages: Float[Tensor, " tokens"]
) -> Float[Tensor, " tokens"]:
    """-w A."""
    return -log_ratio.exp() * advantages


def shaped_surrogate(
    log_ratio: Float[Tensor, " tokens"], advantages: Float[Tensor, " tokens"], beta: float
) -> Float[Tensor, " tokens"]:
    """-f(w) A with f(w) = w / (w + beta) = sigmoid(log w - log beta).

    The quotient is inf / inf once log w exceeds about 88; the sigmoid saturates at 1 and its gradient at 0.
    """
    return -torch.sigmoid(log_ratio - math.log(beta)) * advantages


REPLAY_SURROGATES: dict[str, Callable[[Tensor, Tensor, Tensor, ObjectiveSettings], Tensor]] = {
    "shaped": lambda logprobs, log_ratio, advantages, s: shaped_surrogate(log_ratio, advantages, s.shaping_beta),
    "raw": lambda logprobs, log_ratio, advantages, s: unclipped_surrogate(log_ratio, advantages),
    "clipped": lambda logprobs, log_ratio, advantages, s: clipped_surrogate(log_ratio, advantages, s),
    # -log pi, whatever the advantage and the ratio.
    "likelihood": lambda logprobs, log_ratio, advantages, s: -logprobs,
    # The mask is in the advantages, by `second_moment_masked`.
    "m2po": lambda logprobs, log_ratio, advantages, s: unclipped_surrogate(log_ratio, advantages),
}
"""By `objective.replay_surrogate`, over (log-probs, log-ratios, advantages) of tokens; those of fresh ones are 0."""


def second_moment_mask(
    log_ratio: Float[np.ndarray, " tokens"], advantages: Float[np.ndarray, " tokens"], most: float
) -> Bool[np.ndarray, " tokens"]:
    """Tokens that M2PO keeps (arXiv 2510.01161, algorithm 1): the mean of (log w)^2 over those of T is at most `most`.

    T are the tokens that a clip could act on: w > 1 and A > 0, or w < 1 and A < 0. Those of T that have the largest
    (log w)^2 go until the mean of the rest is low enough; equal ones together, so that their order decides nothing.
    """
    squares, bound = np.square(log_ratio, dtype=np.float64), log_ratio * advantages > 0
    ordered = np.sort(squares[bound])
    over = ordered.cumsum() > most * np.arange(1, len(ordered) + 1)
    return ~bound | (squares < ordered[over].min(initial=np.inf))


def second_moment_masked(batch: MiniBatch, logprobs: Sequence[Float32[np.ndarray, " _"]], most: float) -> MiniBatch:
    """The mini-batch with weight 0 for those of all its replayed tokens that `second_moment_mask` leaves out.

    `logprobs` are those of its replayed rows, in their order, under the weights that are to be updated.
    """
    replayed = [row for row in batch.rows if row.replayed]
    if not replayed:
        return batch
    log_ratio = [own - row.behaviour_logprobs for own, row in zip(logprobs, replayed, strict=True)]
    advantages = np.concatenate([row.token_advantages for row in replayed])
    kept = second_moment_mask(np.concatenate(log_ratio), advantages, most).astype(np.float32)
    masks = iter(np.split(kept, np.cumsum([row.num_tokens for row in replayed])[:-1]))

    def masked(row: TrainingRow) -> TrainingRow:
        weights = 1.0 if row.importance_weights is None else row.importance_weights
        return replace(row, importance_weights=weights * next(masks))

    return replace(batch, rows=tuple(masked(row) if row.replayed else row for row in batch.rows))


def k3_divergence(
    logprobs: Float[Tensor, " tokens"], reference_logprobs: Float[Tensor, " tokens"]
) -> Float[Tensor, " tokens"]:
    """k3 = r - log r - 1 with r = pi_reference / pi_theta: non-negative, unbiased for KL(pi_theta, pi_reference)."""
    log_ratio = reference_logprobs - logprobs
    return log_ratio.exp() - log_ratio - 1


def policy_terms(
    logprobs: Float[Tensor, " tokens"], targets: TokenTargets, *, clip: bool, settings: ObjectiveSettings
) -> Float[Tensor, " tokens"]:
    """The surrogate of every token, fresh and replayed each by its own equation."""
    log_ratio = logprobs - targets.behaviour_logprobs
    # Masked before exp: an overflow among the tokens of the other kind, or of no advantage, times zero would be NaN.
    idle = targets.advantages == 0
    fresh_log_ratio = log_ratio.masked_fill(targets.replayed | idle, 0.0)
    if clip:
        fresh = clipped_surrogate(fresh_log_ratio, targets.advantages, settings)
    else:
        fresh = unclipped_surrogate(fresh_log_ratio, targets.advantages)
    replayed_log_ratio = log_ratio.masked_fill(~targets.replayed | idle, 0.0)
    replayed = REPLAY_SURROGATES[settings.surrogate](logprobs, replayed_log_ratio, targets.advantages, settings)
    return torch.where(targets.replayed, replayed, fresh)


def micro_batch_loss(
    logprobs: Float[Tensor, " tokens"],
    entropies: Float[Tensor, " tokens"],
    reference_logprobs: Float[Tensor, " tokens"] | None,
    targets: TokenTargets,
    *,
    clip: bool,
    settings: ObjectiveSettings,
    denominators: Denominators,
) -> Float[Tensor, ""]:
    """This micro-batch's share of the mini-batch loss: shares add up to it however the mini-batch is split.

    loss_scale * (S_fresh / D_fresh + c S_replay / D_replay) - c_H * sum(H) / tokens + c_KL * sum(k3) / fresh tokens.
    `reference_logprobs` is None only where the KL coefficient is 0.
    """
    terms = policy_terms(logprobs, targets, clip=clip, settings=settings)
    # Both sums over D_fresh; the factor of replayed terms is exactly 1 where they share it and c is 1.
    factor = settings.replay_weight * (denominators.policy / denominators.replayed)
    terms = torch.where(targets.replayed, terms * factor, terms)
    loss = settings.loss_scale * terms.sum() / denominators.policy
    if settings.entropy_coefficient:
        loss = loss - settings.entropy_coefficient * entropies.sum() / denominators.num_tokens
    if settings.kl_coefficient:
        assert reference_logprobs is not None
        divergence = k3_divergence(logprobs, torch.where(targets.replayed, logprobs.detach(), reference_logprobs))
        loss = loss + settings.kl_coefficient * divergence.sum() / denominators.num_fresh_tokens
    return loss


@dataclass(frozen=True, kw_only=True, slots=True)
class ObjectiveSums:
    """Additive parts of a mini-batch's ratios, effective sample size, clip fractions and entropy.

    In float64, in which ratios of e^88 and their squares stay finite; all sums of a micro-batch in one vector, so that
    a device is read once per update and ranks reduce them in one call.
    """

    names: tuple[str, ...]
    """Metrics of the sums; those without a meaning are left out."""
    sums: Float64[Tensor, " sums"]
    maxima: Float64[Tensor, " maxima"]

    def __add__(self, other: "ObjectiveSums") -> "ObjectiveSums":
        return replace(self, sums=self.sums + other.sums, maxima=torch.maximum(self.maxima, other.maxima))

    def on_host(self) -> "ObjectiveSums":
        """The same in main memory, to be sent to another process."""
        return replace(self, sums=self.sums.cpu(), maxima=self.maxima.cpu())

    def metrics(self) -> dict[str, float]:
        """Keys of the step's journal; those of tokens that the mini-batch does not have are absent."""
        total = dict(zip(self.names, self.sums.tolist(), strict=True))
        largest_fresh, largest_replayed = self.maxima.tolist()
        fresh, replayed = total["fresh"], total["replayed"]
        metrics = {}
        if fresh + replayed:
            metrics["policy/entropy"] = total["entropy"] / (fresh + replayed)
        if fresh:
            metrics["policy/ratio_fresh"] = total["ratio_fresh"] / fresh
            metrics["policy/ratio_fresh_max"] = largest_fresh
            if "clipped" in total:
                metrics["policy/clip_fraction"] = total["clipped"] / fresh
            if "divergence" in total:
                metrics["policy/kl"] = total["divergence"] / fresh
        if replayed:
            metrics["policy/ratio_replay"] = total["ratio_replay"] / replayed
            metrics["policy/ratio_replay_max"] = largest_replayed
            if "clipped_replay" in total:
                metrics["policy/clip_fraction_replay"] = total["clipped_replay"] / replayed
            # (sum w)^2 / (n sum w^2): 1 when all replayed tokens weigh the same, 1/n when one outweighs the rest.
            if total["square_replay"]:
                metrics["replay/ess"] = total["ratio_replay"] ** 2 / (replayed * total["square_replay"])
        return metrics


def objective_sums(
    logprobs: Float[Tensor, " tokens"],
    entropies: Float[Tensor, " tokens"],
    reference_logprobs: Float[Tensor, " tokens"] | None,
    targets: TokenTargets,
    *,
    clip: bool,
    settings: ObjectiveSettings,
) -> ObjectiveSums:
    """The sums of one micro-batch, of what `micro_batch_loss` is given.

    A token counts as clipped where its gradient is zero: w > 1 + eps_high with A > 0, or w < 1 - eps_low or w > c (the
    dual clip) with A < 0.
    """
    # A Mac's GPU has no float64.
    place = torch.device("cpu") if logprobs.device.type == "mps" else logprobs.device
    parts = (logprobs.detach(), entropies.detach(), targets.behaviour_logprobs, targets.replayed, targets.advantages)
    logprobs, entropies, behaviour, replayed, advantages = (each.to(place) for each in parts)
    ratio = (logprobs - behaviour).double().exp()
    fresh_ratio, replayed_ratio = ratio.masked_fill(replayed, 0.0), ratio.masked_fill(~replayed, 0.0)
    sums = {
        "fresh": (~replayed).sum(),
        "replayed": replayed.sum(),
        "ratio_fresh": fresh_ratio.sum(),
        "ratio_replay": replayed_ratio.sum(),
        "square_replay": replayed_ratio.square().sum(),
        "entropy": entropies.sum(dtype=torch.float64),
    }
    too_small = (ratio < 1 - settings.clip_low) | (ratio > (settings.dual_clip or math.inf))
    cut_off = ((ratio > 1 + settings.clip_high) & (advantages > 0)) | (too_small & (advantages < 0))
    if clip:
        sums["clipped"] = (cut_off & ~replayed).sum()
    if settings.surrogate == "clipped":
        sums["clipped_replay"] = (cut_off & replayed).sum()
    if reference_logprobs is not None:
        divergence = k3_divergence(logprobs, reference_logprobs.to(place))
        sums["divergence"] = divergence.masked_fill(replayed, 0.0).sum(dtype=torch.float64)
    return ObjectiveSums(
        names=tuple(sums),
        sums=torch.stack([value.double() for value in sums.values()]),
        maxima=torch.stack([fresh_ratio.amax(), replayed_ratio.amax()]),
    )

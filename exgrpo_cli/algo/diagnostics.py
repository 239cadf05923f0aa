"""Importance ratios, effective sample size, clip fraction and entropy of a mini-batch, from sums of its micro-batches.

Axes: tokens = valid tokens of a micro-batch; sums = what adds up, by name; maxima = largest ratios, fresh and replayed.

All sums of a micro-batch are one vector, so that a device is read once per update and ranks reduce them in one call.
"""

import math
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from exgrpo_cli.algo.objective import TokenTargets, k3_divergence
from exgrpo_cli.config.sections.objective import ObjectiveSettings


@dataclass(frozen=True, kw_only=True, slots=True)
class ObjectiveSums:
    """Additive parts of a mini-batch's diagnostics, in float64: ratios of e^88 and their squares stay finite."""

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
    logprobs, entropies, replayed, advantages = (
        logprobs.detach(),
        entropies.detach(),
        targets.replayed,
        targets.advantages,
    )
    ratio = (logprobs - targets.behaviour_logprobs).double().exp()
    fresh_ratio, replayed_ratio = ratio.masked_fill(replayed, 0.0), ratio.masked_fill(~replayed, 0.0)
    sums = {
        "fresh": (~replayed).sum(),
        "replayed": replayed.sum(),
        "ratio_fresh": fresh_ratio.sum(),
        "ratio_replay": replayed_ratio.sum(),
        "square_replay": replayed_ratio.square().sum(),
        "entropy": entropies.detach().sum(dtype=torch.float64),
    }
    too_small = (ratio < 1 - settings.clip_low) | (ratio > (settings.dual_clip or math.inf))
    cut_off = ((ratio > 1 + settings.clip_high) & (advantages > 0)) | (too_small & (advantages < 0))
    if clip:
        sums["clipped"] = (cut_off & ~replayed).sum()
    if settings.surrogate == "clipped":
        sums["clipped_replay"] = (cut_off & replayed).sum()
    if reference_logprobs is not None:
        divergence = k3_divergence(logprobs, reference_logprobs)
        sums["divergence"] = divergence.masked_fill(replayed, 0.0).sum(dtype=torch.float64)
    return ObjectiveSums(
        names=tuple(sums),
        sums=torch.stack([value.double() for value in sums.values()]),
        maxima=torch.stack([fresh_ratio.amax(), replayed_ratio.amax()]),
    )

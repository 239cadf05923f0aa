"""Importance ratios, effective sample size, clip fraction and entropy of a mini-batch, from sums of its micro-batches.

Axes: tokens = valid tokens of a micro-batch; sums = the entries of SUM_KEYS; maxima = the entries of MAX_KEYS.

All sums of a micro-batch are one vector, so that a device is read once per update and ranks reduce them in one call.
"""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Float64
from torch import Tensor

SUM_KEYS = (
    "fresh",
    "replayed",
    "ratio_fresh",
    "ratio_replay",
    "square_replay",
    "clipped",
    "entropy",
    "divergence",
    "clipped_replay",
)
MAX_KEYS = ("ratio_fresh", "ratio_replay")
ClipBounds = tuple[float, float, float]
"""1 - eps_low, 1 + eps_high, and the dual clip c."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ObjectiveSums:
    """Additive parts of a mini-batch's diagnostics, in float64: ratios of e^88 and their squares stay finite."""

    sums: Float64[Tensor, " sums"]
    maxima: Float64[Tensor, " maxima"]
    clip: bool
    """Whether the clip fraction has a meaning."""
    reference: bool
    """Whether the divergence has a meaning."""
    clip_replay: bool = False
    """Whether the clip fraction of replayed tokens has a meaning."""

    @classmethod
    def of_tokens(
        cls,
        *,
        log_ratio: Float[Tensor, " tokens"],
        entropies: Float[Tensor, " tokens"],
        advantages: Float[Tensor, " tokens"],
        replayed: Bool[Tensor, " tokens"],
        clip_bounds: ClipBounds | None,
        divergence: Float[Tensor, " tokens"] | None,
        replay_clip_bounds: ClipBounds | None = None,
    ) -> "ObjectiveSums":
        """Sums over the tokens of one micro-batch.

        A token counts as clipped where its gradient is zero: w > 1 + eps_high with A > 0, or w < 1 - eps_low or w > c
        with A < 0.
        """
        ratio = log_ratio.double().exp()
        fresh_ratio, replayed_ratio = ratio.masked_fill(replayed, 0.0), ratio.masked_fill(~replayed, 0.0)
        zero = ratio.new_zeros(())

        def num_clipped(bounds: ClipBounds | None, kind: Bool[Tensor, " tokens"]) -> Float64[Tensor, ""]:
            if bounds is None:
                return zero
            low, high, dual = bounds
            outside = ((ratio > high) & (advantages > 0)) | (((ratio < low) | (ratio > dual)) & (advantages < 0))
            return (outside & kind).sum().double()

        sums = (
            (~replayed).sum().double(),
            replayed.sum().double(),
            fresh_ratio.sum(),
            replayed_ratio.sum(),
            replayed_ratio.square().sum(),
            num_clipped(clip_bounds, ~replayed),
            entropies.sum(dtype=torch.float64),
            zero if divergence is None else divergence.masked_fill(replayed, 0.0).sum(dtype=torch.float64),
            num_clipped(replay_clip_bounds, replayed),
        )
        maxima = (fresh_ratio.amax(), replayed_ratio.amax()) if len(ratio) else (zero, zero)
        return cls(
            sums=torch.stack(sums),
            maxima=torch.stack(maxima),
            clip=clip_bounds is not None,
            reference=divergence is not None,
            clip_replay=replay_clip_bounds is not None,
        )

    def __add__(self, other: "ObjectiveSums") -> "ObjectiveSums":
        return ObjectiveSums(
            sums=self.sums + other.sums,
            maxima=torch.maximum(self.maxima, other.maxima),
            clip=self.clip,
            reference=self.reference,
            clip_replay=self.clip_replay,
        )

    def on_host(self) -> "ObjectiveSums":
        """The same in main memory, to be sent to another process."""
        return replace(self, sums=self.sums.cpu(), maxima=self.maxima.cpu())

    def metrics(self) -> dict[str, float]:
        """Keys of the step's journal; those of tokens that the mini-batch does not have are absent."""
        total = dict(zip(SUM_KEYS, self.sums.tolist(), strict=True))
        largest = dict(zip(MAX_KEYS, self.maxima.tolist(), strict=True))
        fresh, replayed = total["fresh"], total["replayed"]
        metrics = {}
        if fresh + replayed:
            metrics["policy/entropy"] = total["entropy"] / (fresh + replayed)
        if fresh:
            metrics["policy/ratio_fresh"] = total["ratio_fresh"] / fresh
            metrics["policy/ratio_fresh_max"] = largest["ratio_fresh"]
            if self.clip:
                metrics["policy/clip_fraction"] = total["clipped"] / fresh
            if self.reference:
                metrics["policy/kl"] = total["divergence"] / fresh
        if replayed:
            metrics["policy/ratio_replay"] = total["ratio_replay"] / replayed
            metrics["policy/ratio_replay_max"] = largest["ratio_replay"]
            if self.clip_replay:
                metrics["policy/clip_fraction_replay"] = total["clipped_replay"] / replayed
            # (sum w)^2 / (n sum w^2): 1 when all replayed tokens weigh the same, 1/n when one outweighs the rest.
            if total["square_replay"]:
                metrics["replay/ess"] = total["ratio_replay"] ** 2 / (replayed * total["square_replay"])
        return metrics

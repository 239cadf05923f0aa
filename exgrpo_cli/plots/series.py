"""Drawing one metric over the steps: the raw values, and their moving average where they are many and noisy."""

from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Float64, Int64

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SMOOTHED_FROM = 40
"""Values from which on a moving average is drawn over them."""
WINDOWS_PER_RUN = 20
FEW = 3
"""Fewer values than this are drawn as dots: a line through them would be invisible or mislead."""


def draw_series(
    axes: "Axes",
    steps: Int64[np.ndarray, " rows"],
    values: Float64[np.ndarray, " rows"],
    *,
    colour: str,
    label: str | None = None,
    smooth: bool = True,
    linestyle: str = "-",
) -> None:
    """Draw the finite values; many of them pale, with a centred moving average over 1/20 of the run on top."""
    known = np.isfinite(values)
    x, y = steps[known], values[known]
    marker = "o" if 0 < len(x) < FEW else None
    if not smooth or len(x) < SMOOTHED_FROM:
        axes.plot(x, y, color=colour, label=label, marker=marker, linestyle=linestyle, clip_on=marker is None)
        return
    axes.plot(x, y, color=colour, alpha=0.28, linewidth=0.7)
    axes.plot(x, moving_average(y, max(3, len(x) // WINDOWS_PER_RUN)), color=colour, label=label, linestyle=linestyle)


def moving_average(values: Float64[np.ndarray, " rows"], window: int) -> Float64[np.ndarray, " rows"]:
    """Mean over up to `window` values around each one; at the ends over those that there are."""
    half = window // 2
    sums = np.concatenate([[0.0], np.cumsum(values)])
    low = np.maximum(np.arange(len(values)) - half, 0)
    high = np.minimum(np.arange(len(values)) + half + 1, len(values))
    return (sums[high] - sums[low]) / (high - low)

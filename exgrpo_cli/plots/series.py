"""Drawing one metric over the steps: the raw values, and their moving average where they are many and noisy."""

from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Float64, Int64

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SMOOTHED_FROM = 40
"""Values from which on a moving average is drawn over them."""
WINDOWS_PER_RUN = 20
FEW = 3
"""Fewer values than this are drawn as dots: a line through them would suggest steps that were not measured."""


def draw_series(
    axes: "Axes",
    steps: Int64[np.ndarray, " rows"],
    values: Float64[np.ndarray, " rows"],
    *,
    colour: str,
    label: str | None = None,
    smooth: bool = True,
    linestyle: str = "-",
) -> int:
    """Draw the finite values; many of them thin, with a centred moving average over 1/20 of the run as a thick line.

    Returns the steps that the average is over, 0 where there is none. Turn `smooth` off for maxima: the average of a
    spike is a rectangle that was not measured.
    """
    known = np.isfinite(values)
    x, y = steps[known], values[known]
    if len(x) < FEW:
        axes.plot(x, y, color=colour, label=label, marker="o", linestyle="none", clip_on=False)
        return 0
    if len(x) < SMOOTHED_FROM:
        axes.plot(x, y, color=colour, label=label, linestyle=linestyle)
        return 0
    if not smooth:
        axes.plot(x, y, color=colour, label=label, linestyle=linestyle, linewidth=0.7)
        return 0
    half = max(3, len(x) // WINDOWS_PER_RUN) // 2
    axes.plot(x, y, color=colour, alpha=0.28, linewidth=0.7)
    axes.plot(x, moving_average(y, 2 * half), color=colour, label=label, linestyle=linestyle)
    return 2 * half + 1


def explain_smoothing(figure: "Figure", window: int) -> None:
    """Say below the figure what thin and thick lines are, where an average was drawn."""
    if window:
        figure.supxlabel(f"thin: each step; thick: mean over {window} steps", fontsize=6.5, color="#5A5A5A")


def moving_average(values: Float64[np.ndarray, " rows"], window: int) -> Float64[np.ndarray, " rows"]:
    """Mean over up to `window` values around each one; at the ends over those that there are."""
    half = window // 2
    sums = np.concatenate([[0.0], np.cumsum(values)])
    low = np.maximum(np.arange(len(values)) - half, 0)
    high = np.minimum(np.arange(len(values)) + half + 1, len(values))
    return (sums[high] - sums[low]) / (high - low)

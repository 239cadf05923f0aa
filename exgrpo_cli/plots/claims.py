"""What studies say about claims: the effects of each with their intervals, against what was asked of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from textwrap import wrap
from typing import TYPE_CHECKING

import numpy as np

from exgrpo_cli.plots.style import BLACK, BLUE, FULL_WIDTH, GREY, VERMILION, new_figure, styled

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LABEL_COLUMNS = 52
"""Characters of a claim's title to a line."""
COLOURS = {"supported": BLUE, "contradicted": VERMILION, "undecided": GREY}


@dataclass(frozen=True, kw_only=True, slots=True)
class ClaimEffect:
    """One contrast of a claim that has been run."""

    title: str
    """The claim; empty where it is that of the row above."""
    contrast: str
    """What is compared, in words."""
    mean: float
    low: float
    high: float
    """95 % interval."""
    threshold: float
    """What the effect must exceed; not 0."""
    verdict: str
    """Of the whole claim, one of `COLOURS`."""


def claims_figure(claims: Sequence[ClaimEffect]) -> "Figure | None":
    """A row a contrast in the order given: effect with its interval, and a bar at its threshold; None without any.

    Each in units of the size of its threshold, since endpoints have unlike ones; beside it the effect as it is.
    """
    if not claims:
        return None
    with styled():
        labels = ["\n".join([*wrap(claim.title, LABEL_COLUMNS), claim.contrast]) for claim in claims]
        heights = np.array([label.count("\n") + 1.6 for label in labels])
        rows = np.cumsum(heights) - heights / 2
        figure, (axes,) = new_figure(width=FULL_WIDTH, height=0.7 + 0.14 * float(heights.sum()))
        axes.axvline(0.0, color=GREY, linewidth=0.9, linestyle=(0, (4, 2)), zorder=1)
        for row, claim in zip(rows, claims, strict=True):
            colour, unit = COLOURS[claim.verdict], abs(claim.threshold)
            spread = np.array([[claim.mean - claim.low], [claim.high - claim.mean]]).clip(0) / unit
            x, y = [claim.mean / unit], [row]
            axes.errorbar(x, y, xerr=spread, color=colour, marker="D", markersize=4.5, elinewidth=1.4, capsize=3)
            axes.plot([claim.threshold / unit] * 2, [row - 0.8, row + 0.8], color=BLACK, linewidth=1.6)
            numbers = f"{claim.mean:+.3f} [{claim.low:.3f}, {claim.high:.3f}]"
            beside = f"{claim.verdict}\n{numbers}" if claim.title else numbers
            axes.annotate(
                beside,
                (1.0, row),
                xycoords=("axes fraction", "data"),
                xytext=(6, 0),
                textcoords="offset points",
                va="center",
                color=colour,
                annotation_clip=False,
            )
        axes.set_yticks(rows, labels)
        axes.set_ylim(float(heights.sum()), 0.0)
        axes.tick_params(axis="y", length=0)
        axes.grid(visible=False, axis="y")
        axes.margins(x=0.08)
        axes.set_xlabel(
            "effect in units of the smallest of interest\n(mean, 95 % interval; the bar is what it must exceed)"
        )
        return figure

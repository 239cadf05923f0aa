"""Figures of a study: arms compared by their final score, and their learning curves with bands over the seeds."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from exgrpo_cli.plots.series import FEW
from exgrpo_cli.plots.style import (
    BLACK,
    CYCLE,
    FULL_WIDTH,
    GREY,
    new_figure,
    say_nothing_to_show,
    step_axis,
    styled,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ROW_HEIGHT = 0.34
BAND_ALPHA = 0.15
LINESTYLES = ("-", "--", ":", "-.")


@dataclass(frozen=True, kw_only=True, slots=True)
class ArmResult:
    """One arm's final score."""

    name: str
    mean: float
    low: float
    high: float
    """95 % interval of the mean over seeds; equal to the mean where one seed allows none."""
    seeds: Sequence[float]
    """One final score per seed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ArmCurve:
    """One arm's score over the steps; NaN where it was not measured."""

    name: str
    steps: Sequence[int]
    mean: Sequence[float]
    low: Sequence[float]
    high: Sequence[float]
    """Band over the seeds."""


def arm_comparison(arms: Sequence[ArmResult], *, baseline: str, measure: str) -> "Figure":
    """One row per arm in the order given: mean with its interval, single seeds as dots, the baseline's mean as a line.

    `measure` names the horizontal axis, for example "held-out pass@1".
    """
    with styled():
        figure, (axes,) = new_figure(width=5.0, height=0.9 + ROW_HEIGHT * max(len(arms), 1))
        if not arms:
            say_nothing_to_show(axes, "no arm has finished yet")
            return figure
        colours = _colours([arm.name for arm in arms], baseline)
        reference = next((arm.mean for arm in arms if arm.name == baseline), None)
        if reference is not None:
            axes.axvline(reference, color=GREY, linewidth=0.9, linestyle=(0, (4, 2)), zorder=1)
        for row, arm in enumerate(arms):
            _arm_row(axes, row, arm, colours[arm.name])
        names = [f"{arm.name} (baseline)" if arm.name == baseline else arm.name for arm in arms]
        axes.set_yticks(range(len(arms)), names)
        axes.set_ylim(len(arms) - 0.4, -0.6)
        axes.tick_params(axis="y", length=0)
        axes.grid(visible=False, axis="y")
        axes.margins(x=0.08)
        most = max(len(arm.seeds) for arm in arms)
        axes.set_xlabel(f"{measure} (mean, 95 % interval, {most} {'seed' if most == 1 else 'seeds'})")
        return figure


def arm_curves(curves: Sequence[ArmCurve], *, baseline: str, measure: str) -> "Figure":
    """Each arm's mean over the steps with the band of its seeds; the baseline in black."""
    with styled():
        figure, (axes,) = new_figure(width=FULL_WIDTH, height=3.0)
        last_step = max((step for curve in curves for step in curve.steps), default=0)
        if not last_step:
            say_nothing_to_show(axes, "no step has finished yet")
            return figure
        colours = _colours([curve.name for curve in curves], baseline)
        for number, curve in enumerate(curves):
            _curve(axes, curve, colours[curve.name], LINESTYLES[number // len(CYCLE) % len(LINESTYLES)])
        axes.set_ylabel(measure)
        step_axis(axes, last_step)
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
        return figure


def _colours(names: Sequence[str], baseline: str) -> dict[str, str]:
    """Black for the baseline, the cycle without black for the others."""
    others = [name for name in names if name != baseline]
    palette = [colour for colour in CYCLE if colour != BLACK]
    return {baseline: BLACK} | {name: palette[number % len(palette)] for number, name in enumerate(others)}


def _arm_row(axes: "Axes", row: int, arm: ArmResult, colour: str) -> None:
    seeds = np.asarray(arm.seeds, dtype=np.float64)
    axes.plot(
        seeds,
        np.full(len(seeds), row + 0.22),
        linestyle="none",
        marker="o",
        markersize=3.0,
        markerfacecolor="none",
        markeredgecolor=colour,
        markeredgewidth=0.8,
        alpha=0.8,
    )
    spread = np.array([[arm.mean - arm.low], [arm.high - arm.mean]]).clip(0)
    axes.errorbar([arm.mean], [row], xerr=spread, color=colour, marker="D", markersize=4.5, elinewidth=1.4, capsize=3)


def _curve(axes: "Axes", curve: ArmCurve, colour: str, linestyle: str) -> None:
    steps, mean = np.asarray(curve.steps), np.asarray(curve.mean, dtype=np.float64)
    low, high = np.asarray(curve.low, dtype=np.float64), np.asarray(curve.high, dtype=np.float64)
    known = np.isfinite(mean)
    marker = "o" if known.sum() < FEW else None
    axes.plot(steps[known], mean[known], color=colour, linestyle=linestyle, marker=marker, label=curve.name)
    banded = known & np.isfinite(low) & np.isfinite(high)
    axes.fill_between(steps[banded], low[banded], high[banded], color=colour, alpha=BAND_ALPHA, linewidth=0)

"""Accuracy by benchmark with 95 % intervals, several models side by side."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from exgrpo_cli.plots.style import CYCLE, FULL_WIDTH, SINGLE_COLUMN, new_figure, styled

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MARKERS = ("o", "s", "D", "^", "v", "P", "X")
SPREAD = 0.6
"""Share of a benchmark's slot that its models take up."""
INCHES_PER_POINT = 0.22


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchmarkScore:
    """One model's score on one benchmark; shares from 0 to 1."""

    model: str
    benchmark: str
    """Label on the axis."""
    value: float
    low: float
    high: float


def accuracy_by_benchmark(scores: Sequence[BenchmarkScore]) -> "Figure":
    """One point with its interval per model and benchmark, benchmarks and models in the order they first come up.

    A model told apart by marker as well as colour stays so in print. Raises ValueError without scores.
    """
    if not scores:
        raise ValueError("There are no scores to draw.")
    benchmarks = list(dict.fromkeys(score.benchmark for score in scores))
    models = list(dict.fromkeys(score.model for score in scores))
    width = min(FULL_WIDTH, max(SINGLE_COLUMN, 1.2 + INCHES_PER_POINT * len(models) * len(benchmarks)))
    with styled():
        figure, (axes,) = new_figure(width=width, height=2.4)
        for number, model in enumerate(models):
            own = [score for score in scores if score.model == model]
            offset = SPREAD * ((number + 0.5) / len(models) - 0.5)
            axes.errorbar(
                [benchmarks.index(score.benchmark) + offset for score in own],
                [100 * score.value for score in own],
                yerr=[[100 * (s.value - s.low) for s in own], [100 * (s.high - s.value) for s in own]],
                linestyle="none",
                marker=MARKERS[number % len(MARKERS)],
                color=CYCLE[number % len(CYCLE)],
                elinewidth=1.0,
                capsize=2.0,
                label=model,
            )
        axes.set_xticks(range(len(benchmarks)), benchmarks, rotation=30 if len(benchmarks) > 4 else 0)
        axes.set_xlim(-0.6, len(benchmarks) - 0.4)
        axes.set_ylim(0, min(100.0, 5.0 + max(100 * score.high for score in scores)))
        axes.set_ylabel("accuracy (%), 95 % interval")
        axes.grid(axis="x", visible=False)
        figure.legend(loc="outside upper center", ncols=min(len(models), 3))
        return figure

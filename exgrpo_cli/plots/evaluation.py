"""Figures of evaluations: accuracy by benchmark and by level of the questions."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from exgrpo_cli.plots.style import CYCLE, FULL_WIDTH, MARKERS, SINGLE_COLUMN, new_figure, styled

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SPREAD = 0.62
"""Share of a benchmark's slot that its models take up."""
INCHES_PER_POINT = 0.22
INCHES_PER_CHARACTER = 0.06
"""Of a tick or legend label, a little more than it takes."""
AXES_HEIGHT = 2.1
SHADE = "#F5F5F5"


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchmarkScore:
    """One model's score on one benchmark; shares from 0 to 1."""

    model: str
    benchmark: str
    """Label on the axis; may have two lines."""
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
    columns = _legend_columns(models, width)
    slanted = _longest_line(benchmarks) * INCHES_PER_CHARACTER > (width - 0.6) / len(benchmarks)
    height = AXES_HEIGHT + 0.15 * -(-len(models) // columns)
    height += 0.6 * INCHES_PER_CHARACTER * _longest_line(benchmarks) if slanted else 0.3
    with styled():
        figure, (axes,) = new_figure(width=width, height=height)
        for place in range(1, len(benchmarks), 2):
            axes.axvspan(place - 0.5, place + 0.5, color=SHADE, linewidth=0, zorder=0)
        for number, model in enumerate(models):
            _draw_model(axes, number, len(models), [score for score in scores if score.model == model], benchmarks)
        _benchmark_axis(axes, benchmarks, slanted=slanted)
        top = 5.0 + max(100 * score.high for score in scores)
        axes.set_ylim(0, min(100.0, top))
        axes.set_ylabel("accuracy (%)")
        axes.grid(axis="x", visible=False)
        _legend(figure, axes, columns)
        return figure


@dataclass(frozen=True, kw_only=True, slots=True)
class LevelScores:
    """Accuracy by level of difficulty; shares from 0 to 1."""

    label: str
    levels: Sequence[str]
    value: Sequence[float]
    low: Sequence[float]
    high: Sequence[float]
    """Ends of the 95 % intervals; NaN where an older version stored none."""
    questions: Sequence[int]


def level_scores(results: Mapping[str, Mapping[str, Any]], titles: Mapping[str, str]) -> list[LevelScores]:
    """The `by_level` of each benchmark's object of `results.json`, where its questions have several levels."""
    scores = []
    for name, result in results.items():
        by_level = result.get("by_level") or {}
        levels = sorted(by_level, key=_numbers_first)
        if len(levels) > 1:
            scores.append(
                LevelScores(
                    label=titles.get(name, name),
                    levels=levels,
                    value=[by_level[level]["avg_at_k"] for level in levels],
                    low=[by_level[level].get("low", math.nan) for level in levels],
                    high=[by_level[level].get("high", math.nan) for level in levels],
                    questions=[int(by_level[level]["questions"]) for level in levels],
                )
            )
    return scores


def accuracy_by_level(scores: Sequence[LevelScores]) -> "Figure":
    """Accuracy with 95 % intervals against the level of the questions; of one set with the number of questions."""
    with styled():
        figure, (axes,) = new_figure(width=SINGLE_COLUMN + 0.8, height=2.7)
        levels = sorted({level for score in scores for level in score.levels}, key=_numbers_first)
        for number, score in enumerate(scores):
            value, low, high = (100 * np.asarray(ends) for ends in (score.value, score.low, score.high))
            # Of several sets each a little to the right of the one before: their intervals stay apart.
            aside = 0.06 * (number - (len(scores) - 1) / 2)
            axes.errorbar(
                [levels.index(level) + aside for level in score.levels],
                value,
                yerr=[value - low, high - value],
                capsize=2,
                color=CYCLE[number % len(CYCLE)],
                marker=MARKERS[(number + number // len(CYCLE)) % len(MARKERS)],
                linestyle=":",
                label=score.label,
            )
        counts = dict(zip(scores[0].levels, scores[0].questions, strict=True)) if len(scores) == 1 else {}
        axes.set_xticks(range(len(levels)), [f"{level}\n({counts[level]})" if counts else level for level in levels])
        axes.set_xlabel("level (questions)" if counts else "level")
        axes.set_ylabel("accuracy (%, 95 % intervals)")
        axes.set_ylim(0, 100)
        axes.grid(visible=False, axis="x")
        axes.legend(loc="best")
        return figure


def _numbers_first(level: str) -> tuple[int, float, str]:
    """Sort key: levels that are numbers by their value, then words."""
    try:
        return (0, float(level), level)
    except ValueError:
        return (1, 0.0, level)


def _draw_model(
    axes: "Axes", number: int, num_models: int, own: Sequence[BenchmarkScore], benchmarks: Sequence[str]
) -> None:
    offset = SPREAD * ((number + 0.5) / num_models - 0.5)
    axes.errorbar(
        [benchmarks.index(score.benchmark) + offset for score in own],
        [100 * score.value for score in own],
        yerr=[[100 * (s.value - s.low) for s in own], [100 * (s.high - s.value) for s in own]],
        linestyle="none",
        # After a round of colours the markers are shifted: no two models have both in common.
        marker=MARKERS[(number + number // len(CYCLE)) % len(MARKERS)],
        color=CYCLE[number % len(CYCLE)],
        markeredgecolor="white",
        markeredgewidth=0.4,
        markersize=4.2,
        elinewidth=0.9,
        capsize=1.6,
        capthick=0.9,
        # A score of 0 or 100 stands on the frame.
        clip_on=False,
        zorder=3,
        label=own[0].model,
    )


def _benchmark_axis(axes: "Axes", benchmarks: Sequence[str], *, slanted: bool) -> None:
    axes.set_xticks(
        range(len(benchmarks)),
        benchmarks,
        rotation=35 if slanted else 0,
        ha="right" if slanted else "center",
        rotation_mode="anchor" if slanted else "default",
    )
    axes.tick_params(axis="x", length=0)
    axes.set_xlim(-0.5, len(benchmarks) - 0.5)


def _longest_line(labels: Sequence[str]) -> int:
    return max(len(line) for label in labels for line in label.splitlines())


def _legend(figure: "Figure", axes: "Axes", columns: int) -> None:
    """Models row by row, in their order."""
    handles, labels = axes.get_legend_handles_labels()
    # Matplotlib fills column by column.
    order = [place for column in range(columns) for place in range(column, len(labels), columns)]
    figure.legend(
        [handles[place] for place in order],
        [labels[place] for place in order],
        loc="outside upper center",
        ncols=columns,
        title="95 % intervals over questions",
        title_fontsize=6.5,
        columnspacing=1.4,
    )


def _legend_columns(labels: Sequence[str], width: float) -> int:
    """As many columns of labels as fit; one at least."""
    return next(n for n in range(len(labels), 0, -1) if n == 1 or _legend_width(labels, n) < width)


def _legend_width(labels: Sequence[str], columns: int) -> float:
    """Inches, with 0.4 for a marker and the space after it."""
    longest = [max(len(label) for label in labels[column::columns]) for column in range(columns)]
    return sum(0.4 + INCHES_PER_CHARACTER * length for length in longest)

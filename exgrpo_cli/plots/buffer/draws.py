"""Figures of what was replayed: its entropy, its age, how often, and how it was drawn."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from exgrpo_cli.plots.series import draw_series, explain_smoothing
from exgrpo_cli.plots.style import (
    BLACK,
    BLUE,
    FULL_WIDTH,
    GREY,
    ORANGE,
    SINGLE_COLUMN,
    SKY,
    VERMILION,
    bucket_colours,
    legend_above,
    logarithmic_axis,
    mark_phase_start,
    new_figure,
    say_nothing_to_show,
    step_axis,
    styled,
)
from exgrpo_cli.replay_stats.entropy import GROUPS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from exgrpo_cli.replay_stats.entropy import EntropyGroup, EntropyWindow
    from exgrpo_cli.replay_stats.summary import ReplaySummary

HISTOGRAM_BINS = 30
DIFFICULTY_COLOURS = {"hard": VERMILION, "medium": ORANGE, "easy": SKY}


def entropy_of_choice(summary: "ReplaySummary") -> "Figure":
    """Mean entropy of what was replayed against what was available, and the number of candidates there were."""
    with styled():
        figure, (entropies, candidates) = new_figure(1, 2, width=FULL_WIDTH, height=2.4)
        steps, chosen = np.arange(summary.last_step + 1), summary.selection
        if not np.isfinite(chosen.selected).any():
            say_nothing_to_show(entropies, "nothing has been replayed yet")
            candidates.set_axis_off()
            return figure
        draw_series(entropies, steps, chosen.available, colour=VERMILION, label="available (mean of candidates)")
        window = draw_series(entropies, steps, chosen.selected, colour=BLUE, label="replayed")
        entropies.set_ylabel("mean token entropy (nats)" if chosen.measured else "mean token entropy at birth (nats)")
        entropies.set_ylim(0, None)
        legend_above(entropies, ncols=2)
        draw_series(candidates, steps, chosen.candidates, colour=BLACK)
        candidates.set_ylabel("candidates per question")
        candidates.set_ylim(0, None)
        for axes in (entropies, candidates):
            step_axis(axes, summary.last_step)
            mark_phase_start(axes, summary.first_mixed_step)
        explain_smoothing(figure, window)
        return figure


def units_scanned(summary: "ReplaySummary") -> "Figure":
    """Units scanned and taken in each step, the priority of those taken, and how far the scanned ones had drifted."""
    with styled():
        found, steps = summary.scans, np.arange(summary.last_step + 1)
        drifted = bool(np.isfinite(found.drift).any())
        figure, (counts, *others) = new_figure(1, 2 + drifted, width=FULL_WIDTH, height=2.4)
        if not found.scanned.any():
            for axes in others:
                axes.set_axis_off()
            say_nothing_to_show(counts, "nothing has been drawn yet")
            return figure
        draw_series(counts, steps, found.scanned.astype(np.float64), colour=VERMILION, label="scanned")
        window = draw_series(counts, steps, found.taken.astype(np.float64), colour=BLUE, label="replayed")
        counts.set_ylabel("units")
        counts.legend(loc="best")
        draw_series(others[0], steps, found.priority, colour=BLUE)
        others[0].set_ylabel("priority of the replayed")
        if drifted:
            draw_series(others[1], steps, found.drift, colour=VERMILION)
            others[1].axhline(summary.config.replay.max_drift, color=GREY, linestyle="--")
            others[1].set_ylabel("drift of the scanned, and its bound")
        for axes in (counts, *others):
            axes.set_ylim(0, None)
            step_axis(axes, summary.last_step)
            mark_phase_start(axes, summary.first_mixed_step)
        explain_smoothing(figure, window)
        return figure


def age_and_reuse(summary: "ReplaySummary") -> "Figure":
    """How old replayed trajectories were, and how often each stored one was replayed.

    Both on logarithmic scales: most replays are young and most trajectories never replayed, and the tails matter.
    """
    with styled():
        figure, (ages, reuses) = new_figure(1, 2, width=FULL_WIDTH, height=2.4)
        replays = summary.replays
        if len(replays.age):
            oldest = int(replays.age.max())
            ages.hist(replays.age, bins=_whole_bins(oldest).tolist(), color=BLUE, edgecolor="white", linewidth=0.3)
            median = float(np.median(replays.age))
            ages.axvline(median, color=VERMILION, linewidth=1.0)
            ages.annotate(
                f"median {median:g}",
                xy=(median, 1.0),
                xycoords=("data", "axes fraction"),
                xytext=(3, -2),
                textcoords="offset points",
                fontsize=7,
                color=VERMILION,
                va="top",
            )
            ages.set_xlabel("age when replayed (steps)")
            ages.set_ylabel("replays")
            logarithmic_axis(ages)
            ages.set_ylim(0.7, 1.6 * ages.get_ylim()[1])
            _whole_ticks(ages)
        else:
            say_nothing_to_show(ages, "nothing has been replayed yet")
        if len(replays.reuse):
            _reuse_bars(reuses, replays.reuse)
        else:
            say_nothing_to_show(reuses, "nothing has been stored yet")
        return figure


def entropy_by_bucket(summary: "ReplaySummary") -> "Figure":
    """Entropy at birth of correct trajectories, within stretches of steps: by success count, and by difficulty.

    Over a whole run hard questions' trajectories are older than easy ones' and entropies fall with the steps: the
    pooled comparison (dashed) says more of time than of difficulty.
    """
    with styled():
        figure, (buckets, groups) = new_figure(1, 2, width=FULL_WIDTH, height=2.9)
        if not summary.entropy.by_bucket:
            say_nothing_to_show(buckets, "no trajectory has been stored yet")
            groups.set_axis_off()
            return figure
        colours = bucket_colours(len(summary.entropy_windows))
        for window, colour in zip(summary.entropy_windows, colours, strict=True):
            _means_by_bucket(buckets, window, label=f"steps {window.steps}", color=colour, marker="o")
        if len(summary.entropy_windows) > 1:
            _means_by_bucket(buckets, summary.entropy, label="whole run", color=GREY, linestyle="--")
        buckets.set_xlabel(f"successes of {summary.config.rollout.group_size} when sampled")
        buckets.set_ylabel("mean token entropy (nats)")
        _whole_ticks(buckets)
        legend_above(buckets, ncols=3)
        _difficulty_boxes(groups, summary.entropy_windows)
        for axes in (buckets, groups):
            axes.set_ylim(0, None)
        note = "boxes 25-75 %, whiskers 5-95 %, diamonds means; hard: pass rate up to 1/4, easy: from 3/4"
        figure.supxlabel(note, fontsize=6.5, color="#5A5A5A")
        return figure


def _means_by_bucket(axes: "Axes", window: "EntropyWindow", **style: Any) -> None:
    axes.plot([int(group.name) for group in window.by_bucket], [group.mean for group in window.by_bucket], **style)


def _difficulty_boxes(axes: "Axes", windows: "Sequence[EntropyWindow]") -> None:
    """Hard, medium and easy side by side in each stretch of steps, with the ratio of the means below."""
    from matplotlib.patches import Patch

    for number, window in enumerate(windows):
        for group in window.by_difficulty:
            place = number + 0.26 * (GROUPS.index(group.name) - 1)
            _box(axes, place, group, DIFFICULTY_COLOURS[group.name])
    ratios = ["" if math.isnan(w.hard_over_easy) else f"\nhard/easy {w.hard_over_easy:.2f}" for w in windows]
    axes.set_xticks(
        range(len(windows)),
        [f"{w.steps}{ratio}" for w, ratio in zip(windows, ratios, strict=True)],
        fontsize=6,
    )
    axes.set_xlim(-0.5, len(windows) - 0.5)
    axes.set_xlabel("steps")
    axes.grid(visible=False, axis="x")
    patches = [Patch(facecolor=colour, label=name) for name, colour in DIFFICULTY_COLOURS.items()]
    legend_above(axes, handles=patches, ncols=3)


def draws_against_promise(summary: "ReplaySummary") -> "Figure":
    """Questions drawn from each bucket over the run beside what the sampler promised."""
    with styled():
        figure, (axes,) = new_figure(width=SINGLE_COLUMN, height=2.5)
        rows = [row for row in summary.draws.buckets if row.expected > 0 or row.drawn]
        if not rows:
            say_nothing_to_show(axes, "nothing has been drawn yet")
            return figure
        positions = np.arange(len(rows))
        axes.bar(positions, [row.drawn for row in rows], width=0.75, color=BLUE, label="drawn")
        axes.plot(
            positions, [row.expected for row in rows], linestyle="none", marker="D", color=BLACK, label="promised"
        )
        axes.set_xticks(positions, [f"{row.bucket}/{row.num_members}" for row in rows])
        axes.tick_params(axis="x", length=0)
        axes.grid(visible=False, axis="x")
        axes.set_xlabel("successes at the last visit")
        axes.set_ylabel("questions drawn")
        if summary.draws.p_value is not None:
            axes.set_title(f"chi-square p = {summary.draws.p_value:.2g}", loc="right", fontsize=7)
        figure.legend(loc="outside upper left", ncols=2)
        return figure


def _reuse_bars(axes: "Axes", reuse: np.ndarray) -> None:
    """One bar per number of replays."""
    counts = np.bincount(reuse)
    uses = np.flatnonzero(counts)
    axes.bar(uses, counts[uses], width=0.85, color=[GREY if use == 0 else BLUE for use in uses])
    logarithmic_axis(axes)
    axes.set_ylim(0.7, counts.max() * 2.2)
    axes.set_xlim(-0.6, max(int(uses[-1]), 1) + 0.6)
    axes.set_xlabel("times replayed")
    axes.set_ylabel("trajectories")
    axes.grid(visible=False, axis="x")
    axes.annotate(
        f"{counts[0] / counts.sum():.0%} never",
        xy=(0, max(counts[0], 0.7)),
        xytext=(6, 0),
        textcoords="offset points",
        fontsize=7,
        va="bottom",
        color="#5A5A5A",
    )
    _whole_ticks(axes)


def _box(axes: "Axes", place: float, group: "EntropyGroup", colour: str) -> None:
    """A box from 25 to 75 % with the median, whiskers from 5 to 95 %, the mean as a diamond."""
    low, lower, median, upper, high = group.quantiles
    axes.bxp(
        [{"med": median, "q1": lower, "q3": upper, "whislo": low, "whishi": high, "mean": group.mean, "fliers": []}],
        positions=[place],
        manage_ticks=False,
        showfliers=False,
        showmeans=True,
        patch_artist=True,
        widths=0.22,
        medianprops={"color": "white", "linewidth": 1.2},
        meanprops={"marker": "D", "markerfacecolor": BLACK, "markeredgecolor": "white", "markersize": 3.5},
        whiskerprops={"linewidth": 0.7},
        capprops={"linewidth": 0.7},
        boxprops={"linewidth": 0.4, "facecolor": colour},
    )


def _whole_bins(largest: int) -> np.ndarray:
    """Bin edges between whole numbers, at most HISTOGRAM_BINS bins of equal width."""
    width = max(1, -(-(largest + 1) // HISTOGRAM_BINS))
    return np.arange(-0.5, largest + width + 0.5, width)


def _whole_ticks(axes: "Axes") -> None:
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(nbins=7, integer=True))

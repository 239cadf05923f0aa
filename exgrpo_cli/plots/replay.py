"""Figures of the experience buffer: what it holds, what is drawn from it, how old and how often."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from exgrpo_cli.plots.series import draw_series
from exgrpo_cli.plots.style import (
    BLACK,
    BLUE,
    FULL_WIDTH,
    GREEN,
    GREY,
    ORANGE,
    SINGLE_COLUMN,
    SKY,
    VERMILION,
    brief_count,
    bucket_colours,
    logarithmic_axis,
    mark_phase_start,
    new_figure,
    say_nothing_to_show,
    step_axis,
    styled,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from exgrpo_cli.replay_stats.entropy import EntropyGroup
    from exgrpo_cli.replay_stats.summary import ReplaySummary

HISTOGRAM_BINS = 30


def bucket_occupancy(summary: "ReplaySummary") -> "Figure":
    """Questions per bucket after every step, stacked, few successes at the bottom."""
    with styled():
        figure, (axes,) = new_figure(width=FULL_WIDTH, height=2.9)
        counts = summary.occupancy.in_bucket
        occupied = np.flatnonzero(counts.any(axis=0))
        if not len(occupied):
            say_nothing_to_show(axes, "no question has entered the buffer yet")
            return figure
        buckets = range(int(occupied[0]), int(occupied[-1]) + 1)
        size = summary.config.rollout.group_size
        axes.stackplot(
            np.arange(len(counts)),
            [counts[:, bucket] for bucket in buckets],
            labels=[f"{bucket} of {size}" for bucket in buckets],
            colors=bucket_colours(len(buckets)),
            linewidth=0.25,
            edgecolor="white",
        )
        axes.set_ylabel("questions in the buffer")
        axes.set_ylim(0, None)
        step_axis(axes, summary.last_step)
        mark_phase_start(axes, summary.first_mixed_step, label=True)
        handles, labels = axes.get_legend_handles_labels()
        axes.legend(
            handles[::-1],
            labels[::-1],
            title="successes at\nthe last visit",
            loc="center left",
            bbox_to_anchor=(1.0, 0.5),
        )
        return figure


def question_states(summary: "ReplaySummary") -> "Figure":
    """Buffered, retired, tried and unseen questions after every step, stacked to the whole training set."""
    with styled():
        figure, (axes,) = new_figure(width=FULL_WIDTH, height=2.6)
        now = summary.occupancy
        layers = [("retired", now.retired, GREEN), ("buffered", now.buffered, BLUE)]
        if now.visits_known:
            layers += [("tried, nothing stored", now.tried, ORANGE), ("unseen", now.unseen, "#DDDDDD")]
        elif summary.num_training_questions:
            others = np.clip(summary.num_training_questions - now.retired - now.buffered, 0, None)
            layers.append(("tried or unseen", others, "#DDDDDD"))
        axes.stackplot(
            np.arange(len(now.retired)),
            [values for _, values, _ in layers],
            labels=[name for name, _, _ in layers],
            colors=[colour for _, _, colour in layers],
            linewidth=0.25,
            edgecolor="white",
        )
        axes.set_ylabel("questions")
        axes.set_ylim(0, max(summary.num_training_questions, int((now.retired + now.buffered).max()), 1))
        step_axis(axes, summary.last_step)
        mark_phase_start(axes, summary.first_mixed_step, label=True)
        handles, labels = axes.get_legend_handles_labels()
        axes.legend(handles[::-1], labels[::-1], loc="center left", bbox_to_anchor=(1.0, 0.5))
        return figure


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
        draw_series(entropies, steps, chosen.selected, colour=BLUE, label="replayed")
        entropies.set_ylabel("mean token entropy (nats)" if chosen.measured else "mean token entropy at birth (nats)")
        entropies.set_ylim(0, None)
        entropies.legend(loc="best")
        draw_series(candidates, steps, chosen.candidates, colour=BLACK)
        candidates.set_ylabel("candidates per question")
        candidates.set_ylim(0, None)
        for axes in (entropies, candidates):
            step_axis(axes, summary.last_step)
            mark_phase_start(axes, summary.first_mixed_step)
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
    """Entropy at birth of correct trajectories, by success count and by the paper's difficulty groups."""
    with styled():
        figure, (buckets, groups) = new_figure(1, 2, width=FULL_WIDTH, height=2.5)
        if not summary.by_bucket:
            say_nothing_to_show(buckets, "no trajectory has been stored yet")
            groups.set_axis_off()
            return figure
        _boxes(buckets, summary.by_bucket, bucket_colours(len(summary.by_bucket)))
        buckets.set_xlabel(f"successes of {summary.config.rollout.group_size} when sampled (trajectories)")
        buckets.set_ylabel("mean token entropy (nats)")
        _boxes(
            groups,
            summary.by_difficulty,
            [{"hard": VERMILION, "medium": ORANGE, "easy": SKY}[g.name] for g in summary.by_difficulty],
        )
        groups.set_xlabel("difficulty; hard: pass rate ≤ 1/4, easy: ≥ 3/4")
        groups.sharey(buckets)
        return figure


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


def _boxes(axes: "Axes", groups: "tuple[EntropyGroup, ...]", colours: Sequence[Any]) -> None:
    """Boxes from 25 to 75 % with the median, whiskers from 5 to 95 %, the mean as a diamond, the count in brackets."""
    stats = [
        {"med": q[2], "q1": q[1], "q3": q[3], "whislo": q[0], "whishi": q[4], "mean": group.mean, "fliers": []}
        for group in groups
        for q in (group.quantiles,)
    ]
    drawn = axes.bxp(
        stats,
        showfliers=False,
        showmeans=True,
        patch_artist=True,
        widths=0.6,
        medianprops={"color": "white", "linewidth": 1.2},
        meanprops={"marker": "D", "markerfacecolor": BLACK, "markeredgecolor": "white", "markersize": 4},
        whiskerprops={"linewidth": 0.7},
        capprops={"linewidth": 0.7},
        boxprops={"linewidth": 0.4},
    )
    for box, colour in zip(drawn["boxes"], colours, strict=True):
        box.set_facecolor(colour)
    axes.set_xticks(
        range(1, len(groups) + 1), [f"{group.name}\n({brief_count(group.trajectories)})" for group in groups]
    )
    axes.grid(visible=False, axis="x")
    axes.set_ylim(0, None)


def _whole_bins(largest: int) -> np.ndarray:
    """Bin edges between whole numbers, at most HISTOGRAM_BINS bins of equal width."""
    width = max(1, -(-(largest + 1) // HISTOGRAM_BINS))
    return np.arange(-0.5, largest + width + 0.5, width)


def _whole_ticks(axes: "Axes") -> None:
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(nbins=7, integer=True))

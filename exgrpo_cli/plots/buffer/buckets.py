"""Figures of where questions are and go: buckets over time, states, and what a replay visit does to a question."""

from typing import TYPE_CHECKING

import numpy as np

from exgrpo_cli.plots.style import (
    BLUE,
    FULL_WIDTH,
    GREEN,
    ORANGE,
    mark_phase_start,
    new_figure,
    say_nothing_to_show,
    step_axis,
    styled,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from exgrpo_cli.replay_stats.summary import ReplaySummary

COLOUR_MAP = "viridis"
DARK_SHARE = 0.55
"""Share from which a cell is light enough for black figures."""


def bucket_occupancy(summary: "ReplaySummary") -> "Figure":
    """Questions per bucket and step as a heat map of logarithmic counts, beside the draws from each bucket."""
    with styled():
        figure, (counts, draws) = new_figure(1, 2, width=FULL_WIDTH, height=2.9)
        in_bucket = summary.occupancy.in_bucket
        occupied = np.flatnonzero(in_bucket.any(axis=0))
        if not len(occupied):
            say_nothing_to_show(counts, "no question has entered the buffer yet")
            draws.set_axis_off()
            return figure
        figure.clear()
        counts, draws = figure.subplots(1, 2, width_ratios=(3.2, 1), sharey=True)
        shown = np.arange(int(occupied[0]), int(occupied[-1]) + 1)
        _heat_map(figure, counts, in_bucket[:, shown].T, shown)
        counts.set_yticks(shown)
        counts.set_ylim(shown[0] - 0.5, shown[-1] + 0.5)
        counts.set_ylabel(f"successes of {summary.config.rollout.group_size} at the last visit")
        step_axis(counts, summary.last_step)
        mark_phase_start(counts, summary.first_mixed_step)
        _draws_by_bucket(draws, summary, shown)
        return figure


def _heat_map(figure: "Figure", axes: "Axes", questions: np.ndarray, shown: np.ndarray) -> None:
    from matplotlib.colors import LogNorm

    edges = np.arange(-0.5, questions.shape[1])
    image = axes.pcolormesh(
        edges,
        np.append(shown - 0.5, shown[-1] + 0.5),
        np.ma.masked_equal(questions, 0),
        norm=LogNorm(1, max(int(questions.max()), 2)),
        cmap=COLOUR_MAP,
        # One picture in a vector file, not a rectangle per step and bucket.
        rasterized=True,
    )
    axes.grid(visible=False)
    bar = figure.colorbar(image, ax=axes, pad=0.02, aspect=30)
    bar.set_label("questions (white: none)")
    bar.ax.yaxis.set_major_formatter("{x:g}")
    bar.ax.minorticks_off()


def _draws_by_bucket(axes: "Axes", summary: "ReplaySummary", shown: np.ndarray) -> None:
    if summary.config.replay.composition != "replace":
        axes.set_axis_off()
        return
    drawn = np.zeros(int(shown[-1]) + 1, dtype=np.int64)
    for row in summary.draws.buckets:
        if row.bucket < len(drawn):
            drawn[row.bucket] += row.drawn
    axes.barh(shown, drawn[shown], height=0.8, color=BLUE)
    axes.grid(visible=False, axis="y")
    axes.tick_params(axis="y", length=0, labelleft=False)
    axes.set_xlabel("questions drawn")
    if not drawn.any():
        axes.set_xlim(0, 1)
        axes.set_xticks([0])


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


def bucket_flow(summary: "ReplaySummary") -> "Figure":
    """Where a replay visit takes a question: each row is one bucket, with shares of where its questions were next."""
    with styled():
        flow = summary.flow
        before = np.flatnonzero(flow.visits)
        figure, (axes,) = new_figure(width=5.0, height=1.2 + 0.26 * max(len(before), 4))
        if not len(before):
            say_nothing_to_show(axes, "nothing has been replayed yet")
            return figure
        reached = np.flatnonzero(flow.between.any(axis=0))
        counts = np.column_stack([flow.between[np.ix_(before, reached)], flow.retired[before], flow.dropped[before]])
        names = [*map(str, reached), "retired", "dropped"]
        used = np.flatnonzero(counts.sum(axis=0)).tolist()
        counts, names = counts[:, used], [names[column] for column in used]
        shares = counts / counts.sum(axis=1, keepdims=True)
        axes.pcolormesh(shares, cmap=COLOUR_MAP, vmin=0, vmax=max(float(shares.max()), 0.5), rasterized=True)
        for (row, column), share in np.ndenumerate(shares):
            if share:
                axes.text(
                    column + 0.5,
                    row + 0.5,
                    f"{share:.0%}",
                    ha="center",
                    va="center",
                    fontsize=6.5,
                    color="black" if share > DARK_SHARE * max(float(shares.max()), 0.5) else "white",
                )
        axes.set_xticks(np.arange(len(names)) + 0.5, names)
        axes.set_yticks(
            np.arange(len(before)) + 0.5, [f"{k} ({n:,})" for k, n in zip(before, flow.visits[before], strict=True)]
        )
        axes.tick_params(length=0)
        axes.grid(visible=False)
        size = summary.config.rollout.group_size
        axes.set_xlabel(f"successes of {size} after a replay visit, the replayed one included")
        axes.set_ylabel("successes before (visits)")
        return figure

"""The experience buffers of several runs in one figure."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from exgrpo_cli.plots.series import draw_series
from exgrpo_cli.plots.style import CYCLE, FULL_WIDTH, LINESTYLES, new_figure, say_nothing_to_show, step_axis, styled

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from exgrpo_cli.replay_stats.summary import ReplaySummary


def buffers_compared(labels: Sequence[str], summaries: "Sequence[ReplaySummary]") -> "Figure":
    """What each buffer holds and what was drawn from it, one line per run in every panel."""
    with styled():
        figure, panels = new_figure(2, 3, width=FULL_WIDTH, height=4.0)
        last_step = max(summary.last_step for summary in summaries)
        for number, (label, summary) in enumerate(zip(labels, summaries, strict=True)):
            steps = np.arange(summary.last_step + 1)
            series = (
                ("questions buffered", steps, summary.occupancy.buffered.astype(np.float64)),
                ("questions retired", steps, summary.occupancy.retired.astype(np.float64)),
                ("trajectories in the buffer", steps, summary.occupancy.trajectories.astype(np.float64)),
                ("entropy of replayed (nats)", steps, summary.selection.selected),
                ("age of replayed (steps)", steps, summary.age_over_time),
                ("effective sample size (share)", summary.ratios.steps, summary.ratios.effective_sample_size),
            )
            for axes, (title, x, values) in zip(panels, series, strict=True):
                axes.set_title(title, loc="left")
                draw_series(
                    axes,
                    x,
                    values,
                    colour=CYCLE[number % len(CYCLE)],
                    linestyle=LINESTYLES[number // len(CYCLE) % len(LINESTYLES)],
                    label=label,
                )
        for axes in panels:
            if not any(np.size(line.get_xdata()) for line in axes.lines):
                say_nothing_to_show(axes, "not logged by these runs")
                continue
            axes.set_ylim(bottom=0)
            step_axis(axes, last_step)
        for axes in panels[:3]:
            axes.set_xlabel("")
        handles, names = panels[0].get_legend_handles_labels()
        figure.legend(handles, names, loc="outside upper center", ncols=min(len(names), 4))
        return figure

"""What another policy would have drawn from the same ledger, beside what the run drew."""

from typing import TYPE_CHECKING

import numpy as np

from exgrpo_cli.plots.series import draw_series, explain_smoothing
from exgrpo_cli.plots.style import BLUE, FULL_WIDTH, VERMILION, full_rows, say_nothing_to_show, step_axis, styled
from exgrpo_cli.replay_stats.what_if.policy import metric_title, sampler_title

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from exgrpo_cli.replay_stats.output.report import RunReport
    from exgrpo_cli.replay_stats.what_if.metric import MetricOutcome
    from exgrpo_cli.replay_stats.what_if.sampler import SamplerOutcome

MEANS = {"entropy": "entropy of the chosen (nats)", "age": "age of the chosen (steps)"}


def what_if_figure(report: "RunReport") -> "Figure":
    """The run in blue, the other policy in orange: questions drawn by success count, pass rates, entropies, ages."""
    with styled():
        num = 2 * (report.sampler is not None) + len(MEANS) * (report.metric is not None)
        figure, panels = full_rows(num, 2, width=FULL_WIDTH, row_height=2.3)
        last_step, own = report.summary.last_step, report.summary.config.replay
        windows = [0]
        if report.sampler:
            windows += _sampler_panels(panels[:2], report.sampler, sampler_title(own), last_step)
        if report.metric:
            windows += _metric_panels(panels[num - len(MEANS) :], report.metric, metric_title(own), last_step)
        explain_smoothing(figure, max(windows))
        return figure


def _sampler_panels(panels: "list[Axes]", outcome: "SamplerOutcome", own: str, last_step: int) -> list[int]:
    bars, rates = panels
    buckets = sorted({*outcome.drawn, *outcome.expected})
    if not buckets:
        for axes in panels:
            say_nothing_to_show(axes, "nothing has been drawn yet")
        return []
    places = np.arange(len(buckets))
    bars.bar(places - 0.2, [outcome.drawn.get(k, 0) for k in buckets], width=0.38, color=BLUE, label=f"run: {own}")
    bars.bar(
        places + 0.2,
        [outcome.expected.get(k, 0.0) for k in buckets],
        width=0.38,
        color=VERMILION,
        label=f"what if: {outcome.title}",
    )
    bars.set_xticks(places, [str(bucket) for bucket in buckets])
    bars.grid(visible=False, axis="x")
    bars.set_xlabel("successes at the last visit")
    bars.set_ylabel("questions drawn")
    bars.set_ylim(0, 1.35 * bars.get_ylim()[1])
    bars.legend(loc="upper left")
    window = draw_series(rates, outcome.steps, outcome.pass_rate, colour=BLUE)
    draw_series(rates, outcome.steps, outcome.expected_pass_rate, colour=VERMILION)
    rates.set_ylabel("pass rate of the drawn")
    rates.set_ylim(0, 1)
    step_axis(rates, last_step)
    return [window]


def _metric_panels(panels: "list[Axes]", outcome: "MetricOutcome", own: str, last_step: int) -> list[int]:
    windows = []
    for axes, (name, label) in zip(panels, MEANS.items(), strict=True):
        if not len(outcome.steps):
            say_nothing_to_show(axes, "nothing has been replayed yet")
            continue
        windows.append(draw_series(axes, outcome.steps, outcome.chosen_by_step[name], colour=BLUE, label=f"run: {own}"))
        draw_series(
            axes, outcome.steps, outcome.other_by_step[name], colour=VERMILION, label=f"what if: {outcome.title}"
        )
        axes.set_ylabel(label)
        axes.set_ylim(0, 1.3 * axes.get_ylim()[1])
        axes.legend(loc="upper left")
        step_axis(axes, last_step)
    return windows

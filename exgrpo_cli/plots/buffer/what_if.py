"""What another policy would have drawn from the same ledger, beside what the run drew."""

from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Float64, Int64

from exgrpo_cli.plots.series import draw_series, explain_smoothing
from exgrpo_cli.plots.style import (
    BLUE,
    FULL_WIDTH,
    GREY,
    VERMILION,
    full_rows,
    logarithmic_axis,
    say_nothing_to_show,
    step_axis,
    styled,
)
from exgrpo_cli.replay_stats.what_if.policy import metric_title, sampler_title

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from exgrpo_cli.replay_stats.output.report import RunReport
    from exgrpo_cli.replay_stats.what_if.metric import MetricOutcome
    from exgrpo_cli.replay_stats.what_if.sampler import SamplerOutcome
    from exgrpo_cli.replay_stats.what_if.units import GateOutcome, PriorityOutcome

MEANS = {"entropy": "entropy of the chosen (nats)", "age": "age of the chosen (steps)"}
UNIT_MEANS = {"age": "age of the rows (steps)", "advantage": "absolute advantage of the rows"}


def what_if_figure(report: "RunReport") -> "Figure":
    """The run in blue, the other policy in orange, a row of two panels for each question that was asked."""
    with styled():
        asked = [report.sampler, report.metric, report.priority, report.gate]
        figure, panels = full_rows(2 * sum(map(bool, asked)), 2, width=FULL_WIDTH, row_height=2.3)
        rows = iter(zip(panels[::2], panels[1::2], strict=True))
        last_step, own = report.summary.last_step, report.summary.config.replay
        windows = [0]
        if report.sampler:
            windows += _sampler_panels([*next(rows)], report.sampler, sampler_title(own), last_step)
        if report.metric:
            windows += _metric_panels([*next(rows)], report.metric, metric_title(own), last_step)
        if report.priority:
            windows += _priority_panels([*next(rows)], report.priority, last_step)
        if report.gate:
            windows += _gate_panels([*next(rows)], report.gate, last_step)
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
    return [
        _pair(
            axes,
            outcome.steps,
            (outcome.chosen_by_step[name], outcome.other_by_step[name]),
            (f"run: {own}", f"what if: {outcome.title}"),
            label,
            last_step,
        )
        for axes, (name, label) in zip(panels, MEANS.items(), strict=True)
    ]


def _priority_panels(panels: "list[Axes]", outcome: "PriorityOutcome", last_step: int) -> list[int]:
    return [
        _pair(
            axes,
            outcome.steps,
            (outcome.taken_by_step[name], outcome.expected_by_step[name]),
            (f"run: {outcome.own}", f"what if: {outcome.other}"),
            label,
            last_step,
        )
        for axes, (name, label) in zip(panels, UNIT_MEANS.items(), strict=True)
    ]


def _gate_panels(panels: "list[Axes]", outcome: "GateOutcome", last_step: int) -> list[int]:
    counts, drifts = panels
    names = (f"run: {outcome.own:g}", f"what if: {outcome.other:g}")
    both = (outcome.accepted_by_step.astype(np.float64), outcome.would_accept_by_step.astype(np.float64))
    windows = [_pair(counts, outcome.scan_steps, both, names, "scanned units within the bound", last_step)]
    windows.append(draw_series(drifts, outcome.scan_steps, outcome.drift_by_step, colour=GREY, label="scanned, mean"))
    for bound, colour, name in zip((outcome.own, outcome.other), (BLUE, VERMILION), names, strict=True):
        drifts.axhline(bound, color=colour, label=name)
    if outcome.other > 0 and (outcome.drift_by_step > 0).any():
        logarithmic_axis(drifts)
    drifts.set_ylabel("drift, and its bounds")
    drifts.legend(loc="best")
    step_axis(drifts, last_step)
    return windows


def _pair(
    axes: "Axes",
    steps: Int64[np.ndarray, " draws"],
    values: tuple[Float64[np.ndarray, " draws"], Float64[np.ndarray, " draws"]],
    names: tuple[str, str],
    label: str,
    last_step: int,
) -> int:
    """The run's values and those of the other policy over the steps; returns the window of their moving average."""
    if not len(steps):
        say_nothing_to_show(axes, "nothing has been replayed yet")
        return 0
    window = 0
    for own, colour, name in zip(values, (BLUE, VERMILION), names, strict=True):
        window = max(window, draw_series(axes, steps, own, colour=colour, label=name))
    axes.set_ylabel(label)
    axes.set_ylim(0, 1.3 * axes.get_ylim()[1])
    axes.legend(loc="upper left")
    step_axis(axes, last_step)
    return window

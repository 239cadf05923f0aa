"""Whether the optimisation is healthy: ratios, effective sample size, gradient norms, entropy, log-prob gap."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Float64

from exgrpo_cli.plots.series import draw_series, explain_smoothing
from exgrpo_cli.plots.style import (
    BLACK,
    BLUE,
    FULL_WIDTH,
    ORANGE,
    VERMILION,
    full_rows,
    legend_above,
    logarithmic_axis,
    mark_phase_start,
    new_figure,
    say_nothing_to_show,
    step_axis,
    styled,
)
from exgrpo_cli.runs.metrics import RunMetrics

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLUMNS = 3
PANEL_HEIGHT = 1.75
LEAST_LOGGED = 0.1
"""Share of the steps that must have logged a value: with fewer its panel is empty but for a corner."""
LOGARITHMIC_SPAN = 20.0
"""Largest over smallest value: below, a logarithmic axis has too few labels to be read."""


LEGEND_LINE = 14
"""Points between a panel and its title where a legend stands between them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Panel:
    """One panel: its title, the keys it draws, and how."""

    title: str
    keys: tuple[tuple[str, str, str], ...]
    """(metric, colour, label) of each line; the label is empty where there is one line only."""
    logarithmic: bool = False
    """Allowed, and used once the values span more than LOGARITHMIC_SPAN."""
    from_zero: bool = False
    extra: "Callable[[Axes, RunMetrics], None] | None" = None


def _mark_skipped(axes: "Axes", metrics: RunMetrics) -> None:
    """A cross at the top of the panel for every step with a skipped update."""
    skipped = np.nan_to_num(metrics.series("optim/updates_skipped")) > 0
    if skipped.any():
        axes.plot(
            metrics.steps[skipped],
            np.full(skipped.sum(), 0.97),
            transform=axes.get_xaxis_transform(),
            color=VERMILION,
            linestyle="none",
            marker="x",
            label="update skipped",
        )


PANELS = (
    Panel(title="policy entropy (nats)", keys=(("policy/entropy", BLUE, ""),), from_zero=True),
    Panel(
        title="ratio $w$, fresh tokens",
        keys=(("policy/ratio_fresh", BLUE, "mean"), ("policy/ratio_fresh_max", ORANGE, "max")),
        logarithmic=True,
    ),
    Panel(
        title="ratio $w^*$, replayed tokens",
        keys=(("policy/ratio_replay", BLUE, "mean"), ("policy/ratio_replay_max", ORANGE, "max")),
        logarithmic=True,
    ),
    Panel(title="effective sample size (share)", keys=(("replay/ess", BLUE, ""),), from_zero=True),
    Panel(title="gradient norm", keys=(("optim/grad_norm", BLUE, ""),), logarithmic=True, extra=_mark_skipped),
    Panel(title="clipped tokens (share)", keys=(("policy/clip_fraction", BLUE, ""),), from_zero=True),
    Panel(
        title="log-prob gap, trainer to engine",
        keys=(("policy/logprob_gap_mean", BLUE, "mean"), ("policy/logprob_gap_max", ORANGE, "max")),
        logarithmic=True,
    ),
    Panel(title="response length (tokens)", keys=(("length/mean", BLUE, ""),), from_zero=True),
    Panel(
        title="solved by all / by none (share)",
        keys=(("batch/solve_all", BLUE, "all"), ("batch/solve_none", BLACK, "none")),
        from_zero=True,
    ),
)


def policy_diagnostics(metrics: RunMetrics) -> "Figure":
    """One small panel for each diagnostic with something to see: what was hardly ever logged, or always 0, is not."""
    shown = [panel for panel in PANELS if any(_has_something(metrics.series(key)) for key, _, _ in panel.keys)]
    with styled():
        if not shown:
            figure, (axes,) = new_figure(width=FULL_WIDTH, height=PANEL_HEIGHT)
            say_nothing_to_show(axes, "no step has finished yet")
            return figure
        figure, panels = full_rows(len(shown), COLUMNS, width=FULL_WIDTH, row_height=PANEL_HEIGHT)
        windows = [_draw(axes, panel, metrics) for axes, panel in zip(panels, shown, strict=True)]
        for axes in panels[: (len(shown) - 1) // COLUMNS * COLUMNS]:
            axes.set_xlabel("")
        explain_smoothing(figure, max(windows))
        return figure


def _has_something(values: Float64[np.ndarray, " rows"]) -> bool:
    return bool(np.nan_to_num(values).any() and np.isfinite(values).mean() >= LEAST_LOGGED)


def _draw(axes: "Axes", panel: Panel, metrics: RunMetrics) -> int:
    """Draw a panel; returns the steps that its averages are over."""
    axes.set_title(panel.title, loc="left")
    drawn = [(key, colour, label) for key, colour, label in panel.keys if metrics.has(key)]
    windows = [
        draw_series(
            axes,
            metrics.steps,
            metrics.series(key),
            colour=colour,
            label=label or None,
            smooth=not key.endswith("_max"),
        )
        for key, colour, label in drawn
    ]
    if panel.logarithmic and _spans_decades(np.concatenate([metrics.series(key) for key, _, _ in drawn])):
        logarithmic_axis(axes)
    else:
        axes.ticklabel_format(axis="y", style="sci", scilimits=(-3, 4))
    if panel.from_zero:
        axes.set_ylim(bottom=0)
    step_axis(axes, int(metrics.steps[-1]))
    mark_phase_start(axes, metrics.first_mixed_step)
    if panel.extra:
        panel.extra(axes, metrics)
    if axes.get_legend_handles_labels()[1]:
        legend_above(axes, ncols=3)
        axes.set_title(panel.title, loc="left", pad=LEGEND_LINE)
    return max(windows)


def _spans_decades(values: Float64[np.ndarray, " values"]) -> bool:
    """Whether the finite values are all positive and too far apart for a linear axis."""
    known = values[np.isfinite(values)]
    return bool(known.min() > 0 and known.max() > LOGARITHMIC_SPAN * known.min())

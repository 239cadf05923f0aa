"""Whether the optimisation is healthy: ratios, effective sample size, gradient norms, entropy, log-prob gap."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Float64

from exgrpo_cli.plots.series import draw_series
from exgrpo_cli.plots.style import (
    BLACK,
    BLUE,
    FULL_WIDTH,
    ORANGE,
    VERMILION,
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
LOGARITHMIC_SPAN = 20.0
"""Largest over smallest value: below, a logarithmic axis has too few labels to be read."""


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
        axes.legend(loc="best")


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
    """One small panel for each diagnostic that the run logged; those it did not log are left out."""
    shown = [panel for panel in PANELS if any(metrics.has(key) for key, _, _ in panel.keys)]
    rows = max(1, -(-len(shown) // COLUMNS))
    with styled():
        figure, panels = new_figure(rows, COLUMNS if shown else 1, width=FULL_WIDTH, height=PANEL_HEIGHT * rows)
        if not shown:
            say_nothing_to_show(panels[0], "no step has finished yet")
            return figure
        for axes, panel in zip(panels, shown, strict=False):
            _draw(axes, panel, metrics)
        for axes in panels[len(shown) :]:
            axes.remove()
        for axes in panels[: len(shown) - COLUMNS]:
            axes.set_xlabel("")
        return figure


def _draw(axes: "Axes", panel: Panel, metrics: RunMetrics) -> None:
    axes.set_title(panel.title, loc="left")
    drawn = [key for key, _, _ in panel.keys if metrics.has(key)]
    for key, colour, label in panel.keys:
        if key in drawn:
            draw_series(axes, metrics.steps, metrics.series(key), colour=colour, label=label or None)
    if panel.logarithmic and _spans_decades(np.concatenate([metrics.series(key) for key in drawn])):
        logarithmic_axis(axes)
    else:
        axes.ticklabel_format(axis="y", style="sci", scilimits=(-3, 4))
    if panel.from_zero:
        axes.set_ylim(bottom=0)
    if any(label for _, _, label in panel.keys):
        axes.legend(loc="best")
    step_axis(axes, int(metrics.steps[-1]))
    mark_phase_start(axes, metrics.first_mixed_step)
    if panel.extra:
        panel.extra(axes, metrics)


def _spans_decades(values: Float64[np.ndarray, " values"]) -> bool:
    """Whether the finite values are all positive and too far apart for a linear axis."""
    known = values[np.isfinite(values)]
    return bool(known.min() > 0 and known.max() > LOGARITHMIC_SPAN * known.min())

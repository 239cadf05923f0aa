"""pass@k against k: how many questions a model can solve at all, beside how often it solves them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from exgrpo_cli.plots.style import BAND_ALPHA, CYCLE, FULL_WIDTH, MARKERS, SINGLE_COLUMN, new_figure, styled

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PANELS_A_ROW = 3
PANEL_HEIGHT = 1.9


@dataclass(frozen=True, kw_only=True, slots=True)
class PassCurve:
    """One model's pass@k on one benchmark; shares from 0 to 1."""

    model: str
    benchmark: str
    points: Mapping[int, tuple[float, float, float]]
    """k to the value and the ends of its 95 % interval, k ascending."""


def pass_at_k_curves(curves: Sequence[PassCurve]) -> "Figure":
    """A panel per benchmark, a line with its band per model, both in the order they first come up; k is logarithmic.

    Raises ValueError without curves.
    """
    if not curves:
        raise ValueError("There are no curves to draw.")
    benchmarks = list(dict.fromkeys(curve.benchmark for curve in curves))
    models = list(dict.fromkeys(curve.model for curve in curves))
    columns = min(PANELS_A_ROW, len(benchmarks))
    rows = -(-len(benchmarks) // columns)
    with styled():
        width = FULL_WIDTH if columns > 1 else SINGLE_COLUMN
        figure, panels = new_figure(rows, columns, width=width, height=0.5 + PANEL_HEIGHT * rows)
        for axes in panels[len(benchmarks) :]:
            axes.set_visible(False)
        for place, (axes, benchmark) in enumerate(zip(panels, benchmarks, strict=False)):
            own = [curve for curve in curves if curve.benchmark == benchmark]
            for curve in own:
                _draw(axes, curve, models.index(curve.model))
            axes.set_title(benchmark)
            _label(axes, sorted({k for curve in own for k in curve.points}), first_of_row=place % columns == 0)
        handles = {
            text: handle for axes in panels for handle, text in zip(*axes.get_legend_handles_labels(), strict=True)
        }
        figure.legend(
            [handles[model] for model in models],
            models,
            loc="outside upper center",
            ncols=min(len(models), 2 * columns),
            title="95 % intervals over questions",
            title_fontsize=6.5,
        )
        return figure


def _draw(axes: "Axes", curve: PassCurve, number: int) -> None:
    ks = list(curve.points)
    values, lows, highs = ([100 * point[end] for point in curve.points.values()] for end in range(3))
    colour = CYCLE[number % len(CYCLE)]
    axes.plot(ks, values, color=colour, marker=MARKERS[number % len(MARKERS)], label=curve.model)
    axes.fill_between(ks, lows, highs, color=colour, alpha=BAND_ALPHA, linewidth=0)


def _label(axes: "Axes", ks: Sequence[int], *, first_of_row: bool) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(ks, [str(k) for k in ks])
    axes.minorticks_off()
    axes.set_xlabel("k")
    if first_of_row:
        axes.set_ylabel("pass@k (%)")

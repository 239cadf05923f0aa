"""One look for every figure, and the shapes it is made of: series over steps, curves, rows with intervals, bars.

Figures are made through matplotlib's object interface with the Agg canvas: no window, no global state. Colours are
distinct to colour-blind readers, and arms are told apart by line and marker as well.
"""

import logging
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
from jaxtyping import Float64, Int64

from exgrpo_cli.base.output import printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito (2008), "Color Universal Design": distinct under all common forms of colour blindness.
CYCLE = BLUE, VERMILION, GREEN, ORANGE, PURPLE, SKY = "#0072B2", "#D55E00", "#009E73", "#E69F00", "#CC79A7", "#56B4E9"
BLACK = "#000000"
GREY = "#8C8C8C"
SOFT = "#5A5A5A"
"""Colour of words in a panel."""
MARKERS = ("o", "s", "D", "^", "v", "P", "X")
LINESTYLES = ("-", "--", ":", "-.")
"""After a round of colours the next one."""

WIDTH = 5.0
"""Inches of every figure: half of a wide screen, and all of a telephone's."""
TITLE = "exgrpo-title"
"""Mark of the text that is the figure's title."""
LABEL_COLUMNS = 29
"""Characters to a line of a label in the legend of a panel, of which two stand in a row."""
TITLE_COLUMNS, TITLE_LINE = 58, 0.19
"""Characters to a line of a title, and inches of one."""
MOST_POINTS = 2000
"""Points of a line: beyond them each stands for several steps, since a page has not the width for more."""
MOST_AREAS = 75
"""Places of a panel that have words: more of them are too narrow to be pointed at."""
STYLE_FILE = Path(__file__).with_name("exgrpo.mplstyle")
WORDS = tomllib.loads(Path(__file__).with_name("words.toml").read_text(encoding="utf-8"))
"""Captions, titles and panels of figures; what a page says of files."""

SMOOTHED_FROM = 40
"""Values from which on a moving average is drawn over them."""
WINDOWS_PER_RUN = 20
MAXIMA = "max"
"""Label of a line of maxima."""
FEW = 3
"""Fewer values than this are drawn as dots: a line through them would suggest steps that were not measured."""
LOGARITHMIC_SPAN = 20.0
"""Largest over smallest value: below, a logarithmic axis has too few labels to be read."""
LEGEND_LINE, LEGEND_COLUMNS, TITLE_PAD = 12, 22, 3
"""Points of a line of a legend between a panel and its title, characters that stand on one, points above it."""

Values = Float64[np.ndarray, " values"]
Told = list[tuple[float, str]]
"""Places of a panel, and the words for who points at them."""
_told: "WeakKeyDictionary[Axes, tuple[Told, Told]]" = WeakKeyDictionary()
"""Words of the horizontal axis, and of rows. As texts of matplotlib's they took a third of the time."""


@contextmanager
def styled() -> Iterator[None]:
    """Matplotlib with this look, silent about a home in which it cannot keep its cache."""
    logging.getLogger("matplotlib").setLevel(logging.ERROR)
    import matplotlib

    with matplotlib.rc_context(fname=STYLE_FILE):
        yield


def new_figure(
    rows: int = 1, columns: int = 1, *, width: float = WIDTH, height: float, **options: Any
) -> "tuple[Figure, list[Axes]]":
    """A figure of `width` x `height` inches with rows x columns panels, listed row by row.

    `options` are those of matplotlib's `Figure.subplots`.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, list(figure.subplots(rows, columns, squeeze=False, **options).flat)


def entitle(figure: "Figure", title: str) -> "Figure":
    """Give the figure its title, which says in words what is seen; files have it above the figure, a page sets it."""
    words = fill(printable(title), TITLE_COLUMNS)
    figure.text(0.01, 1.0, words, gid=TITLE, in_layout=False, va="bottom", fontsize=9.5, fontweight="bold")
    return figure


def title_of(figure: "Figure") -> str:
    """The figure's title on one line; empty without one."""
    return " ".join(" ".join(text.get_text().split()) for text in figure.texts if text.get_gid() == TITLE)


def words_of(figure: "Figure") -> str:
    """All that is written in the figure where it is seen."""
    from matplotlib.text import Text

    return "\n".join(text.get_text() for text in figure.findobj(Text) if isinstance(text, Text) and text.get_visible())


def tell(axes: "Axes", place: float, words: str, *, row: bool = False) -> None:
    """Words for who points at a place of the horizontal axis, or at a `row`: an SVG shows them."""
    told_of(axes, row=row).append((place, words))


def told_of(axes: "Axes", *, row: bool) -> Told:
    """The words that `tell` was told of a panel."""
    return _told.setdefault(axes, ([], []))[row]


def tell_line(axes: "Axes", unit: str, label: str, places: np.ndarray, values: np.ndarray) -> None:
    """The values of a line for who points at their places, at most about MOST_AREAS of them, the last among them."""
    known = np.flatnonzero(np.isfinite(values))[::-1]
    for number in known[:: 1 + len(known) // MOST_AREAS].tolist():
        tell(axes, float(places[number]), f"{unit} {places[number]:g}\n{label or 'value'}: {values[number]:.4g}")


def panel_grid(num: int, columns: int, *, row_height: float, **options: Any) -> "tuple[Figure, list[Axes]]":
    """`num` panels, `columns` in a row, all of one size, with room for a legend above."""
    rows = -(-num // columns)
    figure, panels = new_figure(rows, columns, height=0.6 + row_height * rows, **options)
    for axes in panels[num:]:
        axes.set_visible(False)
    return figure, panels[:num]


def legend_of_all(figure: "Figure", panels: "Sequence[Axes]", names: Sequence[str], **options: Any) -> None:
    """One legend above all panels, of the `names` that any of them has."""
    found = {label: handle for axes in panels for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    shown = [name for name in names if name in found]
    figure.legend([found[name] for name in shown], shown, loc="outside upper left", **options)


class Panel(NamedTuple):
    """Lines over the steps on one pair of axes."""

    title: str
    lines: Mapping[str, np.ndarray]
    """Values by label; those that are not finite are left out."""
    steps: Int64[np.ndarray, " values"] | None = None
    """Step of each value; 0, 1, 2, ... without them."""
    logarithmic: bool = False
    """Allowed, and used once the values span more than LOGARITHMIC_SPAN; the axis of another panel begins at 0."""


def series_figure(
    panels: Sequence[Panel], last_step: int, mixed_from: int | None = None, *, one_legend: bool = False
) -> "Figure | None":
    """The panels that have a value, two in a row, each with the legend of its lines or all with `one_legend`; None
    without any."""
    shown = [panel for panel in panels if any(np.isfinite(values).any() for values in panel.lines.values())]
    if not shown:
        return None
    with styled():
        columns, row_height = min(2, len(shown)), 1.9
        figure, places = panel_grid(len(shown), columns, row_height=row_height)
        windows = [_draw_panel(axes, panel) for axes, panel in zip(places, shown, strict=True)]
        for axes in places:
            count_axis(axes, "step", last_step)
            mark_phase_start(axes, mixed_from)
        for axes in places[:-columns]:
            axes.set_xlabel("")
        explain_smoothing(figure, *max(windows))
        if one_legend:
            legend_of_all(figure, places, list(shown[0].lines), ncols=2)
            return figure
        for axes, panel in zip(places, shown, strict=True):
            if any(panel.lines):
                columns = len(panel.lines) if len("".join(panel.lines)) < LEGEND_COLUMNS else 1
                for line in axes.lines:
                    line.set_label(fill(str(line.get_label()), LABEL_COLUMNS))
                legend_above(axes, ncols=columns)
                lines = [label.count("\n") + 1 for label in axes.get_legend_handles_labels()[1]]
                pad = LEGEND_LINE * (sum(lines) if columns == 1 else max(lines))
                axes.set_title(axes.get_title("left"), loc="left", pad=pad + TITLE_PAD, va="bottom")
        return figure


def _draw_panel(axes: "Axes", panel: Panel) -> tuple[int, int]:
    """Draw a panel; returns as `draw_line`, of its longest averages."""
    axes.set_title(fill(panel.title, TITLE_COLUMNS // 2), loc="left")
    values = np.concatenate(list(panel.lines.values()))
    known = values[np.isfinite(values)]
    looks = looks_of(list(panel.lines))
    window = max(draw_line(axes, panel.steps, own, label, **looks[label]) for label, own in panel.lines.items())
    if panel.logarithmic and known.min() > 0 and known.max() > LOGARITHMIC_SPAN * known.min():
        logarithmic_axis(axes)
    else:
        axes.ticklabel_format(axis="y", style="sci", scilimits=(-3, 5))
        if not panel.logarithmic:
            axes.set_ylim(0, None)
    return window


def draw_line(
    axes: "Axes", steps: np.ndarray | None, values: np.ndarray, label: str, *, color: str, linestyle: str, marker: str
) -> tuple[int, int]:
    """Draw the finite values; many of them thin, with a centred moving average over 1/20 of the run as a thick line.

    Returns the steps that the average is over, 0 where there is none: of few values, and of maxima, since the average
    of a spike is a rectangle that was not measured; and the steps that a point stands for, by their mean or maximum.
    """
    known = np.isfinite(values)
    x, y = (np.arange(len(values)) if steps is None else steps)[known], values[known].astype(np.float64)
    tell_line(axes, "step", label, x, y)
    look: dict[str, Any] = {"color": color, "label": label or None, "linestyle": linestyle}
    if len(x) < FEW:
        look |= {"linestyle": "none", "marker": "o", "clip_on": False}
    each = -(-len(x) // MOST_POINTS) or 1
    if len(x) < SMOOTHED_FROM or label == MAXIMA:
        axes.plot(x[::each], _of_each(np.maximum, y, each), **look, linewidth=1.3 if len(x) < SMOOTHED_FROM else 0.7)
        return 0, each
    window = max(3, len(x) // WINDOWS_PER_RUN) // 2 * 2 + 1
    around = np.ones(window)
    # At the ends over those that there are.
    average = np.convolve(y, around, "same") / np.convolve(np.ones(len(y)), around, "same")
    means = _of_each(np.add, y, each) / _of_each(np.add, np.ones(len(y)), each)
    axes.plot(x[::each], means, color=color, alpha=0.28, linewidth=0.7)
    axes.plot(x[::each], average[::each], **look)
    return window, each


def _of_each(function: np.ufunc, values: np.ndarray, each: int) -> np.ndarray:
    """The sum or the maximum of every `each` values."""
    return function.reduceat(values, np.arange(0, len(values), each)) if each > 1 else values


def explain_smoothing(figure: "Figure", window: int, each: int) -> None:
    """Say below the figure what thin and thick lines are, where an average was drawn."""
    if window:
        thin = "each step" if each == 1 else f"mean (of maxima the largest) of every {each} steps"
        write_below(figure, f"thin: {thin}; thick: mean over {window} steps")


def write_below(figure: "Figure", text: str) -> None:
    """A line of small letters below the panels."""
    figure.supxlabel(text, fontsize=7.5, color=SOFT)


Points = Sequence[float] | np.ndarray


def draw_curve(
    axes: "Axes", x: Points, mean: Points, low: Points, high: Points, *, band: bool = True, **look: Any
) -> None:
    """Values with the ends of their intervals, as a band around the line or as bars on it; what is NaN is left out.

    Fewer than FEW are dots with bars. `look` goes to matplotlib: `color`, `marker`, `linestyle`, `label`.
    """
    points = np.array([x, mean, low, high], dtype=np.float64)
    places, values, *ends = points[:, np.isfinite(points[1])]
    few = len(values) < FEW
    if few or not band:
        spread = np.nan_to_num(np.abs(np.stack(ends) - values))
        axes.errorbar(places, values, yerr=spread, capsize=2, **look | ({"linestyle": "none"} if few else {}))
        return
    # On a line the first of the markers is a mere point.
    axes.plot(places, values, **look | {"marker": "." if look.get("marker") == MARKERS[0] else look.get("marker")})
    axes.fill_between(places, *ends, color=look.get("color"), alpha=0.15, linewidth=0)


class Row(NamedTuple):
    """A mean with its interval beside a label; rows stand under one another, the first on top."""

    label: str
    mean: float
    low: float
    high: float
    bar: float | None
    """Value that the mean is held against."""
    colour: str
    marker: str = "D"
    dots: Sequence[float] = ()
    """Single values, drawn below the mean."""
    above: str = ""
    """Written over the row, from the panel's left edge on."""


def draw_rows(axes: "Axes", rows: Sequence[Row], *, reference: float | None = None) -> None:
    """Each row as high as its label; `reference` is where the vertical line stands."""
    if reference is not None:
        axes.axvline(reference, color=GREY, linewidth=0.9, linestyle=(0, (4, 2)), zorder=1)
    heights = np.array([row_height(row) for row in rows])
    ends = np.cumsum(heights)
    places = np.where([bool(row.above) for row in rows], ends - 0.4, ends - heights / 2)
    for place, top, row in zip(places.tolist(), (ends - heights).tolist(), rows, strict=True):
        seeds = f"\nseeds: {', '.join(f'{dot:.3f}' for dot in row.dots)}" if row.dots else ""
        tell(axes, place, f"{row.label or row.above}: {row.mean:.3f} [{row.low:.3f}, {row.high:.3f}]{seeds}", row=True)
        below = np.full(len(row.dots), place + 0.22)
        look: dict[str, Any] = {"fillstyle": "none", "alpha": 0.8, "markersize": 3, "markeredgewidth": 0.8}
        axes.plot(row.dots, below, "o", color=row.colour, **look)
        spread = np.array([[row.mean - row.low], [row.high - row.mean]]).clip(0)
        look = {"color": row.colour, "marker": row.marker, "markersize": 4.5, "elinewidth": 1.4, "capsize": 3}
        axes.errorbar([row.mean], [place], xerr=spread, **look)
        if row.bar is not None:
            axes.plot([row.bar] * 2, [place - 0.3, place + 0.3], color=BLACK, linewidth=1.6)
        over: dict[str, Any] = {"transform": axes.get_yaxis_transform(), "va": "top", "fontsize": 8}
        if row.above:
            paper = {"facecolor": "#FFFFFF", "edgecolor": "none", "pad": 0.5}
            axes.text(0.0, top + 0.1, row.above, color=row.colour, bbox=paper, **over)
            axes.spines["left"].set_visible(False)
    axes.set_yticks(places, [row.label for row in rows])
    axes.set_ylim(float(ends[-1]), 0.0)
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False, axis="y")
    axes.margins(x=0.08)


def row_height(row: Row) -> float:
    """Height of a row, where that of a label of one line is 1."""
    return 1.0 + 0.45 * row.label.count("\n") + (0.42 * row.above.count("\n") + 0.2) * bool(row.above)


Categories = Mapping[str, Mapping[int, Sequence[float]]]
"""By name and place a mean and the ends of its interval."""


def draw_categories(axes: "Axes", labels: Sequence[str], points: Categories, **look: Any) -> None:
    """A line a name over the places of the labels: by place its mean and the ends of its interval.

    Each name is a little to the right of the one before, so that intervals stay apart.
    """
    for number, (name, own) in enumerate(looks_of(list(points)).items()):
        places = [place + 0.08 * (number - (len(points) - 1) / 2) for place in points[name]]
        values = np.array(list(points[name].values()), dtype=np.float64).reshape(-1, 3)
        draw_curve(axes, places, *values.T, band=False, label=name, **own | look)
        for place, (mean, low, high) in zip(points[name], values.tolist(), strict=True):
            ends = f" [{low:.3f}, {high:.3f}]" if low < high else ""
            tell(axes, place, f"{labels[place]}\n{name}: {mean:.4g}{ends}")
    axes.set_xticks(range(len(labels)), labels)
    axes.grid(visible=False, axis="x")


def categories_figure(labels: Sequence[str], points: Categories, **axis: Any) -> "Figure":
    """Means with the ends of their intervals at labelled places; `axis` are those of matplotlib's `Axes.set`."""
    with styled():
        figure, (axes,) = new_figure(height=2.8)
        draw_categories(axes, labels, points, linestyle="none")
        axes.set(**axis)
        legend_above(axes, ncols=min(3, len(points)))
        return figure


def looks_of(names: Sequence[str], baselines: Sequence[str] = ()) -> dict[str, dict[str, Any]]:
    """A look for each name of a panel, no two alike: baselines are black, the others take the colours in turn.

    After a round of colours, and after each baseline, line and marker change; both come round together after 28.
    """
    looks: dict[str, dict[str, Any]] = {}
    for palette, of_baselines in (((BLACK,), True), (CYCLE, False)):
        for number, name in enumerate(name for name in names if (name in baselines) == of_baselines):
            turn, colour = divmod(number, len(palette))
            line, marker = LINESTYLES[turn % len(LINESTYLES)], MARKERS[turn % len(MARKERS)]
            looks[name] = {"color": palette[colour], "linestyle": line, "marker": marker}
    return looks


def count_axis(axes: "Axes", label: str, last: float, margin: float = 0.0) -> None:
    """Label the horizontal axis as whole counts from 0 to `last`, in few characters: 156, 2.2k, 31k, 1.5M."""
    from matplotlib.ticker import EngFormatter

    axes.set(xlabel=label, xlim=(-margin * max(last, 1), (1 + margin) * max(last, 1)))
    axes.locator_params(axis="x", nbins=6, integer=True)
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))


def mark_phase_start(axes: "Axes", step: int | None, *, label: bool = False) -> None:
    """A dotted line where the mixed phase begins."""
    if step is None:
        return
    axes.axvline(step, color=GREY, linewidth=0.8, linestyle=(0, (1, 1.5)), zorder=1)
    if label:
        aside: dict[str, Any] = {"xytext": (2, -2), "textcoords": "offset points", "va": "top"}
        axes.annotate("mixed phase", (step, 1), xycoords=axes.get_xaxis_transform(), color=SOFT, fontsize=7.5, **aside)


def logarithmic_axis(axes: "Axes") -> None:
    """A logarithmic vertical axis with labels at the decades only."""
    from matplotlib.ticker import NullFormatter

    axes.set_yscale("log")
    axes.yaxis.set_minor_formatter(NullFormatter())


def legend_above(axes: "Axes", **options: Any) -> None:
    """The legend on top of a panel, where no line runs."""
    axes.legend(loc="lower left", bbox_to_anchor=(0.0, 1.0), borderaxespad=0.0, columnspacing=1.0, **options)

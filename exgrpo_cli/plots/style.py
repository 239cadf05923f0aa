"""One look for every figure: size, type, colours that colour-blind readers can tell apart, and how it is saved.

Figures are made through matplotlib's object interface with the Agg canvas: no window, no global state.
"""

import logging
import math
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exgrpo_cli.base.files import write_whole

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito (2008), "Color Universal Design": distinct under all common forms of colour blindness.
BLUE = "#0072B2"
ORANGE = "#E69F00"
GREEN = "#009E73"
VERMILION = "#D55E00"
PURPLE = "#CC79A7"
SKY = "#56B4E9"
BLACK = "#000000"
GREY = "#8C8C8C"
MARKERS = ("o", "s", "D", "^", "v", "P", "X")
BAND_ALPHA = 0.15
CYCLE = (BLUE, VERMILION, GREEN, ORANGE, PURPLE, SKY, BLACK)

SINGLE_COLUMN = 3.5
"""Inches: the text width of one column in a two-column paper."""
FULL_WIDTH = 7.0
PNG_DPI = 200

_STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 8.0,
    "axes.titlesize": 8.5,
    "axes.labelsize": 8.0,
    "xtick.labelsize": 7.0,
    "ytick.labelsize": 7.0,
    "legend.fontsize": 7.0,
    "legend.frameon": False,
    "legend.handlelength": 1.4,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.6,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#E3E3E3",
    "grid.linewidth": 0.5,
    "lines.linewidth": 1.3,
    "lines.markersize": 3.5,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    # Text stays text: searchable, and editable in a vector editor.
    "svg.fonttype": "none",
    # Equal input gives an equal file.
    "svg.hashsalt": "exgrpo",
    # TrueType: what journals ask for, where matplotlib's own choice is Type 3.
    "pdf.fonttype": 42,
}


@contextmanager
def styled() -> Iterator[None]:
    """Matplotlib with the house style; its cache goes to a temporary folder where the user's own is read-only."""
    _ensure_cache_folder()
    import matplotlib

    with matplotlib.rc_context(_STYLE):
        yield


def _ensure_cache_folder() -> None:
    """Name a writable cache folder before matplotlib is first imported, which warns about a read-only one."""
    if "MPLCONFIGDIR" in os.environ:
        folders = [Path(os.environ["MPLCONFIGDIR"])]
    else:
        folders = [
            Path(os.environ.get("XDG_CONFIG_HOME", "~/.config")).expanduser() / "matplotlib",
            Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "matplotlib",
        ]
    if not all(_writable(folder) for folder in folders):
        os.environ["MPLCONFIGDIR"] = tempfile.mkdtemp(prefix="exgrpo-matplotlib-")
    logging.getLogger("matplotlib.font_manager").setLevel(logging.ERROR)


def _writable(folder: Path) -> bool:
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    return existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)


def new_figure(
    rows: int = 1, columns: int = 1, *, width: float, height: float, row_heights: Sequence[float] | None = None
) -> "tuple[Figure, list[Axes]]":
    """A figure of `width` x `height` inches with rows x columns panels, listed row by row.

    Rows are alike, or as high as `row_heights` says in relation to each other.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(rows, columns, squeeze=False, height_ratios=row_heights)
    return figure, list(panels.flat)


def full_rows(num: int, columns: int, *, width: float, row_height: float) -> "tuple[Figure, list[Axes]]":
    """`num` panels, `columns` in a row; those of the last row share its whole width, so that no place stays empty."""
    rows = max(1, -(-num // columns))
    figure, _ = new_figure(width=width, height=row_height * rows)
    figure.clear()
    cells = math.lcm(*range(1, columns + 1))
    grid = figure.add_gridspec(rows, cells)
    panels = []
    for row in range(rows):
        here = min(columns, num - row * columns)
        share = cells // here
        panels += [figure.add_subplot(grid[row, place * share : (place + 1) * share]) for place in range(here)]
    return figure, panels


LINESTYLES = ("-", "--", ":", "-.")
"""After a round of colours the next one."""


def step_axis(axes: "Axes", last_step: int) -> None:
    """Label the horizontal axis as steps, on whole numbers, from 0 (before step 1) to the end."""
    from matplotlib.ticker import MaxNLocator

    axes.set_xlabel("step")
    axes.set_xlim(0, max(last_step, 1))
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))


def token_axis(axes: "Axes") -> None:
    """Counts of tokens on the horizontal axis in few characters."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(nbins=5))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda count, _: brief_count(int(count))))


def mark_phase_start(axes: "Axes", step: int | None, *, label: bool = False) -> None:
    """A dotted line where the mixed phase begins."""
    if step is None:
        return
    axes.axvline(step, color=GREY, linewidth=0.8, linestyle=(0, (1, 1.5)), zorder=1)
    if label:
        axes.annotate(
            "mixed phase",
            xy=(step, 1.0),
            xycoords=("data", "axes fraction"),
            xytext=(2, -2),
            textcoords="offset points",
            fontsize=6.5,
            color="#5A5A5A",
            va="top",
            ha="left",
        )


def logarithmic_axis(axes: "Axes") -> None:
    """A logarithmic vertical axis with labels at the decades only."""
    from matplotlib.ticker import NullFormatter

    axes.set_yscale("log")
    axes.yaxis.set_minor_formatter(NullFormatter())


def brief_count(count: int) -> str:
    """A count in at most four characters: 156, 2.2k, 31k, 1.5M."""
    for unit, letter in ((1_000_000, "M"), (1_000, "k")):
        if count >= unit:
            return (
                f"{count / unit:.1f}".removesuffix(".0") + letter
                if count < 9.95 * unit
                else f"{count / unit:.0f}{letter}"
            )
    return str(count)


def legend_above(axes: "Axes", **options: Any) -> None:
    """The legend on top of a panel, where no line runs."""
    axes.legend(loc="lower left", bbox_to_anchor=(0.0, 1.0), borderaxespad=0.0, columnspacing=1.0, **options)


def say_nothing_to_show(axes: "Axes", reason: str) -> None:
    """Write the reason into an empty panel instead of drawing bare axes."""
    axes.set_axis_off()
    axes.text(0.5, 0.5, reason, transform=axes.transAxes, ha="center", va="center", fontsize=7.5, color="#5A5A5A")


def bucket_colours(count: int) -> Sequence[tuple[float, float, float, float]]:
    """`count` steps of viridis, dark for few successes, light for many; the last tenth is too pale on white."""
    import matplotlib

    colour_map = matplotlib.colormaps["viridis"]
    return [colour_map(0.92 * index / max(count - 1, 1)) for index in range(count)]


_SAVING: dict[str, dict[str, Any]] = {
    "png": {"dpi": PNG_DPI},
    # Without a date, equal input gives an equal file.
    "svg": {"metadata": {"Date": None}},
    "pdf": {"metadata": {"CreationDate": None}},
}


def save(figure: "Figure", folder: Path, name: str, formats: Sequence[str] = ("png", "svg")) -> list[Path]:
    """Write `name` into `folder` in each of `formats` (png, svg, pdf), whole or not at all; return the paths."""
    paths = []
    with styled():
        for suffix in formats:
            path = folder / f"{name}.{suffix}"
            write_whole(path, partial(figure.savefig, format=suffix, **_SAVING[suffix]))
            paths.append(path)
            # The layout is in inches, hence that of the next format too; working it out is half of the time.
            figure.set_layout_engine("none")
    return paths

"""Figures as files: SVG with values under the pointer, PNG and PDF, each with its title above it."""

import io
import itertools
from collections.abc import Mapping, Sequence
from functools import cache, partial
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exgrpo_cli.base import files, output
from exgrpo_cli.show.figures.style import TITLE, TITLE_LINE, styled, told_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PNG_DPI = 200
POINTS = 72.0
"""Points to an inch, the unit of an SVG."""
UNDATED = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}
"""Metadata by format: without a date, equal input gives an equal file."""


def make_readable(figure: "Figure") -> None:
    """Make the names in a figure printable, and let formulas that cannot be read stand as they are."""
    from matplotlib.text import Text

    for axis in (axis for axes in figure.axes for axis in (axes.xaxis, axes.yaxis)):
        labels = [label.get_text() for label in axis.get_ticklabels()]
        if any(output.printable(label) != label for label in labels):
            # Their texts are made anew at every drawing.
            axis.set_ticks(axis.get_majorticklocs(), list(map(output.printable, labels)))
    for text in (each for each in figure.findobj(Text) if isinstance(each, Text)):
        text.set_text(output.printable(text.get_text()))
        if text.get_text().count("$") > 1 and not _is_formula(text.get_text()):
            text.set_parse_math(False)


@cache
def _is_formula(text: str) -> bool:
    """Whether matplotlib can read it; kept, since labels of logarithmic axes are the same ones again and again."""
    from matplotlib.mathtext import MathTextParser

    try:
        MathTextParser("path").parse(text)
    except ValueError:
        return False
    return True


def as_svg(figure: "Figure", metadata: Mapping[str, Any], *, entitled: bool = True) -> str:
    """A readable figure as SVG, with values under the pointer, and with its title if it is `entitled`."""
    written = io.StringIO()
    for text in figure.texts:
        text.set_visible(entitled or text.get_gid() != TITLE)
    whole = _whole(figure) if entitled else None
    with styled():
        figure.savefig(written, format="svg", metadata=dict(metadata), bbox_inches=whole)
    height = (whole.height if whole else figure.get_figheight()) * POINTS
    areas = "".join(_areas(axes, height, POINTS / figure.dpi) for axes in figure.axes)
    return written.getvalue().replace("</svg>", f"{areas}</svg>")


def _whole(figure: "Figure") -> Any:
    """The figure laid out, with its title above it, in inches."""
    from matplotlib.layout_engine import ConstrainedLayoutEngine
    from matplotlib.transforms import Bbox

    if isinstance(figure.get_layout_engine(), ConstrainedLayoutEngine):
        # A layout is in inches, hence that of the next format too; working it out is half of the time.
        figure.draw_without_rendering()
        figure.set_layout_engine(None)  # a place holder would have each format drawn twice
        for legend in figure.legends:
            legend.set_bbox_to_anchor((0, 0, 1, 1), figure.transFigure)
    lines = sum(text.get_text().count("\n") + 1 for text in figure.texts if text.get_gid() == TITLE)
    width, height = figure.get_size_inches()
    return Bbox.from_bounds(0, 0, width, height + lines * TITLE_LINE + 0.08 * bool(lines))


def _areas(axes: "Axes", height: float, scale: float) -> str:
    """Transparent rectangles over the axes of an SVG `height` points high, with `scale` points to a pixel: each place
    with words reaches half-way to its neighbours."""
    box = axes.get_window_extent()
    drawn = []
    for row, (start, end) in ((False, (box.x0, box.x1)), (True, (box.y0, box.y1))):
        told: dict[float, list[str]] = {}
        for place, words in told_of(axes, row=row):
            at = axes.transData.transform((0.0, place) if row else (place, 0.0))
            lines = told.setdefault(float(at[int(row)]), [])
            lines += [line for line in output.printable(words).split("\n") if line not in lines]
        places = sorted(told)
        edges = [start, *((one + other) / 2 for one, other in itertools.pairwise(places)), end]
        for place, (low, high) in zip(places, itertools.pairwise(edges), strict=False):
            x0, x1, y0, y1 = (box.x0, box.x1, low, high) if row else (low, high, box.y0, box.y1)
            where = f'x="{x0 * scale:.1f}" y="{height - y1 * scale:.1f}"'
            size = f'width="{(x1 - x0) * scale:.1f}" height="{(y1 - y0) * scale:.1f}"'
            title = "<title>" + escape("\n".join(told[place]), quote=False) + "</title>"
            drawn.append(f'<rect class="value" {where} {size} fill="none" pointer-events="all">{title}</rect>\n')
    return "".join(drawn)


def save(figure: "Figure", folder: Path, name: str, formats: Sequence[str] = ("png", "svg")) -> list[Path]:
    """Write `name` into `folder` in each of `formats` (png, svg, pdf), whole or not at all; return the paths."""
    paths = []
    make_readable(figure)
    with styled():
        for suffix in formats:
            path = folder / f"{name}.{suffix}"
            if suffix == "svg":
                files.write_text(path, as_svg(figure, UNDATED["svg"]))
            else:
                dpi, metadata = PNG_DPI if suffix == "png" else "figure", UNDATED.get(suffix)
                look: dict[str, Any] = {"dpi": dpi, "metadata": metadata, "bbox_inches": _whole(figure)}
                files.write_whole(path, partial(figure.savefig, format=suffix, **look))
            paths.append(path)
    return paths

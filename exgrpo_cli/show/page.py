"""A page: titled sections of paragraphs, tables, figures and responses, rendered as one self-contained HTML file."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup
from rich.table import Table as RichTable

from exgrpo_cli.base.errors import ExgrpoError
from exgrpo_cli.base.files import write_text
from exgrpo_cli.base.output import printable
from exgrpo_cli.show.figures.style import as_svg

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Drawn

NOT_SHOWN = "Not shown: "
"""Before what is wrong with the files of a section."""
PIXELS_PER_INCH = 110
"""Pixels per inch of a figure on a wide screen."""
LEAST_SHARE = 0.62
"""Share of that width to which a narrow screen shrinks it: below, its text cannot be read, and it is scrolled."""
TEMPLATE = Path(__file__).with_name("page.html.j2")


@dataclass(frozen=True, slots=True)
class Paragraph:
    """Running text, a warning, or something to copy, such as a command."""

    text: str
    kind: str = "paragraph"
    """`paragraph`, `warning` or `code`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FigureBlock:
    """A figure as SVG with a line about how to read it."""

    kind = "figure"
    name: str
    svg: Markup
    caption: str


@dataclass(frozen=True, slots=True)
class Response:
    """A response of the policy with what is known about it."""

    kind = "response"
    question: str
    answer: str
    text: str
    facts: str
    good: bool


Block = Paragraph | RichTable | FigureBlock | Response
"""A table with its title and caption above it; what is flush left is text, and may be broken over lines."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Page:
    """A whole page."""

    title: str
    subtitle: str
    sections: Mapping[str, Sequence[Block]]
    """By title."""
    footer: str


def warning(text: str) -> Paragraph:
    """Text that stands out."""
    return Paragraph(text, "warning")


def gather(sections: Mapping[str, Iterator[Block]]) -> dict[str, list[Block]]:
    """Sections that have a block, each up to where a file that it needs is missing or damaged: that is said there."""
    gathered: dict[str, list[Block]] = {}
    for title, blocks in sections.items():
        try:
            for block in blocks:
                gathered.setdefault(title, []).append(block)
        except (ExgrpoError, OSError) as error:
            gathered.setdefault(title, []).append(warning(f"{NOT_SHOWN}{error}"))
    return gathered


def write_page(page: Page, path: Path) -> None:
    """Write the page whole or not at all. Raises RunError where it cannot be written."""
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, finalize=_finished
    )
    environment.globals["cells"] = cells
    write_text(path, environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(page=page))


def _finished(value: object) -> object:
    """A value as a page shows it; what is marked up already stays."""
    return printable(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def figure_block(name: str, figure: "Drawn", captions: Mapping[str, str]) -> FigureBlock:
    """The figure inline: as wide as the page lets it be up to its own size, and without metadata."""
    svg = as_svg(figure, dict.fromkeys(("Date", "Creator", "Format", "Type")))
    svg = svg[svg.index("<svg") :]
    width = PIXELS_PER_INCH * figure.get_figwidth()
    style = f"max-width: {width:.0f}px; min-width: {LEAST_SHARE * width:.0f}px"
    svg = re.sub(r' width="[^"]*" height="[^"]*"', f' style="{style}"', svg, count=1)
    # Ids are counted anew in every figure, and one page has one space of ids.
    svg = re.sub(r'\bid="', f'id="{name}-', svg)
    svg = re.sub(r'(xlink:href="|url\()#', rf"\1#{name}-", svg)
    return FigureBlock(name=name, svg=Markup(svg), caption=captions[name])


def cells(table: RichTable) -> list[tuple[str, ...]]:
    """A terminal's table as rows of text; an interval is not broken over lines, so that the others of a row may be."""

    def kept(cell: object) -> str:
        return re.sub(r"(?<=\d) to (?=[-\d])", "\u00a0to\u00a0", re.sub(r", (?=[-+\d])", ",\u00a0", str(cell)))

    return list(zip(*(map(kept, column.cells) for column in table.columns), strict=True))

"""A page: titled sections of paragraphs, tables, figures and responses, rendered as one self-contained HTML file."""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup
from rich.table import Table as RichTable

from exgrpo_cli.base.errors import ExgrpoError
from exgrpo_cli.base.files import write_text
from exgrpo_cli.base.output import printable, unmarked
from exgrpo_cli.show.figures import style, written

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Drawn

NOT_SHOWN = "Not shown: "
"""Before what is wrong with the files of a section."""
SMALL = 4
"""Most columns of a table that takes half of a wide screen."""
THEME = {
    **dict(zip(style.CYCLE, ("blue", "vermilion", "green", "orange", "purple", "sky"), strict=True)),
    **{style.BLACK: "ink", style.SOFT: "soft", style.GREY: "grey", "#FFFFFF": "paper", "#E3E3E3": "line"},
}
"""Names that the page has for the colours of figures, light and dark."""
TEMPLATE = Path(__file__).with_name("page.html.j2")


class Paragraph(NamedTuple):
    """Running text, a warning, or something to copy, such as a command."""

    text: str
    kind: str = "paragraph"
    """`paragraph`, `warning` or `code`."""


class FigureBlock(NamedTuple):
    """A figure as SVG with its title and a line about how to read it."""

    name: str
    title: str
    svg: Markup
    caption: str


class Links(NamedTuple):
    """Files by their address from the page, each with what it is; without addresses they are only named."""

    files: Mapping[str, str]
    linked: bool


class Response(NamedTuple):
    """A response of the policy with what is known about it."""

    question: str
    answer: str
    text: str
    facts: str
    good: bool


Block = Paragraph | RichTable | FigureBlock | Response | Links
"""A table with its title and caption above it; what is flush left is text, and may be broken over lines."""


class Page(NamedTuple):
    """A whole page."""

    title: str
    headline: str
    """One sentence: what it was and what came of it."""
    subtitle: str
    sections: Mapping[str, Sequence[Block]]
    """By title."""
    footer: str


def warning(text: str) -> Paragraph:
    """Text that stands out."""
    return Paragraph(text, "warning")


def gather(sections: Mapping[str, Sequence[Iterator[Block]]]) -> dict[str, list[Block]]:
    """Sections that have a block, each of their parts up to where a file that it needs is missing or damaged: that is
    said there."""
    gathered: dict[str, list[Block]] = {}
    for title, blocks in ((title, part) for title, parts in sections.items() for part in parts):
        try:
            for block in blocks:
                gathered.setdefault(title, []).append(block)
        except (ExgrpoError, OSError) as error:
            gathered.setdefault(title, []).append(warning(f"{NOT_SHOWN}{error}"))
    return gathered


def write_page(page: Page, path: Path) -> None:
    """Write the page whole or not at all. Raises RunError where it cannot be written."""
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, finalize=unmarked(printable)
    )
    environment.globals |= {"cells": cells, "SMALL": SMALL}
    write_text(path, environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(page=page))


def figure_block(name: str, figure: "Drawn") -> FigureBlock:
    """The figure inline, as wide as the page lets it be, in the page's colours, its title apart, without metadata.

    Of its caption those sentences whose word the figure has.
    """
    caption = " ".join(said for word, said in style.WORDS["captions"][name].items() if word in style.words_of(figure))
    title = style.title_of(figure)
    written.make_readable(figure)
    svg = written.as_svg(figure, dict.fromkeys(("Date", "Creator", "Format", "Type")), entitled=False)
    svg = re.sub(r' width="[^"]*" height="[^"]*"', "", svg[svg.index("<svg") :], count=1)
    for colour, own in THEME.items():
        svg = re.sub(rf"\b(fill|stroke): {colour}\b", rf"\1: var(--{own})", svg, flags=re.IGNORECASE)
    # Ids are counted anew in every figure, and one page has one space of ids.
    svg = re.sub(r'\bid="', f'id="{name}-', svg)
    svg = re.sub(r'(xlink:href="|url\()#', rf"\1#{name}-", svg)
    return FigureBlock(name=name, title=title or name, svg=Markup(svg), caption=caption)


def cells(table: RichTable) -> list[tuple[str, ...]]:
    """A terminal's table as rows of text; an interval is not broken over lines, so that the others of a row may be."""

    def kept(cell: object) -> str:
        return re.sub(r"(?<=\d) to (?=[-\d])", "\u00a0to\u00a0", re.sub(r", (?=[-+\d])", ",\u00a0", str(cell)))

    return list(zip(*(map(kept, column.cells) for column in table.columns), strict=True))

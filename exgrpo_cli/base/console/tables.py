"""Tables on stdout: whole numbers at any width; where a table does not fit, its rows follow one another as lists."""

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from exgrpo_cli.base.console.output import data_stream

PIPE_WIDTH = 120
"""Columns of a table that does not go to a terminal."""
FEW_WORDS = 18
"""Least columns of text that may wrap."""
_AMPLE = 10_000


def stdout_console() -> Console:
    """A console for data: nothing in it is markup; as wide as the terminal, or PIPE_WIDTH in a pipe."""
    out = data_stream()
    return Console(file=out, markup=False, highlight=False, width=None if out.isatty() else PIPE_WIDTH)


def print_table(table: Table, console: Console | None = None) -> None:
    """Print a table whose right-aligned columns, the numbers, keep to one line; too wide a one as lists of its rows.

    Other columns keep the width of a few words. Rich itself would count the longest word of a cell that must not wrap,
    and squeeze others to nothing for it.
    """
    console = console or stdout_console()
    for column in table.columns:
        column.no_wrap = column.no_wrap or column.justify == "right"
        longest = max((len(_plain(cell)) for cell in (column.header, *column.cells)), default=0)
        column.min_width = longest if column.no_wrap else min(longest, FEW_WORDS)
    # Measured with room to spare: in a narrow console no minimum is above its width.
    least = console.measure(table, options=console.options.update(width=_AMPLE)).minimum
    console.print(table if least <= console.width else as_lists(table))


def as_lists(table: Table) -> RenderableType:
    """Each row as lines of column name and value, one pair a line."""
    names = [_plain(column.header) for column in table.columns]
    wide = max((len(name) for name in names), default=0)
    lines: list[Text] = [Text(_plain(table.title))] if table.title else []
    for row in zip(*(list(column.cells) for column in table.columns), strict=True):
        for name, cell in zip(names, row, strict=True):
            lines.append(Text(f"{name:<{wide}}  {_plain(cell)}".strip(), overflow="fold"))
        lines.append(Text(""))
    return Group(*lines)


def _plain(cell: object) -> str:
    return cell.plain if isinstance(cell, Text) else str(cell)

"""How a figure is written in the cell of a table, and the tables' common form."""

import math

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.table import Table

TEXT_SHOWN = 60
"""Characters of a question's text."""
NO_VALUE = "–"


def table_of(title: str, first: str, *others: str) -> Table:
    """An empty table: the first column flush left, the others right."""
    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        caption_justify="left",
        box=SIMPLE_HEAD,
        min_width=len(title),
    )
    table.add_column(first, justify="left", no_wrap=True)
    for name in others:
        table.add_column(name, justify="right", overflow="fold")
    return table


def text_column_last(table: Table) -> None:
    """Let the last column alone be broken over lines: numbers stay whole however narrow the terminal is."""
    for column in table.columns[:-1]:
        column.no_wrap = True
    table.columns[-1].justify = "left"
    # More columns fit without the blank on the left.
    table.padding = (0, 1, 0, 0)


def excerpt(text: str, length: int = TEXT_SHOWN) -> str:
    """A text on one line, cut to `length` characters."""
    line = " ".join(text.split())
    return line if len(line) <= length else f"{line[: length - 1]}…"


def maybe(value: int | None) -> str:
    """A count, or a dash."""
    return NO_VALUE if value is None else str(value)


def number(value: float | None) -> str:
    """Three decimals, or a dash for what is missing or not finite."""
    return NO_VALUE if value is None or not math.isfinite(value) else f"{value:.3f}"


def significant(value: float) -> str:
    """Three digits that count, or a dash where it is not finite: drifts are small, steps as priorities large."""
    return NO_VALUE if not math.isfinite(value) else f"{value:.3g}"


def percent(share: float) -> str:
    """A share in per cent, or a dash where it is not finite."""
    return NO_VALUE if not math.isfinite(share) else f"{share:.1%}"


def mean(values: np.ndarray) -> float:
    """The mean; NaN of nothing."""
    return float(values.mean()) if len(values) else math.nan


def nan_mean(values: np.ndarray) -> float:
    """The mean of what is finite; NaN without any."""
    return mean(values[np.isfinite(values)])

"""A row on its way to a question: the draft, the reasons it cannot become one, and how cells are read."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from exgrpo_cli.base.errors import InputError
from exgrpo_cli.base.types import Message
from exgrpo_cli.questions.question_file.rows import is_unicode, prompt_of
from exgrpo_cli.questions.sources.files import Row

QUESTION_NAMES = ("question", "problem", "input")
ANSWER_NAMES = ("answer", "final_answer", "expected_answer", "ground_truth_answer", "ground_truth", "target")
_LEVEL_NAMES = ("level", "difficulty")


class UnusableRow(ValueError):
    """A row that cannot become a question; the message is the reason it is counted under."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Draft:
    """A question before it has an id."""

    prompt: tuple[Message, ...]
    answer: str
    source: str | None
    """Where the row itself says it came from."""
    level: str | None
    metadata: str | None = None
    """A question file's own: other layouts have none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """How rows of one source become questions."""

    name: str
    columns: tuple[str, ...]
    """Top-level columns that are read."""
    convert: Callable[[Row], Draft]
    """Raises UnusableRow with the reason."""


Columns = Mapping[str, str]
"""Lower-case name to the name as it is in the file."""
Recogniser = Callable[[Columns, Sequence[Row]], Layout | None]
"""From the columns and the first few rows."""


def gold_text(value: Any) -> str:
    """A gold answer as text: numbers without an exponent, the one element of a list, several joined by commas."""
    if value is None or value != value:
        raise UnusableRow("no answer")
    if isinstance(value, list | tuple):
        if any(isinstance(item, list | tuple) for item in value):
            raise UnusableRow("answer is a list of lists, not text or a number")
        return ", ".join(gold_text(item) for item in value) if value else gold_text(None)
    if isinstance(value, float | Decimal):
        if value in (math.inf, -math.inf):
            raise UnusableRow("answer is infinite")
        return str(int(value)) if value == int(value) else f"{Decimal(str(value)):f}"
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise UnusableRow(f"answer is a {type(value).__name__}, not text or a number")
    return filled(str(value), "no answer").strip()


def user_prompt(value: Any) -> tuple[Message, ...]:
    """A text as the one message of a conversation; raises UnusableRow where it is no text or empty."""
    return (Message(role="user", content=filled(value, "no question")),)


def messages(value: Any) -> tuple[Message, ...]:
    """A prompt column, text or a list of messages, as messages; raises UnusableRow where it is neither."""
    if isinstance(value, str):
        return user_prompt(value)
    try:
        return prompt_of(value, "row")
    except InputError as error:
        raise UnusableRow("no usable prompt") from error


def filled(value: Any, reason: str) -> str:
    """`value` where it is text, not empty and valid Unicode; else raises UnusableRow, with `reason` where empty."""
    if not isinstance(value, str) or not value.strip():
        raise UnusableRow(reason)
    if not is_unicode(value):
        raise UnusableRow("text is not valid Unicode")
    return value


def optional(value: Any) -> str | None:
    """`value` as text; None where there is none."""
    return str(value) if value not in (None, "") else None


def reach(row: Row, dotted: str) -> Any:
    """The value at a dotted path through nested columns; None where the path ends early."""
    value: Any = row
    for part in dotted.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def first_of(columns: Columns, names: Sequence[str]) -> str | None:
    """Name, as it is in the file, of the first of `names` that is a column."""
    return next((columns[name] for name in names if name in columns), None)


def present(columns: Columns, *names: str) -> tuple[str, ...]:
    """Names, as they are in the file, of those `names` that are columns."""
    return tuple(columns[name] for name in names if name in columns)


def level_columns(columns: Columns) -> tuple[str, ...]:
    """Columns that tell a question's level."""
    return present(columns, *_LEVEL_NAMES)


def level_of(columns: Columns, row: Row) -> str | None:
    """The level of a row's question; None where no column tells it."""
    name = first_of(columns, _LEVEL_NAMES)
    return None if name is None else optional(row.get(name))

"""Multiple-choice questions as text: options as lettered lines under the question, and back."""

import re
from collections.abc import Sequence

from exgrpo_cli.types import Question

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"

_OPTION_LINE = re.compile(r"^([A-Z])\. (.*)$")


def format_choices(question: str, options: Sequence[str]) -> str:
    """The question, a blank line, and one line `A. option` each."""
    lines = [f"{letter}. {' '.join(option.split())}" for letter, option in zip(LETTERS, options, strict=False)]
    return f"{question.strip()}\n\n" + "\n".join(lines)


def parse_choices(text: str) -> tuple[str, ...] | None:
    """Option texts, A first, of a question made by `format_choices`; None for any other text."""
    lines = text.rsplit("\n\n", maxsplit=1)[-1].splitlines()
    found = [_OPTION_LINE.match(line) for line in lines]
    letters = [match.group(1) for match in found if match]
    if len(letters) != len(lines) or len(lines) < 2 or letters != list(LETTERS[: len(lines)]):
        return None
    return tuple(match.group(2) for match in found if match)


def options_of(question: Question) -> tuple[str, ...] | None:
    """Options of a multiple-choice question, A first; None where it has none, or its gold is none of their letters."""
    options = parse_choices(question.prompt[-1].content)
    return options if options is not None and question.answer in LETTERS[: len(options)] else None

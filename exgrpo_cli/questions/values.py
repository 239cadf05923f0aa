"""Values of a row: options and the gold among them, a gold as text, messages; or the reason why there is none."""

import math
import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from exgrpo_cli.base import errors, types
from exgrpo_cli.questions import choices, question_file

_LISTED = re.compile(r"(?:^|,)\s*\(?([A-Za-z])\s*\)\s*")
_LABELLED = re.compile(r"\s*[(\[]?([A-Z])[)\]]\s*")
_INSIDE = ("value", "text", "answer", "final_answer", "number", "spans", "ground_truth")
"""Members of a table that hold the answer itself."""


class UnusableRow(ValueError):
    """A row that cannot become a question; the message is the reason it is counted under."""


def options_in(value: Any) -> tuple[list[str], list[str]]:
    """Texts and labels, if any, of a row's options."""
    labels: Any = []
    if isinstance(value, str):
        # `a ) 38 , b ) 27 , c ) 30` of MathQA.
        begins = list(_LISTED.finditer(value))
        ends = [*(begin.start() for begin in begins[1:]), len(value)]
        labels = [begin[1] for begin in begins]
        value = [value[begin.end() : end].strip() for begin, end in zip(begins, ends, strict=False)]
    elif isinstance(value, list) and value and all(isinstance(each, Mapping) and "text" in each for each in value):
        value, labels = [each["text"] for each in value], [each.get("label") for each in value]
    elif isinstance(value, Mapping) and "text" in value:
        value, labels = value["text"], value.get("label") or []
    elif isinstance(value, Mapping):
        # Letters as names; a struct has those that other rows use as nulls.
        value = {label: text for label, text in value.items() if text is not None}
        labels, value = list(value), list(value.values())
    if not isinstance(value, list | tuple) or not 2 <= len(value) <= len(choices.LETTERS):
        raise UnusableRow("fewer than two options")
    texts = [filled_text(None if text is None else str(text), "an option is missing") for text in value]
    if not isinstance(labels, list | tuple) or len(labels) not in (0, len(texts)):
        raise UnusableRow("as many labels as options are needed")
    # `(A)21` and `A)21`: AGIEval and AQuA write the label into the option.
    own = [_LABELLED.match(text) for text in texts]
    if all(label and label[1] == letter for label, letter in zip(own, choices.LETTERS, strict=False)):
        texts = [filled_text(_LABELLED.sub("", text, count=1), "an option is missing") for text in texts]
    return texts, [str(label).strip() for label in labels]


def place_of_gold(answer: Any, texts: list[str], labels: list[str]) -> int:
    """Place of the gold option: by its label, a letter, its text, or a place from 0."""
    if isinstance(answer, float) and answer.is_integer():
        # A column of integers with a gap, as pandas writes it.
        answer = int(answer)
    named, places = str(answer).strip(), [str(place) for place in range(len(texts))]
    # A number is no text: 2 is the third of the options 4, 3, 2.
    spoken = [(list(choices.LETTERS[: len(texts)]), named.upper()), (texts, named)] if isinstance(answer, str) else []
    for names, name in [(labels, named), *spoken, (places, named)]:
        if name in names:
            return names.index(name)
    raise UnusableRow("the answer is none of the options")


def gold_text(value: Any) -> str:
    """A gold answer as text: numbers without an exponent, the one element of a list, several joined by commas."""
    if isinstance(value, Mapping):
        inner = [value[name] for name in _INSIDE if value.get(name) not in (None, "", [])]
        if not inner:
            raise UnusableRow("answer is a dict without " + ", ".join(_INSIDE))
        return gold_text(inner[0])
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
    return filled_text(str(value), "no answer").strip()


def messages_of(value: Any) -> tuple[types.Message, ...]:
    """A question, text or a list of messages, as messages."""
    if not isinstance(value, list):
        return (types.Message(role="user", content=filled_text(value, "no question")),)
    try:
        return question_file.prompt_of(value, "row")
    except errors.InputError as error:
        raise UnusableRow("no usable prompt") from error


def filled_text(value: Any, reason: str) -> str:
    """`value` where it is text, not empty and valid Unicode; else raises UnusableRow, with `reason` where empty."""
    if not isinstance(value, str) or not value.strip():
        raise UnusableRow(reason)
    if not question_file.is_unicode(value):
        raise UnusableRow("text is not valid Unicode")
    return value


def optional_text(value: Any) -> str | None:
    """The value as text; None where it is none or blank. Raises UnusableRow for text that is not valid Unicode."""
    text = "" if value is None else f"{value}"
    return filled_text(text, "") if text.strip() else None

"""From the text of a response to the part that is graded.

Two cuts: `answer_text` leaves the thinking away, `last_boxed` takes the boxed answer out of what remains. Both read the
text once, from left to right, so a megabyte of brackets costs milliseconds.
"""

import re
from dataclasses import dataclass

from exgrpo_cli.types import AnswerFormat

THINK_END = "</think>"

_BRACES = re.compile(r"\\boxed\s*\{|[{}]")
_SEPARATOR = re.compile(r"\b(?:and|or)\b|[,;]")
# math-verify's own distances, in characters: boxes this close belong together, without or with a separator.
_ADJACENT = 10
_ADJACENT_WITH_SEPARATOR = 70


@dataclass(frozen=True, kw_only=True, slots=True)
class _Box:
    """A finished `\\boxed{...}`: `text[start:end]`, braces included."""

    start: int
    end: int
    content: str


def answer_text(text: str, *, finished: bool, answer_format: AnswerFormat) -> str | None:
    """The text that is graded, or None where the response has no answer.

    It runs from the first `</think>` to the next one or the end; a response without `</think>` is graded whole, unless
    the template opens `<think>`. `finished` says whether the response ended with EOS.
    """
    if answer_format.require_eos and not finished:
        return None
    _, think_end, after = text.partition(THINK_END)
    if think_end:
        text = after.partition(THINK_END)[0]
    elif answer_format.opens_think:
        return None
    if answer_format.requires_box and last_boxed(text) is None:
        return None
    return text.strip() or None


def last_boxed(text: str) -> str | None:
    """Content of the last finished `\\boxed{...}`; None without one.

    An unfinished box is ignored, so one after a finished one does not take its answer away, and of nested boxes the
    innermost counts. Neighbouring boxes are one answer, joined by commas, under math-verify's rule: fewer than 10
    characters between them, or fewer than 70 with a comma, semicolon, "and" or "or", and different content.
    """
    boxes = _finished_boxes(text)
    if not boxes:
        return None
    joined = [boxes[-1].content]
    last = boxes[-1]
    for box in reversed(boxes[:-1]):
        if box.end > last.start or not _belong_together(text, box, last):
            break
        if box.content != joined[-1]:
            joined.append(box.content)
        last = box
    return ",".join(reversed(joined))


def _finished_boxes(text: str) -> list[_Box]:
    """All finished boxes in order of their start. Escaped braces count as braces, as in math-verify."""
    if "\\boxed" not in text:
        return []
    boxes = []
    open_braces: list[re.Match[str]] = []
    for brace in _BRACES.finditer(text):
        if brace.group() != "}":
            open_braces.append(brace)
        elif open_braces:
            opening = open_braces.pop()
            if opening.group() != "{":
                content = text[opening.end() : brace.start()].strip()
                boxes.append(_Box(start=opening.start(), end=brace.end(), content=content))
    return sorted(boxes, key=lambda box: box.start)


def _belong_together(text: str, box: _Box, following: _Box) -> bool:
    between = text[box.end : following.start]
    if len(between) < _ADJACENT:
        return True
    return (
        box.content != following.content
        and len(between) < _ADJACENT_WITH_SEPARATOR
        and _SEPARATOR.search(between) is not None
    )

"""From the text of a response to the part that is graded.

Two cuts: `answer_text` leaves the thinking away, `last_boxed` takes the boxed answer out of what remains. Both read the
text once, from left to right, in time and memory proportional to its length whatever it nests, so that they need no
worker: 100,000 nested boxes cost 0.2 s and 5 MB. Boxes are looked for in the last million characters.
"""

import re

from exgrpo_cli.base.types import AnswerFormat

THINK_END = "</think>"

_BRACES = re.compile(r"\\boxed\s*\{|[{}]")
_SEPARATOR = re.compile(r"\b(?:and|or)\b|[,;]")
MOST_CHARS = 1_000_000
"""End of a text in which an answer is looked for: several times what a model writes, and read in a second."""
_NO_CONTENT = re.compile(r"(?:[.…\s]|\\[lc]?dots(?![A-Za-z]))*")
"""Content of a box that speaks of boxes, as in "inside \\boxed{}"."""
# math-verify's own distances, in characters: boxes this close belong together, without or with a separator.
_ADJACENT = 10
_ADJACENT_WITH_SEPARATOR = 70


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
    text = text.strip()
    if answer_format.requires_box and last_boxed(text) is None:
        return None
    return text or None


def last_boxed(text: str) -> str | None:
    """Content of the last finished `\\boxed{...}` that has any; empty where none has, None without a box.

    An unfinished box is ignored, so one after a finished one does not take its answer away, and of nested boxes the
    innermost counts. Neighbouring boxes are one answer, joined by commas, under math-verify's rule: fewer than 10
    characters between them, or fewer than 70 with a comma, semicolon, "and" or "or", and different content.
    """
    joined: list[str] = []
    following_start, following_content = 0, ""
    boxes = _finished_boxes(text)
    for start, content_start, end in reversed(boxes):
        # A box around the following one ends the answer before its content is read: nested boxes are copied once.
        if joined and end > following_start:
            break
        content = text[content_start : end - 1].strip()
        if _NO_CONTENT.fullmatch(content):
            continue
        between = text[end:following_start]
        is_separated = len(between) < _ADJACENT_WITH_SEPARATOR and _SEPARATOR.search(between)
        if joined and len(between) >= _ADJACENT and (content == following_content or not is_separated):
            break
        if not joined or content != joined[-1]:
            joined.append(content)
        following_start, following_content = start, content
    return ",".join(reversed(joined)) if boxes else None


def boxed_or_all(text: str) -> str:
    """Content of the last box, or the whole text."""
    boxed = last_boxed(text)
    return text if boxed is None else boxed


def last_box(text: str) -> str | None:
    """Content of the last `\\boxed{}` alone; None where that one is not finished, whatever stands before it."""
    boxes = _finished_boxes(text)
    if not boxes or boxes[-1][0] != text.rfind(r"\boxed"):
        return None
    start, content_start, end = boxes[-1]
    return text[content_start : end - 1] if content_start - start == len(r"\boxed{") else None


def _finished_boxes(text: str) -> list[tuple[int, int, int]]:
    """Places of the backslash, behind the opening and behind the closing brace of each finished box, in order.

    Escaped braces count as braces, as in math-verify.
    """
    if text.find("\\boxed", max(0, len(text) - MOST_CHARS)) < 0:
        return []
    depth = 0
    opened: list[tuple[int, int, int]] = []
    finished: list[tuple[int, int, int]] = []
    for brace in _BRACES.finditer(text, max(0, len(text) - MOST_CHARS)):
        if brace.group() == "}":
            if opened and opened[-1][0] == depth:
                finished.append((*opened.pop()[1:], brace.end()))
            depth = max(0, depth - 1)
            continue
        depth += 1
        if brace.group() != "{":
            opened.append((depth, brace.start(), brace.end()))
    return sorted(finished)

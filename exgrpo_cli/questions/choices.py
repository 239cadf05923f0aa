"""Multiple-choice questions as text: options as labelled lines under the question, and back."""

import re
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from exgrpo_cli.base.types import Question

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"

_NUMERALS = "123456789"
# `(A)`, `[A]`, `A)`, `A.` and `A:`, in letters or digits, bold or not, at the start of a line or behind a space. The
# option may follow a bracket at once, and the other marks too where a letter begins the line.
_LABEL = re.compile(
    r"(?:^|(?<=\s))\**(?:\((?P<inside>[A-Za-z]|[1-9])\)|\[(?P<square>[A-Za-z]|[1-9])\](?!\()|"
    r"(?P<before>[A-Za-z]|[1-9])(?P<mark>[).:]))"
    r"(?:\**[ \t]+|\*\*|(?<=[)\]])|(?<=^[A-Z][.:]))(?=[^\s)\].:=])",
    re.MULTILINE,
)
_BULLETS = ("-", "*", "•")
_JOINT = re.compile(r"(?:[,;](?:\s*(?:and|or))?|\s(?:and|or))$")
# What follows the last option without a blank line, as "Answer:", and goes on from it.
_REQUEST = re.compile(r"\n\s*(?=[A-Z*#<\[(\"'])")
_ASKS_FOR_A_LABEL = re.compile(r"\b(?:answer|options?|choices?|choose|select|labels?|letter)\b", re.IGNORECASE)
_ASKS_FOR_A_NUMBER = re.compile(r"\bhow many\b|\bnumber of\b", re.IGNORECASE)
_PARAGRAPH = re.compile(r"\n\s*\n")
_LEAST_NUMBERED = 3
_MOST_LABELS = 500
_WIDEST_INDENT = 40
_LEAST_WITH_POINTS_IN_A_ROW = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Choices:
    """The options of a question where they stand in its text."""

    labels: tuple[str, ...]
    """As they are written: A, B, C or a, b, c or 1, 2, 3."""
    spans: tuple[tuple[int, int], ...]
    """Start and end of each option's text, its label left out."""
    text: str
    """The whole question."""

    @property
    def options(self) -> tuple[str, ...]:
        """Text of each option, in the order of the question."""
        return tuple(self.text[start:end] for start, end in self.spans)

    def place_of(self, gold: str) -> int | None:
        """Place of the option that a gold names by its label, in any case; None where it is no label."""
        labels = [label.upper() for label in self.labels]
        wanted = gold.strip().strip("()").upper()
        return labels.index(wanted) if wanted in labels else None

    def reordered(self, order: Sequence[int]) -> str:
        """The question with option `order[i]` at place i; labels and everything around them stay as they are."""
        pieces, end = [], 0
        for (start, stop), index in zip(self.spans, order, strict=True):
            pieces += [self.text[end:start], self.text[slice(*self.spans[index])]]
            end = stop
        return "".join(pieces) + self.text[end:]


def format_choices(question: str, options: Sequence[str]) -> str:
    """The question, a blank line, and one line `A. option` each."""
    lines = [f"{letter}. {' '.join(option.split())}" for letter, option in zip(LETTERS, options, strict=False)]
    return f"{question.strip()}\n\n" + "\n".join(lines)


def find_choices(text: str) -> Choices | None:
    """The last list of options in a question: one a line or several in a row, labelled in one style from A or 1 on.

    Options run over lines up to the next label, the last one to the next blank line, or to a request that begins a line
    where no other option takes two. A numbered list has three options or more, nothing behind it but a request for a
    label, and in a row a question or such a request before it: numbered statements stand in many questions without
    options.
    """
    labels = list(deque(_LABEL.finditer(text), maxlen=_MOST_LABELS))
    for place in range(len(labels) - 1, -1, -1):
        if _name(labels[place]).upper() not in ("A", "1"):
            continue
        for in_a_row in (False, True) if _starts_line(labels[place], text) else (True,):
            choices = _choices(list(_run(labels[place:], text, in_a_row=in_a_row)), text, in_a_row=in_a_row)
            if choices is not None:
                return choices
    return None


def options_of(question: Question) -> tuple[str, ...] | None:
    """Options of a multiple-choice question in their order; None without options, or where its gold labels none."""
    choices = find_choices(question.prompt[-1].content)
    return None if choices is None or choices.place_of(question.answer) is None else choices.options


def _run(labels: Sequence["re.Match[str]"], text: str, *, in_a_row: bool) -> Iterator["re.Match[str]"]:
    """Labels that go on from the first in its style: each on a line of its own, or in a row of several lines."""
    start = previous = labels[0]
    alphabet = _NUMERALS if _name(start).isdigit() else LETTERS if _name(start).isupper() else LETTERS.lower()
    expected = iter(alphabet)
    wanted = next(expected)
    left_line = False
    for label in labels:
        begins_line = _starts_line(label, text)
        left_line = left_line or text.find("\n", previous.end(), label.start()) >= 0
        previous = label
        if in_a_row and left_line and not begins_line:
            return
        if _style(label) != _style(start) or not (in_a_row or begins_line):
            continue
        if _name(label) != wanted:
            if in_a_row and not begins_line:
                continue
            return
        yield label
        left_line, wanted = False, next(expected, "")


def _choices(run: Sequence["re.Match[str]"], text: str, *, in_a_row: bool) -> Choices | None:
    if len(run) < 2:
        return None
    numbered = _name(run[0]).isdigit()
    if in_a_row and run[0]["mark"] in (".", ":") and len(run) < _LEAST_WITH_POINTS_IN_A_ROW:
        return None
    spans = _spans(run, text, in_a_row=in_a_row)
    before, rest = text[: run[0].start()].rstrip(), text[spans[-1][1] :].strip(" .\n")
    if numbered and (len(run) < _LEAST_NUMBERED or not _is_asked_for_a_label(before, rest, in_a_row=in_a_row)):
        return None
    return Choices(labels=tuple(_name(label) for label in run), spans=tuple(spans), text=text)


def _is_asked_for_a_label(before: str, rest: str, *, in_a_row: bool) -> bool:
    """Whether what stands around a numbered list takes its items for options."""
    if _ASKS_FOR_A_NUMBER.search(before) or "how many" in rest.lower():
        return False
    asks = _ASKS_FOR_A_LABEL.search(rest) is not None
    if not in_a_row or before.endswith("?"):
        return asks or not rest
    return (asks or not rest) and _ASKS_FOR_A_LABEL.search(f"{before.rpartition('.')[2]} {rest}") is not None


def _spans(run: Sequence["re.Match[str]"], text: str, *, in_a_row: bool) -> list[tuple[int, int]]:
    """Start and end of each option, white space and what joins it to the next one left out."""
    ends = [label.start() for label in run[1:]]
    last = text[run[-1].end() :]
    paragraph = _PARAGRAPH.search(last)
    if paragraph is not None:
        last = last[: paragraph.start()]
    if in_a_row:
        last = last.partition("\n")[0]
    elif not any("\n" in text[label.end() : end].strip() for label, end in zip(run, ends, strict=False)):
        last = _REQUEST.split(last, maxsplit=1)[0]
    texts = [_without_bullet(text[label.end() : end]) for label, end in zip(run, ends, strict=False)]
    last = last.rstrip()
    if in_a_row and all(map(_JOINT.search, texts)):
        texts, last = [_JOINT.sub("", each).rstrip() for each in texts], last.removesuffix(".")
    return [(label.end(), label.end() + len(each)) for label, each in zip(run, [*texts, last], strict=True)]


def _without_bullet(text: str) -> str:
    """An option without the bullet of the next one's line."""
    kept = text.rstrip()
    before = kept[:-1].rstrip(" \t")
    return before.rstrip() if kept.endswith(_BULLETS) and before.endswith("\n") else kept


def _name(label: "re.Match[str]") -> str:
    return label["inside"] or label["square"] or label["before"]


def _style(label: "re.Match[str]") -> str:
    return label["mark"] or ("[]" if label["square"] else "()")


def _starts_line(label: "re.Match[str]", text: str) -> bool:
    before = text[max(0, label.start() - _WIDEST_INDENT) : label.start()]
    line = before.rpartition("\n")[2].strip()
    return ("\n" in before or label.start() < _WIDEST_INDENT) and (not line or line in _BULLETS)

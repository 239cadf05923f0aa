"""Multiple-choice questions as text: options as labelled lines under the question, and back."""

import re
from collections.abc import Sequence
from itertools import pairwise, takewhile
from typing import NamedTuple

from exgrpo_cli.base import data, types

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_ALPHABETS = {"A": LETTERS, "a": LETTERS.lower(), "1": "123456789"}
_RE = data.patterns(data.tables(__file__, "patterns.toml")["choices"], {})
_LEAST_NUMBERED = 3
# The last so many labels A, a and 1 are looked at: a text of a million of them would take hours.
_MOST_STARTS = 64


class Choices(NamedTuple):
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
    """The last list of options in a question: one a line, labelled in one style from A, a or 1 on.

    What `format_choices` wrote is read as it was written. Elsewhere options run over lines up to the next label, the
    last one to the next blank line and over further paragraphs that ask for nothing, or to a request that begins a line
    where no other option takes two. A numbered list has three options or more and nothing behind it but a request for a
    label: numbered statements stand in many questions without options. A list inside an option is no list of its own.
    """
    if written := _written(text):
        return written
    labels = list(_RE.label.finditer(text))
    inner: Choices | None = None
    starts = [place for place, label in enumerate(labels) if _name(label) in _ALPHABETS]
    for place in reversed(starts[-_MOST_STARTS:]):
        if (inner is None or _name(labels[place]) == "A") and (choices := _choices(labels[place:], text)):
            if choices.labels[0] == "A":
                between = text[choices.spans[-1][0] : inner.spans[0][0]] if inner else ""
                return inner if _RE.paragraph.search(between) or "?" in between else choices
            inner = inner or choices
    return inner


def _written(text: str) -> Choices | None:
    """The options where the last paragraph is lines `A. option`, `B. option` and so on alone."""
    begin = text.rfind("\n\n") + 2
    lines = text[begin:].split("\n") if begin > 1 else []
    if not 2 <= len(lines) <= len(LETTERS):
        return None
    spans = []
    for letter, line in zip(LETTERS, lines, strict=False):
        if not (line.startswith(f"{letter}. ") and line[3:].strip()):
            return None
        spans.append((begin + 3, begin + len(line)))
        begin += len(line) + 1
    return Choices(labels=tuple(LETTERS[: len(lines)]), spans=tuple(spans), text=text)


def options_of(question: types.Question) -> tuple[str, ...] | None:
    """Options of a multiple-choice question in their order; None without options, or where its gold labels none."""
    choices = find_choices(question.prompt[-1].content)
    return None if choices is None or choices.place_of(question.answer) is None else choices.options


def _choices(labels: Sequence["re.Match[str]"], text: str) -> Choices | None:
    """The list that begins with the first label; None where it is too short, or numbers statements."""
    first = labels[0]
    alike = [label for label in labels if _style(label) == _style(first)]
    pairs = zip(alike, _ALPHABETS[_name(first)], strict=False)
    run = [label for label, _ in takewhile(lambda pair: _name(pair[0]) == pair[1], pairs)]
    texts = [text[one.end() : other.start()].rstrip() for one, other in pairwise(run)]
    # Paragraphs and the blank lines between them, in turn.
    last, *more = re.split(f"({_RE.paragraph.pattern})", text[run[-1].end() :])
    while _name(first) == "A" and len(more) > 1 and more[1].strip() and not _RE.is_request.search(more[1]):
        last, more = last + more[0] + more[1], more[2:]
    last = last.rstrip()
    if not any("\n" in each for each in texts):
        request = _RE.request.search(last)
        # A list inside the option is none.
        last = last[: request.start()] if request and not _RE.label.match(last[request.end() :]) else last
    spans = [(label.end(), label.end() + len(each)) for label, each in zip(run, [*texts, last], strict=True)]
    if _name(first) == "1":
        rest = text[spans[-1][1] :].strip(" .\n")
        counted = _RE.asks_for_a_number.search(text[: first.start()]) or "how many" in rest.lower()
        if len(run) < _LEAST_NUMBERED or counted or (rest and not _RE.asks_for_a_label.search(rest)):
            return None
    elif len(run) < 2:
        return None
    return Choices(labels=tuple(map(_name, run)), spans=tuple(spans), text=text)


def _name(label: "re.Match[str]") -> str:
    return label["round"] or label["square"] or label["before"]


def _style(label: "re.Match[str]") -> tuple[str, bool, bool]:
    name = _name(label)
    return label["mark"] or ("[]" if label["square"] else "()"), name.isupper(), name.isdigit()

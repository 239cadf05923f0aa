"""Multiple-choice questions as text: options as labelled lines under the question, and back."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from exgrpo_cli.types import Question

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"

_NUMERALS = "123456789"
# `(A)`, `A)`, `A.` and `A:`, in letters or digits, at the start of a line or behind a space.
_LABEL = re.compile(
    r"(?:^|(?<=\s))(?:\((?P<inside>[A-Za-z]|[1-9])\)|(?P<before>[A-Za-z]|[1-9])(?P<mark>[).:]))[ \t]+(?=\S)",
    re.MULTILINE,
)
_PARAGRAPH = re.compile(r"\n\s*\n")
_LEAST_NUMBERED = 3
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
    """The last list of options in a question: one a line or all in a row, labelled in one style from A or 1 on.

    Options run over lines up to the next label, the last one to the next blank line. A numbered list needs three of
    them and the end of the text, since numbered statements stand in many questions that have no options.
    """
    labels = list(_LABEL.finditer(text))
    for place in range(len(labels) - 1, -1, -1):
        if _name(labels[place]).upper() not in ("A", "1"):
            continue
        run = list(_run(labels, place, text))
        choices = _choices(run, text)
        if choices is not None:
            return choices
    return None


def options_of(question: Question) -> tuple[str, ...] | None:
    """Options of a multiple-choice question in their order; None without options, or where its gold labels none."""
    choices = find_choices(question.prompt[-1].content)
    return None if choices is None or choices.place_of(question.answer) is None else choices.options


def _run(labels: Sequence["re.Match[str]"], first: int, text: str) -> Iterator["re.Match[str]"]:
    """Labels that go on from this one in its style, on lines of their own where it is on one, else on its line."""
    start = labels[first]
    alphabet = _NUMERALS if _name(start).isdigit() else LETTERS if _name(start).isupper() else LETTERS.lower()
    expected = iter(alphabet)
    wanted = next(expected)
    for label in labels[first:]:
        in_a_row = not _starts_line(start, text)
        if in_a_row and "\n" in text[start.start() : label.start()].strip():
            return
        if _style(label) != _style(start) or (not in_a_row and not _starts_line(label, text)):
            continue
        if _name(label) != wanted:
            if in_a_row:
                continue
            return
        yield label
        wanted = next(expected, "")


def _choices(run: Sequence["re.Match[str]"], text: str) -> Choices | None:
    if len(run) < 2:
        return None
    in_a_row = not _starts_line(run[0], text)
    numbered = _name(run[0]).isdigit()
    if in_a_row and (numbered or (run[0]["mark"] in (".", ":") and len(run) < _LEAST_WITH_POINTS_IN_A_ROW)):
        return None
    paragraph = _PARAGRAPH.search(text, run[-1].end())
    line_end = text.find("\n", run[-1].end())
    end = len(text) if paragraph is None else paragraph.start()
    if in_a_row and line_end >= 0:
        end = min(end, line_end)
    if numbered and (len(run) < _LEAST_NUMBERED or text[end:].strip()):
        return None
    ends = [label.start() for label in run[1:]] + [end]
    spans = []
    for label, stop in zip(run, ends, strict=True):
        spans.append((label.end(), label.end() + len(text[label.end() : stop].rstrip())))
    return Choices(labels=tuple(_name(label) for label in run), spans=tuple(spans), text=text)


def _name(label: "re.Match[str]") -> str:
    return label["inside"] or label["before"]


def _style(label: "re.Match[str]") -> str:
    return label["mark"] or "()"


def _starts_line(label: "re.Match[str]", text: str) -> bool:
    return not text[text.rfind("\n", 0, label.start()) + 1 : label.start()].strip()

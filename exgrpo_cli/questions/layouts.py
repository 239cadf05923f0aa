"""Layouts of public question sets: which columns hold the question, the gold answer and the options.

`_KNOWN` goes from the particular to the general, and the first entry that fits the columns and a few rows wins. Column
names are compared without case.
"""

import hashlib
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from itertools import takewhile
from typing import Any, NamedTuple

from exgrpo_cli.base.errors import InputError, nearest
from exgrpo_cli.base.types import Message, Question
from exgrpo_cli.grading import last_boxed
from exgrpo_cli.questions.choices import LETTERS, format_choices
from exgrpo_cli.questions.files import Row
from exgrpo_cli.questions.question_file import is_unicode, own_metadata, prompt_of, question_id, reach

_GSM8K_MARK = "####"
_LEVEL = {"level": ("level", "difficulty")}
MULTIPLE_CHOICE = "multiple choice"
"""Name of the layouts whose gold is a letter."""

Asked = tuple[tuple[Message, ...], str]
"""Prompt and gold answer."""
Columns = Mapping[str, str]
"""Lower-case name to the name as it is in the file."""


class UnusableRow(ValueError):
    """A row that cannot become a question; the message is the reason it is counted under."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NamedFields:
    """Fields the user named; a dot reaches into a struct."""

    question: str | None = None
    answer: str | None = None
    answer_pattern: str | None = None
    """Regular expression; its last match in the answer field is the gold: group 1 where it has one."""

    def __post_init__(self) -> None:
        if (self.question is None) != (self.answer is None):
            missing = "--question-field" if self.question is None else "--answer-field"
            raise InputError(f"{missing} is missing: --question-field and --answer-field go together.")
        try:
            re.compile(self.answer_pattern or "")
        except re.error as error:
            raise InputError(f"--answer-pattern {self.answer_pattern!r} is no regular expression: {error}.") from None


@dataclass(frozen=True, slots=True)
class Layout:
    """Rules that make questions of the rows of one source; a dot in the name of a column reaches into a struct."""

    name: str
    columns: tuple[str, ...]
    """Columns whose values `read` takes."""
    read: Callable[..., Asked]
    """Raises UnusableRow with the reason."""
    own: Mapping[str, str | None]
    """Columns of what a row itself says of its `source`, `level` and `metadata`."""
    answer_pattern: str | None = None
    """As of `NamedFields`."""

    @property
    def wanted(self) -> tuple[str, ...]:
        """Top-level columns that are read."""
        return tuple(dict.fromkeys(name.partition(".")[0] for name in (*self.columns, *self.own.values()) if name))

    def question(self, row: Row, source: str) -> Question:
        """The question of a row, from `source` where it says nothing else; raises UnusableRow with the reason."""
        prompt, answer = self.read(*(reach(row, name) for name in self.columns))
        if self.answer_pattern is not None:
            matches = list(re.finditer(self.answer_pattern, answer))
            if not matches:
                raise UnusableRow("answer pattern not found")
            answer = gold_text(matches[-1].group(min(1, matches[-1].re.groups)))
        own = {key: reach(row, name) for key, name in self.own.items() if name}
        return Question(
            id=question_id(prompt, answer),
            prompt=prompt,
            answer=answer,
            source=_optional(own.get("source")) or source,
            level=_optional(own.get("level")),
            metadata=own_metadata(own.get("metadata")),
        )


def recognise(where: str, rows: Sequence[Row], named: NamedFields) -> Layout:
    """The layout of a file with these first rows; fields the user named come first.

    Raises InputError listing the columns where nothing fits.
    """
    columns = list(dict.fromkeys(name for row in rows for name in row))
    lower = {name.lower(): name for name in columns}
    if named.question is not None and named.answer is not None:
        fields = (named.question, named.answer)
        for option, top in zip(("question", "answer"), (each.partition(".")[0] for each in fields), strict=True):
            if top not in columns:
                raise InputError(f"{where} has no column {top!r} for --{option}-field.{nearest(top, columns)}")
        own = {"level": _first_of(lower, _LEVEL["level"])}
        return Layout("named fields", fields, _question_answer, own, named.answer_pattern)
    for known in _KNOWN:
        found = [name for names in known.columns if (name := _first_of(lower, names)) is not None]
        if len(found) == len(known.columns) and known.when(lower, rows):
            found += [lower[name] for name in takewhile(lower.__contains__, known.more)]
            own = {key: _first_of(lower, names) for key, names in known.own.items()}
            return Layout(known.name, tuple(found), known.read, own, named.answer_pattern)
    raise InputError(
        f"{where} has no known layout: its columns are {columns}. Name the two that hold the question and "
        f"the gold answer with --question-field and --answer-field."
    )


def _question_answer(question: Any, answer: Any) -> Asked:
    return _messages(question), gold_text(answer)


def _is_gsm8k(columns: Columns, rows: Sequence[Row]) -> bool:
    # Most of them, not the first: one row without the mark is a broken row, one with it may be a heading.
    answers = [value for row in rows if isinstance(value := row.get(columns["answer"]), str) and value.strip()]
    return 2 * sum(_GSM8K_MARK in value for value in answers) > len(answers)


def _gsm8k(question: Any, answer: Any) -> Asked:
    prompt = _messages(question)
    _, mark, final = _filled(answer, "no answer").rpartition(_GSM8K_MARK)
    if not mark:
        raise UnusableRow("no #### answer")
    # 1,200 is a number with a thousands separator, never a list, in this data set.
    return prompt, gold_text(re.sub(r"(?<=\d),(?=\d{3})", "", final))


def _math(question: Any, solution: Any) -> Asked:
    prompt = _messages(question)
    boxed = last_boxed(_filled(solution, "no solution"))
    if boxed is None:
        raise UnusableRow("no boxed answer")
    return prompt, gold_text(boxed)


def _listed_choices(question: Any, options: Any, answer: Any) -> Asked:
    """A list (MMLU, MMLU-Pro), texts and labels (ARC), or a table by letter; the answer by any."""
    texts, labels = _options(options)
    return _choice(question, texts, _place(answer, texts, labels))


def _lettered_choices(question: Any, answer: Any, *options: Any) -> Asked:
    # An option left empty, as the fourth where others have five, does not move the letters behind it.
    return _listed_choices(question, dict(zip(LETTERS, map(_optional, options), strict=False)), answer)


def _separate_choices(question: Any, correct: Any, *wrong: Any) -> Asked:
    """The correct answer, in a column of its own, is placed by a hash of the question."""
    text = _filled(question, "no question")
    texts = [_filled(each, "an option is missing") for each in wrong]
    place = int(hashlib.sha256(text.encode()).hexdigest(), 16) % (len(texts) + 1)
    texts.insert(place, _filled(correct, "no answer"))
    return _choice(text, texts, place)


def _choice(question: Any, texts: Sequence[str], place: int) -> Asked:
    return _messages(format_choices(_filled(question, "no question"), texts)), LETTERS[place]


class _Known(NamedTuple):
    """Columns, in lower case, by which a layout is recognised, and how their values are read."""

    name: str
    columns: tuple[tuple[str, ...], ...]
    """The names that each column may have, of which the first that is there is taken."""
    read: Callable[..., Asked]
    more: Sequence[str] = ()
    """Further columns that are read, up to the first that is not there."""
    own: Mapping[str, tuple[str, ...]] = _LEVEL
    """As of a `Layout`, by the names that each column may have."""
    when: Callable[[Columns, Sequence[Row]], bool] = lambda columns, rows: True
    """Further condition on the columns and the first few rows."""


_QUESTIONS = ("question", "problem", "input")
_ANSWERS = ("answer", "final_answer", "expected_answer", "ground_truth_answer", "ground_truth", "target")
_KEYS = ("answerkey", "answer", "answer_index")
_WRONG = ("incorrect answer 1", "incorrect answer 2", "incorrect answer 3")
_VERL = {"source": ("data_source",), "level": ("extra_info.level",), "metadata": ("extra_info.metadata",)}
_OWN = {name: (name,) for name in _VERL}
_KNOWN = (
    _Known("verl", (("prompt",), ("reward_model.ground_truth",)), _question_answer, own=_VERL),
    _Known("canonical", (("prompt",), _ANSWERS), _question_answer, own=_OWN),
    _Known(MULTIPLE_CHOICE, (("question",), ("correct answer",), _WRONG[:1]), _separate_choices, _WRONG[1:]),
    _Known(MULTIPLE_CHOICE, (_QUESTIONS, ("choices", "options"), _KEYS), _listed_choices),
    _Known(MULTIPLE_CHOICE, (_QUESTIONS, _ANSWERS, ("a",), ("b",)), _lettered_choices, LETTERS[2:].lower()),
    _Known("gsm8k", (_QUESTIONS, ("answer",)), _gsm8k, when=_is_gsm8k),
    _Known("question and answer", (_QUESTIONS, _ANSWERS), _question_answer),
    _Known("math", (_QUESTIONS, ("solution",)), _math),
    # Rows of two turns, as Open-Reasoner-Zero writes them.
    _Known("orz", (("0.value",), ("1.ground_truth.value",)), _question_answer),
)


def _options(value: Any) -> tuple[list[str], list[str]]:
    """Texts and labels, if any, of a row's options."""
    labels: Any = []
    if isinstance(value, Mapping) and "text" in value:
        value, labels = value["text"], value.get("label") or []
    elif isinstance(value, Mapping):
        # Letters as names; a struct has those that other rows use as nulls.
        value = {label: text for label, text in value.items() if text is not None}
        labels, value = list(value), list(value.values())
    if not isinstance(value, list | tuple) or not 2 <= len(value) <= len(LETTERS):
        raise UnusableRow("fewer than two options")
    texts = [_filled(None if text is None else str(text), "an option is missing") for text in value]
    if not isinstance(labels, list | tuple) or len(labels) not in (0, len(texts)):
        raise UnusableRow("as many labels as options are needed")
    return texts, [str(label).strip() for label in labels]


def _place(answer: Any, texts: list[str], labels: list[str]) -> int:
    """Place of the gold option: by its label, a letter, its text, or a place from 0."""
    if isinstance(answer, float) and answer.is_integer():
        # A column of integers with a gap, as pandas writes it.
        answer = int(answer)
    named, places = str(answer).strip(), [str(place) for place in range(len(texts))]
    # A number is no text: 2 is the third of the options 4, 3, 2.
    spoken = [(list(LETTERS[: len(texts)]), named.upper()), (texts, named)] if isinstance(answer, str) else []
    for names, name in [(labels, named), *spoken, (places, named)]:
        if name in names:
            return names.index(name)
    raise UnusableRow("the answer is none of the options")


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
    return _filled(str(value), "no answer").strip()


def _messages(value: Any) -> tuple[Message, ...]:
    """A question, text or a list of messages, as messages."""
    if not isinstance(value, list):
        return (Message(role="user", content=_filled(value, "no question")),)
    try:
        return prompt_of(value, "row")
    except InputError as error:
        raise UnusableRow("no usable prompt") from error


def _filled(value: Any, reason: str) -> str:
    """`value` where it is text, not empty and valid Unicode; else raises UnusableRow, with `reason` where empty."""
    if not isinstance(value, str) or not value.strip():
        raise UnusableRow(reason)
    if not is_unicode(value):
        raise UnusableRow("text is not valid Unicode")
    return value


def _optional(value: Any) -> str | None:
    return str(value) if value not in (None, "") else None


def _first_of(columns: Columns, names: Sequence[str]) -> str | None:
    """Name, as it is in the file, of the first of `names` that is a column, or reaches into one by a dot."""
    split = (name.partition(".") for name in names)
    return next((columns[top] + dot + inner for top, dot, inner in split if top in columns), None)

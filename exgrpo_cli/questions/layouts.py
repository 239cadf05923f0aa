"""Layouts of public question sets: which columns hold the question, the gold answer and the options.

A recogniser looks at the columns and a few rows and returns a Layout or None; the first that knows the columns wins, so
the order of `_RECOGNISERS` goes from the particular to the general. Column names are compared without case.
"""

import hashlib
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Any

from exgrpo_cli.base.errors import InputError, nearest
from exgrpo_cli.base.types import Message, Question
from exgrpo_cli.grading import last_boxed
from exgrpo_cli.questions.choices import LETTERS, format_choices
from exgrpo_cli.questions.files import Row
from exgrpo_cli.questions.question_file import is_unicode, own_metadata, prompt_of, question_id, reach

_QUESTIONS = ("question", "problem", "input")
_ANSWERS = ("answer", "final_answer", "expected_answer", "ground_truth_answer", "ground_truth", "target")
_LEVELS = ("level", "difficulty")
_TRACES = ("generations", "messages", "correctness_math_verify", "traces", "target")
_GSM8K_MARK = "####"
MULTIPLE_CHOICE = "multiple choice"
"""Name of the layouts whose gold is a letter."""

Asked = tuple[tuple[Message, ...], str]
"""Prompt and gold answer."""
Columns = Mapping[str, str]
"""Lower-case name to the name as it is in the file."""


class UnusableRow(ValueError):
    """A row that cannot become a question; the message is the reason it is counted under."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """How rows of one source become questions."""

    name: str
    columns: tuple[str, ...]
    """Top-level columns of the question and its gold."""
    asked: Callable[[Row], Asked]
    """Raises UnusableRow with the reason."""
    source: str | None = None
    """Dotted column of what the row itself says it came from, as of the two below; None where there is none."""
    level: str | None = None
    metadata: str | None = None

    @property
    def wanted(self) -> tuple[str, ...]:
        """Top-level columns that are read."""
        more = [name.partition(".")[0] for name in (self.source, self.level, self.metadata) if name]
        return tuple(dict.fromkeys((*self.columns, *more)))

    def question(self, row: Row, source: str) -> Question:
        """The question of a row, from `source` where it says nothing else; raises UnusableRow with the reason."""
        prompt, answer = self.asked(row)
        own, level, metadata = (
            None if name is None else reach(row, name) for name in (self.source, self.level, self.metadata)
        )
        return Question(
            id=question_id(prompt, answer),
            prompt=prompt,
            answer=answer,
            source=_optional(own) or source,
            level=_optional(level),
            metadata=own_metadata(metadata),
        )


Recogniser = Callable[[Columns, Sequence[Row]], Layout | None]
"""From the columns and the first few rows."""


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


def recognise(where: str, columns: Sequence[str], rows: Sequence[Row], named: NamedFields) -> Layout:
    """The layout of a file with these columns and these first rows; fields the user named come first.

    Raises InputError listing the columns where nothing fits.
    """
    lower = {name.lower(): name for name in columns}
    if named.question is not None and named.answer is not None:
        layout: Layout | None = _named_layout(where, columns, lower, named.question, named.answer)
    else:
        found = (recogniser(lower, rows) for recogniser in _RECOGNISERS)
        layout = next((each for each in found if each is not None), None)
    if layout is None:
        raise InputError(
            f"{where} has no known layout: its columns are {list(columns)}. Name the two that hold the question and "
            f"the gold answer with --question-field and --answer-field."
        )
    return layout if named.answer_pattern is None else _with_pattern(layout, named.answer_pattern)


def _named_layout(where: str, columns: Sequence[str], lower: Columns, question: str, answer: str) -> Layout:
    for option, name in (("--question-field", question), ("--answer-field", answer)):
        top = name.partition(".")[0]
        if top not in columns:
            raise InputError(f"{where} has no column {top!r} for {option}.{nearest(top, list(columns))}")
    return _question_and_gold("named fields", lower, question, answer, gold_text)


def _with_pattern(layout: Layout, pattern: str) -> Layout:
    compiled = re.compile(pattern)

    def asked(row: Row) -> Asked:
        prompt, answer = layout.asked(row)
        matches = list(compiled.finditer(answer))
        if not matches:
            raise UnusableRow("answer pattern not found")
        return prompt, gold_text(matches[-1].group(1 if compiled.groups else 0))

    return replace(layout, asked=asked)


def _question_and_gold(
    name: str, columns: Columns, question: str, answer: str, gold: Callable[[Any], str], level: bool = True
) -> Layout:
    """A layout of two columns, dotted or not; `gold` reads the cell of the second."""
    return Layout(
        name=name,
        columns=(question.partition(".")[0], answer.partition(".")[0]),
        asked=lambda row: (_user_prompt(reach(row, question)), gold(reach(row, answer))),
        level=_first_of(columns, _LEVELS) if level else None,
    )


def _canonical(columns: Columns, rows: Sequence[Row]) -> Layout | None:
    prompt, answer = columns.get("prompt"), _first_of(columns, _ANSWERS)
    if prompt is None or answer is None:
        return None
    return Layout(
        name="canonical" if "id" in columns else "prompt and answer",
        columns=(answer, prompt),
        asked=lambda row: (_messages(row.get(prompt)), gold_text(row.get(answer))),
        source=columns.get("source"),
        level=columns.get("level"),
        metadata=columns.get("metadata"),
    )


def _verl(columns: Columns, rows: Sequence[Row]) -> Layout | None:
    prompt, reward_model, extra = (columns.get(name) for name in ("prompt", "reward_model", "extra_info"))
    if prompt is None or reward_model is None:
        return None
    return Layout(
        name="verl",
        columns=(prompt, reward_model),
        asked=lambda row: (_messages(row.get(prompt)), gold_text(reach(row, f"{reward_model}.ground_truth"))),
        source=columns.get("data_source"),
        level=extra and f"{extra}.level",
        metadata=extra and f"{extra}.metadata",
    )


def _gsm8k(columns: Columns, rows: Sequence[Row]) -> Layout | None:
    question, answer = _first_of(columns, _QUESTIONS), columns.get("answer")
    if question is None or answer is None:
        return None
    # Most of them, not the first: one row without the mark is a broken row, one with it may be a heading.
    answers = [value for value in (row.get(answer) for row in rows) if isinstance(value, str) and value.strip()]
    if 2 * sum(_GSM8K_MARK in value for value in answers) <= len(answers):
        return None

    def gold(cell: Any) -> str:
        _, mark, final = _filled(cell, "no answer").rpartition(_GSM8K_MARK)
        if not mark:
            raise UnusableRow("no #### answer")
        # 1,200 is a number with a thousands separator, never a list, in this data set.
        return gold_text(re.sub(r"(?<=\d),(?=\d{3})", "", final))

    return _question_and_gold("gsm8k", columns, question, answer, gold)


def _math(columns: Columns, rows: Sequence[Row]) -> Layout | None:
    question, solution = _first_of(columns, _QUESTIONS), columns.get("solution")
    if question is None or solution is None or _first_of(columns, _ANSWERS) is not None:
        return None

    def gold(cell: Any) -> str:
        boxed = last_boxed(_filled(cell, "no solution"))
        if boxed is None:
            raise UnusableRow("no boxed answer")
        return gold_text(boxed)

    return _question_and_gold("math", columns, question, solution, gold)


def _question_answer(columns: Columns, rows: Sequence[Row]) -> Layout | None:
    question, answer = _first_of(columns, _QUESTIONS), _first_of(columns, _ANSWERS)
    if question is None or answer is None:
        return None
    has_traces = any(trace in columns and columns[trace] != answer for trace in _TRACES)
    name = "openr1" if has_traces else "question and answer"
    return _question_and_gold(name, columns, question, answer, gold_text)


def _turns(columns: Columns, rows: Sequence[Row]) -> Layout | None:
    """Rows that are two turns, as Open-Reasoner-Zero writes them: `value` of the human's, `ground_truth.value` of the
    assistant's."""
    if not {"0", "1"} <= columns.keys() or not all(isinstance(reach(row, "1.ground_truth"), Mapping) for row in rows):
        return None
    return _question_and_gold("orz", columns, "0.value", "1.ground_truth.value", gold_text, level=False)


def _listed_choices(columns: Columns, rows: Sequence[Row]) -> Layout | None:
    """`choices` or `options`: a list (MMLU, MMLU-Pro), texts and labels (ARC), or by letter; the answer by any."""
    question, options = _first_of(columns, _QUESTIONS), _first_of(columns, ("choices", "options"))
    answer = _first_of(columns, ("answerkey", "answer", "answer_index"))
    if question is None or options is None or answer is None:
        return None

    def asked(row: Row) -> Asked:
        texts, labels = _options(row.get(options))
        place = _place(row.get(answer), texts, labels)
        return _choice(row.get(question), texts, place)

    return _choice_layout(columns, (question, options, answer), asked)


def _lettered_choices(columns: Columns, rows: Sequence[Row]) -> Layout | None:
    """Columns A, B, C, ... beside the question."""
    question, answer = _first_of(columns, _QUESTIONS), _first_of(columns, _ANSWERS)
    letters = [columns[letter.lower()] for letter in LETTERS if letter.lower() in columns]
    if question is None or answer is None or [name.upper() for name in letters[:2]] != ["A", "B"]:
        return None

    def asked(row: Row) -> Asked:
        # An option left empty, as the fourth where others have five, does not move the letters behind it.
        texts, labels = _options({letter.upper(): _optional(row.get(letter)) for letter in letters})
        return _choice(row.get(question), texts, _place(row.get(answer), texts, labels))

    return _choice_layout(columns, (question, answer, *letters), asked)


def _separate_choices(columns: Columns, rows: Sequence[Row]) -> Layout | None:
    """Correct and incorrect answers in columns of their own: the correct one is placed by a hash of the question."""
    question, correct = columns.get("question"), columns.get("correct answer")
    wrong = [columns[f"incorrect answer {number}"] for number in (1, 2, 3) if f"incorrect answer {number}" in columns]
    if question is None or correct is None or not wrong:
        return None

    def asked(row: Row) -> Asked:
        text = _filled(row.get(question), "no question")
        texts = [_filled(row.get(name), "an option is missing") for name in wrong]
        place = int(hashlib.sha256(text.encode()).hexdigest(), 16) % (len(texts) + 1)
        texts.insert(place, _filled(row.get(correct), "no answer"))
        return _choice(text, texts, place)

    return _choice_layout(columns, (question, correct, *wrong), asked)


_RECOGNISERS: tuple[Recogniser, ...] = (
    _verl,
    _canonical,
    _separate_choices,
    _listed_choices,
    _lettered_choices,
    _gsm8k,
    _math,
    _question_answer,
    _turns,
)


def _choice_layout(columns: Columns, used: tuple[str, ...], asked: Callable[[Row], Asked]) -> Layout:
    return Layout(name=MULTIPLE_CHOICE, columns=used, asked=asked, level=_first_of(columns, _LEVELS))


def _choice(question: Any, texts: Sequence[str], place: int) -> Asked:
    return _user_prompt(format_choices(_filled(question, "no question"), texts)), LETTERS[place]


def _options(value: Any) -> tuple[list[str], list[str] | None]:
    """Texts and labels, if any, of a row's options."""
    labels: Any = None
    if isinstance(value, Mapping) and "text" in value:
        value, labels = value["text"], value.get("label")
    elif isinstance(value, Mapping):
        # Letters as names; a struct has those that other rows use as nulls.
        value = {label: text for label, text in value.items() if text is not None}
        labels, value = list(value), list(value.values())
    if not isinstance(value, list | tuple) or not 2 <= len(value) <= len(LETTERS):
        raise UnusableRow("fewer than two options")
    texts = [_filled(None if text is None else str(text), "an option is missing") for text in value]
    if labels is None:
        return texts, None
    if not isinstance(labels, list | tuple) or len(labels) != len(texts):
        raise UnusableRow("as many labels as options are needed")
    return texts, [str(label).strip() for label in labels]


def _place(answer: Any, texts: Sequence[str], labels: Sequence[str] | None) -> int:
    """Place of the gold option: by its label, a place from 0, a letter, or its text."""
    if isinstance(answer, float) and answer.is_integer():
        # A column of integers with a gap, as pandas writes it.
        answer = int(answer)
    named = str(answer).strip()
    if labels is not None and named in labels:
        return list(labels).index(named)
    if isinstance(answer, str):
        if len(named) == 1 and named.upper() in LETTERS[: len(texts)]:
            return LETTERS.index(named.upper())
        if named in texts:
            return list(texts).index(named)
    places = [str(place) for place in range(len(texts))]
    if isinstance(answer, str | int) and not isinstance(answer, bool) and named in places:
        return places.index(named)
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


def _user_prompt(value: Any) -> tuple[Message, ...]:
    return (Message(role="user", content=_filled(value, "no question")),)


def _messages(value: Any) -> tuple[Message, ...]:
    """A prompt column, text or a list of messages, as messages."""
    if isinstance(value, str):
        return _user_prompt(value)
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
    """Name, as it is in the file, of the first of `names` that is a column."""
    return next((columns[name] for name in names if name in columns), None)

"""Layouts of public question sets: which columns hold the question, the gold answer and the options.

`_KNOWN` goes from the particular to the general, and the first entry that fits the columns and a few rows wins. Column
names are compared without case.
"""

import hashlib
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
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
_KEYS = ("answerkey", "answer", "answer_index")
_LEVEL = {"level": ("level", "difficulty")}
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
    """Rules that make questions of the rows of one source."""

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


@dataclass(frozen=True, slots=True)
class _Known:
    """Columns, in lower case, by which a layout is recognised, and how its rows are read."""

    name: str
    columns: tuple[tuple[str, ...], ...]
    """The names that each column may have, of which the first that is there is taken."""
    read: Callable[..., Asked]
    """From a row and the names of the columns."""
    when: Callable[[Columns, Sequence[Row]], bool] = lambda columns, rows: True
    """Further condition on the columns and the first few rows."""
    more: tuple[str, ...] = ()
    """Columns that are read where they are there."""
    own: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: _LEVEL)
    """Dotted columns of what a `Layout` takes from the row itself."""


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


def recognise(where: str, rows: Sequence[Row], named: NamedFields) -> Layout:
    """The layout of a file with these first rows; fields the user named come first.

    Raises InputError listing the columns where nothing fits.
    """
    columns = list(dict.fromkeys(name for row in rows for name in row))
    lower = {name.lower(): name for name in columns}
    if named.question is not None and named.answer is not None:
        layout: Layout | None = _named_layout(where, columns, lower, named.question, named.answer)
    else:
        layout = next((each for known in _KNOWN if (each := _layout_of(known, lower, rows)) is not None), None)
    if layout is None:
        raise InputError(
            f"{where} has no known layout: its columns are {columns}. Name the two that hold the question and "
            f"the gold answer with --question-field and --answer-field."
        )
    return layout if named.answer_pattern is None else _with_pattern(layout, named.answer_pattern)


def _layout_of(known: _Known, columns: Columns, rows: Sequence[Row]) -> Layout | None:
    found = [_first_of(columns, names) for names in known.columns]
    names = [name for name in found if name is not None]
    if len(names) < len(found) or not known.when(columns, rows):
        return None
    names += [columns[name] for name in known.more if name in columns]
    own = {key: _first_of(columns, dotted) for key, dotted in known.own.items()}
    return Layout(name=known.name, columns=tuple(names), asked=lambda row: known.read(row, *names), **own)


def _named_layout(where: str, columns: Sequence[str], lower: Columns, question: str, answer: str) -> Layout:
    tops = (question.partition(".")[0], answer.partition(".")[0])
    for option, top in zip(("--question-field", "--answer-field"), tops, strict=True):
        if top not in columns:
            raise InputError(f"{where} has no column {top!r} for {option}.{nearest(top, list(columns))}")
    return Layout(
        name="named fields",
        columns=tops,
        asked=lambda row: _question_answer(row, question, answer),
        level=_first_of(lower, _LEVEL["level"]),
    )


def _with_pattern(layout: Layout, pattern: str) -> Layout:
    compiled = re.compile(pattern)

    def asked(row: Row) -> Asked:
        prompt, answer = layout.asked(row)
        matches = list(compiled.finditer(answer))
        if not matches:
            raise UnusableRow("answer pattern not found")
        return prompt, gold_text(matches[-1].group(1 if compiled.groups else 0))

    return replace(layout, asked=asked)


def _prompt_answer(row: Row, prompt: str, answer: str) -> Asked:
    return _messages(row.get(prompt)), gold_text(reach(row, answer))


def _verl(row: Row, prompt: str, reward_model: str) -> Asked:
    return _prompt_answer(row, prompt, f"{reward_model}.ground_truth")


def _question_answer(row: Row, question: str, answer: str) -> Asked:
    return _user_prompt(reach(row, question)), gold_text(reach(row, answer))


def _is_gsm8k(columns: Columns, rows: Sequence[Row]) -> bool:
    # Most of them, not the first: one row without the mark is a broken row, one with it may be a heading.
    answers = [value for row in rows if isinstance(value := row.get(columns["answer"]), str) and value.strip()]
    return 2 * sum(_GSM8K_MARK in value for value in answers) > len(answers)


def _gsm8k(row: Row, question: str, answer: str) -> Asked:
    prompt = _user_prompt(row.get(question))
    _, mark, final = _filled(row.get(answer), "no answer").rpartition(_GSM8K_MARK)
    if not mark:
        raise UnusableRow("no #### answer")
    # 1,200 is a number with a thousands separator, never a list, in this data set.
    return prompt, gold_text(re.sub(r"(?<=\d),(?=\d{3})", "", final))


def _math(row: Row, question: str, solution: str) -> Asked:
    prompt = _user_prompt(row.get(question))
    boxed = last_boxed(_filled(row.get(solution), "no solution"))
    if boxed is None:
        raise UnusableRow("no boxed answer")
    return prompt, gold_text(boxed)


def _has_traces(columns: Columns, rows: Sequence[Row]) -> bool:
    return any(trace in columns and columns[trace] != _first_of(columns, _ANSWERS) for trace in _TRACES)


def _listed_choices(row: Row, question: str, options: str, answer: str) -> Asked:
    """A list (MMLU, MMLU-Pro), texts and labels (ARC), or a table by letter; the answer by any."""
    texts, labels = _options(row.get(options))
    return _choice(row.get(question), texts, _place(row.get(answer), texts, labels))


def _lettered_choices(row: Row, question: str, answer: str, *letters: str) -> Asked:
    # An option left empty, as the fourth where others have five, does not move the letters behind it.
    texts, labels = _options({letter.upper(): _optional(row.get(letter)) for letter in letters})
    return _choice(row.get(question), texts, _place(row.get(answer), texts, labels))


def _separate_choices(row: Row, question: str, correct: str, *wrong: str) -> Asked:
    """The correct answer, in a column of its own, is placed by a hash of the question."""
    text = _filled(row.get(question), "no question")
    texts = [_filled(row.get(name), "an option is missing") for name in wrong]
    place = int(hashlib.sha256(text.encode()).hexdigest(), 16) % (len(texts) + 1)
    texts.insert(place, _filled(row.get(correct), "no answer"))
    return _choice(text, texts, place)


def _are_turns(columns: Columns, rows: Sequence[Row]) -> bool:
    return all(isinstance(reach(row, "1.ground_truth"), Mapping) for row in rows)


def _turns(row: Row, human: str, assistant: str) -> Asked:
    """Rows that are two turns, as Open-Reasoner-Zero writes them."""
    return _question_answer(row, f"{human}.value", f"{assistant}.ground_truth.value")


_OWN = {"source": ("source",), "level": ("level",), "metadata": ("metadata",)}
_VERL = {"source": ("data_source",), "level": ("extra_info.level",), "metadata": ("extra_info.metadata",)}
_WRONG = ("incorrect answer 1", "incorrect answer 2", "incorrect answer 3")
_KNOWN = (
    _Known("verl", (("prompt",), ("reward_model",)), _verl, own=_VERL),
    _Known("canonical", (("prompt",), _ANSWERS), _prompt_answer, lambda columns, rows: "id" in columns, own=_OWN),
    _Known("prompt and answer", (("prompt",), _ANSWERS), _prompt_answer, own=_OWN),
    _Known(MULTIPLE_CHOICE, (("question",), ("correct answer",), _WRONG[:1]), _separate_choices, more=_WRONG[1:]),
    _Known(MULTIPLE_CHOICE, (_QUESTIONS, ("choices", "options"), _KEYS), _listed_choices),
    _Known(MULTIPLE_CHOICE, (_QUESTIONS, _ANSWERS, ("a",), ("b",)), _lettered_choices, more=tuple(LETTERS[2:].lower())),
    _Known("gsm8k", (_QUESTIONS, ("answer",)), _gsm8k, _is_gsm8k),
    _Known("math", (_QUESTIONS, ("solution",)), _math, lambda columns, rows: not columns.keys() & set(_ANSWERS)),
    _Known("openr1", (_QUESTIONS, _ANSWERS), _question_answer, _has_traces),
    _Known("question and answer", (_QUESTIONS, _ANSWERS), _question_answer),
    _Known("orz", (("0",), ("1",)), _turns, _are_turns, own={}),
)


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
    """Name, as it is in the file, of the first of `names` that is a column, or reaches into one by a dot."""
    split = (name.partition(".") for name in names)
    return next((columns[top] + dot + inner for top, dot, inner in split if top in columns), None)

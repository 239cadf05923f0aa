"""Layouts of public question sets: which columns hold the question and the gold answer, recognised by name.

A recogniser looks at the columns and a few rows and returns a Layout or None; the first that knows the columns wins, so
the order of `_RECOGNISERS` goes from the particular to the general. Column names are compared without case.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from exgrpo_cli.base.errors import InputError, nearest
from exgrpo_cli.grading import last_boxed
from exgrpo_cli.questions.layouts.choices import lettered_choices, listed_choices, separate_choices
from exgrpo_cli.questions.layouts.drafts import (
    ANSWER_NAMES,
    QUESTION_NAMES,
    Columns,
    Draft,
    Layout,
    Recogniser,
    UnusableRow,
    filled,
    first_of,
    gold_text,
    level_columns,
    level_of,
    messages,
    optional,
    present,
    reach,
    user_prompt,
)
from exgrpo_cli.questions.question_file.rows import own_metadata
from exgrpo_cli.questions.sources.files import Row

_TRACE_NAMES = ("generations", "messages", "correctness_math_verify", "traces", "target")
_GSM8K_MARK = "####"


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
        if self.answer_pattern is not None:
            try:
                re.compile(self.answer_pattern)
            except re.error as error:
                raise InputError(
                    f"--answer-pattern {self.answer_pattern!r} is no regular expression: {error}."
                ) from None


def recognise(where: str, columns: Sequence[str], rows: Sequence[Row], named: NamedFields) -> Layout:
    """The layout of a file with these columns and these first rows; fields the user named come first.

    Raises InputError listing the columns where nothing fits.
    """
    if named.question is not None and named.answer is not None:
        return _with_pattern(_named_layout(where, columns, named.question, named.answer), named.answer_pattern)
    lower = {name.lower(): name for name in columns}
    for recogniser in _RECOGNISERS:
        layout = recogniser(lower, rows)
        if layout is not None:
            return _with_pattern(layout, named.answer_pattern)
    raise InputError(
        f"{where} has no known layout: its columns are {list(columns)}. Name the two that hold the question and the "
        f"gold answer with --question-field and --answer-field."
    )


def _named_layout(where: str, columns: Sequence[str], question: str, answer: str) -> Layout:
    tops = (question.partition(".")[0], answer.partition(".")[0])
    for option, top in zip(("--question-field", "--answer-field"), tops, strict=True):
        if top not in columns:
            raise InputError(f"{where} has no column {top!r} for {option}.{nearest(top, list(columns))}")
    return Layout(
        name="named fields",
        columns=tuple(dict.fromkeys((*tops, *level_columns({name.lower(): name for name in columns})))),
        convert=lambda row: Draft(
            prompt=user_prompt(reach(row, question)),
            answer=gold_text(reach(row, answer)),
            source=None,
            level=level_of({name.lower(): name for name in row}, row),
        ),
    )


def _with_pattern(layout: Layout, pattern: str | None) -> Layout:
    if pattern is None:
        return layout
    compiled = re.compile(pattern)

    def convert(row: Row) -> Draft:
        draft = layout.convert(row)
        matches = list(compiled.finditer(draft.answer))
        if not matches:
            raise UnusableRow("answer pattern not found")
        found = matches[-1].group(1 if compiled.groups else 0)
        return replace(draft, answer=gold_text(found))

    return Layout(name=layout.name, columns=layout.columns, convert=convert)


def _canonical(columns: Columns, rows: Sequence[Row]) -> Layout | None:
    answer = first_of(columns, ANSWER_NAMES)
    if "prompt" not in columns or answer is None:
        return None
    prompt, source, level, metadata = (columns.get(name, "") for name in ("prompt", "source", "level", "metadata"))
    return Layout(
        name="canonical" if "id" in columns else "prompt and answer",
        columns=(answer, *present(columns, "prompt", "source", "level", "metadata")),
        convert=lambda row: Draft(
            prompt=messages(row.get(prompt)),
            answer=gold_text(row.get(answer)),
            source=optional(row.get(source)),
            level=optional(row.get(level)),
            metadata=own_metadata(row.get(metadata)),
        ),
    )


def _verl(columns: Columns, rows: Sequence[Row]) -> Layout | None:
    if not {"prompt", "reward_model"} <= columns.keys():
        return None
    prompt, reward_model, source, extra = (
        columns.get(name, "") for name in ("prompt", "reward_model", "data_source", "extra_info")
    )

    def convert(row: Row) -> Draft:
        extra_info = row.get(extra)
        more = extra_info if isinstance(extra_info, Mapping) else {}
        return Draft(
            prompt=messages(row.get(prompt)),
            answer=gold_text(reach(row, f"{reward_model}.ground_truth")),
            source=optional(row.get(source)),
            level=optional(more.get("level")),
            metadata=own_metadata(more.get("metadata")),
        )

    wanted = present(columns, "prompt", "reward_model", "data_source", "extra_info")
    return Layout(name="verl", columns=wanted, convert=convert)


def _gsm8k(columns: Columns, rows: Sequence[Row]) -> Layout | None:
    question, answer = first_of(columns, QUESTION_NAMES), columns.get("answer")
    if question is None or answer is None:
        return None
    # Most of them, not the first: one row without the mark is a broken row, one with it may be a heading.
    answers = [value for value in (row.get(answer) for row in rows) if isinstance(value, str) and value.strip()]
    if 2 * sum(_GSM8K_MARK in value for value in answers) <= len(answers):
        return None

    def gold(row: Row) -> str:
        _, mark, final = filled(row.get(answer), "no answer").rpartition(_GSM8K_MARK)
        if not mark:
            raise UnusableRow("no #### answer")
        # 1,200 is a number with a thousands separator, never a list, in this data set.
        return gold_text(re.sub(r"(?<=\d),(?=\d{3})", "", final))

    return _question_answer_layout("gsm8k", columns, question, answer, gold)


def _math(columns: Columns, rows: Sequence[Row]) -> Layout | None:
    question, solution = first_of(columns, QUESTION_NAMES), columns.get("solution")
    if question is None or solution is None or first_of(columns, ANSWER_NAMES) is not None:
        return None

    def gold(row: Row) -> str:
        boxed = last_boxed(filled(row.get(solution), "no solution"))
        if boxed is None:
            raise UnusableRow("no boxed answer")
        return gold_text(boxed)

    return _question_answer_layout("math", columns, question, solution, gold)


def _question_answer(columns: Columns, rows: Sequence[Row]) -> Layout | None:
    question, answer = first_of(columns, QUESTION_NAMES), first_of(columns, ANSWER_NAMES)
    if question is None or answer is None:
        return None
    name = (
        "openr1"
        if any(trace in columns and columns[trace] != answer for trace in _TRACE_NAMES)
        else "question and answer"
    )
    return _question_answer_layout(name, columns, question, answer, lambda row: gold_text(row.get(answer)))


def _turns(columns: Columns, rows: Sequence[Row]) -> Layout | None:
    """Rows that are two turns, as Open-Reasoner-Zero writes them: `value` of the human's, `ground_truth.value` of the
    assistant's."""
    if not {"0", "1"} <= columns.keys() or not all(isinstance(reach(row, "1.ground_truth"), Mapping) for row in rows):
        return None
    return Layout(
        name="orz",
        columns=("0", "1"),
        convert=lambda row: Draft(
            prompt=user_prompt(reach(row, "0.value")),
            answer=gold_text(reach(row, "1.ground_truth.value")),
            source=None,
            level=None,
        ),
    )


_RECOGNISERS: tuple[Recogniser, ...] = (
    _verl,
    _canonical,
    separate_choices,
    listed_choices,
    lettered_choices,
    _gsm8k,
    _math,
    _question_answer,
    _turns,
)


def _question_answer_layout(
    name: str, columns: Columns, question: str, answer: str, gold: Callable[[Row], str]
) -> Layout:
    def convert(row: Row) -> Draft:
        return Draft(prompt=user_prompt(row.get(question)), answer=gold(row), source=None, level=level_of(columns, row))

    return Layout(name=name, columns=(question, answer, *level_columns(columns)), convert=convert)

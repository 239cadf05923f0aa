"""Layouts of multiple-choice sets: options in a list, in lettered columns, or right and wrong ones apart."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from exgrpo_cli.questions.layouts.drafts import (
    ANSWER_NAMES,
    QUESTION_NAMES,
    Columns,
    Draft,
    Layout,
    UnusableRow,
    filled,
    first_of,
    level_columns,
    level_of,
    optional,
    user_prompt,
)
from exgrpo_cli.questions.question_file.choices import LETTERS, format_choices
from exgrpo_cli.questions.sources.files import Row

_OPTION_NAMES = ("choices", "options")
_PLACES = tuple(str(place) for place in range(len(LETTERS)))


def listed_choices(columns: Columns, rows: Sequence[Row]) -> Layout | None:
    """`choices` or `options`: a list (MMLU, MMLU-Pro), texts and labels (ARC), or by letter; the answer by any."""
    question, options = first_of(columns, QUESTION_NAMES), first_of(columns, _OPTION_NAMES)
    answer = first_of(columns, ("answerkey", "answer", "answer_index"))
    if question is None or options is None or answer is None:
        return None

    def convert(row: Row) -> Draft:
        texts, labels = _options(row.get(options))
        place = _place(row.get(answer), texts, labels)
        return _choice_draft(row.get(question), texts, place, level_of(columns, row))

    wanted = (question, options, answer, *level_columns(columns))
    return Layout(name="multiple choice", columns=wanted, convert=convert)


def lettered_choices(columns: Columns, rows: Sequence[Row]) -> Layout | None:
    """Columns A, B, C, ... beside the question."""
    question, answer = first_of(columns, QUESTION_NAMES), first_of(columns, ANSWER_NAMES)
    letters = [columns[letter.lower()] for letter in LETTERS if letter.lower() in columns]
    if question is None or answer is None or [name.upper() for name in letters[:2]] != ["A", "B"]:
        return None

    def convert(row: Row) -> Draft:
        # An option left empty, as the fourth where others have five, does not move the letters behind it.
        cells = {letter.upper(): optional(row.get(letter)) for letter in letters}
        filled_cells = {letter: text for letter, text in cells.items() if text is not None}
        texts, labels = _options(filled_cells)
        return _choice_draft(row.get(question), texts, _place(row.get(answer), texts, labels), level_of(columns, row))

    wanted = (question, answer, *letters, *level_columns(columns))
    return Layout(name="multiple choice", columns=wanted, convert=convert)


def separate_choices(columns: Columns, rows: Sequence[Row]) -> Layout | None:
    """Correct and incorrect answers in columns of their own: the correct one is placed by a hash of the question."""
    wrong = [columns[f"incorrect answer {number}"] for number in (1, 2, 3) if f"incorrect answer {number}" in columns]
    if "correct answer" not in columns or "question" not in columns or not wrong:
        return None
    question, correct = columns["question"], columns["correct answer"]

    def convert(row: Row) -> Draft:
        asked = filled(row.get(question), "no question")
        texts = [filled(row.get(name), "an option is missing") for name in wrong]
        place = int(hashlib.sha256(asked.encode()).hexdigest(), 16) % (len(texts) + 1)
        texts.insert(place, filled(row.get(correct), "no answer"))
        return _choice_draft(asked, texts, place, level_of(columns, row))

    wanted = (question, correct, *wrong, *level_columns(columns))
    return Layout(name="multiple choice", columns=wanted, convert=convert)


def _choice_draft(question: Any, texts: Sequence[str], place: int, level: str | None) -> Draft:
    asked = filled(question, "no question")
    return Draft(prompt=user_prompt(format_choices(asked, texts)), answer=LETTERS[place], source=None, level=level)


def _options(value: Any) -> tuple[list[str], list[str] | None]:
    labels: Any = None
    if isinstance(value, Mapping) and "text" in value:
        value, labels = value["text"], value.get("label")
    elif isinstance(value, Mapping):
        # Letters as names; a struct has those that other rows use as nulls.
        value = {label: text for label, text in value.items() if text is not None}
        labels, value = list(value), list(value.values())
    if not isinstance(value, list | tuple) or not 2 <= len(value) <= len(LETTERS):
        raise UnusableRow("fewer than two options")
    texts = [filled(None if text is None else str(text), "an option is missing") for text in value]
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
    if labels is not None and str(answer).strip() in labels:
        return list(labels).index(str(answer).strip())
    if isinstance(answer, str):
        answer = answer.strip()
        if len(answer) == 1 and answer.upper() in LETTERS[: len(texts)]:
            return LETTERS.index(answer.upper())
        if answer in texts:
            return list(texts).index(answer)
        if answer in _PLACES:
            answer = int(answer)
    if isinstance(answer, int) and not isinstance(answer, bool) and 0 <= answer < len(texts):
        return answer
    raise UnusableRow("the answer is none of the options")

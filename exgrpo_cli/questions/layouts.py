"""Layouts of public question sets: which columns hold the question, the gold answer and the options.

`_KNOWN` goes from the particular to the general, and the first entry that fits the columns and a few rows wins. Column
names are compared without case.
"""

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from typing import Any, NamedTuple

from exgrpo_cli.base import data, types
from exgrpo_cli.base.errors import InputError, nearest
from exgrpo_cli.config.requests import PrepareRequest
from exgrpo_cli.grading import last_boxed
from exgrpo_cli.questions import files, values
from exgrpo_cli.questions.choices import LETTERS, format_choices
from exgrpo_cli.questions.made.countdown import SOURCE, solve
from exgrpo_cli.questions.question_file import own_metadata, question_id, reach

_GSM8K_MARK = "####"
_LEVEL = {"level": ("level", "difficulty")}
_PASSAGE_CHARS = 400
_LEAST_WORDS = 6
# Share of a question's words from which another column says the same once more.
_RESTATED = 0.7
_RE = data.patterns(data.tables(__file__, "patterns.toml")["layouts"], {})
_MOST_NUMBERS = 5
SAMPLE_ROWS = 20
"""First rows of a file by which its layout is recognised."""
MULTIPLE_CHOICE = "multiple choice"
"""Name of the layouts whose gold is a letter."""

Asked = tuple[tuple[types.Message, ...], str] | tuple[tuple[types.Message, ...], str, str]
"""Prompt and gold answer, and metadata that name a verifier where the layout has one."""
Columns = Mapping[str, str]
"""Lower-case name to the name as it is in the file."""


class Layout(NamedTuple):
    """Rules that make questions of the rows of one source; a dot in the name of a column reaches into a struct."""

    name: str
    columns: tuple[str, ...]
    """Columns whose values `read` takes."""
    read: Callable[..., Asked]
    """Raises UnusableRow with the reason."""
    own: Mapping[str, str | None]
    """Columns of what a row itself says of its `source`, `level` and `metadata`."""
    answer_pattern: str | None = None
    """As of `PrepareRequest`."""
    left_empty: tuple[str, ...] = ()
    """Columns of options that the first rows leave empty."""

    @property
    def wanted(self) -> tuple[str, ...]:
        """Top-level columns that are read."""
        named = (*self.columns, *self.own.values(), *self.left_empty)
        parts = (part for name in named if name for part in name.split("+"))
        return tuple(dict.fromkeys(part.partition(".")[0] for part in parts))

    def question(self, row: files.Row, source: str) -> types.Question:
        """The question of a row, from `source` where it says nothing else; raises UnusableRow with the reason."""
        if any(row.get(name) not in (None, "", []) for name in self.left_empty):
            raise values.UnusableRow("options, which the first rows have not")
        prompt, answer, *more = self.read(*(joined(row, name) for name in self.columns))
        if self.answer_pattern is not None:
            matches = list(re.finditer(self.answer_pattern, answer))
            if not matches:
                raise values.UnusableRow("answer pattern not found")
            answer = values.gold_text(matches[-1].group(min(1, matches[-1].re.groups)))
        answer = values.filled_text(answer, "no answer")
        own = {key: reach(row, name) for key, name in self.own.items() if name}
        return types.Question(
            id=question_id(prompt, answer),
            prompt=prompt,
            answer=answer,
            source=values.optional_text(own.get("source")) or source,
            level=values.optional_text(own.get("level")),
            metadata=more[0] if more else own_metadata(own.get("metadata")),
        )


def joined(row: files.Row, name: str) -> Any:
    """The value of a column; of several, as `Body+Question`, their texts, without one that is empty or in the last."""
    *before, last = (reach(row, part) for part in name.split("+"))
    if not before or not isinstance(last, str):
        return last
    texts = [text.strip() for text in before if isinstance(text, str) and text.strip() and text.strip() not in last]
    between = " " if all(len(text) < _PASSAGE_CHARS for text in texts) else "\n\n"
    return between.join([*texts, last])


def recognise(where: str, rows: Sequence[files.Row], asked: PrepareRequest) -> Layout:
    """The layout of a file with these first rows; fields the user named come first.

    Raises InputError listing the columns where nothing fits.
    """
    columns = list(dict.fromkeys(name for row in rows for name in row))
    lower = {name.lower(): name for name in columns}
    if asked.question_field is not None and asked.answer_field is not None:
        fields = (asked.question_field, asked.answer_field)
        for option, field in zip(("question", "answer"), fields, strict=True):
            for top in (part.partition(".")[0] for part in field.split("+")):
                if top not in columns:
                    raise InputError(f"{where} has no column {top!r} for --{option}-field.{nearest(top, columns)}")
        own = {"level": _first_of(lower, _LEVEL["level"])}
        return Layout("named fields", fields, _question_answer, own, asked.answer_pattern)
    # A column that these rows leave empty, as the options of a set that has few, is none; where nothing fits, it is.
    used = {column for row in rows for column in columns if row.get(column) not in (None, "")}
    filled = {name: column for name, column in lower.items() if name in LETTERS.lower() or column in used}
    for present, known in [(present, known) for present in (filled, lower) for known in _KNOWN]:
        found = [name for names in known.columns if (name := _first_of(present, names, rows)) is not None]
        if len(found) == len(known.columns) and known.when(present, rows):
            story = _first_of(lower, _STORIES) if known.tells else None
            if story is not None:
                found[0] = f"{story}+{found[0]}"
            found += [lower[name] for name in takewhile(lower.__contains__, known.more)]
            own = {key: _first_of(lower, names) for key, names in known.own.items()}
            left = tuple(lower[name] for name in _OFFERED if name in lower and name not in present)
            layout = Layout(known.name, tuple(found), known.read, own, asked.answer_pattern, left)
            _refuse_unused(where, layout, columns, rows)
            return layout
    raise InputError(
        f"{where} has no known layout: its columns are {columns}. Name the two that hold the question and "
        f"the gold answer with --question-field and --answer-field (a conversation without a gold answer, an "
        "environment or tools are no questions)."
    )


def _refuse_unused(where: str, layout: Layout, columns: Sequence[str], rows: Sequence[files.Row]) -> None:
    """Raise InputError where a column that is not read has more words than the question, and none of its own use.

    Facts of a question stand in a column beside it in many sets. A trace, or the question in other words, may be long.
    """
    used = [set(" ".join(map(str, (joined(row, name) for name in layout.columns))).lower().split()) for row in rows]
    asked = sum(len(str(joined(row, layout.columns[0])).split()) for row in rows)
    for name in columns:
        texts = [row.get(name) for row in rows]
        words = [text.lower().split() if isinstance(text, str) else [] for text in texts]
        total = sum(map(len, words))
        if name in layout.wanted or _RE.beside.search(name) or total <= max(asked, _LEAST_WORDS * len(rows)):
            continue
        again = sum(len(own & set(text)) for own, text in zip(used, words, strict=True)) / max(1, sum(map(len, used)))
        if again < _RESTATED:
            first = layout.columns[0]
            raise InputError(
                f"{where}: the column {name!r} has more words than {first!r} and would not be used: name all that make "
                f"the question, as --question-field {name}+{first} (or {first} alone), and the answer's --answer-field."
            )


def _question_answer(question: Any, answer: Any) -> Asked:
    return values.messages_of(question), values.gold_text(answer)


def _told_in_two(question: Any, answer: Any) -> Asked:
    """Facts and question apart (SVAMP, ASDiv); behind a number, what it counts is no part of the gold: 9 (apples)."""
    counted = _RE.counted.fullmatch(values.gold_text(answer))
    return values.messages_of(question), counted[1] if counted else values.gold_text(answer)


def _numbered(question: Any, numbers: Any, answer: Any) -> Asked:
    """A text with number0, number1 in place of its numbers (SVAMP for graph-to-tree models)."""
    raise values.UnusableRow("numbers apart from their question: put them in first")


def _quantity(question: Any, answer: Any, unit: Any) -> Asked:
    """A number and its unit apart (SciBench)."""
    text, unit = values.gold_text(answer), str(unit or "").strip().strip("$").strip()
    return values.messages_of(question), text if unit in ("", "None") or unit in text else f"{text} {unit}"


def _countdown(numbers: Any, target: Any) -> Asked:
    """Numbers and target alone (Countdown-Tasks-3to4); the gold is one solution of many, and graded as such."""
    try:
        given, wanted = [int(number) for number in numbers], int(target)
    except (TypeError, ValueError):
        raise values.UnusableRow("no numbers and target") from None
    solution = solve([(number, str(number)) for number in given], wanted) if 1 < len(given) <= _MOST_NUMBERS else None
    if solution is None:
        raise values.UnusableRow(f"no solution, or over {_MOST_NUMBERS} numbers")
    listed = ", ".join(map(str, given))
    text = f"Use each of the numbers {listed} once, with + - * / and brackets, to make {wanted}."
    metadata = {"verifier": SOURCE, "numbers": given, "target": wanted}
    return values.messages_of(text), solution, json.dumps(metadata)


def _is_numbered(columns: Columns, rows: Sequence[files.Row]) -> bool:
    return any(_RE.numbered.search(str(row.get(columns["question"]))) for row in rows)


def _is_gsm8k(columns: Columns, rows: Sequence[files.Row]) -> bool:
    # Most of them, not the first: one row without the mark is a broken row, one with it may be a heading.
    answers = [value for row in rows if isinstance(value := row.get(columns["answer"]), str) and value.strip()]
    return 2 * sum(_GSM8K_MARK in value for value in answers) > len(answers)


def _gsm8k(question: Any, answer: Any) -> Asked:
    prompt = values.messages_of(question)
    _, mark, final = values.filled_text(answer, "no answer").rpartition(_GSM8K_MARK)
    if not mark:
        raise values.UnusableRow("no #### answer")
    # 1,200 is a number with a thousands separator, never a list, in this data set.
    return prompt, values.gold_text(re.sub(r"(?<=\d),(?=\d{3})", "", final))


def _math(question: Any, solution: Any) -> Asked:
    prompt = values.messages_of(question)
    boxed = last_boxed(values.filled_text(solution, "no solution"))
    if boxed is None:
        raise values.UnusableRow("no boxed answer")
    return prompt, values.gold_text(boxed)


def _listed_choices(question: Any, options: Any, answer: Any) -> Asked:
    """A list (MMLU, MMLU-Pro), texts and labels (ARC), or a table by letter; the answer by any."""
    texts, labels = values.options_in(options)
    return _choice(question, texts, values.place_of_gold(answer, texts, labels))


def _lettered_choices(question: Any, answer: Any, *options: Any) -> Asked:
    # An option left empty, as the fourth where others have five, does not move the letters behind it.
    return _listed_choices(question, dict(zip(LETTERS, map(values.optional_text, options), strict=False)), answer)


def _separate_choices(question: Any, correct: Any, *wrong: Any) -> Asked:
    """The correct answer, in a column of its own, is placed by a hash of the question."""
    text = values.filled_text(question, "no question")
    texts = [values.filled_text(each, "an option is missing") for each in wrong]
    place = int(hashlib.sha256(text.encode()).hexdigest(), 16) % (len(texts) + 1)
    texts.insert(place, values.filled_text(correct, "no answer"))
    return _choice(text, texts, place)


def _choice(question: Any, texts: Sequence[str], place: int) -> Asked:
    return values.messages_of(format_choices(values.filled_text(question, "no question"), texts)), LETTERS[place]


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
    tells: bool = False
    """Whether facts of the question may stand in a column of their own."""
    when: Callable[[Columns, Sequence[files.Row]], bool] = lambda columns, rows: True
    """Further condition on the columns and the first few rows."""


_QUESTIONS = ("question", "problem", "input")
_ANSWERS = ("answer", "final_answer", "expected_answer", "ground_truth_answer", "ground_truth", "target")
_ASKED = ("question.stem", "question_stem", *_QUESTIONS)
_OFFERED = ("question.choices", "choices", "options")
_KEYS = ("answerkey", "answer", "answer_index", "answer_idx", "label", "correct", "correct_option")
_STORIES = ("body", "passage", "context", "article")
_WRONG = ("incorrect answer 1", "incorrect answer 2", "incorrect answer 3")
_VERL = {"source": ("data_source",), "level": ("extra_info.level",), "metadata": ("extra_info.metadata",)}
_OWN = {name: (name,) for name in _VERL}
_KNOWN = (
    _Known("verl", (("prompt",), ("reward_model.ground_truth",)), _question_answer, own=_VERL),
    _Known("canonical", (("prompt",), _ANSWERS), _question_answer, own=_OWN),
    _Known(MULTIPLE_CHOICE, (("question",), ("correct answer",), _WRONG[:1]), _separate_choices, _WRONG[1:]),
    _Known(MULTIPLE_CHOICE, (_ASKED, _OFFERED, _KEYS), _listed_choices, tells=True),
    _Known(MULTIPLE_CHOICE, (_QUESTIONS, _ANSWERS, ("a",), ("b",)), _lettered_choices, LETTERS[2:].lower()),
    _Known("numbers apart", (("question",), ("numbers",), ("answer",)), _numbered, tells=True, when=_is_numbered),
    _Known("facts and question", (("question",), ("answer",)), _told_in_two, tells=True, when=lambda c, _: "body" in c),
    _Known("gsm8k", (_QUESTIONS, ("answer",)), _gsm8k, when=_is_gsm8k),
    _Known("question and answer", (_QUESTIONS, _ANSWERS), _question_answer, tells=True),
    _Known("math", (_QUESTIONS, ("solution",)), _math),
    _Known("scibench", (("problem_text",), ("answer_number",), ("unit",)), _quantity),
    _Known("countdown", (("nums", "numbers"), ("target",)), _countdown),
    # Rows of two turns, as Open-Reasoner-Zero writes them.
    _Known("orz", (("0.value",), ("1.ground_truth.value",)), _question_answer),
)


def _first_of(columns: Columns, names: Sequence[str], rows: Sequence[files.Row] = ()) -> str | None:
    """Name, as it is in the file, of the first of `names` that is a column, or reaches into one by a dot.

    With `rows` what is reached into has a value in one of them.
    """
    split = (name.partition(".") for name in names)
    found = (columns[top] + dot + inner for top, dot, inner in split if top in columns)
    reached = (name for name in found if not rows or "." not in name or any(reach(row, name) for row in rows))
    return next(reached, None)

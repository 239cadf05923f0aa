"""A source as questions: rows converted by the layout they have, exact duplicates folded."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from exgrpo_cli.base.errors import InputError
from exgrpo_cli.base.types import Question
from exgrpo_cli.config.settings import Config
from exgrpo_cli.questions.audit.checks import Progress, Tally, one_line
from exgrpo_cli.questions.layouts.drafts import Draft, Layout, UnusableRow
from exgrpo_cli.questions.layouts.recognise import NamedFields, recognise
from exgrpo_cli.questions.made.sources import make_split
from exgrpo_cli.questions.question_file.identity import question_id, same_content
from exgrpo_cli.questions.sources.files import Row, column_names, count_rows, iter_rows
from exgrpo_cli.questions.sources.open import Source, open_source

_SAMPLE_ROWS = 20
_PROGRESS_ROWS = 500


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """A source as questions, exact duplicates folded."""

    questions: list[Question]
    layout: str
    source: str
    revision: str | None
    split: str | None
    num_read: int
    num_folded: int


def made_source(source: str, settings: Config, *, heldout: bool) -> Reading:
    """The training questions that the program makes of a source, or the held-out ones."""
    split = make_split(source, settings)
    questions = split.heldout if heldout else split.train
    return Reading(
        questions=questions,
        layout="built-in",
        source=source,
        revision=None,
        split="held-out" if heldout else "train",
        num_read=len(questions),
        num_folded=0,
    )


def read_source(text: str, fields: NamedFields, dropped: Tally, progress: Progress) -> Reading:
    """Read every row of a file, a folder or a hub data set; rows that are no questions go to `dropped`.

    Raises InputError for a source that cannot be read or has no known layout, and for one id with different content.
    """
    source = open_source(text, lambda done, total: progress(done, total, "fetching files"))
    layouts = _layouts_of(source, fields)
    total = sum(count_rows(file) for file in source.files)
    kept: dict[str, Question] = {}
    place_of: dict[str, str] = {}
    num_read = num_folded = 0
    for place, row, layout in _placed_rows(layouts):
        if num_read % _PROGRESS_ROWS == 0:
            progress(num_read, total, "reading rows")
        num_read += 1
        try:
            question = _to_question(layout.convert(row), source.name)
        except UnusableRow as error:
            dropped.add(str(error), f"{place}: {one_line(str(dict(row)))}")
            continue
        earlier = kept.setdefault(question.id, question)
        place_of.setdefault(question.id, place)
        if earlier is question:
            continue
        if not same_content(earlier, question):
            raise InputError(
                f"{place_of[question.id]} and {place} have the id {question.id!r} (the last user message and the "
                f"answer are the same) but other messages differ: keep one of them."
            )
        num_folded += 1
    progress(total, total, "reading rows")
    return Reading(
        questions=list(kept.values()),
        layout=next(iter(layouts.values())).name,
        source=source.name,
        revision=source.revision,
        split=source.split,
        num_read=num_read,
        num_folded=num_folded,
    )


def _layouts_of(source: Source, fields: NamedFields) -> dict[Path, Layout]:
    """Layout of each file that has rows: one layout for all, though their columns may have different names."""
    layouts: dict[Path, Layout] = {}
    for file in source.files:
        sample = [row for _, row in islice(iter_rows(file), _SAMPLE_ROWS)]
        if sample:
            layouts[file] = recognise(str(file), column_names(file, sample), sample, fields)
    if not layouts:
        raise InputError(f"{', '.join(map(str, source.files))}: no rows, so there are no questions to prepare.")
    first_file, first = next(iter(layouts.items()))
    for file, layout in layouts.items():
        if layout.name != first.name:
            raise InputError(
                f"{first_file} has the {first.name} layout and {file} the {layout.name} one: prepare them one by one."
            )
    return layouts


def _placed_rows(layouts: Mapping[Path, Layout]) -> Iterator[tuple[str, Row, Layout]]:
    for file, layout in layouts.items():
        for number, row in iter_rows(file, layout.columns):
            yield f"{file}: row {number}", row, layout


def _to_question(draft: Draft, source: str) -> Question:
    return Question(
        id=question_id(draft.prompt, draft.answer),
        prompt=draft.prompt,
        answer=draft.answer,
        source=draft.source or source,
        level=draft.level,
        metadata=draft.metadata,
    )

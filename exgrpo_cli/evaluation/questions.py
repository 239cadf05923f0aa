"""The questions of a benchmark: built in, from the hub, or from a file of the user's.

Multiple-choice options are asked in a recorded order: a source may list the right one first, and models have favourite
letters.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from exgrpo_cli.base.errors import InputError, RunError
from exgrpo_cli.base.types import Message, Question
from exgrpo_cli.config.sections.data import ArithmeticSettings
from exgrpo_cli.evaluation.benchmarks import Benchmark
from exgrpo_cli.evaluation.records import QuestionRecord
from exgrpo_cli.questions.choices import find_choices
from exgrpo_cli.questions.files import iter_rows
from exgrpo_cli.questions.layouts import NamedFields, UnusableRow, recognise
from exgrpo_cli.questions.made.sums import make_arithmetic
from exgrpo_cli.questions.question_file import content_hash, question_id
from exgrpo_cli.questions.sources import Source, open_source


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchmarkQuestions:
    """Distinct questions in their order, and how they came about."""

    asked: tuple[QuestionRecord, ...]
    """With the options of multiple-choice questions in the order in which they are asked."""
    origin: str
    """Data set id with its commit, path of a file, or `arithmetic`."""
    num_folded: int = 0
    """Repeated rows left out."""

    @property
    def questions(self) -> tuple[Question, ...]:
        """The questions alone."""
        return tuple(record.question for record in self.asked)

    @property
    def content_hash(self) -> str:
        """Hash of what is asked."""
        return content_hash(self.questions)


def benchmark_questions(
    benchmark: Benchmark, data: Path | None = None, progress: Callable[[int, int], None] = lambda done, total: None
) -> BenchmarkQuestions:
    """Load a benchmark's questions; a file given as `data` replaces its source.

    Of a file only the rows whose source is the benchmark's are kept, and repeated rows are folded into one question.
    Raises InputError where nothing can be read, a row is no question, or nothing is left.
    """
    if data is None and benchmark.source.dataset == "arithmetic":
        made = make_arithmetic(ArithmeticSettings()).heldout
        return BenchmarkQuestions(asked=tuple(QuestionRecord(question=each) for each in made), origin="arithmetic")
    try:
        source = open_source(benchmark.source.text if data is None else str(data), progress)
    except (InputError, RunError) as error:
        if data is not None:
            raise
        advice = "Or name a file of its questions: --data FILE (of prepare: --decontaminate FILE)."
        raise InputError(f"{benchmark.name}: {error} {advice}") from error
    rows, origin = list(_questions(source, benchmark)), str(data or f"{benchmark.source.dataset}@{source.revision}")
    if data is not None and benchmark.source.dataset:
        # The user's own benchmark has no name to select by: every row of the file is its.
        rows = _select(data, rows, benchmark)
    distinct = list({question.id: question for question in rows}.values())
    asked = [QuestionRecord(question=question) for question in distinct]
    if benchmark.protocol.grader == "choice":
        asked = [shuffle_choices(question, benchmark.protocol.shuffle_seed) for question in distinct]
    return BenchmarkQuestions(asked=tuple(asked), origin=origin, num_folded=len(rows) - len(distinct))


def shuffle_choices(question: Question, seed: int) -> QuestionRecord:
    """The question with its options in another order and the gold's label moved along.

    The order depends on the seed and the question's text, not on its place in the file. Where the options cannot be
    told from the text, or the gold is not one of their labels, the question stays as it is and has no options.
    """
    choices = find_choices(question.prompt[-1].content)
    place = None if choices is None else choices.place_of(question.answer)
    if choices is None or place is None:
        return QuestionRecord(question=question)
    digest = hashlib.blake2b(f"{seed}\x1f{choices.text}".encode(), digest_size=8, person=b"exgrpo-options").digest()
    rng = np.random.default_rng(int.from_bytes(digest, "big"))
    order = [int(index) for index in rng.permutation(len(choices.options))]
    prompt = (*question.prompt[:-1], Message(role="user", content=choices.reordered(order)))
    answer = choices.labels[order.index(place)]
    return QuestionRecord(
        question=replace(question, id=question_id(prompt, answer), prompt=prompt, answer=answer),
        options=tuple(choices.options[index] for index in order),
    )


def _questions(source: Source, benchmark: Benchmark) -> Iterator[Question]:
    """Every row, without metadata: the protocol's grader counts, not a verifier that a question brings."""
    for path in source.files:
        first = next(iter_rows(path), None)
        if first is None:
            raise InputError(f"{path} has no rows: there are no questions to ask.")
        try:
            layout = recognise(str(path), [first[1]], NamedFields())
        except InputError as error:
            raise InputError(
                f"{error} These are options of `exgrpo prepare`, which makes a question file of it."
            ) from error
        for number, row in iter_rows(path, layout.wanted):
            try:
                yield replace(layout.question(row, source.name), metadata=None)
            except UnusableRow as error:
                raise InputError(f"{path}: row {number} is no question of {benchmark.name}: {error}.") from error


def _select(data: Path, rows: Sequence[Question], benchmark: Benchmark) -> list[Question]:
    known = {_plain(name) for name in (*benchmark.source.data_sources, benchmark.name, benchmark.source.dataset)}
    kept = [question for question in rows if _plain(question.source) in known]
    if not kept:
        found = sorted({question.source for question in rows})
        listed = ", ".join(map(repr, found[:8])) + (f" and {len(found) - 8} more" if len(found) > 8 else "")
        raise InputError(
            f"{data} has no questions of {benchmark.name}: its sources are {listed}, and those of {benchmark.name} are "
            f"called {', '.join(sorted(known))}. Without a BENCHMARK all of its rows are used."
        )
    return kept


def _plain(name: str) -> str:
    """`HuggingFaceH4/MATH-500` as math500: spellings of a data set's name differ by more than they should."""
    return "".join(char for char in name.rpartition("/")[2].casefold() if char.isalnum())

"""The questions of a benchmark: built in, from the hub, or from a file of the user's."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from exgrpo_cli.base.errors import InputError, RunError
from exgrpo_cli.base.types import Question
from exgrpo_cli.config.sections.data import ArithmeticSettings
from exgrpo_cli.evaluation.benchmarks.choices import shuffle_choices
from exgrpo_cli.evaluation.benchmarks.presets import Benchmark
from exgrpo_cli.questions.layouts.drafts import UnusableRow
from exgrpo_cli.questions.layouts.recognise import Layout, NamedFields, recognise
from exgrpo_cli.questions.made.arithmetic import make_questions
from exgrpo_cli.questions.question_file.questions import content_hash, question_id
from exgrpo_cli.questions.sources.files import column_names, iter_rows
from exgrpo_cli.questions.sources.open import Source, open_source

FetchProgress = Callable[[int, int], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchmarkQuestions:
    """Distinct questions in their order, and how they came about."""

    questions: tuple[Question, ...]
    origin: str
    """Data set id with its commit, path of a file, or `arithmetic`."""
    content_hash: str
    num_folded: int
    """Repeated rows left out."""
    options: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Options of multiple-choice questions as asked, A first, by question id."""


def benchmark_questions(
    benchmark: Benchmark, data: Path | None = None, progress: FetchProgress = lambda done, total: None
) -> BenchmarkQuestions:
    """Load a benchmark's questions; a file given as `data` replaces its source.

    Of a file only the rows whose source is the benchmark's are kept, and repeated rows are folded into one question.
    Raises InputError where nothing can be read, a row is no question, or nothing is left.
    """
    if data is None and benchmark.source.dataset == "arithmetic":
        return _arithmetic()
    if data is None:
        source = _fetched(benchmark, progress)
        rows = list(_questions(source, benchmark))
        origin = f"{benchmark.source.dataset}@{source.revision}"
    else:
        source = open_source(str(data), progress)
        rows = _select(data, list(_questions(source, benchmark)), benchmark)
        origin = str(data)
    return _asked(benchmark, rows, origin)


def _fetched(benchmark: Benchmark, progress: FetchProgress) -> Source:
    try:
        return open_source(benchmark.source.text, progress)
    except (InputError, RunError) as error:
        raise InputError(
            f"{benchmark.name}: {error} Or name a file of its questions: --data FILE "
            "(of prepare: --decontaminate FILE)."
        ) from error


def _arithmetic() -> BenchmarkQuestions:
    made = make_questions(ArithmeticSettings()).heldout
    return BenchmarkQuestions(questions=tuple(made), origin="arithmetic", content_hash=content_hash(made), num_folded=0)


def _questions(source: Source, benchmark: Benchmark) -> Iterator[Question]:
    for path in source.files:
        layout = _layout(path, benchmark)
        for number, row in iter_rows(path, {name.partition(".")[0] for name in layout.columns}):
            try:
                draft = layout.convert(row)
            except UnusableRow as error:
                raise InputError(f"{path}: row {number} is no question of {benchmark.name}: {error}.") from error
            yield Question(
                id=question_id(draft.prompt, draft.answer),
                prompt=draft.prompt,
                answer=draft.answer,
                source=draft.source or source.name,
                level=draft.level,
            )


def _layout(path: Path, benchmark: Benchmark) -> Layout:
    first = next(iter_rows(path), None)
    if first is None:
        raise InputError(f"{path} has no rows: there are no questions to ask.")
    try:
        return recognise(str(path), column_names(path, [first[1]]), [first[1]], NamedFields())
    except InputError as error:
        raise InputError(
            f"{error} These are options of `exgrpo prepare`, which makes a question file of it."
        ) from error


def _select(data: Path, rows: Sequence[Question], benchmark: Benchmark) -> list[Question]:
    if not benchmark.source.dataset:
        # The user's own benchmark has no name to select by: every row of the file is its.
        return list(rows)
    known = {_plain(name) for name in (*benchmark.source.data_sources, benchmark.name, benchmark.source.dataset)}
    kept = [question for question in rows if _plain(question.source) in known]
    if not kept:
        raise InputError(
            f"{data} has no questions of {benchmark.name}: its sources are {_sources(rows)}, and those of "
            f"{benchmark.name} are called {', '.join(sorted(known))}. Without a BENCHMARK all of its rows are used."
        )
    return kept


def _asked(benchmark: Benchmark, rows: Sequence[Question], origin: str) -> BenchmarkQuestions:
    questions = list({question.id: question for question in rows}.values())
    options: dict[str, tuple[str, ...]] = {}
    if benchmark.protocol.grader == "choice":
        for place, question in enumerate(questions):
            shuffled = shuffle_choices(question, benchmark.protocol.shuffle_seed)
            if shuffled is not None:
                questions[place] = shuffled.question
                options[shuffled.question.id] = shuffled.options
    return BenchmarkQuestions(
        questions=tuple(questions),
        origin=origin,
        content_hash=content_hash(questions),
        num_folded=len(rows) - len(questions),
        options=options,
    )


def _plain(name: str) -> str:
    """`HuggingFaceH4/MATH-500` as math500: spellings of a data set's name differ by more than they should."""
    return "".join(char for char in name.rpartition("/")[2].casefold() if char.isalnum())


def _sources(questions: Sequence[Question]) -> str:
    found = sorted({question.source for question in questions})
    return ", ".join(map(repr, found[:8])) + (f" and {len(found) - 8} more" if len(found) > 8 else "")

"""The questions of a benchmark: built in, from the hub, or from a file of the user's."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from exgrpo_cli.data.arithmetic import make_questions
from exgrpo_cli.data.questions import content_hash, read_questions
from exgrpo_cli.errors import InputError
from exgrpo_cli.evaluation.benchmarks import Benchmark
from exgrpo_cli.evaluation.hub import read_hub
from exgrpo_cli.settings import ArithmeticSettings
from exgrpo_cli.types import Question


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


def benchmark_questions(benchmark: Benchmark, data: Path | None = None) -> BenchmarkQuestions:
    """Load a benchmark's questions; a file given as `data` replaces its source.

    Of a file only the rows whose source is the benchmark's are kept, and repeated rows are folded into one question.
    Raises InputError where nothing can be read or nothing is left.
    """
    if data is not None:
        return _from_file(benchmark, data)
    if benchmark.source.dataset == "arithmetic":
        return _arithmetic()
    read = read_hub(benchmark)
    folded = {question.id: question for question in read.questions}
    return BenchmarkQuestions(
        questions=tuple(folded.values()),
        origin=f"{benchmark.source.dataset}@{read.commit}",
        content_hash=content_hash(tuple(folded.values())),
        num_folded=len(read.questions) - len(folded),
        options=read.options,
    )


def _arithmetic() -> BenchmarkQuestions:
    settings = ArithmeticSettings()
    made = make_questions(
        num_train=0, num_heldout=settings.num_heldout, levels=settings.levels, seed=settings.seed
    ).heldout
    return BenchmarkQuestions(questions=tuple(made), origin="arithmetic", content_hash=content_hash(made), num_folded=0)


def _from_file(benchmark: Benchmark, data: Path) -> BenchmarkQuestions:
    read = read_questions(data)
    # The user's own benchmark has no names to select by: every row of the file is its.
    names = benchmark.source.data_sources if benchmark.source.dataset else ()
    known = {_plain(name) for name in (*names, benchmark.name, benchmark.source.dataset)}
    kept = tuple(q for q in read.questions if not benchmark.source.dataset or _plain(q.source) in known)
    if not kept:
        raise InputError(
            f"{data} has no questions of {benchmark.name}: its sources are {_sources(read.questions)}, and those of "
            f"{benchmark.name} are called {', '.join(sorted(known))}. Without a BENCHMARK all of its rows are used."
        )
    return BenchmarkQuestions(
        questions=kept, origin=str(data), content_hash=content_hash(kept), num_folded=read.num_folded
    )


def _plain(name: str) -> str:
    """`HuggingFaceH4/MATH-500` as math500: spellings of a data set's name differ by more than they should."""
    return "".join(char for char in name.rpartition("/")[2].casefold() if char.isalnum())


def _sources(questions: Sequence[Question]) -> str:
    found = sorted({question.source for question in questions})
    return ", ".join(map(repr, found[:8])) + (f" and {len(found) - 8} more" if len(found) > 8 else "")

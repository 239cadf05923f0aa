"""Benchmarks as presets, and their questions: built in, from the hub, or from a file of the user's.

A preset holds a `[source]` and a `[protocol]` table, or a `[suite]` of other benchmarks with the averages over them.
Multiple-choice options are asked in a recorded order: a source may list the right one first, and models have favourite
letters.
"""

import hashlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from exgrpo_cli.base import errors, types
from exgrpo_cli.config import requests, sections, settings
from exgrpo_cli.config.sections.data import ArithmeticSettings, RequireBox
from exgrpo_cli.evaluation.sampling import QuestionRecord
from exgrpo_cli.presets import load_preset, preset_names
from exgrpo_cli.questions import files, layouts, question_file, sources, values
from exgrpo_cli.questions.choices import find_choices
from exgrpo_cli.questions.made.sums import make_arithmetic


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchmarkSource:
    """Place of a benchmark's questions and meaning of its columns."""

    dataset: str
    """`arithmetic` (built in) or a hub data set id; empty for questions that come from a file alone."""
    revision: str = "main"
    """Hub revision; the commit it stood for is part of every result."""
    selectors: tuple[str, ...] = ()
    """Configuration and split of the data set, or one of its files."""
    data_sources: tuple[str, ...] = ()
    """Names of this benchmark in a file given with `--data`, lower case, letters and digits only."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Protocol:
    """Sampling and grading of a benchmark."""

    template: str = "auto"
    """Prompt template; "auto" is the run's own for a run folder, else the model's chat template."""
    grader: str = "math"
    """A built-in one, of `config.names.GRADERS`."""
    samples: int = sections.setting(1, sections.POSITIVE)
    """k of avg@k."""
    temperature: float = sections.setting(0.6, sections.POSITIVE)
    top_p: float = sections.setting(1.0, sections.Bound(lambda p: 0 < p <= 1, "above 0 and at most 1"))
    max_tokens: int = sections.setting(8192, sections.POSITIVE)
    """Response limit in tokens, EOS included."""
    require_box: RequireBox = "auto"
    """Whether a response without `\\boxed{}` has no answer; "auto" takes what the template asks for."""
    require_eos: bool = False
    """Whether a response cut off at the limit has no answer."""
    shuffle_seed: int = sections.setting(0, sections.NON_NEGATIVE)
    """Seed of the order of multiple-choice options."""

    def __post_init__(self) -> None:
        sections.check("protocol", self)


@dataclass(frozen=True, kw_only=True, slots=True)
class Benchmark:
    """One benchmark."""

    name: str
    title: str
    """Column head in tables."""
    source: BenchmarkSource
    protocol: Protocol


def load_benchmark(name: str) -> Benchmark:
    """The benchmark preset of this name.

    Raises InputError naming the nearest preset when there is none, and for an unknown or mistyped key.
    """
    preset = load_preset("benchmarks", name)
    if "suite" in preset:
        raise errors.InputError(f"{name!r} is a suite of benchmarks: name one of {', '.join(_members(preset))}.")
    where = f"benchmark preset {name!r}"
    return Benchmark(
        name=name,
        title=preset["about"]["title"],
        source=settings.read_section("source", (BenchmarkSource,), [(where, preset.get("source", {}))]),
        protocol=settings.read_section("protocol", (Protocol,), [(where, preset.get("protocol", {}))]),
    )


def load_benchmarks(names: Collection[str]) -> tuple[Benchmark, ...]:
    """Benchmarks by name, suites spelled out, each once."""
    presets = {name: load_preset("benchmarks", name) for name in names}
    members = [_members(preset) if "suite" in preset else [name] for name, preset in presets.items()]
    return tuple(map(load_benchmark, dict.fromkeys(name for group in members for name in group)))


def own_benchmark(name: str) -> Benchmark:
    """A benchmark of the user's own questions, all rows of a file given with `--data`."""
    if name in preset_names("benchmarks"):
        raise errors.InputError(f"{name!r} is the name of a shipped benchmark: rename the question file.")
    return Benchmark(name=name, title=name, source=BenchmarkSource(dataset=""), protocol=Protocol())


def title_of(name: str) -> str:
    """Column head of a benchmark; the name itself of a user's own."""
    return load_benchmark(name).title if name in preset_names("benchmarks") else name


def averages_over(names: Collection[str]) -> dict[str, tuple[str, ...]]:
    """Averages over any set of benchmarks: name of the average to its members; none for a single benchmark.

    The groups of a shipped suite where the benchmarks make up nothing but such groups, each whole or in part, and one
    average over all otherwise. A part is named by its members, as `aime24+math500`.
    """
    if len({name.partition("@")[0] for name in names}) < max(2, len(names)):
        # One benchmark, or each at several temperatures.
        return {}
    for suite in _suites():
        found = {group: tuple(name for name in members if name in names) for group, members in suite.items()}
        found = {group: members for group, members in found.items() if members}
        if sum(map(len, found.values())) == len(names) and all(len(members) > 1 for members in found.values()):
            return {group if len(each) == len(suite[group]) else "+".join(each): each for group, each in found.items()}
    return {"+".join(names): tuple(names)}


def in_suite_order(names: Collection[str]) -> list[str]:
    """Benchmarks of a shipped suite in its order, then the others as they come."""
    known = [name for suite in _suites() for members in suite.values() for name in members]
    return list(dict.fromkeys([*(name for name in known if name in names), *names]))


def _suites() -> list[dict[str, list[str]]]:
    """Each shipped suite as its averages: name of the average to its members."""
    presets = [load_preset("benchmarks", name) for name in preset_names("benchmarks")]
    return [preset["suite"]["averages"] for preset in presets if "suite" in preset]


def _members(preset: Mapping[str, Any]) -> list[str]:
    return [name for members in preset["suite"]["averages"].values() for name in members]


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchmarkQuestions:
    """Distinct questions in their order, and how they came about."""

    records: tuple[QuestionRecord, ...]
    """With the options of multiple-choice questions in the order in which they are asked."""
    origin: str
    """Data set id with its commit, path of a file, or `arithmetic`."""
    num_folded: int = 0
    """Repeated rows left out."""

    @property
    def questions(self) -> tuple[types.Question, ...]:
        """The questions alone."""
        return tuple(record.question for record in self.records)


def benchmark_questions(benchmark: Benchmark, data: Path | None = None) -> BenchmarkQuestions:
    """Load a benchmark's questions; a file given as `data` replaces its source.

    Of a file only the rows whose source is the benchmark's are kept, and repeated rows are folded into one question.
    Raises InputError where nothing can be read, a row is no question, or nothing is left.
    """
    if data is None and benchmark.source.dataset == "arithmetic":
        made = make_arithmetic(ArithmeticSettings()).heldout
        return BenchmarkQuestions(records=tuple(QuestionRecord(question=each) for each in made), origin="arithmetic")
    preset = ":".join([f"{benchmark.source.dataset}@{benchmark.source.revision}", *benchmark.source.selectors])
    try:
        source = sources.open_source(preset if data is None else str(data), lambda done, total: None)
    except (errors.InputError, errors.RunError) as error:
        if data is not None:
            raise
        advice = "Or name a file of its questions: --data FILE (of prepare: --decontaminate FILE)."
        raise errors.InputError(f"{benchmark.name}: {error} {advice}") from error
    rows, origin = list(_questions(source, benchmark)), str(data or f"{benchmark.source.dataset}@{source.revision}")
    if data is not None and benchmark.source.dataset:
        # The user's own benchmark has no name to select by: every row of the file is its.
        rows = _select(data, rows, benchmark)
    distinct = list({question.id: question for question in rows}.values())
    records = [QuestionRecord(question=question) for question in distinct]
    if benchmark.protocol.grader == "choice":
        records = [shuffle_choices(question, benchmark.protocol.shuffle_seed) for question in distinct]
    return BenchmarkQuestions(records=tuple(records), origin=origin, num_folded=len(rows) - len(distinct))


def shuffle_choices(question: types.Question, seed: int) -> QuestionRecord:
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
    prompt = (*question.prompt[:-1], types.Message(role="user", content=choices.reordered(order)))
    answer = choices.labels[order.index(place)]
    return QuestionRecord(
        question=replace(question, id=question_file.question_id(prompt, answer), prompt=prompt, answer=answer),
        options=tuple(choices.options[index] for index in order),
    )


def _questions(source: sources.Source, benchmark: Benchmark) -> Iterator[types.Question]:
    """Every row, without metadata: the protocol's grader counts, not a verifier that a question brings."""
    for path in source.files:
        question_file.require_content(path)
        first = [row for _, row in islice(files.iter_rows(path), layouts.SAMPLE_ROWS)]
        if not first:
            raise errors.InputError(f"{path} has no rows: there are no questions to ask.")
        try:
            layout = layouts.recognise(str(path), first, requests.PrepareRequest())
        except errors.InputError as error:
            meant = "These are options of `exgrpo prepare`, which makes a question file of it."
            raise errors.InputError(f"{error} {meant}") from error
        for number, row in files.iter_rows(path, layout.wanted):
            try:
                yield replace(layout.question(row, source.name), metadata=None)
            except values.UnusableRow as error:
                raise errors.InputError(f"{path}: row {number} is no question of {benchmark.name}: {error}.") from error


def _select(data: Path, rows: Sequence[types.Question], benchmark: Benchmark) -> list[types.Question]:
    known = {_plain(name) for name in (*benchmark.source.data_sources, benchmark.name, benchmark.source.dataset)}
    kept = [question for question in rows if _plain(question.source) in known]
    if not kept:
        found = sorted({question.source for question in rows})
        listed = ", ".join(map(repr, found[:8])) + (f" and {len(found) - 8} more" if len(found) > 8 else "")
        raise errors.InputError(
            f"{data} has no questions of {benchmark.name}: its sources are {listed}, and those of {benchmark.name} are "
            f"called {', '.join(sorted(known))}. Without a BENCHMARK all of its rows are used."
        )
    return kept


def _plain(name: str) -> str:
    """`HuggingFaceH4/MATH-500` as math500: spellings of a data set's name differ by more than they should."""
    return "".join(char for char in name.rpartition("/")[2].casefold() if char.isalnum())

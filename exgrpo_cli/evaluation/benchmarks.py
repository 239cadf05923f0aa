"""Benchmarks as presets: where the questions come from and how they are asked.

A preset holds a `[source]` and a `[protocol]` table, or a `[suite]` of other benchmarks with the averages over them.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from exgrpo_cli.base.errors import InputError
from exgrpo_cli.config.settings import read_section
from exgrpo_cli.presets import load_preset, preset_names


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

    @property
    def text(self) -> str:
        """The source as `prepare` takes it: `owner/name@revision:configuration:split`."""
        return ":".join([f"{self.dataset}@{self.revision}", *self.selectors])


@dataclass(frozen=True, kw_only=True, slots=True)
class Protocol:
    """Sampling and grading of a benchmark."""

    template: str = "auto"
    """Prompt template; "auto" is the run's own for a run folder, else the model's chat template."""
    grader: str = "math"
    """A built-in one, of `config.names.GRADERS`."""
    samples: int = 1
    """k of avg@k."""
    temperature: float = 0.6
    top_p: float = 1.0
    max_tokens: int = 8192
    """Response limit in tokens, EOS included."""
    require_box: Literal["auto", "always", "never"] = "auto"
    """Whether a response without `\\boxed{}` has no answer; "auto" takes what the template asks for."""
    require_eos: bool = False
    """Whether a response cut off at the limit has no answer."""
    shuffle_seed: int = 0
    """Seed of the order of multiple-choice options."""

    def __post_init__(self) -> None:
        bounds = {
            "samples": (self.samples >= 1, "at least 1"),
            "temperature": (0 < self.temperature < float("inf"), "a finite number above 0"),
            "top_p": (0 < self.top_p <= 1, "above 0 and at most 1"),
            "max_tokens": (self.max_tokens >= 1, "at least 1"),
            "shuffle_seed": (self.shuffle_seed >= 0, "at least 0"),
        }
        for name, (holds, bound) in bounds.items():
            if not holds:
                raise InputError(f"{name} = {getattr(self, name)!r} is out of range: use {bound}.")

    @property
    def requires_box(self) -> bool | None:
        """`require_box` as templates take it: None leaves it to the template."""
        return {"auto": None, "always": True, "never": False}[self.require_box]


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
        raise InputError(f"{name!r} is a suite of benchmarks: name one of {', '.join(_members(preset))}.")
    where = f"benchmark preset {name!r}"
    return Benchmark(
        name=name,
        title=preset["about"]["title"],
        source=read_section("source", (BenchmarkSource,), [(where, preset.get("source", {}))]),
        protocol=read_section("protocol", (Protocol,), [(where, preset.get("protocol", {}))]),
    )


def load_benchmarks(names: Collection[str]) -> tuple[Benchmark, ...]:
    """Benchmarks by name, suites spelled out, each once."""
    presets = {name: load_preset("benchmarks", name) for name in names}
    members = [_members(preset) if "suite" in preset else [name] for name, preset in presets.items()]
    return tuple(map(load_benchmark, dict.fromkeys(name for group in members for name in group)))


def own_benchmark(name: str) -> Benchmark:
    """A benchmark of the user's own questions, all rows of a file given with `--data`."""
    if name in preset_names("benchmarks"):
        raise InputError(f"{name!r} is the name of a shipped benchmark: rename the question file.")
    return Benchmark(name=name, title=name, source=BenchmarkSource(dataset=""), protocol=Protocol())


def benchmark_title(name: str) -> str:
    """Column head of a benchmark; the name itself of a user's own."""
    return load_benchmark(name).title if name in preset_names("benchmarks") else name


def averages_over(names: Collection[str]) -> dict[str, tuple[str, ...]]:
    """Averages over any set of benchmarks: name of the average to its members; none for a single benchmark.

    The groups of a shipped suite where the benchmarks make up nothing but such groups, each whole or in part, and one
    average over all otherwise. A part is named by its members, as `aime24+math500`.
    """
    if len(names) < 2:
        return {}
    for suite in _suites():
        found = {group: tuple(name for name in members if name in names) for group, members in suite.items()}
        found = {group: members for group, members in found.items() if members}
        if sum(map(len, found.values())) == len(names) and all(len(members) > 1 for members in found.values()):
            return {
                group if len(members) == len(suite[group]) else "+".join(members): members
                for group, members in found.items()
            }
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

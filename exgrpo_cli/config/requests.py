"""Requests: what a user asks of a command, or of the toolkit from Python; None leaves a choice to presets and defaults.

commands/options.toml says which of the fields are options of the command. What a request needs to be carried out is
imported where that is done, so that a command line is read at once.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from exgrpo_cli.base.errors import InputError
from exgrpo_cli.config import names, sections


@dataclass(frozen=True, kw_only=True, slots=True)
class _OfSettings:
    """The settings that a request is carried out with, and where its results go."""

    backbone: str | None = None
    config_file: Path | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    """Settings by section, stronger than the file's."""
    assignments: Sequence[str] = ()
    """Texts of `--set`, stronger than all others."""
    allow_code: bool = False
    """Whether files of settings may name functions of the user."""
    output: Path | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class RunRequest(_OfSettings):
    """Request of a run, new or resumed."""

    method: str | None = None
    regime: str | None = None
    resume: bool = False
    replay_from: str | None = None
    """Folder of the run whose ledger fills the buffer."""
    with_retired: bool = False
    as_published: bool = False
    """With what the method's paper changed besides its replay."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StudyRequest(_OfSettings):
    """Request of a study, whose folder's last part is its name; settings of all runs are weaker than an arm's own.

    Without an axis: the metric `ent`, or in regimes ExGRPO and on-policy training.
    """

    claim: str | None = None
    """`all`, `quick`, or names of claims, which bring their own arms, regimes and seeds."""
    metric: str | None = None
    sampler: str | None = None
    methods: str | None = None
    regimes: str | None = None
    """Regime presets; each arm is run in each of them."""
    vary: Sequence[str] = ()
    seeds: str | None = None
    """Number of seeds, or the seeds: "3" or "0,1,5"; three without one."""
    name: str | None = None
    equal: str | None = None
    """Budget in which arms equal the baseline; without one `generated` with methods or regimes, else `steps`."""
    replay_from: str | None = None
    """Folder of the run whose experience the arms replay that store none of their own."""
    results: Sequence[Path] = ()
    """Folders of results that count as finished runs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PrepareRequest(_OfSettings):
    """Request of a question file; the tokenizer of `backbone` counts the tokens of prompts."""

    source: str = "arithmetic"
    layout: Literal["canonical", "verl"] = "canonical"
    """Layout of the output."""
    question_field: str | None = None
    answer_field: str | None = None
    """Names of both columns or of none; a dot reaches into a struct."""
    answer_pattern: str | None = None
    """Regular expression; its last match in the answer field is the gold: group 1 where it has one."""
    show: int = 0
    """Prompts to show as the backbone sees them."""
    max_prompt_tokens: int | None = None
    decontaminate: str | None = None
    """Benchmarks or files whose questions are left out, comma list."""
    overlap: float = 0.5
    """Share of a benchmark question's n-grams from which a question is contaminated."""
    ngram: int = 8
    """Words of one of them."""
    split: float | None = None
    """Share of the questions that goes into a held-out file of its own beside the output."""
    seed: int | None = None
    """Seed of a source that the program makes itself."""

    def __post_init__(self) -> None:
        if (self.question_field is None) != (self.answer_field is None):
            missing = "--question-field" if self.question_field is None else "--answer-field"
            raise InputError(f"{missing} is missing: --question-field and --answer-field go together.")
        try:
            re.compile(self.answer_pattern or "")
        except re.error as error:
            raise InputError(f"--answer-pattern {self.answer_pattern!r} is no regular expression: {error}.") from None
        sections.require(0 < self.overlap <= 1, "--overlap", self.overlap, "a share above 0 and up to 1")
        sections.require(self.split is None or 0 < self.split < 1, "--split", self.split, "a share between 0 and 1")
        sections.require(self.ngram >= 1, "--ngram", self.ngram, "a number of words of at least 1")


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationRequest:
    """Request of scores; None stands for the benchmark preset's choice."""

    benchmarks: Sequence[str] = ()
    model: str | None = None
    data: Path | None = None
    protocol: Mapping[str, Any] = field(default_factory=dict)
    """Values that replace the presets': samples, temperature (several: a sequence), top_p, max_tokens, template."""
    second_graders: Sequence[str] = ()
    """Beside those that always stand beside the benchmark's own."""
    engine: Literal["hf", "vllm"] = "hf"
    tensor_parallel: int = 1
    """GPUs that hold one vLLM engine together."""
    endpoint: str | None = None
    timeout: float | None = None
    """Seconds that one whole answer of the endpoint may take."""
    device: names.Device = "auto"
    threads: int = 1
    output: Path | None = None
    seed: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleRequest:
    """Request of a few responses to one question."""

    model: str
    """A run, a checkpoint (`RUN@best`), a model folder, a preset or a hub id."""
    question: str
    samples: int = 1
    temperature: float = 1.0
    max_tokens: int | None = None
    """None: the response limit that a run was trained with, else 512."""
    seed: int = 0
    engine: Literal["hf", "vllm"] = "hf"
    device: names.Device = "auto"

"""`prepare`: any question set in, one audited question file out.

Read, fold exact duplicates, then the checks of `audit` in the order of their cost to the user: gold answers,
contamination, prompt length. The output appears when everything is done, under its own name at once; an interrupted
preparation leaves nothing but the hub's cache, and the next one starts from that.
"""

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from exgrpo_cli import __version__
from exgrpo_cli.base.errors import InputError
from exgrpo_cli.base.files import require_writable
from exgrpo_cli.base.types import Question
from exgrpo_cli.config.names import is_made, section_of_made
from exgrpo_cli.config.sections.run import GradingSettings
from exgrpo_cli.config.settings import Config
from exgrpo_cli.grading import GradingPool
from exgrpo_cli.questions.audit.checks import (
    Progress,
    Tally,
    drop_bad_golds,
    drop_contaminated,
    drop_long_prompts,
    mark_near_duplicates,
)
from exgrpo_cli.questions.audit.report import PrepareReport
from exgrpo_cli.questions.layouts.recognise import NamedFields
from exgrpo_cli.questions.prompts import Template, Tokenizer
from exgrpo_cli.questions.question_file.identity import content_hash
from exgrpo_cli.questions.question_file.questions import (
    MADE_BY_PREPARE,
    FileLayout,
    is_prepared,
    read_metadata,
    write_questions,
)
from exgrpo_cli.questions.reading import Reading, made_source, read_source
from exgrpo_cli.questions.sources.formats import stem_of
from exgrpo_cli.questions.sources.open import default_name, hub_id_of, is_local
from exgrpo_cli.questions.split import heldout_beside, split_questions

MULTIPLE_CHOICE = "multiple choice"
DATA_FOLDER = Path("data")


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptLimit:
    """The longest prompt a backbone is to see."""

    template: Template
    tokenizer: Tokenizer
    max_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class PrepareOptions:
    """How a question set is read and audited."""

    layout: FileLayout = "canonical"
    """Layout of the output."""
    fields: NamedFields = field(default_factory=NamedFields)
    grading: GradingSettings = field(default_factory=GradingSettings)
    """Verifier of gold answers; multiple-choice sets use `choice` in place of `math`."""
    prompt_limit: PromptLimit | None = None
    benchmarks: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Evaluation questions by benchmark name; training questions that overlap with them are dropped."""
    overlap_ngram: int = 8
    """Words of an n-gram of the contamination check."""
    overlap_threshold: float = 0.5
    """Share of a benchmark question's n-grams from which a question is contaminated."""
    near_threshold: float = 0.8
    """Jaccard similarity from which two questions are reported as almost the same."""
    made: Config = field(default_factory=Config)
    """Holds the section of each source that the program makes itself."""
    heldout: bool = False
    """Of a made source: the held-out questions instead of the training ones."""
    split: float | None = None
    """Share of the questions that goes into a held-out file of its own beside the output."""

    def __post_init__(self) -> None:
        if not 0 < self.overlap_threshold <= 1:
            raise InputError(f"--overlap {self.overlap_threshold} is out of range: use a share above 0 and up to 1.")
        if self.split is not None and not 0 < self.split < 1:
            raise InputError(f"--split {self.split} is out of range: use a share between 0 and 1.")
        if self.overlap_ngram < 1:
            raise InputError(f"--ngram {self.overlap_ngram} is out of range: use a number of words of at least 1.")


def default_output(source: str) -> Path:
    """Where the questions of a source go when nothing else is said."""
    return DATA_FOLDER / f"{default_name(source)}.parquet"


def outputs_of(source: str, output: Path, options: PrepareOptions) -> list[Path]:
    """The files that `prepare_files` writes; raises InputError where one cannot be, or a split is asked for twice."""
    if is_made(source) and options.split is not None:
        raise InputError(f"--split does nothing here: {source} brings held-out questions of its own.")
    two = is_made(source) or options.split is not None
    outputs = [output, heldout_beside(output)] if two else [output]
    for path in outputs:
        check_output(source, path)
    return outputs


def prepare_files(source: str, output: Path, options: PrepareOptions, progress: Progress) -> list[PrepareReport]:
    """The question file and, of a made source and with `split`, the held-out one beside it; raises as `prepare`."""
    outputs = outputs_of(source, output, options)
    if is_made(source):
        return [prepare(source, path, replace(options, heldout=path is not output), progress) for path in outputs]
    report = prepare(source, output, options, progress)
    if options.split is None:
        return [report]
    train, heldout = split_questions(report.questions, options.split)
    parts = [
        replace(report, output=path, questions=tuple(part), content_hash=content_hash(part), levels=_levels(part))
        for path, part in zip(outputs, (train, heldout), strict=True)
    ]
    # The held-out file first: a training file that names it must find it.
    for part in reversed(parts):
        own = {"heldout": outputs[1].name} if part.output == output else {"heldout_of": output.name}
        write_questions(part.output, part.questions, {**_metadata(part, options), **own}, options.layout)
    return parts


def prepare(source: str, output: Path, options: PrepareOptions, progress: Progress) -> PrepareReport:
    """Read, audit and write one question file.

    Raises InputError for a source that cannot be read, an output that cannot be written or is not `prepare`'s own, and
    where no question is left; RunError for a download that breaks off or a disk that fills up.
    """
    started = time.perf_counter()
    check_output(source, output)
    dropped, marked = Tally(), Tally()
    if is_made(source):
        reading = made_source(source, options.made, heldout=options.heldout)
    else:
        reading = read_source(source, options.fields, dropped, progress)
    questions = _audited(reading, options, dropped, marked, progress)
    if not questions:
        found = [f"{each.count} {reason} ({each.examples[0]})" for reason, each in dropped.findings().items()]
        raise InputError(f"{source}: none of the {reading.num_read} rows is left: {'; '.join(found)}.")
    report = PrepareReport(
        source=reading.source,
        revision=reading.revision,
        split=reading.split,
        layout=reading.layout,
        output=output,
        questions=tuple(questions),
        content_hash=content_hash(questions),
        num_read=reading.num_read,
        num_folded=reading.num_folded,
        dropped=dropped.findings(),
        marked=marked.findings(),
        levels=_levels(questions),
        seconds=time.perf_counter() - started,
    )
    if options.split is None:
        write_questions(output, questions, _metadata(report, options), options.layout)
    return report


def check_source(source: str) -> None:
    """Raises InputError for a source that is neither built in, nor on disk, nor a hub id; nothing is fetched."""
    if not is_made(source) and not is_local(source):
        hub_id_of(source)


def check_output(source: str, output: Path) -> None:
    """Raises InputError where writing `output` would fail or destroy what `prepare` cannot make again."""
    if output.is_dir():
        raise InputError(f"--output {output} is a folder: name a file, for example {output / 'questions.parquet'}.")
    if output.exists() and Path(source).exists() and output.samefile(source):
        raise InputError(f"--output {output} is the source itself: name another file.")
    if output.exists() and not is_prepared(read_metadata(output)):
        raise InputError(f"--output {output} exists and was not made by `exgrpo prepare`: name another file.")
    if output.suffix.lower() != ".parquet":
        raise InputError(f"--output {output} would be a parquet file: name it {stem_of(output)}.parquet.")
    require_writable(output)


def _audited(
    reading: Reading, options: PrepareOptions, dropped: Tally, marked: Tally, progress: Progress
) -> list[Question]:
    by_choice = reading.layout == MULTIPLE_CHOICE and options.grading.grader == "math"
    with GradingPool(replace(options.grading, grader="choice") if by_choice else options.grading) as pool:
        questions = drop_bad_golds(reading.questions, pool, dropped, progress)
    if options.benchmarks:
        questions = drop_contaminated(
            questions,
            options.benchmarks,
            dropped,
            progress,
            size=options.overlap_ngram,
            threshold=options.overlap_threshold,
        )
    limit = options.prompt_limit
    if limit is not None:
        questions = drop_long_prompts(
            questions, limit.template, limit.tokenizer, dropped, progress, max_tokens=limit.max_tokens
        )
    mark_near_duplicates(questions, marked, progress, threshold=options.near_threshold)
    return questions


def seed_of(source: str, options: PrepareOptions) -> int | None:
    """Of a made source; None of any other."""
    return int(getattr(options.made, section_of_made(source)).seed) if is_made(source) else None


def _levels(questions: Sequence[Question]) -> dict[str, int]:
    counts = Counter(question.level for question in questions if question.level is not None)
    return {level: counts[level] for level in sorted(counts)}


def _metadata(report: PrepareReport, options: PrepareOptions) -> dict[str, Any]:
    limit = options.prompt_limit
    return {
        "made_by": MADE_BY_PREPARE,
        "toolkit_version": __version__,
        "source": report.source,
        "revision": report.revision,
        "split": report.split,
        "source_layout": report.layout,
        "options": {
            "layout": options.layout,
            "question_field": options.fields.question,
            "answer_field": options.fields.answer,
            "answer_pattern": options.fields.answer_pattern,
            "grader": options.grading.grader,
            "max_prompt_tokens": None if limit is None else limit.max_tokens,
            "template": None if limit is None else limit.template.name,
            "decontaminate": sorted(options.benchmarks),
            "overlap_ngram": options.overlap_ngram,
            "overlap_threshold": options.overlap_threshold,
            "near_threshold": options.near_threshold,
            "held_out_share": options.split,
            "seed": seed_of(report.source, options),
        },
        "counts": report.counts(),
        "dropped": {reason: finding.to_json() for reason, finding in report.dropped.items()},
        "marked": {reason: finding.to_json() for reason, finding in report.marked.items()},
    }

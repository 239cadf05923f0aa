"""`prepare`: any question set in, one audited question file out.

Read, fold exact duplicates, then the checks of `audit` in the order of their cost to the user: gold answers,
contamination, prompt length. The output appears when everything is done, under its own name at once; an interrupted
preparation leaves nothing but the hub's cache, and the next one starts from that.
"""

import hashlib
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from exgrpo_cli import __version__
from exgrpo_cli.base import errors, types
from exgrpo_cli.base.files import require_place, require_writable
from exgrpo_cli.config.names import is_made, section_of_made
from exgrpo_cli.config.requests import PrepareRequest
from exgrpo_cli.config.settings import Config
from exgrpo_cli.grading import GradingPool
from exgrpo_cli.questions import audit, files, prompts, question_file, sources, values
from exgrpo_cli.questions.layouts import MULTIPLE_CHOICE, SAMPLE_ROWS, Layout, recognise
from exgrpo_cli.questions.made import make_split

DATA_FOLDER = Path("data")
_NEAR = 0.8
"""Jaccard similarity from which two questions are reported as almost the same."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PrepareOptions:
    """Options of reading and auditing a question set."""

    request: PrepareRequest = field(default_factory=PrepareRequest)
    settings: Config = field(default_factory=Config)
    """The verifier of gold answers, for which multiple-choice sets use `choice` in place of `math`; the section of each
    source that the program makes itself."""
    prompt_limit: prompts.PromptLimit | None = None
    benchmarks: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Evaluation questions by benchmark name; training questions that overlap with them are dropped."""

    def to_json(self) -> dict[str, Any]:
        """Those that a plan and a file's metadata both begin with."""
        fields = ("layout", "question_field", "answer_field", "answer_pattern")
        return {**{name: getattr(self.request, name) for name in fields}, "grader": self.settings.grading.grader}


@dataclass(frozen=True, kw_only=True, slots=True)
class PrepareReport:
    """A question set: what was read of its source, what was kept, and why the rest was not."""

    source: sources.Source
    layout: str
    """Layout recognised in the source."""
    num_read: int
    questions: Sequence[types.Question]
    """Those that are kept, exact duplicates folded."""
    num_folded: int = 0
    dropped: audit.Tally = field(default_factory=audit.Tally)
    """Rows and, once they are audited, questions that were left out."""
    marked: audit.Tally = field(default_factory=audit.Tally)
    """Findings about questions that were kept."""
    output: Path = Path()
    seconds: float = 0.0
    other: "PrepareReport | None" = None
    """The other part of a split, which has the rest of what was read."""
    is_heldout: bool = False
    """Whether it is the held-out part of a split."""

    def findings(self) -> dict[str, Any]:
        """The counts, read = kept + folded + dropped (+ other part of a split), and every reason with examples."""
        kept, dropped = len(self.questions), dict(self.dropped)
        counts: dict[str, Any] = {"read": self.num_read, "kept": kept, "folded": self.num_folded, "dropped": dropped}
        counts |= {} if self.other is None else {"other_part": len(self.other.questions)}
        return {"counts": counts, "dropped": self.dropped.to_json(), "marked": self.marked.to_json()}

    def to_json(self) -> dict[str, Any]:
        """The report without the questions themselves, as `prepare --json` prints it."""
        levels = Counter(question.level for question in self.questions if question.level is not None)
        return {
            **self.source.to_json(),
            "layout": self.layout,
            "output": str(self.output),
            "content_hash": question_file.content_hash(self.questions),
            **self.findings(),
            "levels": dict(sorted(levels.items())),
            "seconds": round(self.seconds, 3),
        }

    def lines(self) -> list[str]:
        """The report as text; of the held-out part of a split nothing, since it is in that of the other one."""
        if self.is_heldout:
            return []
        report, source = self.to_json(), self.source
        commit = source.revision and f"at {source.revision[:12]}"
        where = " ".join(part for part in (source.name, source.split, commit) if part)
        levels = ", ".join(f"{level}: {count:,}" for level, count in report["levels"].items())
        return [
            f"{where}: {self.layout} layout, {self.seconds:.1f} s",
            f"  {self.num_read:>8,} read",
            f"  {self.num_folded:>8,} exact duplicates folded",
            f"  {self.dropped.total():>8,} dropped",
            *self.dropped.lines(),
            f"  {len(self.questions):>8,} kept in {self.output}",
            *([f"  {len(self.other.questions):>8,} held out in {self.other.output}"] if self.other else []),
            *self.marked.lines(),
            *([f"  levels: {levels}"] if levels else []),
            f"  content hash {report['content_hash'][:16]}",
        ]


def default_output(source: str) -> Path:
    """Default path of the questions of a source."""
    return DATA_FOLDER / f"{sources.default_name(source)}.parquet"


def heldout_beside(file: Path) -> Path:
    """Path of the held-out part of a question file: `mine.parquet` has `mine-heldout.parquet`."""
    return file.with_stem(f"{file.stem}-heldout")


def outputs_of(source: str, output: Path, options: PrepareOptions) -> list[Path]:
    """The files that `prepare` writes.

    Raises InputError where writing one would fail or destroy what cannot be made again, or a split is asked for twice.
    """
    if is_made(source) and options.request.split is not None:
        raise errors.InputError(f"--split does nothing here: {source} brings held-out questions of its own.")
    require_place(output)
    outputs = [output]
    if is_made(source) or options.request.split is not None:
        outputs.append(heldout_beside(output))
    for path in outputs:
        require_place(path)
        if path.exists() and Path(source).exists() and path.samefile(source):
            raise errors.InputError(f"--output {path} is the source itself: name another file.")
        if path.exists() and not question_file.is_prepared(question_file.read_metadata(path)):
            raise errors.InputError(f"--output {path} exists and was not made by `exgrpo prepare`: name another file.")
        if path.suffix.lower() != ".parquet":
            raise errors.InputError(f"--output {path} would be a parquet file: name it {files.stem_of(path)}.parquet.")
        require_writable(path)
    return outputs


def prepare(source: str, output: Path, options: PrepareOptions, progress: audit.Progress) -> list[PrepareReport]:
    """Read, audit and write a question file and, of a made source and with `split`, the held-out one beside it.

    Raises InputError for a source that cannot be read, an output that cannot be written or is not `prepare`'s own, and
    where no question is left; RunError for a download that breaks off or a disk that fills up.
    """
    started, split = time.perf_counter(), options.request.split
    outputs = outputs_of(source, output, options)
    if is_made(source):
        reports = []
        for name, part in zip(("train", "held-out"), make_split(source, options.settings), strict=True):
            made = sources.Source(name=source, split=name, files=())
            reports.append(PrepareReport(source=made, layout="built-in", num_read=len(part), questions=part))
    else:
        reports = [read_source(source, options.request, progress)]
    reports = [_audit(source, report, options, progress) for report in reports]
    beside: list[dict[str, str]] = [{}, {}]
    if split is not None:
        reports = [replace(reports[0], questions=part) for part in split_questions(reports[0].questions, split)]
        beside = [{"heldout": outputs[1].name}, {"heldout_of": output.name}]
    seconds = time.perf_counter() - started
    reports = [replace(report, output=path, seconds=seconds) for path, report in zip(outputs, reports, strict=True)]
    if split is not None:
        train, heldout = reports
        reports = [replace(train, other=heldout), replace(heldout, other=train, is_heldout=True)]
    # The held-out file first: a training file that names it must find it.
    for report, names in reversed(list(zip(reports, beside, strict=False))):
        metadata = {**_metadata(report, options), **names}
        question_file.write_questions(report.output, report.questions, metadata, options.request.layout)
    return reports


def seed_of(source: str, options: PrepareOptions) -> int | None:
    """Seed of a made source; None of any other."""
    return int(getattr(options.settings, section_of_made(source)).seed) if is_made(source) else None


def read_source(text: str, asked: PrepareRequest, progress: audit.Progress) -> PrepareReport:
    """Read every row of a file, a folder or a hub data set; rows that are no questions are counted as dropped.

    Raises InputError for a source that cannot be read, has no known layout or several, and for one id with different
    content.
    """
    source = sources.open_source(text, lambda done, total: progress(done, total, "fetching files"))
    layouts: dict[Path, Layout] = {}
    for file in source.files:
        # Files of one layout may name their columns differently.
        if sample := [row for _, row in islice(files.iter_rows(file), SAMPLE_ROWS)]:
            layouts[file] = recognise(str(file), sample, asked)
            # Long rows need not be in memory twice.
            del sample
    named = {layout.name: file for file, layout in layouts.items()}
    if not named:
        raise errors.InputError(f"{', '.join(map(str, source.files))}: no rows, so there are no questions to prepare.")
    if len(named) > 1:
        found = " and ".join(f"{file} has the {name} layout" for name, file in named.items())
        raise errors.InputError(f"{found}: prepare them one by one.")
    dropped, marked = audit.Tally(), audit.Tally()
    for file in source.files:
        try:
            question_file.require_content(file)
        except errors.InputError as error:
            marked.add("file not as it was written, taken as it is", str(error))

    def placed() -> Iterator[tuple[str, types.Question]]:
        for number, (file, layout) in enumerate(layouts.items()):
            progress(number, len(layouts), "reading files")
            for place, row in files.iter_rows(file, layout.wanted):
                where = f"{file}: row {place}"
                try:
                    yield where, layout.question(row, source.name)
                except values.UnusableRow as error:
                    dropped.add(str(error), f"{where}: {audit.one_line(str(dict(row)))}")
        progress(len(layouts), len(layouts), "reading files")

    questions, num_folded = question_file.fold(placed())
    return PrepareReport(
        source=source,
        layout=next(iter(named)),
        num_read=len(questions) + num_folded + dropped.total(),
        questions=questions,
        num_folded=num_folded,
        dropped=dropped,
        marked=marked,
    )


def split_questions(
    questions: Sequence[types.Question], fraction: float, *, seed: int = 0, most: int | None = None
) -> tuple[list[types.Question], list[types.Question]]:
    """(training, held-out) questions in their order; about `fraction` of them held out, `most` of them at most.

    Questions of the same words are kept on one side, whatever their answers: the lowest hashes of (seed, last user
    message) are held out. Raises InputError where one side would be empty.
    """
    texts = [question_file.normalised(question_file.question_text(question)) for question in questions]
    asked = [hashlib.sha256(f"{seed}\x1f{text}".encode()).hexdigest() for text in texts]
    wanted = max(1, round(fraction * len(questions)))
    chosen = set(sorted(set(asked))[: wanted if most is None else min(wanted, most)])
    heldout = [question for question, key in zip(questions, asked, strict=True) if key in chosen]
    train = [question for question, key in zip(questions, asked, strict=True) if key not in chosen]
    if not train:
        parts = f"training and held-out ones (a share of {fraction:g})"
        remedy = "use more questions, or --heldout none"
        raise errors.InputError(f"{len(questions)} questions cannot be split into {parts}: {remedy}.")
    return train, heldout


def _audit(source: str, report: PrepareReport, options: PrepareOptions, progress: audit.Progress) -> PrepareReport:
    """The report with the questions that pass every check; the others are counted as dropped, findings as marked.

    Raises InputError where none is left.
    """
    grading, limit = options.settings.grading, options.prompt_limit
    questions, dropped = report.questions, report.dropped
    if report.layout == MULTIPLE_CHOICE and grading.grader == "math":
        grading = replace(grading, grader="choice")
    with GradingPool(grading) as pool:
        check = partial(audit.gold_reasons, pool=pool)
        questions = audit.sift(questions, check, "verifying gold answers", dropped, progress)
    if options.benchmarks:
        index = audit.BenchmarkIndex(options.benchmarks, size=options.request.ngram)
        check = partial(index.reasons, threshold=options.request.overlap)
        questions = audit.sift(questions, check, "comparing with benchmarks", dropped, progress)
    if limit is not None:
        questions = audit.sift(questions, limit.reasons, "counting prompt tokens", dropped, progress)
    if not questions:
        found = [f"{count} {reason} ({dropped.examples[reason][0]})" for reason, count in dropped.items()]
        raise errors.InputError(f"{source}: none of the {report.num_read} rows is left: {'; '.join(found)}.")
    audit.mark_near_duplicates(questions, report.marked, progress, threshold=_NEAR)
    return replace(report, questions=questions)


def _metadata(report: PrepareReport, options: PrepareOptions) -> dict[str, Any]:
    limit = options.prompt_limit
    return {
        "made_by": question_file.MADE_BY_PREPARE,
        "toolkit_version": __version__,
        **report.source.to_json(),
        "source_layout": report.layout,
        "options": {
            **options.to_json(),
            "max_prompt_tokens": None if limit is None else limit.max_tokens,
            "template": None if limit is None else limit.template.name,
            "decontaminate": sorted(options.benchmarks),
            "overlap_ngram": options.request.ngram,
            "overlap_threshold": options.request.overlap,
            "near_threshold": _NEAR,
            "held_out_share": options.request.split,
            "seed": seed_of(report.source.name, options),
        },
        **report.findings(),
    }

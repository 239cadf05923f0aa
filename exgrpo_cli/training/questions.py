"""The questions of a run: made, read or prepared before it starts, and kept in the run folder."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from exgrpo_cli.base.errors import InputError
from exgrpo_cli.base.files import file_digest, find_damage, write_json, write_manifest
from exgrpo_cli.base.reporter import Reporter
from exgrpo_cli.base.types import Question
from exgrpo_cli.config import names, requests, settings
from exgrpo_cli.config.sections.data import DataSettings
from exgrpo_cli.evaluation.benchmarks import benchmark_questions, load_benchmark
from exgrpo_cli.grading import GradingPool
from exgrpo_cli.presets import preset_names
from exgrpo_cli.questions import audit, question_file, sources
from exgrpo_cli.questions import prepare as preparing
from exgrpo_cli.questions.made import make_split

# A larger question file is linked instead of copied: 100 MB (interface of the run folder).
LINK_ABOVE_BYTES = 100_000_000
OWN_SHARE, OWN_MOST = 0.1, 500
"""Held out of a training set that brings no held-out questions: a tenth, at most 500, seconds to minutes to ask."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunQuestions:
    """Training and held-out questions."""

    train: tuple[Question, ...]
    heldout: tuple[Question, ...]
    train_hash: str
    """Content hash of the training questions: part of the ledger's identity."""


def load_questions(config: settings.Config, reporter: Reporter) -> RunQuestions:
    """The settings' questions: made, read, or prepared where they are not yet.

    Raises InputError naming the file, row and field that is wrong.
    """
    train = source_questions(config, config.data.train, "train", reporter)
    train, heldout = with_heldout(config, train, reporter)
    both = {question.id for question in train} & {question.id for question in heldout}
    if both:
        raise InputError(
            f"{len(both)} questions, {min(both)} among them, are in data.train {config.data.train!r} and in "
            f"data.heldout {config.data.heldout!r}: held-out questions must not be trained on."
        )
    limit = config.validation.max_questions or len(heldout)
    return RunQuestions(
        train=tuple(train), heldout=tuple(heldout[:limit]), train_hash=question_file.content_hash(train)
    )


def check_questions(config: settings.Config, reporter: Reporter) -> RunQuestions | None:
    """Raise InputError for questions that `load_questions` would refuse; nothing is fetched, nothing is graded.

    Returns those that could be read so.
    """
    data, heldout = config.data, heldout_source(config.data)
    for source in (data.train, heldout):
        if source and not names.is_made(source) and source not in preset_names("benchmarks"):
            sources.check_source(source)
            if sources.is_local(source) and not question_file.is_question_file(Path(source)):
                question_file.require_content(Path(source))
                preparing.read_source(source, requests.PrepareRequest(), reporter.progress)
    if not names.is_made(data.train) and not question_file.is_question_file(Path(data.train)):
        return None
    if heldout and not names.is_made(heldout) and not question_file.is_question_file(Path(heldout)):
        config = replace(config, data=replace(data, heldout="none"))
    return load_questions(config, reporter)


def heldout_source(data: DataSettings) -> str | None:
    """Source of the held-out questions: empty for none, None where they are taken out of the training ones.

    Raises InputError where `prepare --split` put them beside the training questions and they are gone.
    """
    train = Path(data.train)
    if not data.has_heldout:
        return ""
    if data.heldout != "auto":
        return data.heldout if data.heldout_share is None else None
    if names.is_made(data.train):
        return data.train
    if not train.is_file() or "heldout" not in question_file.read_metadata(train):
        return None
    beside = preparing.heldout_beside(train)
    if not beside.is_file():
        raise InputError(f"{beside} is missing: `prepare --split` put the held-out questions of {data.train} there.")
    return str(beside)


def with_heldout(
    config: settings.Config, train: list[Question], reporter: Reporter
) -> tuple[list[Question], Sequence[Question]]:
    """The questions to train on and the held-out ones: none, a set of their own, or a part taken from the first."""
    data, source = config.data, heldout_source(config.data)
    if source is not None:
        return train, source_questions(config, source, "heldout", reporter) if source else []
    share, most = (OWN_SHARE, OWN_MOST) if data.heldout_share is None else (data.heldout_share, None)
    kept, heldout = preparing.split_questions(train, share, most=most)
    reporter.note(
        f"held-out questions: {len(heldout)} of the {len(train)} of {data.train}, which are not trained on "
        "(--heldout FILE, BENCHMARK, a share or none chooses others)"
    )
    return kept, heldout


def source_questions(config: settings.Config, source: str, split: str, reporter: Reporter) -> list[Question]:
    """Questions of `data.train` or `data.heldout`: built in, whatever `prepare` reads, or a benchmark."""
    if names.is_made(source):
        made = make_split(source, config)
        return made.train if split == "train" else made.heldout
    if question_file.is_question_file(Path(source)):
        return list(question_file.read_questions(source).questions)
    options = preparing.PrepareOptions(settings=config)
    if sources.is_local(source):
        question_file.require_content(Path(source))
        with TemporaryDirectory(prefix="exgrpo-") as folder:
            (report,) = preparing.prepare(source, Path(folder) / "questions.parquet", options, reporter.progress)
        dropped = "".join(f", {count} {reason}" for reason, count in report.dropped.items())
        reporter.note(f"{source}: {len(report.questions)} of {report.num_read} questions kept{dropped}")
        return list(report.questions)
    if source in preset_names("benchmarks"):
        return list(benchmark_questions(load_benchmark(source)).questions)
    sources.check_source(source)
    output = preparing.default_output(source)
    if not output.exists():
        reporter.note(f"preparing {source} as {output}")
        preparing.prepare(source, output, options, reporter.progress)
    return list(question_file.read_questions(output).questions)


def check_answers(config: settings.Config, pool: GradingPool, train: tuple[Question, ...], reporter: Reporter) -> None:
    """Every gold answer must verify against itself; what `prepare` has already checked is not checked again."""
    path = Path(config.data.train)
    if question_file.is_question_file(path) and not question_file.is_prepared(question_file.read_metadata(path)):
        with reporter.showing(f"checking the answers of {path.name}"):
            audit.check_golds(train, pool)


def store_questions(folder: Path, config: settings.Config, questions: RunQuestions) -> None:
    """Write `train.parquet` and `heldout.parquet`; a question file of over 100 MB is linked, its hash beside it."""
    for name, source, kept in (
        ("train", config.data.train, questions.train),
        ("heldout", config.data.heldout, questions.heldout),
    ):
        if not kept:
            continue
        path = Path(source)
        whole = name == "heldout" or heldout_source(config.data) is not None
        if whole and question_file.is_question_file(path) and path.stat().st_size > LINK_ABOVE_BYTES:
            (folder / f"{name}.parquet").symlink_to(path.resolve())
            write_json(folder / f"{name}.json", {"source": str(path.resolve()), "sha256": file_digest(path)})
        else:
            question_file.write_questions(folder / f"{name}.parquet", kept, {"made_by": "train", "data": source})
    write_manifest(folder)


def stored_questions(folder: Path) -> RunQuestions:
    """The questions of an existing run folder, for a resume. Raises InputError naming a file that is not as it was."""
    if damage := find_damage(folder):
        raise InputError(f"{damage}: restore it from a copy, or start a new run.")
    train = read_stored(folder / "train.parquet")
    heldout = read_stored(folder / "heldout.parquet").questions if (folder / "heldout.parquet").exists() else ()
    return RunQuestions(train=train.questions, heldout=heldout, train_hash=train.content_hash)


def read_stored(path: Path) -> question_file.QuestionSet:
    """A question file of the run folder; a linked one must not have changed since."""
    digest = path.with_suffix(".json")
    if digest.exists() and json.loads(digest.read_text())["sha256"] != file_digest(path):
        raise InputError(f"{path.resolve()} has changed since the run began: restore it, or start a new run.")
    return question_file.read_questions(path)

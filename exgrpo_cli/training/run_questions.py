"""The questions of a run: made, read or prepared before it starts, and kept in the run folder."""

import json
from dataclasses import dataclass
from pathlib import Path

from exgrpo_cli.config.settings import Config
from exgrpo_cli.console.reporter import Reporter
from exgrpo_cli.data.arithmetic import make_questions
from exgrpo_cli.data.audit.checks import check_golds
from exgrpo_cli.data.prepare import PrepareOptions, check_source, default_output, prepare
from exgrpo_cli.data.question_file.questions import (
    QuestionSet,
    content_hash,
    is_prepared,
    read_metadata,
    read_questions,
    write_questions,
)
from exgrpo_cli.data.reading import WORD_PROBLEMS
from exgrpo_cli.data.word_problems import make_word_problems
from exgrpo_cli.errors import InputError
from exgrpo_cli.evaluation.benchmarks.presets import load_benchmark
from exgrpo_cli.evaluation.benchmarks.questions import benchmark_questions
from exgrpo_cli.files import write_json
from exgrpo_cli.grading import GradingPool
from exgrpo_cli.manifest import MANIFEST, file_digest, find_damage, write_manifest
from exgrpo_cli.presets import preset_names
from exgrpo_cli.types import Question

# A larger question file is linked instead of copied: 100 MB (interface of the run folder).
LINK_ABOVE_BYTES = 100_000_000


@dataclass(frozen=True, kw_only=True, slots=True)
class RunQuestions:
    """Training and held-out questions."""

    train: tuple[Question, ...]
    heldout: tuple[Question, ...]
    train_hash: str
    """Content hash of the training questions: part of the ledger's identity."""


def load_questions(config: Config, reporter: Reporter) -> RunQuestions:
    """The settings' questions: made, read, or prepared from the hub where no prepared file is there yet.

    Raises InputError naming the file, row and field that is wrong.
    """
    train = source_questions(config, config.data.train, "train", reporter)
    heldout = source_questions(config, config.data.heldout, "heldout", reporter) if config.data.heldout else []
    both = {question.id for question in train} & {question.id for question in heldout}
    if both:
        raise InputError(
            f"{len(both)} questions, {min(both)} among them, are in data.train {config.data.train!r} and in "
            f"data.heldout {config.data.heldout!r}: held-out questions must not be trained on."
        )
    limit = config.validation.max_questions or len(heldout)
    return RunQuestions(train=tuple(train), heldout=tuple(heldout[:limit]), train_hash=content_hash(train))


def source_questions(config: Config, source: str, split: str, reporter: Reporter) -> list[Question]:
    """Questions of `data.train` or `data.heldout`: a built-in source, a question file, a benchmark, or a hub id."""
    if source == "arithmetic":
        settings = config.arithmetic
        made = make_questions(
            num_train=settings.num_train, num_heldout=settings.num_heldout, levels=settings.levels, seed=settings.seed
        )
        return made.train if split == "train" else made.heldout
    if source == WORD_PROBLEMS:
        return make_word_problems(config.word_problems, heldout=split != "train")
    if Path(source).exists():
        return list(read_questions(source).questions)
    if source in preset_names("benchmarks"):
        return list(benchmark_questions(load_benchmark(source)).questions)
    return list(read_questions(prepared_file(config, source, split, reporter)).questions)


def prepared_file(config: Config, source: str, split: str, reporter: Reporter) -> Path:
    """The file `prepare` makes of a hub id, made now when it is not there."""
    try:
        check_source(source)
    except InputError as error:
        raise InputError(f"data.{split}: {error}") from error
    output = default_output(source)
    if not output.exists():
        reporter.note(f"preparing {source} as {output}")
        prepare(source, output, PrepareOptions(grading=config.grading), reporter.progress)
    return output


def check_answers(config: Config, pool: GradingPool, train: tuple[Question, ...]) -> None:
    """Every gold answer must verify against itself; what `prepare` has already checked is not checked again."""
    path = Path(config.data.train)
    if path.is_file() and not is_prepared(read_metadata(path)):
        check_golds(train, pool)


def store_questions(folder: Path, config: Config, questions: RunQuestions) -> None:
    """Write `train.parquet` and `heldout.parquet`; a file of over 100 MB is linked, its hash beside it."""
    for name, source, kept in (
        ("train", config.data.train, questions.train),
        ("heldout", config.data.heldout, questions.heldout),
    ):
        if not kept:
            continue
        path = Path(source)
        if path.is_file() and path.stat().st_size > LINK_ABOVE_BYTES:
            (folder / f"{name}.parquet").symlink_to(path.resolve())
            digest = {"source": str(path.resolve()), "sha256": file_digest(path)}
            write_json(folder / f"{name}.json", digest)
        else:
            write_questions(folder / f"{name}.parquet", kept, {"made_by": "train", "data": source})
    write_manifest(folder)


def stored_questions(folder: Path, config: Config) -> RunQuestions:
    """The questions of an existing run folder, for a resume. Raises InputError naming a file that is not as it was."""
    damage = find_damage(folder)
    if not damage and config.data.heldout and not (folder / MANIFEST).exists():
        # Runs of older versions always kept their held-out questions.
        path = folder / "heldout.parquet"
        damage = "" if path.exists() else f"{path} is missing"
    if damage:
        raise InputError(f"{damage}: restore it from a copy, or start a new run.")
    train = read_stored(folder / "train.parquet")
    heldout = read_stored(folder / "heldout.parquet").questions if (folder / "heldout.parquet").exists() else ()
    return RunQuestions(train=train.questions, heldout=heldout, train_hash=train.content_hash)


def read_stored(path: Path) -> QuestionSet:
    """A question file of the run folder; a linked one must not have changed since."""
    digest = path.with_suffix(".json")
    if digest.exists() and json.loads(digest.read_text())["sha256"] != file_digest(path):
        raise InputError(f"{path.resolve()} has changed since the run began: restore it, or start a new run.")
    return read_questions(path)

"""A run as repositories: the model with its card, and the ledger as a data set that is a run folder again."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from exgrpo_cli.base.errors import InputError
from exgrpo_cli.base.files import read_json
from exgrpo_cli.config.settings import Config
from exgrpo_cli.evaluation.comparison import results_in
from exgrpo_cli.ledger.schemas import TRAJECTORIES
from exgrpo_cli.ledger.writer import IDENTITY_FILE
from exgrpo_cli.publishing.base_model import find_base
from exgrpo_cli.publishing.cards import Score, evaluation_score, ledger_card, model_card, run_scores
from exgrpo_cli.publishing.experience import ROWS, write_rows, write_tables
from exgrpo_cli.publishing.package import Package, make_package
from exgrpo_cli.publishing.private import TOLD, Private
from exgrpo_cli.questions.question_file import read_questions, write_questions
from exgrpo_cli.runs.folder import RunFolder
from exgrpo_cli.runs.manifest import find_changes, require_model
from exgrpo_cli.runs.result import read_summary
from exgrpo_cli.show.record import (
    LEDGER_FOLDER,
    QUESTIONS_FILE,
    TOKENIZER_FILE,
    find_tokenizer,
    keeps_experience,
    read_config,
)
from exgrpo_cli.show.study_page import write_report

WEIGHTS = (".safetensors",)
VOCABULARY = (TOKENIZER_FILE, "vocab.json", "merges.txt", "tokenizer.model", "spiece.model")
"""Of the tokenizer: words of the model, which nothing is taken out of."""
TEXTS = (".json", ".jinja", ".txt")
"""Other files of a model folder that go along."""


def run_packages(
    run: Path, repo: str, staging: Path, private: Private, *, results: Sequence[Path], ledger: bool
) -> list[Package]:
    """The repositories of a finished run, their own files under `staging`: its ledger, if there is one, and its model.

    `results` are folders of `exgrpo evaluate` whose figures the card has too. Raises InputError for a run that has not
    finished or has no held-out figure, and for what is private and cannot be taken out.
    """
    folder, config = RunFolder.existing(run), read_config(run)
    if not folder.summary.is_file() or not folder.model.is_dir():
        raise InputError(
            f"{run} has not finished: it has no final model yet. Go on with exgrpo train --resume --output {run}."
        )
    if changes := find_changes(run):
        raise InputError(f"{'; '.join(changes)}: restore it from a copy before others get it.")
    require_model(folder.model)
    summary = read_summary(folder.summary)
    scores = [*run_scores(summary), *results_scores(results)]
    if not scores:
        raise InputError(
            f"{run} has no held-out figure for its card (data.heldout = 'none'): measure it with exgrpo evaluate "
            f"BENCHMARK --model {run}, then publish with --results FOLDER."
        )
    origin = private.without_in(run_origin(run, summary), "the run's name")
    with_ledger = ledger and (run / LEDGER_FOLDER / IDENTITY_FILE).is_file() and keeps_experience(run)
    packages = []
    if with_ledger:
        packages.append(ledger_package(run, repo, config, origin, staging / "ledger", private))
    card = model_card(
        repo,
        config,
        find_base(config),
        scores,
        steps=summary["steps"],
        example=example_question(run),
        ledger=with_ledger,
    )
    packages.append(model_package(folder.model, card, origin, staging / "model", private))
    return packages


def run_origin(run: Path, summary: dict[str, Any]) -> dict[str, str]:
    """Which run this is, to tell it from others."""
    environment = read_json(run / "environment.json", {"train_questions_sha256": str})
    return {
        "run": run.resolve().name,
        "method": summary["method"],
        "backbone": summary["backbone"],
        "seed": str(summary["seed"]),
        "questions": environment["train_questions_sha256"],
    }


def results_scores(folders: Sequence[Path]) -> list[Score]:
    """The scores in results folders. Raises InputError for a folder that is none, or is not finished."""
    scores = []
    for result in (result for folder in folders for result in results_in(folder)):
        file = result.path / "results.json"
        if not file.is_file():
            raise InputError(f"{result.path} is not finished: it has no results.json.")
        scores.append(evaluation_score(read_json(file), str(file)))
    return scores


def example_question(run: Path) -> str:
    """The first training question, for the lines that use the model."""
    path = run / QUESTIONS_FILE
    return read_questions(path).questions[0].prompt[-1].content if path.is_file() else "What is 2 + 3?"


def model_package(model: Path, card: str, origin: dict[str, str], staged: Path, private: Private) -> Package:
    """Weights and tokenizer from where they lie, the other files without what is private, and the card."""
    staged.mkdir(parents=True)
    linked = {}
    for path in sorted(model.iterdir()):
        if path.suffix in WEIGHTS or path.name in VOCABULARY:
            linked[path.name] = path
        elif path.suffix in TEXTS:
            copy_text(path, staged / path.name, private)
    (staged / "README.md").write_text(private.without(card, "the card"), encoding="utf-8")
    return make_package("model", origin, staged, linked)


def ledger_package(
    run: Path, repo: str, config: Config, origin: dict[str, str], staged: Path, private: Private
) -> Package:
    """The ledger as a data set, with what makes a run folder of it again: settings, journal, questions, tokenizer."""
    staged.mkdir(parents=True)
    for name in (name for name in TOLD if (run / name).is_file()):
        copy_text(run / name, staged / name, private)
    tables = {ROWS: f"{ROWS}/*.parquet"}
    num_rows = write_rows(run, config.backbone.source, staged / ROWS, private)
    if (run / QUESTIONS_FILE).is_file():
        copy_questions(run / QUESTIONS_FILE, staged / QUESTIONS_FILE, private)
        tables["questions"] = QUESTIONS_FILE.as_posix()
    write_report(run, staged / "report.html")
    copy_text(staged / "report.html", staged / "report.html", private)
    for table in write_tables(run, staged / LEDGER_FOLDER):
        if table != TRAJECTORIES:
            tables[table] = f"{LEDGER_FOLDER}/{table}/*.parquet"
    linked = {}
    tokenizer = find_tokenizer(run, config.backbone.source)
    if tokenizer is not None:
        linked[f"model/{TOKENIZER_FILE}"] = tokenizer
    card = private.without(ledger_card(repo, config, tables, num_rows), "the card")
    (staged / "README.md").write_text(card, encoding="utf-8")
    return make_package("dataset", origin, staged, linked)


def copy_text(source: Path, target: Path, private: Private) -> None:
    """A text file without what is private."""
    text = source.read_text(encoding="utf-8")
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(private.without(text, str(source)), encoding="utf-8")


def copy_questions(source: Path, target: Path, private: Private) -> None:
    """The question file with the names of its sources alone, and without how it was made."""
    target.parent.mkdir(parents=True, exist_ok=True)
    questions = [
        replace(question, source=private.without(question.source, str(source)))
        for question in read_questions(source).questions
    ]
    texts = ("\n".join([*(turn.content for turn in question.prompt), question.answer]) for question in questions)
    private.check_rows(texts, str(source))
    write_questions(target, questions, {})

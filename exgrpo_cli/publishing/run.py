"""A run as repositories: the model with its card, and the ledger as a data set that is a run folder again.

A published trajectory is the ledger's row with the question's text and answer, the decoded response, and the body
(token ids, behaviour log-probs) bit for bit, so that the bodies need not be stored twice.
"""

import tomllib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from exgrpo_cli.base.errors import InputError, first_line
from exgrpo_cli.base.files import NUMBER, Shape, read_json, write_json
from exgrpo_cli.config.settings import Config
from exgrpo_cli.evaluation.comparison import results_in
from exgrpo_cli.ledger.reader import LedgerReader, LedgerWarning, list_parts, part_path, steps_of
from exgrpo_cli.ledger.schemas import BODIES, EVENTS, IDENTITY_FILE, SCHEMAS, TABLES, TRAJECTORIES
from exgrpo_cli.ledger.writer import schema_with_metadata, write_parquet
from exgrpo_cli.publishing.hub import BATCH, ROWS, check_name
from exgrpo_cli.publishing.package import METADATA_FILES, Package, Private
from exgrpo_cli.publishing.study import study_package
from exgrpo_cli.questions.question_file import read_questions, write_questions
from exgrpo_cli.questions.sources import parse_hub_id, read_card
from exgrpo_cli.runs.folder import find_changes, require_model
from exgrpo_cli.runs.result import read_summary, remarks
from exgrpo_cli.show import record
from exgrpo_cli.show.report import is_run, write_report

LINKED = (".safetensors", record.TOKENIZER_FILE, "vocab.json", "merges.txt", "tokenizer.model", "spiece.model")
"""Ends of the names of weights and vocabulary: words of the model, which nothing is taken out of."""
TEXTS = (".json", ".jinja", ".txt")
"""Other files of a model folder that go along."""
MEANINGS = Path(__file__).with_name("columns.toml")
"""Meanings of the columns of each table."""
ROWS_PER_FILE = 50_000
ROW_SCHEMA = pa.schema(
    [
        *SCHEMAS[TRAJECTORIES],
        *(pa.field(name, pa.string()) for name in ("question", "answer", "response")),
        *list(SCHEMAS[BODIES])[1:],
    ]
)
RESULT: Shape = {
    "protocol": {"benchmark": {"name": str}},
    **dict.fromkeys(("avg_at_k", "low", "high"), NUMBER),
    **dict.fromkeys(("questions", "k"), int),
}
"""Fields that a card takes from a `results.json`."""


@contextmanager
def packed(folder: Path, repo: str, *, results: Sequence[Path] = (), ledger: bool = True) -> Iterator[list[Package]]:
    """Packages that publishing the run or study would upload, while the body lasts.

    `results` are folders of `exgrpo evaluate` for the card of a run. Raises InputError for a folder that is neither a
    finished run nor a study, for a name that is no OWNER/NAME, and for what is private and cannot be taken out.
    """
    check_name(repo)
    private = Private.of(folder)
    with TemporaryDirectory(prefix="exgrpo-publish-") as staging:
        if is_run(folder):
            yield run_packages(folder, repo, Path(staging), private, results=results, ledger=ledger)
        else:
            yield [study_package(folder, repo, Path(staging) / "study", private)]


def run_packages(
    run: Path, repo: str, staging: Path, private: Private, *, results: Sequence[Path], ledger: bool
) -> list[Package]:
    """The repositories of a finished run, their own files under `staging`: its ledger, if there is one, and its model.

    Raises InputError for a run that has not finished or has no held-out figure, and for what is private and cannot be
    taken out.
    """
    config, model = record.read_config(run), run / "model"
    if not (run / "summary.json").is_file() or not model.is_dir():
        raise InputError(
            f"{run} has not finished: it has no final model yet. Go on with exgrpo train --resume --output {run}."
        )
    if changes := find_changes(run):
        raise InputError(f"{'; '.join(changes)}: restore it from a copy before others get it.")
    require_model(model)
    summary = read_summary(run / "summary.json")
    scores = [*_own_scores(summary["heldout"]), *_scores_of_results(results)]
    if not scores:
        raise InputError(
            f"{run} has no held-out figure for its card (data.heldout = 'none'): measure it with exgrpo evaluate "
            f"BENCHMARK --model {run}, then publish with --results FOLDER."
        )
    origin = {
        "run": run.resolve().name,
        **{name: str(summary[name]) for name in ("method", "backbone", "seed")},
        "questions": read_json(run / "environment.json", {"train_questions_sha256": str})["train_questions_sha256"],
    }
    with_ledger = ledger and config.replay.keeps_buffer and (run / record.LEDGER_FOLDER / IDENTITY_FILE).is_file()
    about = {"repo": repo, "config": config, "data": _hub_data(config) or Path(config.data.train).name}
    packages = []
    if with_ledger:
        package = Package(repo_type="dataset", origin=origin, folder=staging / "ledger", private=private)
        packages.append(_with_ledger(package, run, about))
    questions = read_questions(run / record.QUESTIONS_FILE).questions if (run / record.QUESTIONS_FILE).is_file() else ()
    example = repr(questions[0].prompt[-1].content if questions else "What is 2 + 3?")
    about |= {"scores": scores, "steps": summary["steps"], "example": example, "ledger": with_ledger}
    package = Package(repo_type="model", origin=origin, folder=staging / "model", private=private)
    return [*packages, _with_model(package, model, about)]


def _own_scores(heldout: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The held-out scores that the run itself measured, as the card shows them."""
    return [
        score | {"set": heldout["set"], "when": f"{when} training", "remarks": remarks(score)}
        for when in ("before", "after")
        if (score := heldout[when])
    ]


def _scores_of_results(folders: Sequence[Path]) -> list[dict[str, Any]]:
    """The scores in results folders. Raises InputError for a folder that is none, or is not finished."""
    scores = []
    for result in (result for folder in folders for result in results_in(folder)):
        file = result.path / "results.json"
        if not file.is_file():
            raise InputError(f"{result.path} is not finished: it has no results.json.")
        score = read_json(file, RESULT)
        name = score["protocol"]["benchmark"]["name"]
        own = {"set": name, "when": "after training", "pass_at_1": score["avg_at_k"], "samples": score["k"]}
        scores.append(score | own)
    return scores


def _with_model(package: Package, model: Path, about: Mapping[str, Any]) -> Package:
    """Weights and vocabulary from where they lie, the other files without what is private, and the card."""
    for path in sorted(model.iterdir()):
        if path.name.endswith(LINKED):
            package.linked[path.name] = path
        elif path.suffix in TEXTS:
            package.copy(path)
    base, card = _base(about["config"])
    front = {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["exgrpo", "reinforcement-learning", "rlvr"],
        **card,
        "base_model_relation": "finetune" if "base_model" in card else None,
        "datasets": _hub_data(about["config"]) or None,
    }
    return package.finish("model.md.j2", front, {}, base=base, **about)


def _base(config: Config) -> tuple[str, dict[str, Any]]:
    """Name of the base model, and its hub id and licence as its own card states them.

    Raises InputError where the card of a hub model cannot be had.
    """
    source = config.backbone.source
    folder, hub = Path(source), parse_hub_id(source)
    name = config.backbone.name
    card: Mapping[str, Any] = {}
    if folder.is_dir():
        name, file = folder.name, folder / "README.md"
        card = read_card(file) if file.is_file() else {}
    elif hub is not None:
        name, card = hub.repo, {**_hub_card(hub.repo, config.backbone.revision), "base_model": hub.repo}
    kept = ("base_model", "license", "license_name", "license_link")
    return name, {key: card[key] for key in kept if card.get(key)}


def _hub_card(repo: str, revision: str) -> Mapping[str, Any]:
    from huggingface_hub import errors, hf_hub_download

    try:
        return read_card(Path(hf_hub_download(repo, "README.md", revision=revision)))
    except errors.RemoteEntryNotFoundError:
        return {}
    except (errors.HTTPError, errors.HfHubHTTPError, OSError) as error:
        raise InputError(
            f"the card of the base model {repo} cannot be fetched ({first_line(error)}), and its licence must be kept: "
            "try again with a network, or fetch the model first."
        ) from error


def _hub_data(config: Config) -> str:
    """The hub id of the training questions; empty where they are not from the hub."""
    hub = None if Path(config.data.train).exists() else parse_hub_id(config.data.train)
    return hub.repo if hub else ""


def _with_ledger(package: Package, run: Path, about: Mapping[str, Any]) -> Package:
    """The ledger as a data set, with what makes a run folder of it again: settings, journal, questions, tokenizer."""
    for name in (name for name in METADATA_FILES if (run / name).is_file()):
        package.copy(run / name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LedgerWarning)  # raised as an error of one line
        reader = LedgerReader(run / record.LEDGER_FOLDER)
    if reader.dropped:
        raise InputError(f"{reader.folder} is whole up to step {reader.last_step} only: {reader.dropped}.")
    num_rows = _write_rows(package, run, about["config"].backbone.source, reader)
    tables = {ROWS: f"{ROWS}/*.parquet"}
    if (run / record.QUESTIONS_FILE).is_file():
        _copy_questions(package, run / record.QUESTIONS_FILE)
        tables["questions"] = record.QUESTIONS_FILE.as_posix()
    package.copy(write_report(run, package.folder / "report.html"))
    tables |= _write_tables(reader, package.folder / record.LEDGER_FOLDER)
    tokenizer = Path("model", record.TOKENIZER_FILE)
    if (run / tokenizer).is_file():
        package.linked[tokenizer.as_posix()] = run / tokenizer
    meanings = tomllib.loads(MEANINGS.read_text(encoding="utf-8"))
    columns = {name: meanings[name] for name in tables}
    front = {"tags": ["exgrpo", "reinforcement-learning", "experience-replay"]}
    return package.finish("ledger.md.j2", front, tables, num_rows=num_rows, columns=columns, **about)


def _write_rows(package: Package, run: Path, source: str, reader: LedgerReader) -> int:
    """Write every trajectory as a row; returns how many there are. `source` is the backbone's, for its tokenizer.

    Raises InputError for a response or question that holds something private.
    """
    table, folder = reader.trajectories(), package.folder / ROWS
    folder.mkdir()
    for number, begin in enumerate(range(0, len(table), ROWS_PER_FILE)):
        part = table.slice(begin, ROWS_PER_FILE)
        with pq.ParquetWriter(folder / f"train-{number:05d}.parquet", ROW_SCHEMA, compression="zstd") as file:
            for first in range(0, len(part), BATCH):
                rows = part.slice(first, BATCH)
                more = _texts_and_bodies(run, source, reader, rows, package.private)
                file.write_table(pa.table([*rows.columns, *more], schema=ROW_SCHEMA))
    return len(table)


def _texts_and_bodies(
    run: Path, source: str, reader: LedgerReader, rows: pa.Table, private: Private
) -> list[list[Any]]:
    """Columns of a published trajectory beside the ledger's: texts, token ids, log-probs."""
    ids, owners = (rows.column(name).to_pylist() for name in ("trajectory_id", "question_id"))
    questions, responses = record.question_texts(run, sorted(set(owners))), record.response_texts(run, source, ids)
    texts = [questions[owner] for owner in owners]
    private.check_rows((f"{text['text']}\n{text['answer']}" for text in texts), "the questions")
    private.check_rows(responses.values(), "the responses")
    asked = [[text[name] or None for text in texts] for name in ("text", "answer")]
    return [*asked, [responses.get(each) for each in ids], *map(list, zip(*reader.bodies(ids), strict=True))]


def _write_tables(reader: LedgerReader, folder: Path) -> dict[str, str]:
    """Write each table of the ledger but the bodies as one part under `folder`; returns files by table, of those with
    rows.

    One part each, since `datasets` cannot read the parts of steps in which nothing happened.
    """
    tables = {name: reader.table(name) for name in TABLES if name != BODIES}
    first_step, _ = steps_of(list_parts(reader.folder, EVENTS)[0])
    totals = {name: len(rows) for name, rows in tables.items()}
    totals[BODIES] = totals[TRAJECTORIES]
    for name, rows in tables.items():
        path = part_path(folder, name, first_step, reader.last_step)
        if len(rows) or name == EVENTS:
            path.parent.mkdir(parents=True)
            with path.open("wb") as file:
                own_totals = totals if name == EVENTS else None
                write_parquet(file, rows, schema_with_metadata(name, reader.last_step, own_totals))
    write_json(folder / IDENTITY_FILE, asdict(reader.identity))
    return {name: f"{folder.name}/{name}/*.parquet" for name in tables if totals[name] and name != TRAJECTORIES}


def _copy_questions(package: Package, source: Path) -> None:
    """The question file with the names of its sources alone, and without how it was made."""
    private, target = package.private, package.folder / record.QUESTIONS_FILE
    questions = [
        replace(question, source=private.redact(question.source, str(source)))
        for question in read_questions(source).questions
    ]
    texts = ("\n".join([*(turn.content for turn in question.prompt), question.answer]) for question in questions)
    private.check_rows(texts, str(source))
    target.parent.mkdir(parents=True, exist_ok=True)
    write_questions(target, questions, {})

"""Contents of repositories: a run's model with its card, its ledger as a data set that is a run folder again; a study.

A published trajectory is the ledger's row with the question's text and answer, the decoded response, and the body
(token ids, behaviour log-probs) bit for bit, so that the bodies need not be stored twice. A study is a row per run, a
row per step of every run (as JSON), their settings, and its page.
"""

import json
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from markupsafe import Markup

from exgrpo_cli.base.data import tables
from exgrpo_cli.base.errors import InputError, ToolkitWarning, first_line
from exgrpo_cli.base.files import read_json, read_manifest
from exgrpo_cli.config.settings import Config
from exgrpo_cli.evaluation.comparison import results_in
from exgrpo_cli.ledger.reader import LedgerReader, list_parts, part_path, steps_of
from exgrpo_cli.ledger.schemas import BODIES, EVENTS, IDENTITY_FILE, SCHEMAS, TABLES, TRAJECTORIES
from exgrpo_cli.ledger.writer import schema_with_metadata, write_parquet
from exgrpo_cli.publishing.hub import BATCH, ROWS
from exgrpo_cli.publishing.package import AS_IT_IS, MODEL_TEXTS, Package
from exgrpo_cli.publishing.private import METADATA_FILES, QUOTED, Private
from exgrpo_cli.questions.question_file import read_questions, write_questions
from exgrpo_cli.questions.sources import parse_hub_id, read_card
from exgrpo_cli.runs.folder import CHECKSUMS_FILE, journal_lines, require_model
from exgrpo_cli.runs.result import SUFFIX, read_summary, remarks, verdict_of
from exgrpo_cli.show import record
from exgrpo_cli.show.report import is_run, write_report
from exgrpo_cli.studies.output import markdown, score_rows
from exgrpo_cli.studies.report import compare_runs
from exgrpo_cli.studies.study import RESULTS_FOLDER, read_study

MEANINGS = tables(__file__, "columns.toml")
"""Meanings of the columns of each table."""
ROWS_PER_FILE = 50_000
WORDS = [pa.field(name, pa.string()) for name in ("question", "answer", "response")]
ROW_SCHEMA = pa.schema([*SCHEMAS[TRAJECTORIES], *WORDS, *list(SCHEMAS[BODIES])[1:]])


@contextmanager
def packed(folder: Path, repo: str, *, results: Sequence[Path] = (), ledger: bool = True) -> Iterator[list[Package]]:
    """Packages that publishing the run or study would upload, while the body lasts.

    `results` are folders of `exgrpo evaluate` for the card of a run. Raises InputError for a folder that is neither a
    finished run nor a study, for a name that is no OWNER/NAME, and for what is private and cannot be taken out.
    """
    hub = parse_hub_id(repo)
    if hub is None or hub.repo != repo:
        raise InputError(f"--to {repo} is no name of a repository: it must be OWNER/NAME, such as your-name/my-run.")
    _require_own(folder)
    private = Private.of(folder)
    with TemporaryDirectory(prefix="exgrpo-publish-") as staging:
        if is_run(folder):
            packages = run_packages(folder, repo, Path(staging), private, results=results, ledger=ledger)
        else:
            packages = [study_package(folder, repo, Path(staging) / "study", private)]
        for package in packages:
            package.look()
        yield packages


def _require_own(folder: Path) -> None:
    """Raise InputError for a link out of the folder, and for no file or folder, among what is read of a run or study.

    Questions may be a link: their rows are checked, and a large file of them is linked by `train` itself.
    """
    read = [*(folder / RESULTS_FOLDER).glob("*")]
    for run in (folder, *folder.glob("*/seed-*")):
        read += [run / "data", *(path for path in run.glob("*") if path.suffix in (*QUOTED, ".md"))]
        for part in (run / "model", run / "samples", run / record.LEDGER_FOLDER):
            read += [part, *part.rglob("*")]
    whole = folder.resolve()
    for path in filter(os.path.lexists, read):
        # `resolve` fails where a link leads to itself.
        end = Path(os.path.realpath(path))
        if not end.is_relative_to(whole):
            danger = "what is there would be published. Put a copy in its place"
            raise InputError(f"{path} is a link to {end}, outside {folder}: {danger}.")
        if not (path.is_file() or path.is_dir()):
            raise InputError(f"{path} is neither a file nor a folder: nothing was published. Remove it.")


def run_packages(
    run: Path, repo: str, staging: Path, private: Private, *, results: Sequence[Path], ledger: bool
) -> list[Package]:
    """The repositories of a finished run, their own files under `staging`: its ledger, if there is one, and its model.

    Raises InputError for a run that has not finished or has no held-out figure, and for what is private and cannot be
    taken out.
    """
    config, model = record.read_config(run), run / "model"
    if not (run / "summary.json").is_file() or not model.is_dir():
        remedy = f"Go on with exgrpo train --resume --output {run}"
        raise InputError(f"{run} has not finished: it has no final model yet. {remedy}.")
    if changes := [*record.changes(run)]:
        raise InputError(f"{'; '.join(changes)}: restore it from a copy before others get it.")
    require_model(model)
    summary = read_summary(run / "summary.json")
    if not (scores := list(_scores(summary["heldout"], results))):
        remedy = f"measure it with exgrpo evaluate BENCHMARK --model {run}, then publish with --results FOLDER"
        raise InputError(f"{run} has no held-out figure for its card (data.heldout = 'none'): {remedy}.")
    origin = {
        "run": run.resolve().name,
        **{name: str(summary[name]) for name in ("method", "backbone", "seed")},
        "questions": read_json(run / "environment.json", {"train_questions_sha256": str})["train_questions_sha256"],
    }
    with_ledger = ledger and config.replay.keeps_buffer and (run / record.LEDGER_FOLDER / IDENTITY_FILE).is_file()
    data = None if Path(config.data.train).exists() else parse_hub_id(config.data.train)
    about = {
        "repo": repo,
        "config": config,
        "data": data.repo if data else Path(config.data.train).name,
        "hub_data": data and data.repo,
        "scores": scores,
        "steps": summary["steps"],
        "verified": verdict_of(run),
        "example": Markup(repr(read_questions(run / record.QUESTIONS_FILE).questions[0].prompt[-1].content)),
        "ledger": with_ledger,
    }
    models = Package(repo_type="model", origin=origin, folder=staging / "model", private=private)
    ledgers = Package(repo_type="dataset", origin=origin, folder=staging / "ledger", private=private)
    return [*([_with_ledger(ledgers, run, about)] if with_ledger else []), _with_model(models, model, about)]


def _scores(heldout: Mapping[str, Any], folders: Sequence[Path]) -> Iterator[dict[str, Any]]:
    """The held-out scores of the run itself, and those in results folders, as the card shows them.

    Raises InputError for a folder that is none, is not finished, or is damaged.
    """
    for when in ("before", "after"):
        if score := heldout[when]:
            yield score | {"set": heldout["set"], "when": f"{when} training", "remarks": remarks(score)}
    for result in (result for folder in folders for result in results_in(folder)):
        if not result.has_result:
            raise InputError(f"{result.path} is not finished: it has no results.json.")
        score = result.result()
        own = {"set": score["protocol"]["benchmark"]["name"], "pass_at_1": score["avg_at_k"], "samples": score["k"]}
        yield score | own | {"when": "after training"}


def _with_model(package: Package, model: Path, about: Mapping[str, Any]) -> Package:
    """Weights and vocabulary from where they lie, the other files without what is private, and the card.

    Of a run that has noted its files only those go; a warning names others, which stay here.
    """
    noted = model.parent / CHECKSUMS_FILE
    own = read_manifest(noted) if noted.is_file() else None
    others = []
    for path in sorted(model.iterdir()):
        is_own = own is None or f"{model.name}/{path.name}" in own
        if is_own and AS_IT_IS.fullmatch(path.name):
            package.files[path.name] = path
        elif is_own and MODEL_TEXTS.fullmatch(path.name):
            package.copy(path)
        elif path.name != "README.md":
            others.append(path.name)
    if others:
        more = f"{model} has more than the run wrote, which stays here: {', '.join(others)}."
        warnings.warn(more, ToolkitWarning, stacklevel=2)
    base, card = _base(about["config"])
    front = {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["exgrpo", "reinforcement-learning", "rlvr"],
        **card,
        "base_model_relation": "finetune" if "base_model" in card else None,
        "datasets": about["hub_data"],
    }
    return package.finish("model.md.j2", front, {}, base=base, **about)


def _base(config: Config) -> tuple[str, dict[str, Any]]:
    """Name of the base model, and its hub id and licence as its own card states them.

    Raises InputError where the card of a hub model cannot be had.
    """
    from huggingface_hub import errors, hf_hub_download

    name, folder, hub = config.backbone.name, Path(config.backbone.source), parse_hub_id(config.backbone.source)
    card: Mapping[str, Any] = {}
    if folder.is_dir():
        name, file = folder.name, folder / "README.md"
        card = read_card(file) if file.is_file() else {}
    elif hub is not None:
        name = hub.repo
        try:
            card = read_card(Path(hf_hub_download(hub.repo, "README.md", revision=config.backbone.revision)))
        except errors.RemoteEntryNotFoundError:
            pass  # a model without a card
        except (errors.HTTPError, errors.HfHubHTTPError, OSError) as error:
            lacking = f"cannot be fetched ({first_line(error)}), and its licence must be kept"
            remedy = "try again with a network, or fetch the model first"
            raise InputError(f"the card of the base model {hub.repo} {lacking}: {remedy}.") from error
        card = {**card, "base_model": hub.repo}
    kept = ("base_model", "license", "license_name", "license_link")
    return name, {key: card[key] for key in kept if card.get(key)}


def _with_ledger(package: Package, run: Path, about: Mapping[str, Any]) -> Package:
    """The ledger as a data set, with what makes a run folder of it again: settings, journal, questions, tokenizer."""
    for name in (name for name in METADATA_FILES if (run / name).is_file()):
        package.copy(run / name)
    reader = record.open_ledger(run)
    if reader.dropped:
        raise InputError(f"{reader.folder} is whole up to step {reader.last_step} only: {reader.dropped}.")
    num_rows = _write_rows(package, run, about["config"].backbone.source, reader)
    # With the names of their sources alone, and without how they were made.
    source = run / record.QUESTIONS_FILE
    public = package.private.redact
    questions = [replace(each, source=public(each.source, str(source))) for each in read_questions(source).questions]
    write_questions(package.place(str(record.QUESTIONS_FILE)), questions, {})
    package.copy(write_report(run, package.place("report.html")))
    tables = {ROWS: f"{ROWS}/*.parquet", "questions": str(record.QUESTIONS_FILE), **_write_tables(package, reader)}
    tokenizer = Path("model", record.TOKENIZER_FILE)
    if (run / tokenizer).is_file():
        package.files[tokenizer.as_posix()] = run / tokenizer
    columns = {name: MEANINGS[name] for name in tables}
    front = {"tags": ["exgrpo", "reinforcement-learning", "experience-replay"]}
    return package.finish("ledger.md.j2", front, tables, num_rows=num_rows, columns=columns, **about)


def _write_rows(package: Package, run: Path, source: str, reader: LedgerReader) -> int:
    """Write every trajectory as a row; returns how many there are. `source` is the backbone's, for its tokenizer."""
    table = reader.trajectories()
    for number, begin in enumerate(range(0, len(table), ROWS_PER_FILE)):
        path, part = package.place(f"{ROWS}/train-{number:05d}.parquet"), table.slice(begin, ROWS_PER_FILE)
        with pq.ParquetWriter(path, ROW_SCHEMA, compression="zstd") as file:
            for first in range(0, len(part), BATCH):
                rows = part.slice(first, BATCH)
                more = _other_columns(run, source, reader, rows)
                file.write_table(pa.table([*rows.columns, *more], schema=ROW_SCHEMA))
    return len(table)


def _other_columns(run: Path, source: str, reader: LedgerReader, rows: pa.Table) -> list[list[Any]]:
    """Columns of a published trajectory beside the ledger's: texts, token ids, log-probs."""
    ids, owners = (rows.column(name).to_pylist() for name in ("trajectory_id", "question_id"))
    questions, responses = record.question_texts(run, sorted(set(owners))), record.response_texts(run, source, ids)
    texts = [questions[owner] for owner in owners]
    asked = [[text[name] or None for text in texts] for name in ("text", "answer")]
    return [*asked, [responses.get(each) for each in ids], *map(list, zip(*reader.bodies(ids), strict=True))]


def _write_tables(package: Package, reader: LedgerReader) -> dict[str, str]:
    """Write each table of the ledger but the bodies as one part; returns files by table, of those with rows.

    One part each, since `datasets` cannot read the parts of steps in which nothing happened.
    """
    folder, tables = Path(record.LEDGER_FOLDER), {name: reader.table(name) for name in TABLES if name != BODIES}
    first_step, _ = steps_of(list_parts(reader.folder, EVENTS)[0])
    totals = {name: len(rows) for name, rows in tables.items()}
    totals[BODIES] = totals[TRAJECTORIES]
    for name, rows in tables.items():
        if len(rows) or name == EVENTS:
            path = part_path(folder, name, first_step, reader.last_step)
            schema = schema_with_metadata(name, reader.last_step, totals if name == EVENTS else None)
            with package.place(path.as_posix()).open("wb") as file:
                write_parquet(file, rows, schema)
    package.copy(reader.folder / IDENTITY_FILE, f"{folder}/{IDENTITY_FILE}")
    return {name: f"{folder}/{name}/*.parquet" for name in tables if totals[name] and name != TRAJECTORIES}


def study_package(folder: Path, repo: str, staged: Path, private: Private) -> Package:
    """The repository of a study, its files under `staged`. Raises InputError where no run has finished."""
    study, _ = read_study(folder)
    report = compare_runs(study)
    if not report["arms"]:
        kinds = "neither a run (no config.toml) nor a study with a run that has finished (ARM/seed-N/config.toml)"
        raise InputError(f"{folder} is {kinds}: there is nothing to publish.")
    baseline = ", ".join(study.baselines)
    # More seeds or arms make no other study of it.
    backbone = {"backbone": study.runs[0].config.backbone.name} if study.runs else {}
    origin = {"study": study.name, **backbone, "baseline": baseline}
    package = Package(repo_type="dataset", origin=origin, folder=staged, private=private)
    tables: dict[str, list[Mapping[str, Any]]] = {
        "runs": [{"arm": arm} | run.to_json() for arm, found in study.results().items() for run in found.values()],
        "steps": [],
    }
    for run in (run for run in study.runs if run.state == "finished"):
        key = {"arm": run.arm.name, "seed": run.seed}
        tables["steps"] += [key | line for line in journal_lines(run.folder / "metrics.jsonl")]
        package.copy(run.folder / "config.toml", f"configs/{run.folder.parent.name}-{run.folder.name}.toml")
    files = {name: f"{name}.jsonl" for name, rows in tables.items() if rows}
    for name, file in files.items():
        rows = "".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in tables[name])
        package.write(file, rows, f"{name} of {folder}")
    texts = (folder / name for name in ("study.json", "results.json", "report.md") if (folder / name).is_file())
    for path in sorted([*texts, *(folder / RESULTS_FOLDER).glob(f"*{SUFFIX}")]):
        package.copy(path, path.relative_to(folder).as_posix())
    package.copy(write_report(folder, package.place("report.html")))
    front = {"tags": ["exgrpo", "reinforcement-learning", "ablation"]}
    table = Markup(markdown(score_rows(report)))
    return package.finish("study.md.j2", front, files, repo=repo, table=table, baseline=baseline)

"""A study as one data set: a row per run, a row per step of every run, their settings, and the study's page."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from exgrpo_cli.base.errors import InputError
from exgrpo_cli.base.files import read_json
from exgrpo_cli.publishing.cards import study_card
from exgrpo_cli.publishing.package import Package, make_package
from exgrpo_cli.publishing.private import Private
from exgrpo_cli.publishing.runs import copy_text
from exgrpo_cli.runs.folder import journal_lines
from exgrpo_cli.runs.result import RunResult
from exgrpo_cli.show.study_page import carried, read_study, write_report
from exgrpo_cli.studies.output import markdown, score_rows
from exgrpo_cli.studies.report import compare_runs
from exgrpo_cli.studies.study import RESULTS_FOLDER, Study, StudyRun

TEXTS = (".json", ".md", ".tex", ".csv")
"""Files of a study's folder that go along: its tables."""


def study_package(folder: Path, repo: str, staging: Path, private: Private) -> Package:
    """The repository of a study, its files under `staging`. Raises InputError where no run has finished."""
    study, _ = read_study(folder)
    report = compare_runs(study)
    if not report.arms:
        raise InputError(f"{folder}: no run of the study has finished, so there is nothing to publish.")
    staged = staging / "study"
    staged.mkdir(parents=True)
    finished = [run for run in study.runs if run.state == "finished"]
    others = [result_row(arm, seed, result) for (arm, seed), result in carried(study).items()]
    write_table([*map(run_row, finished), *others], staged / "runs.parquet", private)
    if finished:
        write_table([row for run in finished for row in step_rows(run)], staged / "steps.parquet", private)
    for path in sorted(path for path in folder.iterdir() if path.suffix in TEXTS):
        copy_text(path, staged / path.name, private)
    for run in finished:
        name = f"{run.folder.parent.name}-{run.folder.name}.toml"
        copy_text(run.folder / "config.toml", staged / "configs" / name, private)
    for path in sorted((folder / RESULTS_FOLDER).glob("*.json")):
        copy_text(path, staged / RESULTS_FOLDER / path.name, private)
    write_report(folder, staged / "report.html")
    copy_text(staged / "report.html", staged / "report.html", private)
    card = study_card(repo, markdown(score_rows(report)), ", ".join(study.baselines), with_steps=bool(finished))
    (staged / "README.md").write_text(private.without(card, "the card"), encoding="utf-8")
    return make_package("dataset", private.without_in(study_origin(study), "the study's name"), staged, {})


def study_origin(study: Study) -> dict[str, str]:
    """Which study this is, to tell it from others; more seeds or arms make no other one of it."""
    backbone = {"backbone": study.runs[0].config.backbone.name} if study.runs else {}
    return {"study": study.name, **backbone, "baseline": ", ".join(study.baselines)}


def run_row(run: StudyRun) -> dict[str, Any]:
    """The final figures of a run, flat."""
    summary = read_json(run.folder / "summary.json")
    return {"arm": run.arm.name, "seed": run.seed, **flat(summary, skip=("seed",))}


def result_row(arm: str, seed: int, result: RunResult) -> dict[str, Any]:
    """The same of a run whose result alone is known, as far as that goes."""
    scores = {"before": result.before, "after": result.after}
    return {
        "arm": arm,
        "seed": seed,
        "steps": result.totals.steps,
        **{f"heldout/{k}/pass_at_1": float(each.mean()) / result.samples for k, each in scores.items() if len(each)},
        "heldout/after/questions": len(result.after),
        "tokens/generated": result.totals.generated,
        "tokens/trained": result.totals.trained,
        "wall_seconds/total": result.totals.seconds,
    }


def step_rows(run: StudyRun) -> list[dict[str, Any]]:
    """The journal of a run, arm and seed in every row."""
    return [{"arm": run.arm.name, "seed": run.seed, **line} for line in journal_lines(run.folder / "metrics.jsonl")]


def flat(values: dict[str, Any], prefix: str = "", skip: tuple[str, ...] = ()) -> dict[str, Any]:
    """Nested objects as one, keys joined with "/"."""
    rows: dict[str, Any] = {}
    for key, value in values.items():
        if key in skip:
            continue
        rows |= flat(value, f"{prefix}{key}/") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return rows


def write_table(rows: list[dict[str, Any]], path: Path, private: Private) -> None:
    """Rows as Parquet, a column for every key of any row, texts without what is private."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    columns = {name: [_public(row.get(name), private, str(path.name)) for row in rows] for name in names}
    pq.write_table(pa.table({name: pa.array(_alike(values)) for name, values in columns.items()}), path)


def _public(value: Any, private: Private, where: str) -> Any:
    if isinstance(value, list):
        return [_public(each, private, where) for each in value]
    return private.without(value, where) if isinstance(value, str) else value


def _alike(values: list[Any]) -> list[Any]:
    """A column of one type: whole numbers beside fractions as fractions, anything else that is mixed as text."""
    kinds = {type(value) for value in values if value is not None}
    if kinds <= {int, float}:
        return [None if value is None else float(value) for value in values] if float in kinds else values
    return values if len(kinds) <= 1 else [None if value is None else str(value) for value in values]

"""A study as one data set: a row per run, a row per step of every run, their settings, and the study's page."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from exgrpo_cli.base.errors import InputError
from exgrpo_cli.base.files import read_json
from exgrpo_cli.publishing.package import Package, Private
from exgrpo_cli.runs.folder import journal_lines
from exgrpo_cli.runs.result import RunResult
from exgrpo_cli.show.report import carried, read_study, write_report
from exgrpo_cli.studies.output import markdown, score_rows
from exgrpo_cli.studies.report import compare_runs
from exgrpo_cli.studies.study import RESULTS_FOLDER

TEXTS = (".json", ".md", ".csv")
"""Files of a study's folder that go along: its tables."""


def study_package(folder: Path, repo: str, staged: Path, private: Private) -> Package:
    """The repository of a study, its files under `staged`. Raises InputError where no run has finished."""
    study, _ = read_study(folder)
    report = compare_runs(study)
    if not report["arms"]:
        raise InputError(
            f"{folder} is neither a run (no config.toml) nor a study with a run that has finished "
            "(ARM/seed-N/config.toml): there is nothing to publish."
        )
    baseline = ", ".join(study.baselines)
    # More seeds or arms make no other study of it.
    backbone = {"backbone": study.runs[0].config.backbone.name} if study.runs else {}
    origin = {"study": study.name, **backbone, "baseline": baseline}
    package = Package(repo_type="dataset", origin=origin, folder=staged, private=private)
    runs, steps = [], []
    for run in (run for run in study.runs if run.state == "finished"):
        key = {"arm": run.arm.name, "seed": run.seed}
        runs.append(key | _flat(read_json(run.folder / "summary.json")))
        steps += [key | line for line in journal_lines(run.folder / "metrics.jsonl")]
        package.copy(run.folder / "config.toml", f"configs/{run.folder.parent.name}-{run.folder.name}.toml")
    runs += [_result_row(arm, seed, result) for (arm, seed), result in carried(study).items()]
    tables = {"runs": runs, "steps": steps} if steps else {"runs": runs}
    for name, rows in tables.items():
        _write_table(package, f"{name}.parquet", rows)
    for path in sorted(path for path in folder.iterdir() if path.suffix in TEXTS):
        package.copy(path)
    for path in sorted((folder / RESULTS_FOLDER).glob("*.json")):
        package.copy(path, f"{RESULTS_FOLDER}/{path.name}")
    package.copy(write_report(folder, staged / "report.html"))
    front = {"tags": ["exgrpo", "reinforcement-learning", "ablation"]}
    files = {name: f"{name}.parquet" for name in tables}
    text = markdown(score_rows(report))
    return package.finish("study.md.j2", front, files, repo=repo, table=text, baseline=baseline)


def _result_row(arm: str, seed: int, result: RunResult) -> dict[str, Any]:
    """The final figures of a run whose result alone is known, as far as that goes."""
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


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested objects as one, keys joined with "/"."""
    rows: dict[str, Any] = {}
    for key, value in values.items():
        rows |= _flat(value, f"{prefix}{key}/") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return rows


def _write_table(package: Package, name: str, rows: Iterable[Mapping[str, Any]]) -> None:
    """Rows as Parquet without what is private, a column for every key of any row."""
    texts = (json.dumps(row, ensure_ascii=False) for row in rows)
    public = [json.loads(package.private.redact(text, name)) for text in texts]
    names = dict.fromkeys(key for row in public for key in row)
    package.folder.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({key: _column([row.get(key) for row in public]) for key in names}), package.folder / name)


def _column(values: list[Any]) -> pa.Array:
    """Values of one type, whole numbers beside fractions as fractions; what is mixed otherwise as text."""
    try:
        return pa.array(values)
    except pa.ArrowException:
        return pa.array([None if value is None else str(value) for value in values])

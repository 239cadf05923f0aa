"""What `replay-stats` reports of each run: its summary, and what else was asked for."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from exgrpo_cli.errors import InputError
from exgrpo_cli.replay_stats.as_json import history_json, metric_json, sampler_json, summary_json
from exgrpo_cli.replay_stats.questions import QuestionHistory, question_history
from exgrpo_cli.replay_stats.record import read_run
from exgrpo_cli.replay_stats.summary import ReplaySummary, summarise_record
from exgrpo_cli.replay_stats.what_if import MetricOutcome, SamplerOutcome, other_metric, other_sampler, parse_what_if


@dataclass(frozen=True, kw_only=True, slots=True)
class RunReport:
    """One run's figures; the last three only where they were asked for."""

    label: str
    """Shortest end of the run's path that no other run of the report shares."""
    summary: ReplaySummary
    history: QuestionHistory | None = None
    sampler: SamplerOutcome | None = None
    metric: MetricOutcome | None = None


def report_runs(runs: Sequence[Path], *, question_id: str = "", what_if: str = "", seed: int = 0) -> list[RunReport]:
    """Summarise every run; with `question_id` its history, with `what_if` what that policy would have drawn.

    `seed` is that of the other policy's draws. Raises InputError for what is no run, an unknown question or a `what_if`
    that cannot be read.
    """
    return [
        _report(run, label, question_id, what_if, np.random.default_rng(seed))
        for run, label in zip(runs, labels(runs), strict=True)
    ]


def _report(run: Path, label: str, question_id: str, what_if: str, rng: np.random.Generator) -> RunReport:
    record = read_run(run)
    other = parse_what_if(what_if, record.config.replay) if what_if else None
    return RunReport(
        label=label,
        summary=summarise_record(record),
        history=question_history(record, question_id) if question_id else None,
        sampler=other_sampler(record, other, rng) if other and other.sampler else None,
        metric=other_metric(record, other, rng) if other and other.metric else None,
    )


def labels(runs: Sequence[Path]) -> list[str]:
    """The last parts of each path, as many as it takes to tell the runs apart.

    Raises InputError for a run that is named twice.
    """
    parts = [run.resolve().parts for run in runs]
    for position, run in enumerate(runs):
        if parts[position] in parts[:position]:
            raise InputError(f"{run} is named twice. Name each run once.")
    most = max((len(path) for path in parts), default=1)
    for length in range(1, most + 1):
        shortened = ["/".join(path[-length:]) for path in parts]
        if len(set(shortened)) == len(shortened):
            return shortened
    return [str(run) for run in runs]


def report_json(reports: Sequence[RunReport]) -> dict[str, Any]:
    """One run's object; of several runs {"runs": {label: object}}."""
    objects = {report.label: _run_json(report) for report in reports}
    return next(iter(objects.values())) if len(reports) == 1 else {"runs": objects}


def _run_json(report: RunReport) -> dict[str, Any]:
    asked: dict[str, Any] = {}
    if report.history:
        asked["question"] = history_json(report.history)
    outcomes: dict[str, Any] = {}
    if report.sampler:
        outcomes["sampler"] = sampler_json(report.sampler)
    if report.metric:
        outcomes["metric"] = metric_json(report.metric)
    if outcomes:
        asked["what_if"] = outcomes
    return summary_json(report.summary) | asked

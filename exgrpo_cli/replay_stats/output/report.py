"""What `replay-stats` reports of each run: its summary, and what else was asked for."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from exgrpo_cli.base.errors import DamageWarning, InputError
from exgrpo_cli.replay_stats.output.as_json import (
    history_json,
    metric_json,
    plain,
    sampler_json,
    step_json,
    summary_json,
)
from exgrpo_cli.replay_stats.questions import QuestionHistory, question_history
from exgrpo_cli.replay_stats.record import read_run
from exgrpo_cli.replay_stats.step import StepReplay, step_replay
from exgrpo_cli.replay_stats.summary import ReplaySummary, summarise_record
from exgrpo_cli.replay_stats.what_if.metric import MetricOutcome, other_metric
from exgrpo_cli.replay_stats.what_if.policy import parse_what_if, require_questions
from exgrpo_cli.replay_stats.what_if.sampler import SamplerOutcome, other_sampler
from exgrpo_cli.replay_stats.what_if.units import GateOutcome, PriorityOutcome, other_gate, other_priority


@dataclass(frozen=True, kw_only=True, slots=True)
class RunReport:
    """One run's figures; all but the summary only where they were asked for."""

    label: str
    """Shortest end of the run's path that no other run of the report shares."""
    summary: ReplaySummary
    step: StepReplay | None = None
    history: QuestionHistory | None = None
    sampler: SamplerOutcome | None = None
    metric: MetricOutcome | None = None
    priority: PriorityOutcome | None = None
    gate: GateOutcome | None = None

    @property
    def detailed(self) -> bool:
        """Whether something besides the summary was asked for."""
        return any((self.step, self.history, self.sampler, self.metric, self.priority, self.gate))


def report_runs(
    runs: Sequence[Path], *, step: int | None = None, question_id: str = "", what_if: str = ""
) -> list[RunReport]:
    """Summarise every run; besides what `step` replayed, the history of `question_id`, what `what_if` would have drawn.

    Warns (DamageWarning) of what is left out. Raises InputError for what is no run, a step that it has not finished, an
    unknown question or a `what_if` that cannot be read.
    """
    return [
        _report(run, label, step, question_id, what_if, np.random.default_rng(0))
        for run, label in zip(runs, labels(runs), strict=True)
    ]


def _report(
    run: Path, label: str, step: int | None, question_id: str, what_if: str, rng: np.random.Generator
) -> RunReport:
    record = read_run(run)
    if record.incomplete:
        warnings.warn(f"{run}: {record.incomplete}", DamageWarning, stacklevel=2)
    other = parse_what_if(what_if, record.config.replay) if what_if else None
    if other:
        require_questions(record, other)
    return RunReport(
        label=label,
        summary=summarise_record(record),
        step=None if step is None else step_replay(record, step),
        history=question_history(record, question_id) if question_id else None,
        sampler=other_sampler(record, other, rng) if other and other.sampler else None,
        metric=other_metric(record, other, rng) if other and other.metric else None,
        priority=other_priority(record, other.units, rng) if other and other.units else None,
        gate=other_gate(record, other.max_drift) if other and other.max_drift is not None else None,
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
    outcomes = {
        "sampler": report.sampler and sampler_json(report.sampler),
        "metric": report.metric and metric_json(report.metric),
        "priority": report.priority,
        "max_drift": report.gate,
    }
    asked = {
        "step": report.step and step_json(report.step),
        "question": report.history and history_json(report.history),
        "what_if": {name: outcome for name, outcome in outcomes.items() if outcome},
    }
    return summary_json(report.summary) | plain({name: value for name, value in asked.items() if value})

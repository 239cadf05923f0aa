"""What another metric would have chosen: among the candidates of the questions drawn, by that step's measurements."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64, Int64

from exgrpo_cli.replay.drawing.selection import Candidates, Metric, choose, resolve_metric
from exgrpo_cli.replay_stats.entropy import draw_numbers
from exgrpo_cli.replay_stats.record import RunRecord
from exgrpo_cli.replay_stats.what_if.policy import WhatIf, metric_title


@dataclass(frozen=True, kw_only=True, slots=True)
class MetricOutcome:
    """The run's own trajectory choices beside those of another metric."""

    name: str
    direction: str
    title: str
    """Name and direction, as `--metric` writes them."""
    measured: bool
    """Whether the run measured its candidates; otherwise their values are those of birth."""
    draws: int
    share_with_choice: float
    """Share of draws with more candidates than were taken."""
    share_same: float
    """Share of the draws with a choice in which both take the same trajectories."""
    chosen: Mapping[str, float]
    """Means over all draws of `entropy`, `nll`, `num_tokens` and `age` of what the run took."""
    other: Mapping[str, float]
    """The same of what the other metric would have taken."""
    steps: Int64[np.ndarray, " draws"]
    """Steps that replayed something."""
    chosen_by_step: Mapping[str, Float64[np.ndarray, " draws"]]
    """The means of each of them."""
    other_by_step: Mapping[str, Float64[np.ndarray, " draws"]]


def other_metric(record: RunRecord, what_if: WhatIf, rng: np.random.Generator) -> MetricOutcome:
    """Let another metric choose among the candidates of every draw that replayed something."""
    metric = resolve_metric(what_if.metric)
    scores, trajectories = record.scores, record.trajectories
    numbers = draw_numbers(scores, trajectories.question[scores.row])
    order = np.lexsort((scores.row, numbers))
    bounds = np.searchsorted(numbers[order], np.arange(numbers.max(initial=-1) + 2))
    taken, others, with_choice, same = [], [], [], []
    for begin, end in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        rows = order[begin:end]
        chosen = np.flatnonzero(scores.chosen[rows])
        if len(chosen):
            taken += rows[chosen].tolist()
            others += rows[_choose(record, rows, metric, what_if.direction, len(chosen), rng)].tolist()
            with_choice.append(len(rows) > len(chosen))
            same.append(set(taken[-len(chosen) :]) == set(others[-len(chosen) :]))
    own, other = np.array(taken, dtype=np.int64), np.array(others, dtype=np.int64)
    choice = np.array(with_choice, dtype=bool)
    return MetricOutcome(
        name=what_if.metric,
        direction=what_if.direction,
        title=metric_title(what_if),
        measured=record.config.replay.needs_scores,
        draws=len(choice),
        share_with_choice=float(choice.mean()) if len(choice) else float("nan"),
        share_same=float(np.array(same)[choice].mean()) if choice.any() else float("nan"),
        chosen=_means(record, own),
        other=_means(record, other),
        steps=np.unique(scores.step[own]),
        chosen_by_step=_means_by_step(record, own),
        other_by_step=_means_by_step(record, other),
    )


def _choose(
    record: RunRecord,
    rows: Int64[np.ndarray, " candidates"],
    metric: Metric,
    direction: str,
    num: int,
    rng: np.random.Generator,
) -> Int64[np.ndarray, " chosen"]:
    """Positions of the `num` candidates that a metric takes."""
    scores, trajectories = record.scores, record.trajectories
    stored = scores.row[rows]
    candidates = Candidates(
        question_id=record.question_ids[int(trajectories.question[stored[0]])].as_py(),
        trajectory_ids=trajectories.trajectory_id[stored],
        num_tokens=trajectories.num_tokens[stored].astype(np.int32),
        step_born=trajectories.step_born[stored].astype(np.int32),
        born_version=trajectories.weight_version[stored].astype(np.int32),
        entropy=scores.entropy[rows],
        nll=scores.nll[rows],
        measured_version=scores.weight_version[rows].astype(np.int32),
        reward=trajectories.reward[stored].astype(np.float32),
        priority=np.full(len(rows), np.nan),
    )
    return np.array(choose(candidates, metric, direction, rng, num=num), dtype=np.int64)


def _values(record: RunRecord, rows: Int64[np.ndarray, " draws"]) -> dict[str, np.ndarray]:
    scores, trajectories = record.scores, record.trajectories
    stored = scores.row[rows]
    return {
        "entropy": scores.entropy[rows],
        "nll": scores.nll[rows],
        "num_tokens": trajectories.num_tokens[stored],
        "age": scores.step[rows] - trajectories.step_born[stored],
    }


def _means(record: RunRecord, rows: Int64[np.ndarray, " draws"]) -> dict[str, float]:
    values = _values(record, rows)
    return {name: float(column.mean()) if len(column) else float("nan") for name, column in values.items()}


def _means_by_step(record: RunRecord, rows: Int64[np.ndarray, " draws"]) -> dict[str, Float64[np.ndarray, " steps"]]:
    _, steps = np.unique(record.scores.step[rows], return_inverse=True)
    counts = np.bincount(steps)
    return {name: np.bincount(steps, weights=column) / counts for name, column in _values(record, rows).items()}

"""What was replayed: how old, how often, how much of the training it made up.

Axes: `replays` are the trajectories replayed, in order of time, a trajectory as often as it was drawn.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64, Int64

from exgrpo_cli.ledger.columns import EVICTED, SELECTED
from exgrpo_cli.replay_stats.record import RunRecord


@dataclass(frozen=True, kw_only=True, slots=True)
class Replays:
    """All replays of a run."""

    step: Int64[np.ndarray, " replays"]
    question: Int64[np.ndarray, " replays"]
    row: Int64[np.ndarray, " replays"]
    """Row of the trajectory columns."""
    age: Int64[np.ndarray, " replays"]
    """Steps since the trajectory was born."""
    reuse: Int64[np.ndarray, " trajectories"]
    """How often each trajectory ever stored was replayed."""
    evicted: Int64[np.ndarray, " evictions"]
    """Rows of the trajectories that a limit evicted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayShares:
    """How much of a run was replay."""

    steps: int
    """Steps that replayed at least one trajectory."""
    share_of_steps: float
    tokens: int
    """Replayed response tokens; a trajectory's count as often as it was replayed."""
    share_of_tokens: float
    """Of all tokens trained on, in the steps whose metrics are known; NaN when none are."""


def replays(record: RunRecord) -> Replays:
    """The replays of a run with their trajectories."""
    selected = record.events.of(SELECTED)
    rows = record.trajectories.rows_of(selected.trajectory_id)
    evicted = record.events.of(EVICTED).trajectory_id
    return Replays(
        step=selected.step,
        question=selected.question,
        row=rows,
        age=selected.step - record.trajectories.step_born[rows],
        reuse=np.bincount(rows, minlength=len(record.trajectories.trajectory_id)),
        evicted=record.trajectories.rows_of(evicted[evicted >= 0]),
    )


def replay_shares(record: RunRecord, drawn: Replays) -> ReplayShares:
    """Shares of steps and of trained tokens that were replayed."""
    tokens = np.bincount(drawn.step, weights=record.trajectories.num_tokens[drawn.row], minlength=record.last_step + 1)
    num_replays = np.bincount(drawn.step, minlength=record.last_step + 1)
    trained = record.metrics.series("tokens/trained")
    known = np.isfinite(trained) & (record.metrics.steps >= 0)
    replayed_of_known = tokens[record.metrics.steps[known]].sum()
    trained_total = trained[known].sum()
    return ReplayShares(
        steps=int((num_replays > 0).sum()),
        share_of_steps=float((num_replays > 0).sum() / max(record.last_step, 1)),
        tokens=int(tokens.sum()),
        share_of_tokens=float(replayed_of_known / trained_total) if trained_total > 0 else float("nan"),
    )


def mean_by_step(
    steps: Int64[np.ndarray, " rows"], values: Float64[np.ndarray, " rows"] | Int64[np.ndarray, " rows"], last_step: int
) -> Float64[np.ndarray, " steps"]:
    """Mean of the rows of each step 0..last_step, NaN for a step without rows."""
    totals = np.bincount(steps, weights=values, minlength=last_step + 1)
    counts = np.bincount(steps, minlength=last_step + 1)
    return np.divide(totals, counts, out=np.full(last_step + 1, np.nan), where=counts > 0)

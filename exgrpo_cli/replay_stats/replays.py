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


@dataclass(frozen=True, kw_only=True, slots=True)
class Scans:
    """The units scanned in each step; means are NaN in a step without any."""

    scanned: Int64[np.ndarray, " steps"]
    taken: Int64[np.ndarray, " steps"]
    priority: Float64[np.ndarray, " steps"]
    """Mean of those taken."""
    weight: Float64[np.ndarray, " steps"]
    """Mean of those taken."""
    drift: Float64[np.ndarray, " steps"]
    """Mean of those scanned; NaN where nothing was measured."""


def scans(record: RunRecord) -> Scans:
    """How many units each step scanned and took, and what they were like."""
    units, last = record.units, record.last_step
    taken = units.accepted
    return Scans(
        scanned=np.bincount(units.step, minlength=last + 1),
        taken=np.bincount(units.step[taken], minlength=last + 1),
        priority=mean_by_step(units.step[taken], units.priority[taken], last),
        weight=mean_by_step(units.step[taken], units.weight[taken], last),
        drift=mean_by_step(units.step, units.drift, last),
    )


def replays(record: RunRecord) -> Replays:
    """The replays of a run with their trajectories: those selected, or those of accepted units."""
    trajectories, selected = record.trajectories, record.events.of(SELECTED)
    unit_steps, unit_rows = rows_of_units(record, record.units.unit[record.units.accepted])
    steps = np.concatenate([selected.step, record.units.step[record.units.accepted][unit_steps]])
    rows = np.concatenate([trajectories.rows_of(selected.trajectory_id), unit_rows])
    evicted = record.events.of(EVICTED).trajectory_id
    return Replays(
        step=steps,
        question=trajectories.question[rows],
        row=rows,
        age=steps - trajectories.step_born[rows],
        reuse=np.bincount(rows, minlength=len(record.trajectories.trajectory_id)),
        evicted=record.trajectories.rows_of(evicted[evicted >= 0]),
    )


def rows_of_units(
    record: RunRecord, units: Int64[np.ndarray, " units"]
) -> tuple[Int64[np.ndarray, " members"], Int64[np.ndarray, " members"]]:
    """Position among `units` and trajectory row of each of their members, unit by unit."""
    if not record.config.replay.draws_groups:
        return np.arange(len(units)), record.trajectories.rows_of(units)
    # The rows of a visit stand together, in the order of their ids.
    begins = np.searchsorted(record.trajectories.group, units)
    lengths = np.searchsorted(record.trajectories.group, units, side="right") - begins
    which = np.repeat(np.arange(len(units)), lengths)
    within = np.arange(len(which)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    return which, np.repeat(begins, lengths) + within


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

"""Rebuilding the state of a buffer from its tables, a few passes over columns whatever the length of the run.

The state is a function of the rows alone: a question's bucket is that of its last event, a trajectory is live unless it
was evicted, its current entropy is that of its last score.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from jaxtyping import Bool, Float64, Int32, Int64

from exgrpo_cli.ledger.columns import (
    EVICTED,
    MISSING,
    NO_BUCKET,
    READMITTED,
    RETIRED,
    SELECTED,
    EventColumns,
    column,
    decode_events,
    question_numbers,
    stored_names,
)
from exgrpo_cli.ledger.schemas import EVENTS, REPLAYS, SCORES, TRAJECTORIES
from exgrpo_cli.replay.trajectory_index import BORN, NO_QUESTION, ROW

NEVER = -1

ReadTable = Callable[[str, Sequence[str]], pa.Table]
"""Table and columns in, rows out, with question ids and event words dictionary-encoded."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredState:
    """What the rows of a ledger add up to, by question number (position in the ids given) and trajectory id."""

    rows: np.ndarray
    """Index rows, dtype index.ROW; `question` is -1 for evicted ones."""
    success_counts: Int32[np.ndarray, " questions"]
    """Bucket of each question; NO_BUCKET outside the buffer."""
    num_members: Int32[np.ndarray, " questions"]
    retired: Bool[np.ndarray, " questions"]
    last_selected: Int32[np.ndarray, " questions"]
    """Step of the last replay; NEVER where there was none."""
    headroom: Float64[np.ndarray, " trajectories"]
    """Of the unit under each trajectory's number, as last measured; NaN where it was not."""


def rebuild(read: ReadTable, question_ids: Sequence[str]) -> StoredState:
    """The state after all rows that `read` gives. Raises InputError for a question that is not among `question_ids`."""
    known = pa.array(question_ids, type=pa.string())
    events = decode_events(read(EVENTS, stored_names(EventColumns)), known)
    rows = _born(read, known)
    _apply_scores(rows, read)
    rows["question"][events.trajectory_id[events.kind == EVICTED]] = NO_QUESTION

    replays = read(REPLAYS, ("unit_id", "headroom", "accepted"))
    units, measured, accepted = (column(replays, name) for name in replays.column_names)
    headroom = np.full(len(rows), np.nan)
    latest = last_positions(units, len(rows), ~np.isnan(measured))
    headroom[latest >= 0] = measured[latest[latest >= 0]]
    replayed = np.concatenate([events.trajectory_id[events.kind == SELECTED], units[accepted]])
    uses = np.bincount(replayed, minlength=len(rows))
    rows["uses"] = np.minimum(uses, np.iinfo(np.int16).max)

    last = last_positions(events.question, len(question_ids))
    selected, retired, readmitted = (
        last_positions(events.question, len(question_ids), events.kind == kind)
        for kind in (SELECTED, RETIRED, READMITTED)
    )
    return StoredState(
        rows=rows,
        headroom=headroom,
        success_counts=_at(events.bucket, last, NO_BUCKET),
        num_members=_at(events.num_members, last, MISSING),
        retired=retired > readmitted,
        last_selected=_at(events.step, selected, NEVER),
    )


def last_positions(
    keys: Int64[np.ndarray, " rows"],
    size: int,
    where: Bool[np.ndarray, " rows"] | None = None,
) -> Int64[np.ndarray, " keys"]:
    """Row of the last occurrence (among rows `where`) of each key in range(size); -1 where there is none."""
    rows = np.arange(len(keys)) if where is None else np.flatnonzero(where)
    last = np.full(size, -1, dtype=np.int64)
    np.maximum.at(last, keys[rows], rows)
    return last


def _born(read: ReadTable, known: pa.Array) -> np.ndarray:
    """Index rows as they were at birth."""
    table = read(TRAJECTORIES, ("question_id", *dict.fromkeys(BORN.values())))
    rows = np.zeros(len(table), dtype=ROW)
    for name, own in BORN.items():
        rows[name] = column(table, own)
    rows["question"] = question_numbers(table, known)
    return rows


def _apply_scores(rows: np.ndarray, read: ReadTable) -> None:
    """Keep the last measurement of every trajectory that was scored."""
    scores = read(SCORES, ("trajectory_id", "weight_version", "entropy", "nll"))
    last = last_positions(column(scores, "trajectory_id"), len(rows))
    scored = np.flatnonzero(last >= 0)
    for name in ("entropy", "nll", "measured_version"):
        rows[name][scored] = column(scores, BORN[name])[last[scored]]


def _at(
    values: Int64[np.ndarray, " rows"], positions: Int64[np.ndarray, " questions"], missing: int
) -> Int32[np.ndarray, " questions"]:
    found = np.full(len(positions), missing, dtype=np.int32)
    found[positions >= 0] = values[positions[positions >= 0]]
    return found

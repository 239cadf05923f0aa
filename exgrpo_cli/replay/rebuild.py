"""Rebuilding the state of a buffer from its tables, a few passes over columns whatever the length of the run.

The state is a function of the rows alone: a question's bucket is that of its last event, a trajectory is live unless it
was evicted, its current entropy is that of its last score.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from jaxtyping import Bool, Int32, Int64

from exgrpo_cli.errors import InputError
from exgrpo_cli.ledger.schemas import EVENTS, SCORES, TRAJECTORIES, Event
from exgrpo_cli.replay.trajectory_index import ROW

NO_BUCKET = -1
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


def rebuild(read: ReadTable, question_ids: Sequence[str]) -> StoredState:
    """The state after all rows that `read` gives. Raises InputError for a question that is not among `question_ids`."""
    known = pa.array(question_ids, type=pa.string())
    events = read(EVENTS, ("step", "event", "question_id", "trajectory_id", "bucket", "num_members"))
    kind, question = _kinds(events), question_numbers(events, known)
    rows = _born(read, known)
    _apply_scores(rows, read)
    evicted = events.column("trajectory_id").filter(pa.array(kind == _code(Event.EVICTED)))
    rows["question"][evicted.to_numpy()] = -1

    last = last_positions(question, len(question_ids))
    selected = last_positions(question, len(question_ids), kind == _code(Event.SELECTED))
    retired = last_positions(question, len(question_ids), kind == _code(Event.RETIRED))
    readmitted = last_positions(question, len(question_ids), kind == _code(Event.READMITTED))
    return StoredState(
        rows=rows,
        success_counts=_at(_filled(events, "bucket", NO_BUCKET), last, NO_BUCKET),
        num_members=_at(_filled(events, "num_members", 0), last, 0),
        retired=retired > readmitted,
        last_selected=_at(_filled(events, "step", NEVER), selected, NEVER),
    )


def question_numbers(table: pa.Table, known: pa.Array) -> Int32[np.ndarray, " rows"]:
    """Position in `known` of each row's question. Raises InputError where one is not there."""
    dictionary, indices = _encoded(table, "question_id")
    numbers = pc.fill_null(pc.index_in(dictionary, value_set=known), -1).to_numpy()
    found = numbers[indices]
    missing = np.unique(indices[found < 0])
    if len(missing):
        raise InputError(
            f"the ledger holds {len(missing)} questions that are not in this run's question file, "
            f"{dictionary[int(missing[0])].as_py()} first; use the question file it was made with"
        )
    return found


def last_positions(
    keys: Int32[np.ndarray, " rows"] | Int64[np.ndarray, " rows"],
    size: int,
    where: Bool[np.ndarray, " rows"] | None = None,
) -> Int64[np.ndarray, " keys"]:
    """Row of the last occurrence (among rows `where`) of each key in range(size); -1 where there is none."""
    rows = np.arange(len(keys)) if where is None else np.flatnonzero(where)
    last = np.full(size, -1, dtype=np.int64)
    np.maximum.at(last, keys[rows], rows)
    return last


_KINDS = tuple(Event)


def _code(event: Event) -> int:
    return _KINDS.index(event)


def _kinds(events: pa.Table) -> Int32[np.ndarray, " rows"]:
    dictionary, indices = _encoded(events, "event")
    return pc.index_in(dictionary, value_set=pa.array([event.value for event in _KINDS])).to_numpy()[indices]


def _encoded(table: pa.Table, column: str) -> tuple[pa.Array, Int32[np.ndarray, " rows"]]:
    """The words of a dictionary-encoded column and each row's position among them; all chunks share one dictionary."""
    chunks = table.column(column).chunks
    if not chunks:
        return pa.array([], type=pa.string()), np.empty(0, dtype=np.int32)
    return chunks[0].dictionary, np.concatenate([chunk.indices.to_numpy() for chunk in chunks])


def _born(read: ReadTable, known: pa.Array) -> np.ndarray:
    """Index rows as they were at birth."""
    copied = {
        "entropy": "entropy",
        "nll": "nll",
        "token_hash": "token_hash",
        "step_born": "step_born",
        "num_tokens": "num_tokens",
        "born_version": "weight_version",
        "measured_version": "weight_version",
    }
    table = read(TRAJECTORIES, ("question_id", *dict.fromkeys(copied.values())))
    rows = np.zeros(len(table), dtype=ROW)
    for name, column in copied.items():
        rows[name] = table.column(column).to_numpy()
    rows["question"] = question_numbers(table, known)
    return rows


def _apply_scores(rows: np.ndarray, read: ReadTable) -> None:
    """Keep the last measurement of every trajectory that was scored."""
    scores = read(SCORES, ("trajectory_id", "weight_version", "entropy", "nll"))
    last = last_positions(scores.column("trajectory_id").to_numpy(), len(rows))
    scored = np.flatnonzero(last >= 0)
    for name, column in (("entropy", "entropy"), ("nll", "nll"), ("measured_version", "weight_version")):
        rows[name][scored] = scores.column(column).to_numpy()[last[scored]]


def _filled(events: pa.Table, column: str, missing: int) -> Int32[np.ndarray, " rows"]:
    return pc.fill_null(events.column(column), missing).to_numpy()


def _at(
    values: Int32[np.ndarray, " rows"], positions: Int64[np.ndarray, " questions"], missing: int
) -> Int32[np.ndarray, " questions"]:
    found = np.full(len(positions), missing, dtype=np.int32)
    found[positions >= 0] = values[positions[positions >= 0]]
    return found

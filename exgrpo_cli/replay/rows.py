"""Rows of a store in one flat structured array, and their state rebuilt from a ledger's tables.

The state is a function of the tables alone: a question's bucket is that of its last event, a row is live unless it was
evicted, its current entropy is that of its last score.
"""

from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any

import numpy as np
import pyarrow as pa
from jaxtyping import Bool, Int32, Int64

from exgrpo_cli.ledger.columns import (
    EVICTED,
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
from exgrpo_cli.replay.by_question import AWAKE, NO_BUCKET, Candidates, QuestionStates

GONE = -1
"""Stands for the question of a row that was evicted."""
GROWTH = 1.2
"""Factor by which a full array grows: at most a fifth of it is spare."""
ROW = np.dtype(
    [
        ("entropy", np.float64),
        ("nll", np.float64),
        ("token_hash", np.int64),
        ("step_born", np.int32),
        ("born_version", np.int32),
        ("measured_version", np.int32),
        ("num_tokens", np.int32),
        ("advantage", np.float64),
        ("priority", np.float64),
        ("reward", np.float32),
        ("group", np.int32),
        ("success_count", np.int16),
        ("uses", np.int16),
        ("question", np.int32),
    ]
)
"""`question` is GONE once evicted; `group` is the first row of the visit that stored it, so the column never falls;
`priority` is that of its unit, NaN where none has one."""
_RENAMED = {
    "born_version": "weight_version",
    "measured_version": "weight_version",
    "success_count": "k",
    "group": "group_id",
}
BORN = {name: _RENAMED.get(name, name) for name in (ROW.names or ())[:-2]}
"""Fields of ROW that a birth fills -> columns of the ledger's trajectories; a null there is NaN here."""
_born = itemgetter(*BORN.values())

ReadTable = Callable[[str, Sequence[str]], pa.Table]
"""Table and columns in, rows out, with question ids and event words dictionary-encoded."""


class StoredRows:
    """All rows ever stored, by trajectory id; live are those that were not evicted."""

    def __init__(self, rows: np.ndarray, num_questions: int) -> None:
        """`rows` (dtype ROW) are the trajectories 0, 1, 2, ... of a ledger."""
        self._rows = rows
        self._size = len(rows)
        self._live = np.flatnonzero(rows["question"] != GONE)
        self._seen, self._evicted = self._size, False
        owners = rows["question"][self._live]
        self.held: Int32[np.ndarray, " questions"] = np.bincount(owners, minlength=num_questions).astype(np.int32)
        """Live rows of each question."""

    def __len__(self) -> int:
        """Rows ever stored, evicted ones included: the next id."""
        return self._size

    @property
    def all(self) -> np.ndarray:
        """Every row, to be read and written."""
        return self._rows[: self._size]

    @property
    def nbytes(self) -> int:
        """Memory in bytes."""
        return self._rows.nbytes + self._live.nbytes + self.held.nbytes

    def add(self, question: int, born: Mapping[str, Any]) -> None:
        """Append a row of a question as the ledger tells its birth, measured by the weights that sampled it."""
        if self._size == len(self._rows):
            grown = np.zeros(max(1024, int(GROWTH * self._size)), dtype=ROW)
            grown[: self._size] = self._rows
            self._rows = grown
        self._rows[self._size] = (*_born(born), 0, question)
        self.held[question] += 1
        self._size += 1

    def live(self) -> Int64[np.ndarray, " live"]:
        """Rows that were not evicted, in ascending order; costs what lived at the last call and came since."""
        if self._seen < self._size:
            self._live = np.concatenate([self._live, np.arange(self._seen, self._size)])
        if self._evicted:
            self._live = self._live[self._rows["question"][self._live] != GONE]
        self._seen, self._evicted = self._size, False
        return self._live

    def units(self, retired: Bool[np.ndarray, " questions"], *, groups: bool) -> Int64[np.ndarray, " units"]:
        """Numbers of the units (rows, or groups) of questions that are not retired, in ascending order."""
        live = self.live()
        if retired.any():
            live = live[~retired[self._rows["question"][live]]]
        return live[self._rows["group"][live] == live] if groups else live

    def by_question(self, questions: Sequence[int]) -> dict[int, Int64[np.ndarray, " own"]]:
        """The live rows of each of the questions, in ascending order: one pass for all of them."""
        wanted = np.zeros(len(self.held), dtype=bool)
        wanted[questions] = True
        live = self.live()
        ids = live[wanted[self._rows["question"][live]]]
        owners = self._rows["question"][ids]
        order = np.argsort(owners, kind="stable")
        numbers = np.unique(np.asarray(questions, dtype=np.int64))
        parts = np.split(ids[order], np.searchsorted(owners[order], numbers[1:]))
        return dict(zip(numbers.tolist(), parts, strict=False))

    def born_before(self, step: int) -> Int64[np.ndarray, " old"]:
        """Live rows born before `step`, oldest first."""
        # Ids are in order of birth.
        live = self.live()
        return live[: int(np.searchsorted(self._rows["step_born"][live], step))]

    def question_of(self, trajectory_id: int) -> int:
        """The question of a row, GONE once it is evicted."""
        return int(self._rows["question"][trajectory_id])

    def of_group(self, group: int) -> list[int]:
        """The live rows of a visit, which stand together."""
        end = int(np.searchsorted(self.all["group"], group, side="right"))
        return (group + np.flatnonzero(self._rows["question"][group:end] != GONE)).tolist()

    def evict(self, trajectory_id: int) -> int:
        """Drop a live row; returns its question."""
        question = self.question_of(trajectory_id)
        self.held[question] -= 1
        self._rows["question"][trajectory_id] = GONE
        self._evicted = True
        return question

    def measure(self, candidates: Candidates) -> None:
        """Keep the latest measurements of a question's rows."""
        for name in ("entropy", "nll", "measured_version"):
            self._rows[name][candidates.trajectory_ids] = getattr(candidates, name)

    def use(self, trajectory_id: int) -> int:
        """Count a replay; returns how many there have been."""
        uses = min(int(self._rows["uses"][trajectory_id]) + 1, np.iinfo(np.int16).max)
        self._rows["uses"][trajectory_id] = uses
        return uses


def rebuild(
    read: ReadTable, question_ids: Sequence[str], *, cooldown: int = 0, remeasured: bool = False
) -> tuple[np.ndarray, QuestionStates]:
    """Rows and question states after all that `read` gives.

    Questions rest for `cooldown` steps after a replay; with `remeasured` a unit's priority is its last headroom, where
    it was measured. Raises InputError for a question that is not among `question_ids`.
    """
    states = QuestionStates(question_ids)
    known = pa.array(states.ids, type=pa.string())
    events = decode_events(read(EVENTS, stored_names(EventColumns)), known)
    rows = _born_rows(read, known)
    rows["question"][events.trajectory_id[events.kind == EVICTED]] = GONE

    scores = read(SCORES, ("trajectory_id", "weight_version", "entropy", "nll"))
    _keep_last(rows, column(scores, "trajectory_id"), {name: column(scores, BORN[name]) for name in _MEASURED})
    replays = read(REPLAYS, ("unit_id", "headroom", "accepted"))
    units, headroom, accepted = (column(replays, name) for name in replays.column_names)
    if remeasured:
        measured = ~np.isnan(headroom)
        _keep_last(rows, units[measured], {"priority": headroom[measured]})
    used = np.concatenate([events.trajectory_id[events.kind == SELECTED], units[accepted]])
    rows["uses"] = np.minimum(np.bincount(used, minlength=len(rows)), np.iinfo(np.int16).max)

    size = len(states.ids)
    selected, retired, readmitted = (
        last_positions(events.question, size, events.kind == kind) for kind in (SELECTED, RETIRED, READMITTED)
    )
    last = last_positions(events.question, size)
    states.success_counts[:] = _at(events.bucket, last, NO_BUCKET)
    states.num_members[:] = np.where(states.success_counts == NO_BUCKET, 0, _at(events.num_members, last, 0))
    states.retired[:] = retired > readmitted
    if cooldown:
        states.rests_until[:] = _at(events.step + cooldown, selected, AWAKE)
    return rows, states


_MEASURED = ("entropy", "nll", "measured_version")


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


def _born_rows(read: ReadTable, known: pa.Array) -> np.ndarray:
    """Rows as they were at birth."""
    table = read(TRAJECTORIES, ("question_id", *dict.fromkeys(BORN.values())))
    rows = np.zeros(len(table), dtype=ROW)
    for name, own in BORN.items():
        rows[name] = column(table, own)
    rows["question"] = question_numbers(table, known)
    return rows


def _keep_last(rows: np.ndarray, ids: Int64[np.ndarray, " some"], values: Mapping[str, np.ndarray]) -> None:
    """Set columns of the rows `ids` to the last of the values given for each."""
    last = last_positions(ids, len(rows))
    found = np.flatnonzero(last >= 0)
    for name, own in values.items():
        rows[name][found] = own[last[found]]


def _at(
    values: Int64[np.ndarray, " rows"], positions: Int64[np.ndarray, " questions"], missing: int
) -> Int64[np.ndarray, " questions"]:
    found = np.full(len(positions), missing, dtype=np.int64)
    found[positions >= 0] = values[positions[positions >= 0]]
    return found

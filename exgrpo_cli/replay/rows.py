"""Rows and questions of a store in flat arrays, what a visit brings, and the state rebuilt from a ledger's tables.

The state is a function of the tables alone: a question's bucket is that of its last event, a row is live unless it was
evicted, its current entropy is that of its last score.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256

import numpy as np
import pyarrow as pa
from jaxtyping import Bool, Float32, Int32, Int64

from exgrpo_cli.ledger import columns as ledger
from exgrpo_cli.ledger.schemas import EVENTS, REPLAYS, SCHEMAS, SCORES, TRAJECTORIES
from exgrpo_cli.replay.by_question import Bucket
from exgrpo_cli.replay.place import Place

GONE = -1
"""Stands for the question of a row that was evicted."""
AWAKE = -1
"""Stands for the last step of rest of a question that does not rest."""
GROWTH = 1.2
"""Factor by which full arrays grow: at most a fifth of them is spare."""
BORN = {
    **dict.fromkeys(("entropy", "nll", "advantage", "priority"), np.float64),
    **dict.fromkeys(("step_born", "weight_version", "num_tokens", "group_id"), np.int32),
    **{"token_hash": np.int64, "reward": np.float32, "correct": np.bool_, "k": np.int16},
}
"""Columns that a birth fills, named as in the ledger's trajectories, whose nulls are NaN here. `group_id` is the first
row of the visit that stored it, so it never falls; `priority` is that of its unit."""
ROW = BORN | {"measured_version": np.int32, "question": np.int32, "uses": np.int16}
"""All columns: with the weight version of its last measurement, its question (GONE once evicted) and its replays."""

ReadTable = Callable[[str, Sequence[str]], pa.Table]
"""Table and columns in, rows out, with question ids and event words dictionary-encoded."""


class Rows:
    """All rows ever stored, by trajectory id, in one array a column; live are those that were not evicted."""

    def __init__(self, columns: Mapping[str, np.ndarray], num_questions: int) -> None:
        """`columns` (of ROW) are of the trajectories 0, 1, 2, ... of a ledger."""
        self._columns, self._size = columns, len(columns["question"])
        self._live = np.flatnonzero(columns["question"] != GONE)
        self._seen, self._evicted = self._size, False
        self.held = np.bincount(columns["question"][self._live], minlength=num_questions)
        """Live rows of each question."""

    def __len__(self) -> int:
        """Rows ever stored, evicted ones included: the next id."""
        return self._size

    def __getitem__(self, name: str) -> np.ndarray:
        """A column, to be read and written."""
        return self._columns[name][: self._size]

    def add(self, question: int, born: Mapping[str, float]) -> int:
        """Append a row of a question, measured by the weights that sampled it; returns its id."""
        if self._size == len(self._columns["question"]):
            spare = max(1024, int((GROWTH - 1) * self._size))
            self._columns = {name: np.append(own, np.zeros(spare, own.dtype)) for name, own in self._columns.items()}
        row = {**born, "measured_version": born["weight_version"], "question": question, "uses": 0}
        for name, value in row.items():
            self._columns[name][self._size] = value
        self.held[question] += 1
        self._size += 1
        return self._size - 1

    def evict(self, trajectory_id: int) -> int:
        """Drop a live row; returns its question."""
        question = int(self["question"][trajectory_id])
        self.held[question] -= 1
        self["question"][trajectory_id] = GONE
        self._evicted = True
        return question

    def live(self) -> Int64[np.ndarray, " live"]:
        """Rows that were not evicted, in ascending order; costs what lived at the last call and came since."""
        if self._seen < self._size:
            self._live = np.concatenate([self._live, np.arange(self._seen, self._size)])
        if self._evicted:
            self._live = self._live[self["question"][self._live] != GONE]
        self._seen, self._evicted = self._size, False
        return self._live

    def units(self, retired: Bool[np.ndarray, " questions"], *, groups: bool) -> Int64[np.ndarray, " units"]:
        """Numbers of the units (rows, or groups) of questions that are not retired, in ascending order."""
        live = self.live()
        if retired.any():
            live = live[~retired[self["question"][live]]]
        return live[self["group_id"][live] == live] if groups else live

    def members(self, units: Int64[np.ndarray, " units"], *, groups: bool) -> list[range]:
        """The rows of each unit; those of a group, which its first row gives the number, stand together."""
        ends = np.searchsorted(self["group_id"], units.astype(np.int32), side="right") if groups else units + 1
        return [range(begin, end) for begin, end in zip(units.tolist(), ends.tolist(), strict=True)]

    def of_questions(self, questions: Sequence[int]) -> list[Int64[np.ndarray, " own"]]:
        """The live rows of each of the questions, in ascending order: one pass for all of them."""
        wanted, live = np.zeros(len(self.held), dtype=bool), self.live()
        wanted[list(questions)] = True
        some = live[wanted[self["question"][live]]]
        owners = self["question"][some]
        return [some[owners == question] for question in questions]


class Questions:
    """Bucket, rest and retirement of every question, in flat arrays by its number: the rank of its id among all.

    A question has a bucket exactly while it is in the buffer: it has live rows and is not retired. Drawable are those
    that do not rest after a replay.
    """

    def __init__(self, question_ids: Collection[str]) -> None:
        self.ids = np.array(sorted(question_ids), dtype=object)
        self.numbers: dict[str, int] = dict(zip(self.ids.tolist(), range(len(self.ids)), strict=True))
        size = len(self.ids)
        self.success_counts: Int32[np.ndarray, " questions"] = np.full(size, ledger.NO_BUCKET, dtype=np.int32)
        """Latest success count; NO_BUCKET outside the buffer."""
        self.num_members: Int32[np.ndarray, " questions"] = np.zeros(size, dtype=np.int32)
        self.retired: Bool[np.ndarray, " questions"] = np.zeros(size, dtype=bool)
        self.rests_until: Int32[np.ndarray, " questions"] = np.full(size, AWAKE, dtype=np.int32)
        """Last step at which a question may not be drawn."""

    def bucket(self, question: int) -> tuple[int, int] | None:
        """Latest success count of a question, and out of how many members; None where it is in no bucket."""
        count = int(self.success_counts[question])
        return None if count == ledger.NO_BUCKET else (count, int(self.num_members[question]))

    def move(self, question: int, bucket: tuple[int, int] | None) -> None:
        """Put a question into a bucket, or take it out of the buffer (None)."""
        self.success_counts[question], self.num_members[question] = bucket or (ledger.NO_BUCKET, 0)

    def drawable(self, step: int) -> list[Bucket]:
        """Non-empty buckets in ascending order, each with its drawable questions in the order of their ids."""
        questions = np.flatnonzero((self.success_counts != ledger.NO_BUCKET) & (self.rests_until < step))
        most = int(self.num_members.max(initial=0)) + 1
        keys = self.success_counts[questions] * most + self.num_members[questions]
        found = {key: self.ids[questions[keys == key]].tolist() for key in np.flatnonzero(np.bincount(keys)).tolist()}
        return [
            Bucket(success_count=key // most, num_members=key % most, question_ids=own) for key, own in found.items()
        ]


RESTING = {False: (ledger.SELECTED,), True: (ledger.SELECTED, ledger.COLLECTED)}
"""Kinds of events after which a question rests, by `rests_when_stored`."""


def rebuild(
    read: ReadTable, question_ids: Collection[str], rules: Place | None = None, keeps_headroom: bool = False
) -> tuple[Rows, Questions]:
    """Rows and questions after all that `read` gives.

    Questions rest by the `rules`; with `keeps_headroom` a unit's priority is its last headroom.
    Raises InputError for a question that is not among `question_ids`.
    """
    questions = Questions(question_ids)
    known = pa.array(questions.ids, type=pa.string())
    events = ledger.decode_events(read(EVENTS, SCHEMAS[EVENTS].names), known)
    born = read(TRAJECTORIES, ("question_id", *BORN))
    rows: dict[str, np.ndarray] = {name: ledger.column(born, name).astype(kind) for name, kind in BORN.items()}
    rows["question"] = ledger.question_numbers(born, known).astype(np.int32)
    rows["question"][events.trajectory_id[events.kind == ledger.EVICTED]] = GONE

    # Of several values for one place the last is assigned last, and stays.
    rows["measured_version"] = rows["weight_version"].copy()
    scores = read(SCORES, ("trajectory_id", "weight_version", "entropy", "nll"))
    for name, measured in (("entropy", "entropy"), ("nll", "nll"), ("measured_version", "weight_version")):
        rows[name][ledger.column(scores, "trajectory_id")] = ledger.column(scores, measured)
    replays = read(REPLAYS, ("unit_id", "headroom", "accepted"))
    units, headroom, accepted = (ledger.column(replays, name) for name in replays.column_names)
    renewed = np.isfinite(headroom) & keeps_headroom
    rows["priority"][units[renewed]] = headroom[renewed]
    selected = events.of(ledger.SELECTED)
    used = np.concatenate([selected.trajectory_id, units[accepted]])
    rows["uses"] = np.bincount(used, minlength=len(born)).astype(np.int16)

    questions.success_counts[events.question] = events.bucket
    questions.num_members[events.question] = np.maximum(events.num_members, 0)
    turned = np.isin(events.kind, (ledger.RETIRED, ledger.READMITTED))
    questions.retired[events.question[turned]] = events.kind[turned] == ledger.RETIRED
    if rules and rules.cooldown:
        rest = np.isin(events.kind, RESTING[rules.rests_when_stored])
        questions.rests_until[events.question[rest]] = events.step[rest] + rules.cooldown
    return Rows(rows, len(questions.ids)), questions


@dataclass(frozen=True, kw_only=True, slots=True)
class FreshRow:
    """A fresh rollout that its visit may store."""

    token_ids: Int32[np.ndarray, " tokens"]
    behaviour_logprobs: Float32[np.ndarray, " tokens"]
    """The very array that serves as pi_old in this step."""
    entropy: float
    """Mean token entropy under the policy that sampled it, in nats; NaN where it was not measured."""
    nll: float
    """Mean negative log-likelihood under that policy, in nats; NaN where the log-probs are, which were not recorded."""
    reward: float = 1.0
    correct: bool = True
    parts: Mapping[str, float] = field(default_factory=dict)
    """Parts of the reward by name, as its graders tell them."""
    advantage: float = math.nan
    """As this step trains on it; NaN where it was not recorded."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Visit:
    """One graded group."""

    question_id: str
    step: int
    weight_version: int
    success_count: int
    """k over the members that count: all K where replayed rows stand in for some, else the fresh ones."""
    num_fresh_successes: int
    """Successes among the fresh members."""
    num_replayed: int
    """Members of the group that stored rows stood in for."""
    verifier_failed: bool
    """A verdict was a timeout or a crash: k is then a lower bound."""
    rows: Sequence[FreshRow]
    """The fresh members; those that are not correct may be left out where only successes are stored."""
    num_members: int | None = None
    """Members that count, where they are neither K nor what replay left of K: a visit of another program."""
    alpha: float | None = None
    beta: float | None = None
    """Discounted successes and failures of the question after this visit, where a run keeps its history."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreCounts:
    """Sizes of a store."""

    num_questions: int
    """Questions in the buffer, resting ones included."""
    num_trajectories: int
    """Trajectories of the questions in the buffer."""
    num_retired: int
    buckets: dict[int, int]
    """Buffered questions by latest success count; empty buckets are absent."""


def token_hash(token_ids: Int32[np.ndarray, " tokens"]) -> int:
    """64-bit fingerprint of a response (the start of its SHA-256), by which a question's exact duplicates are known.

    Two responses of one question that differ share it once in 10^19 pairs or so.
    """
    return int.from_bytes(sha256(np.ascontiguousarray(token_ids).data).digest()[:8], "little", signed=True)

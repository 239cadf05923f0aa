"""The index: what memory keeps of every trajectory, 76 bytes each, in lists per question.

Bodies stay on disk. A question's trajectories are linked newest first, so collecting, evicting and listing the
candidates of a question cost what that question holds, whatever the size of the buffer.
"""

from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any

import numpy as np
from jaxtyping import Float64, Int32, Int64

from exgrpo_cli.replay.drawing.selection import Candidates

_NONE = -1
NO_QUESTION = -1
"""Stands for the question of a trajectory that is no longer live."""

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
        ("previous", np.int32),
    ]
)
"""`question` is -1 once evicted; `previous` is the question's next older trajectory, or -1.
`group` is the first trajectory of the visit that stored it; `priority` is that of its unit, NaN where none has one."""


_RENAMED = {
    "born_version": "weight_version",
    "measured_version": "weight_version",
    "success_count": "k",
    "group": "group_id",
}
BORN = {name: _RENAMED.get(name, name) for name in (ROW.names or ())[:-3]}
"""Fields of ROW that a birth fills -> columns of the ledger's trajectories; a null there is NaN here."""
_born = itemgetter(*BORN.values())


class TrajectoryIndex:
    """All trajectories ever stored, by id, and for each question the live ones."""

    def __init__(self, num_questions: int, rows: np.ndarray | None = None) -> None:
        """`rows` (dtype ROW, `previous` filled in here) are the trajectories 0, 1, 2, ... of a ledger."""
        self._head: Int32[np.ndarray, " questions"] = np.full(num_questions, _NONE, dtype=np.int32)
        self._count: Int32[np.ndarray, " questions"] = np.zeros(num_questions, dtype=np.int32)
        self._rows = np.zeros(0, dtype=ROW) if rows is None else rows
        self._size = len(self._rows)
        self._expired = 0
        self._link()

    def __len__(self) -> int:
        """Trajectories ever stored, evicted ones included: the next id."""
        return self._size

    @property
    def nbytes(self) -> int:
        """Memory in bytes."""
        return self._rows.nbytes + self._head.nbytes + self._count.nbytes

    def count(self, question: int) -> int:
        """Live trajectories of a question."""
        return int(self._count[question])

    def counts(self) -> Int32[np.ndarray, " questions"]:
        """Live trajectories by question."""
        return self._count

    def question_of(self, trajectory_id: int) -> int:
        """The question of a trajectory, -1 once it is evicted."""
        return int(self._rows["question"][trajectory_id])

    def add(self, question: int, born: Mapping[str, Any]) -> None:
        """Append a trajectory as its row of the ledger tells its birth, measured by the weights that sampled it."""
        if self._size == len(self._rows):
            grown = np.zeros(max(1024, 2 * self._size), dtype=ROW)
            grown[: self._size] = self._rows
            self._rows = grown
        trajectory_id = self._size
        self._rows[trajectory_id] = (*_born(born), 0, question, self._head[question])
        self._head[question] = trajectory_id
        self._count[question] += 1
        self._size += 1

    def evict(self, trajectory_id: int) -> None:
        """Take a live trajectory off its question's list."""
        question, previous = self._rows["question"], self._rows["previous"]
        owner = question[trajectory_id]
        if self._head[owner] == trajectory_id:
            self._head[owner] = previous[trajectory_id]
        else:
            newer = self._head[owner]
            while previous[newer] != trajectory_id:
                newer = previous[newer]
            previous[newer] = previous[trajectory_id]
        self._count[owner] -= 1
        question[trajectory_id] = _NONE

    def born_before(self, step: int) -> list[int]:
        """Live trajectories born before `step`, oldest first, each looked at only once over all calls."""
        # Ids are in order of birth, so those over age are a prefix, and the part of it seen before is evicted.
        born = self._rows["step_born"][: self._size]
        end = max(self._expired, int(np.searchsorted(born, step)))
        begin, self._expired = self._expired, end
        return (begin + np.flatnonzero(self._rows["question"][begin:end] != _NONE)).tolist()

    def ids(self, question: int) -> list[int]:
        """Live trajectories of a question, in ascending order."""
        previous, found = self._rows["previous"], []
        trajectory_id = int(self._head[question])
        while trajectory_id != _NONE:
            found.append(trajectory_id)
            trajectory_id = int(previous[trajectory_id])
        return found[::-1]

    def column(self, name: str, trajectory_ids: Sequence[int] | Int64[np.ndarray, " some"]) -> np.ndarray:
        """One column of ROW of some trajectories."""
        return self._rows[name][np.asarray(trajectory_ids, dtype=np.int64)]

    def by_hash(self, question: int) -> dict[int, list[int]]:
        """Live trajectories of a question by the fingerprint of their tokens."""
        found: dict[int, list[int]] = {}
        ids = self.ids(question)
        for trajectory_id, token_hash in zip(ids, self._rows["token_hash"][ids].tolist(), strict=True):
            found.setdefault(token_hash, []).append(trajectory_id)
        return found

    def candidates(self, question: int, question_id: str) -> Candidates:
        """A question's live trajectories with what selection may ask of them."""
        ids = np.array(self.ids(question), dtype=np.int64)
        rows = self._rows[ids]
        return Candidates(
            question_id=question_id,
            trajectory_ids=ids,
            **{name: rows[name].copy() for name in Candidates.MEASURES},
        )

    def measure(
        self,
        trajectory_ids: Int64[np.ndarray, " candidates"],
        *,
        entropy: np.ndarray,
        nll: np.ndarray,
        measured_version: np.ndarray,
    ) -> None:
        """Keep the latest measurements of some trajectories."""
        self._rows["entropy"][trajectory_ids] = entropy
        self._rows["nll"][trajectory_ids] = nll
        self._rows["measured_version"][trajectory_ids] = measured_version

    def group_of(self, trajectory_id: int) -> int:
        """The first trajectory of the visit that stored this one."""
        return int(self._rows["group"][trajectory_id])

    def group_members(self, group: int) -> list[int]:
        """The live trajectories of a visit, which stand together."""
        group_of, question = self._rows["group"], self._rows["question"]
        end = group
        while end < self._size and group_of[end] == group:
            end += 1
        return (group + np.flatnonzero(question[group:end] != _NONE)).tolist()

    def priorities(
        self, trajectory_ids: Int64[np.ndarray, " some"]
    ) -> tuple[Float64[np.ndarray, " some"], Float64[np.ndarray, " some"]]:
        """Priority and step of birth of the units under these numbers."""
        return self._rows["priority"][trajectory_ids], self._rows["step_born"][trajectory_ids].astype(np.float64)

    def set_priorities(
        self, trajectory_ids: Int64[np.ndarray, " some"], priorities: Float64[np.ndarray, " some"]
    ) -> None:
        """Give trajectories new priorities."""
        self._rows["priority"][trajectory_ids] = priorities

    def use(self, trajectory_id: int) -> int:
        """Count a replay; returns how many there have been."""
        uses = min(int(self._rows["uses"][trajectory_id]) + 1, np.iinfo(np.int16).max)
        self._rows["uses"][trajectory_id] = uses
        return uses

    def sums(self, units: Int64[np.ndarray, " some"], *, groups: bool) -> dict[str, np.ndarray]:
        """What is known of units (rows, or groups under their first row), the sums and means over their rows."""
        first = self._rows[units]
        rewards, advantages, tokens = (
            first["reward"].astype(np.float64),
            np.abs(first["advantage"]),
            first["num_tokens"],
        )
        if groups:
            members = [self._rows[self.group_members(unit)] for unit in units.tolist()]
            rewards = np.array([rows["reward"].mean(dtype=np.float64) for rows in members])
            advantages = np.array([np.abs(rows["advantage"]).mean() for rows in members])
            tokens = np.array([rows["num_tokens"].sum() for rows in members])
        return {
            "step": first["step_born"].astype(np.int64),
            "version": first["born_version"].astype(np.int64),
            "uses": first["uses"].astype(np.int64),
            "k": first["success_count"].astype(np.int64),
            "reward": rewards,
            "advantage": advantages,
            "tokens": tokens.astype(np.int64),
        }

    def _link(self) -> None:
        """Build every question's list at once from the `question` column."""
        question = self._rows["question"]
        live = np.flatnonzero(question != _NONE)
        by_question = live[np.argsort(question[live], kind="stable")]
        owners = question[by_question]
        same = owners[1:] == owners[:-1]
        self._rows["previous"] = _NONE
        self._rows["previous"][by_question[1:][same]] = by_question[:-1][same]
        last = np.flatnonzero(np.append(~same, True)) if len(owners) else np.empty(0, dtype=np.int64)
        self._head[owners[last]] = by_question[last]
        self._count += np.bincount(owners, minlength=len(self._count)).astype(np.int32)

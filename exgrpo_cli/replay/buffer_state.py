"""The state of a buffer and the elementary changes to it, each logged as an event of the ledger.

Whatever changes here can be replayed from the rows it leaves: `BufferState` built from a ledger's catalogue equals the
one that lived through the run.
"""

import math
from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from exgrpo_cli.base.errors import InputError, RunError
from exgrpo_cli.base.types import Trajectory
from exgrpo_cli.config.sections.replay import ReplaySettings
from exgrpo_cli.ledger.columns import NO_BUCKET
from exgrpo_cli.ledger.parts import Body, Catalogue, DamagedBytes, PartInfo
from exgrpo_cli.ledger.reader import BodyStore, read_rows
from exgrpo_cli.ledger.schemas import BODIES, EVENTS, NO_LOGPROBS, REPLAYS, VISITS, Event
from exgrpo_cli.ledger.writer import LedgerWriter
from exgrpo_cli.replay.drawing.units import DrawnUnit, ScannedUnit, UnitStore
from exgrpo_cli.replay.question_states import BucketKey, QuestionStates
from exgrpo_cli.replay.rebuild import NEVER, StoredState, rebuild
from exgrpo_cli.replay.trajectory_index import TrajectoryIndex
from exgrpo_cli.replay.visits import FreshRow, Visit


class BufferState:
    """Questions, index of trajectories, and access to their bodies."""

    def __init__(
        self, catalogue: Catalogue, writer: LedgerWriter, question_ids: Sequence[str], rules: ReplaySettings
    ) -> None:
        """Take on what the ledger's rows add up to. Raises InputError for a stored question that is not in the ids."""

        def read(table: str, columns: Sequence[str]) -> pa.Table:
            return read_rows(table, catalogue.parts[table], columns, dictionary=True)

        self._writer = writer
        self._rules = rules
        self.questions = QuestionStates(question_ids)
        stored = rebuild(read, self.questions.ids)
        if rules.priority == "headroom":
            stored.rows["priority"] = np.where(np.isnan(stored.headroom), stored.rows["priority"], stored.headroom)
        self.index = TrajectoryIndex(len(self.questions.ids), stored.rows)
        self._bodies = BodyStore(catalogue.parts[BODIES])
        self.questions.restore(
            success_counts=stored.success_counts, num_members=stored.num_members, retired=stored.retired
        )
        self.num_trajectories = int(self.index.counts()[stored.success_counts != NO_BUCKET].sum())
        """Live trajectories of the questions in the buffer."""
        self.units = self._units(stored) if rules.keeps_units else None
        """Present where units are drawn by priority, or counted against a capacity."""
        until = stored.last_selected + rules.cooldown
        resting = np.flatnonzero((stored.last_selected != NEVER) & (until > catalogue.last_step))
        for question in resting[np.argsort(until[resting], kind="stable")].tolist():
            self.questions.rest(question, int(until[question]))

    def _units(self, stored: StoredState) -> UnitStore:
        owner = stored.rows["question"]
        live = np.flatnonzero((owner >= 0) & ~stored.retired[owner])
        groups = self._rules.draws_groups
        units = np.unique(stored.rows["group"][live]).astype(np.int64) if groups else live
        return UnitStore(self._rules, self.index, self.questions.ids, units, groups=groups)

    def bodies(self, trajectory_ids: Sequence[int]) -> list[Body]:
        """Copies of stored bodies, flushed or not. Raises RunError naming the file where one is damaged."""
        try:
            stored = iter(self._bodies.read([i for i in trajectory_ids if not self._writer.is_pending(i)]))
        except DamagedBytes as error:
            raise RunError(f"{error}; restore the file from a copy, then go on with --resume") from error
        return [self._writer.pending_body(i) if self._writer.is_pending(i) else next(stored) for i in trajectory_ids]

    def begin(self, step: int) -> None:
        """Let rested questions be drawn again and evict what is over age; idempotent within a step."""
        self.questions.wake(step)
        if self._rules.max_age:
            for trajectory_id in self.index.born_before(step - self._rules.max_age):
                self.evict(step, trajectory_id)

    def number(self, question_id: str) -> int:
        """Number of a question. Raises InputError for one that is not of the run's question file."""
        if question_id not in self.questions:
            raise InputError(f"question {question_id} is not in the question file of this run")
        return self.questions.number(question_id)

    def trajectories(self, trajectory_ids: Sequence[int]) -> list[Trajectory]:
        """Live trajectories with their bodies, bit for bit as they were recorded."""
        names = ("question", "step_born", "born_version", "reward", "advantage")
        columns = [self.index.column(name, trajectory_ids).tolist() for name in names]
        return [
            Trajectory(
                trajectory_id=int(trajectory_id),
                question_id=self.questions.ids[question],
                token_ids=token_ids,
                behaviour_logprobs=logprobs,
                step_born=step_born,
                weight_version=version,
                reward=reward,
                advantage=advantage,
            )
            for trajectory_id, (token_ids, logprobs), question, step_born, version, reward, advantage in zip(
                trajectory_ids, self.bodies(trajectory_ids), *columns, strict=True
            )
        ]

    def add_part(self, part: PartInfo) -> None:
        """Find the bodies of a part that was just closed."""
        self._bodies.add(part)

    def collect(
        self, visit: Visit, question: int, row: FreshRow, token_hash: int, *, group: int | None, priority: float
    ) -> int:
        """Store a trajectory of a question that has a bucket, and return its id; `group` is None for a visit's first.

        Its unit is drawn once `admit` has taken it in.
        """
        trajectory_id = len(self.index)
        born = {
            "trajectory_id": trajectory_id,
            "question_id": visit.question_id,
            "step_born": visit.step,
            "weight_version": visit.weight_version,
            "k": visit.success_count,
            "num_tokens": len(row.token_ids),
            "entropy": float(row.entropy),
            "nll": float(row.nll),
            "logprob_source": NO_LOGPROBS if math.isnan(row.nll) else self._writer.identity.logprob_source,
            "token_hash": token_hash,
            "reward": row.reward,
            "advantage": _known(row.advantage),
            "priority": _known(priority),
            "group_id": trajectory_id if group is None else group,
        }
        self.index.add(question, born)
        self.num_trajectories += 1
        self._writer.append_trajectory((row.token_ids, row.behaviour_logprobs), born)
        self._log(visit.step, Event.COLLECTED, question, trajectory_id)
        return trajectory_id

    def admit(self, trajectory_ids: Sequence[int]) -> None:
        """Let the units of trajectories that were just collected be drawn."""
        if self.units is not None:
            self.units.add(list(dict.fromkeys(map(self.units.unit_of, trajectory_ids))))

    def note_visit(self, visit: Visit, key: BucketKey) -> None:
        """Log a graded group, whatever becomes of it."""
        self._writer.append(
            VISITS,
            {
                "step": visit.step,
                "question_id": visit.question_id,
                "k": key.success_count,
                "num_fresh_successes": visit.num_fresh_successes,
                "num_members": key.num_members,
                "verifier_failed": visit.verifier_failed,
                "alpha": visit.alpha,
                "beta": visit.beta,
            },
        )

    def enter(self, question: int, key: BucketKey) -> None:
        """Give a bucket to a question that is about to store its first trajectory; the collection logs it."""
        self.questions.place(question, key)

    def move(self, step: int, question: int, key: BucketKey) -> None:
        """Put a question into the bucket of its latest visit."""
        self.questions.place(question, key)
        self._log(step, Event.MOVED, question)

    def select(self, step: int, trajectory_id: int) -> None:
        """Note a replay; its question rests for the cool-down."""
        question = self.index.question_of(trajectory_id)
        self._log(step, Event.SELECTED, question, trajectory_id)
        if self._rules.cooldown:
            self.questions.rest(question, step + self._rules.cooldown)
        self._use(step, trajectory_id, [trajectory_id])

    def replay_unit(self, step: int, drawn: DrawnUnit, verdict: ScannedUnit) -> None:
        """Note that a drawn unit was scanned, keep its headroom as measured, and count its use where it was taken."""
        assert self.units is not None
        unit = drawn.unit_id
        members = self.units.members(unit)
        self._writer.append(
            REPLAYS,
            {
                "step": step,
                "unit_id": unit,
                "group_id": self.index.group_of(unit),
                "priority": drawn.priority,
                "probability": drawn.probability,
                "weight": drawn.weight,
                "drift": verdict.drift,
                "headroom": verdict.headroom,
                "accepted": verdict.accepted,
            },
        )
        if verdict.headroom is not None and self._rules.priority == "headroom":
            self.index.set_priorities(np.array([unit]), np.array([verdict.headroom]))
        if verdict.accepted:
            self._use(step, unit, members)

    def _use(self, step: int, unit: int, members: Sequence[int]) -> None:
        """Count a replay; what was replayed as often as it may leaves."""
        if self.index.use(unit) >= self._rules.max_uses > 0:
            for trajectory_id in members:
                self.evict(step, trajectory_id)

    def evict(self, step: int, trajectory_id: int) -> None:
        """Let go of a live trajectory; with its last one the question leaves the buffer."""
        question = self.index.question_of(trajectory_id)
        if self.units is not None:
            self.units.discard(self.units.unit_of(trajectory_id))
        self.index.evict(trajectory_id)
        if self.questions.bucket(question) is not None:
            self.num_trajectories -= 1
            if not self.index.count(question):
                self.questions.place(question, None)
        self._log(step, Event.EVICTED, question, trajectory_id)

    def retire(self, step: int, question: int) -> None:
        """Take a question out of the buffer for good; its trajectories wait for a re-admission."""
        if self.questions.bucket(question) is not None:
            self.num_trajectories -= self.index.count(question)
        if self.units is not None:
            for trajectory_id in self.index.ids(question):
                self.units.discard(self.units.unit_of(trajectory_id))
        self.questions.retire(question)
        self._log(step, Event.RETIRED, question)

    def readmit(self, step: int, question: int, key: BucketKey) -> None:
        """Let a retired question come back, to bucket `key` where it has trajectories."""
        stored = self.index.count(question)
        self.num_trajectories += stored
        self.questions.unretire(question)
        self.questions.place(question, key if stored else None)
        self.admit(self.index.ids(question))
        self._log(step, Event.READMITTED, question)

    def _log(self, step: int, event: Event, question: int, trajectory_id: int | None = None) -> None:
        """Append an event with the bucket that the question is in after it."""
        key = self.questions.bucket(question)
        self._writer.append(
            EVENTS,
            {
                "step": step,
                "event": event.value,
                "question_id": self.questions.ids[question],
                "trajectory_id": trajectory_id,
                "bucket": None if key is None else key.success_count,
                "num_members": None if key is None else key.num_members,
            },
        )


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value

"""The experience store of a run: its rows in one flat array, the state of its questions, and the ledger of both.

Every change is an event of the ledger, and `open` rebuilds the state from the ledger alone, so a resumed run draws
exactly as an uninterrupted one (paper, section 3). Bodies live on disk; memory holds 80 bytes a row. A unit that is
drawn from the whole store is a row, or the rows of one group under the number of the first.
"""

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from jaxtyping import Float32, Int32, Int64

from exgrpo_cli.base.errors import InputError, RunError
from exgrpo_cli.base.files import write_text
from exgrpo_cli.base.types import Trajectory
from exgrpo_cli.ledger.parts import Body, Catalogue, DamagedBytes, check_cut, cut_after, read_catalogue
from exgrpo_cli.ledger.reader import BodyStore, read_identity, read_rows
from exgrpo_cli.ledger.schemas import (
    BODIES,
    DRAWS,
    EVENTS,
    NO_LOGPROBS,
    REPLAYS,
    RESUME_FIELDS,
    SCORES,
    TABLES,
    VISITS,
    WARM_START_STEP,
    Event,
    LedgerIdentity,
)
from exgrpo_cli.ledger.writer import IDENTITY_FILE, LedgerWriter, create_folders, lock_ledger
from exgrpo_cli.replay.by_question import Bucket, BucketKey, Candidates, NamedQuestions, QuestionDraw
from exgrpo_cli.replay.by_unit import PRIORITIES, BornUnit, DrawnUnit, UnitDraw, UnitPlace, leaving
from exgrpo_cli.replay.place import Place
from exgrpo_cli.replay.rows import GONE, StoredRows, rebuild
from exgrpo_cli.replay.warm_start import WarmStartReport, read_experience


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
    """The fresh members; those without a reward may be left out where only successes are stored."""
    num_members: int | None = None
    """Members that count, where they are neither K nor what replay left of K: a visit of another program."""
    alpha: float | None = None
    beta: float | None = None
    """Discounted successes and failures of the question after this visit, where a run keeps its history."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreCounts:
    """How much a store holds."""

    num_questions: int = 0
    """Questions in the buffer, resting ones included."""
    num_trajectories: int = 0
    """Trajectories of the questions in the buffer."""
    num_retired: int = 0
    buckets: dict[int, int] = field(default_factory=dict)
    """Buffered questions by latest success count; empty buckets are absent."""


class Store(AbstractContextManager):
    """Made by `create` or `open`; holds the ledger's writer lock until `close`."""

    def __init__(
        self, folder: Path, writer: LedgerWriter, rules: Place, question_ids: Sequence[str], catalogue: Catalogue
    ) -> None:
        self.folder = folder
        self.rules = rules
        self.group_size = writer.identity.group_size
        self._writer = writer
        self._question_ids = question_ids
        self._restore(catalogue)

    def _restore(self, catalogue: Catalogue) -> None:
        """Take the state that the ledger's rows add up to."""

        def read(table: str, columns: Sequence[str]) -> pa.Table:
            return read_rows(table, catalogue.parts[table], columns, dictionary=True)

        by_headroom = isinstance(self.rules, UnitPlace) and self.rules.priority == "headroom"
        rows, self.questions = rebuild(read, self._question_ids, cooldown=self.rules.cooldown, remeasured=by_headroom)
        self.rows = StoredRows(rows, len(self._question_ids))
        self._bodies = BodyStore(catalogue.parts[BODIES])

    @classmethod
    def create(cls, folder: Path, *, identity: LedgerIdentity, rules: Place, question_ids: Sequence[str]) -> "Store":
        """An empty store with a new ledger in `folder`, which must not hold one. Raises InputError."""
        if (folder / IDENTITY_FILE).exists():
            raise InputError(f"{folder} holds a ledger already; resume that run, or give another --output")
        create_folders(folder)
        lock = lock_ledger(folder)
        try:
            writer = LedgerWriter(folder, identity, lock, WARM_START_STEP, dict.fromkeys(TABLES, 0))
            store = cls(folder, writer, rules, question_ids, read_catalogue(folder))
            write_text(folder / IDENTITY_FILE, identity.to_json())
        except BaseException:
            lock.release()
            raise
        return store

    @classmethod
    def open(
        cls, folder: Path, *, identity: LedgerIdentity, rules: Place, question_ids: Sequence[str], at_step: int
    ) -> "Store":
        """The store as it was at the end of step `at_step`; what the ledger holds of later steps is deleted.

        Raises InputError where the ledger is another run's, is being written, is not whole up to that step or cannot be
        read; nothing is deleted then.
        """
        identity.require_match(read_identity(folder), str(folder), RESUME_FIELDS)
        lock = lock_ledger(folder)
        try:
            create_folders(folder)
            catalogue = check_cut(folder, at_step)
            writer = LedgerWriter(folder, identity, lock, at_step, catalogue.totals)
            store = cls(folder, writer, rules, question_ids, catalogue)
            cut_after(folder, at_step)
            return store
        except BaseException:
            lock.release()
            raise

    def warm_start(self, source: Path, *, max_response_tokens: int, with_retired: bool) -> WarmStartReport:
        """Copy the experience of another run's ledger into this still empty one, durably, as step 0.

        Raises InputError where tokenizer, template, K or question ids do not match.
        """
        if any(self._writer.totals.values()) or len(self.rows):
            raise InputError(f"{self.folder}: a warm start needs an empty ledger; this one has been written to")
        experience = read_experience(
            source,
            identity=self._writer.identity,
            question_ids=frozenset(self._question_ids),
            rules=self.rules,
            max_response_tokens=max_response_tokens,
            with_retired=with_retired,
        )
        self._writer.write(WARM_START_STEP, experience.tables, experience.bodies(), experience.num_bodies)
        self._restore(read_catalogue(self.folder))
        self._trim_store(WARM_START_STEP + 1)
        return experience.report

    def close(self) -> None:
        """Release the writer lock. Rows that were not flushed are gone."""
        self._writer.close()

    def __exit__(self, *error: object) -> None:
        self.close()

    def flush(self, step: int) -> None:
        """Let readers see the step, also where nothing happened in it. Raises RunError where the disk refuses."""
        for part in self._writer.flush(step):
            self._bodies.add(part)

    def seal(self) -> None:
        """Make the steps flushed durable, so that the ledger can be cut back to here: before each checkpoint."""
        for part in self._writer.seal():
            self._bodies.add(part)

    @property
    def retired(self) -> NamedQuestions:
        """Ids of the retired questions; membership costs a look-up."""
        return self.questions.named(np.flatnonzero(self.questions.retired))

    @property
    def nbytes(self) -> int:
        """Memory of the rows and of what is kept of every question."""
        return self.rows.nbytes + self.questions.nbytes

    @property
    def counts(self) -> StoreCounts:
        """How much the store holds now."""
        buffered = np.flatnonzero(self.questions.success_counts >= 0)
        sizes = np.bincount(self.questions.success_counts[buffered])
        return StoreCounts(
            num_questions=len(buffered),
            num_trajectories=int(self.rows.held[buffered].sum()),
            num_retired=int(self.questions.retired.sum()),
            buckets={k: int(sizes[k]) for k in np.flatnonzero(sizes).tolist()},
        )

    def begin(self, step: int) -> None:
        """Evict what is over age; idempotent within a step."""
        if self.rules.max_age:
            for trajectory_id in self.rows.born_before(step - self.rules.max_age).tolist():
                self._evict(step, trajectory_id)

    def load(self, trajectory_ids: Sequence[int]) -> list[Trajectory]:
        """Live trajectories with their bodies, bit for bit as they were recorded."""
        rows = self.rows.all[np.asarray(trajectory_ids, dtype=np.int64)]
        return [
            Trajectory(
                trajectory_id=int(trajectory_id),
                question_id=self.questions.ids[int(row["question"])],
                token_ids=token_ids,
                behaviour_logprobs=logprobs,
                step_born=int(row["step_born"]),
                weight_version=int(row["born_version"]),
                reward=float(row["reward"]),
                advantage=float(row["advantage"]),
            )
            for trajectory_id, (token_ids, logprobs), row in zip(
                trajectory_ids, self._read_bodies(trajectory_ids), rows, strict=True
            )
        ]

    def _read_bodies(self, trajectory_ids: Sequence[int]) -> list[Body]:
        """Copies of stored bodies, flushed or not. Raises RunError naming the file where one is damaged."""
        try:
            stored = iter(self._bodies.read([i for i in trajectory_ids if not self._writer.is_pending(i)]))
        except DamagedBytes as error:
            raise RunError(f"{error}; restore the file from a copy, then go on with --resume") from error
        return [self._writer.pending_body(i) if self._writer.is_pending(i) else next(stored) for i in trajectory_ids]

    # By question.

    def drawable(self, step: int) -> list[Bucket]:
        """Non-empty buckets in ascending order, each with its questions that may be drawn at `step`."""
        self.begin(step)
        return self.questions.drawable(step)

    def only_drawable(self, question_ids: Sequence[str], step: int) -> list[str]:
        """Those of the questions whose rows may be replayed at `step`."""
        self.begin(step)
        can_draw = self.questions.can_draw(step)
        return [question_id for question_id in question_ids if can_draw[self.questions.number(question_id)]]

    def candidates(self, question_ids: Sequence[str]) -> list[Candidates]:
        """The live trajectories of each question, with their last measurements."""
        numbers = [self.questions.number(question_id) for question_id in question_ids]
        held = self.rows.by_question(numbers)
        names = ("num_tokens", "step_born", "born_version", "entropy", "nll", "measured_version", "reward")
        found = []
        for question_id, number in zip(question_ids, numbers, strict=True):
            rows = self.rows.all[held[number]]
            columns: Mapping[str, Any] = {name: rows[name].copy() for name in names}
            found.append(Candidates(question_id=question_id, trajectory_ids=held[number], **columns))
        return found

    def record_draw(self, step: int, buckets: Sequence[Bucket], draw: QuestionDraw) -> None:
        """Record what the sampler promised of each bucket, and what it drew."""
        keys = [self.questions.bucket(self.questions.number(question_id)) for question_id in draw.question_ids]
        for bucket, probability in zip(buckets, draw.probabilities.tolist(), strict=True):
            row = {
                "step": step,
                "bucket": bucket.success_count,
                "num_members": bucket.num_members,
                "num_questions": len(bucket),
                "probability": probability,
                "num_drawn": keys.count(BucketKey(bucket.success_count, bucket.num_members)),
            }
            self._writer.append(DRAWS, row)

    def record_choice(self, step: int, offered: Sequence[Candidates], *, taken: bool = True) -> None:
        """Record the measurements of candidates, and which are replayed: none where the draw is not `taken`.

        The questions of those that are rest afterwards.
        """
        for each in offered:
            self.rows.measure(each)
            for position, trajectory_id in enumerate(each.trajectory_ids.tolist()):
                row = {
                    "step": step,
                    "question_id": each.question_id,
                    "trajectory_id": trajectory_id,
                    "weight_version": int(each.measured_version[position]),
                    "entropy": float(each.entropy[position]),
                    "nll": float(each.nll[position]),
                    "num_tokens": int(each.num_tokens[position]),
                    "chosen": taken and position in each.chosen,
                }
                self._writer.append(SCORES, row)
        for trajectory_id in [i for each in offered for i in each.chosen_ids] if taken else ():
            question = self.rows.question_of(trajectory_id)
            self._log(step, Event.SELECTED, question, trajectory_id)
            if self.rules.cooldown:
                self.questions.rests_until[question] = step + self.rules.cooldown
            self._use(step, trajectory_id, [trajectory_id])

    # By unit.

    def draw_units(self, place: UnitPlace, step: int, rng: np.random.Generator) -> UnitDraw:
        """A draw from the whole store by a place's priority. Raises RunError where the user's breaks its promises."""
        self.begin(step)
        return UnitDraw(place, self.rows.all, self._units(), self.questions.ids, step, rng)

    def load_units(self, drawn: Sequence[DrawnUnit]) -> list[DrawnUnit]:
        """Drawn units with their rows."""
        members = [self._members(unit.unit_id) for unit in drawn]
        rows = iter(self.load([trajectory_id for own in members for trajectory_id in own]))
        return [
            replace(unit, trajectories=tuple(next(rows) for _ in own)) for unit, own in zip(drawn, members, strict=True)
        ]

    def record_scan(self, step: int, scanned: Sequence[DrawnUnit]) -> None:
        """Record what became of the units scanned; the headroom of now is kept, and the use of what was taken."""
        for unit in scanned:
            row = {
                "step": step,
                "unit_id": unit.unit_id,
                "group_id": int(self.rows.all["group"][unit.unit_id]),
                "priority": unit.priority,
                "probability": unit.probability,
                "weight": unit.weight,
                "drift": unit.drift,
                "headroom": unit.headroom,
                "accepted": unit.accepted,
            }
            self._writer.append(REPLAYS, row)
            if unit.headroom is not None and isinstance(self.rules, UnitPlace) and self.rules.priority == "headroom":
                self.rows.all["priority"][unit.unit_id] = unit.headroom
            if unit.accepted:
                self._use(step, unit.unit_id, self._members(unit.unit_id))

    def _units(self) -> Int64[np.ndarray, " units"]:
        return self.rows.units(self.questions.retired, groups=self.rules.draws_groups)

    def _members(self, unit: int) -> list[int]:
        """The rows of a unit."""
        return self.rows.of_group(unit) if self.rules.draws_groups else [unit]

    def _use(self, step: int, unit: int, members: Sequence[int]) -> None:
        """Count a replay; what was replayed as often as it may leaves."""
        if self.rows.use(unit) >= self.rules.max_uses > 0:
            for trajectory_id in members:
                self._evict(step, trajectory_id)

    # Visits.

    def record_visits(self, visits: Sequence[Visit], *, collecting: bool = True) -> None:
        """Record how a step's questions went, in their order: each retires, or stores what is eligible and moves.

        Without `collecting` (before the delayed start) nothing is stored; retirement is active all the same. A failure
        of the verifier neither retires a question nor moves a bucket already set; its successes are stored, but with
        store = all nothing is, since a reward that was never given would be replayed.
        """
        numbers = [self.questions.number(visit.question_id) for visit in visits]
        held = self.rows.by_question(numbers) if collecting and self.rules.store == "successes" else {}
        for visit, question in zip(visits, numbers, strict=True):
            known, before = held.get(question, np.zeros(0, dtype=np.int64)), len(self.rows)
            self._record_visit(visit, question, known, collecting=collecting)
            held[question] = np.append(known, np.arange(before, len(self.rows)))

    def _record_visit(self, visit: Visit, question: int, held: Int64[np.ndarray, " held"], *, collecting: bool) -> None:
        rules, states = self.rules, self.questions
        assert not states.retired[question], f"question {visit.question_id} was retired before"
        key = BucketKey(visit.success_count, visit.num_members or self.group_size)
        if rules.count_fresh_only and visit.num_replayed:
            key = BucketKey(visit.num_fresh_successes, self.group_size - visit.num_replayed)
        self._log_visit(visit, key)
        if rules.retirement and key.success_count >= rules.retires_at(key.num_members) and not visit.verifier_failed:
            states.place(question, None)
            states.retired[question] = True
            self._log(visit.step, Event.RETIRED, question)
            return
        eligible = rules.lower_bound < key.success_count <= rules.upper(max(self.group_size, key.num_members))
        new = self._to_store(visit, held) if collecting and eligible else []
        bucket = states.bucket(question)
        if bucket is None and new:
            # The collection logs it.
            states.place(question, key)
        elif bucket not in (None, key) and not visit.verifier_failed:
            states.place(question, key)
            self._log(visit.step, Event.MOVED, question)
        self._collect(visit, question, new)
        self._trim_question(visit.step, question)
        self._trim_store(visit.step)

    def _to_store(self, visit: Visit, held: Int64[np.ndarray, " held"]) -> list[tuple[int, FreshRow]]:
        """Rows of an eligible visit that are stored, each with its fingerprint: of equal successes the first."""
        if self.rules.store == "all":
            return [] if visit.verifier_failed else [(token_hash(row.token_ids), row) for row in visit.rows]
        if self.rules.store == "none":
            return []
        held = held[self.rows.all["question"][held] != GONE]
        hashes = self.rows.all["token_hash"][held]
        new: list[tuple[int, FreshRow]] = []
        for row in visit.rows:
            if row.reward <= 0:
                continue
            fingerprint = token_hash(row.token_ids)
            like = [other.token_ids for known, other in new if known == fingerprint]
            like += [token_ids for token_ids, _ in self._read_bodies(held[hashes == fingerprint].tolist())]
            if not any(np.array_equal(row.token_ids, token_ids) for token_ids in like):
                new.append((fingerprint, row))
        return new

    def _collect(self, visit: Visit, question: int, new: Sequence[tuple[int, FreshRow]]) -> None:
        """Store rows of a question that has a bucket, as one group."""
        group = len(self.rows)
        for (fingerprint, row), priority in zip(new, self._priorities(visit.step, new), strict=True):
            trajectory_id = len(self.rows)
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
                "token_hash": fingerprint,
                "reward": row.reward,
                "advantage": None if math.isnan(row.advantage) else row.advantage,
                "priority": None if math.isnan(priority) else priority,
                "group_id": group,
            }
            self.rows.add(question, born)
            self._writer.append_trajectory((row.token_ids, row.behaviour_logprobs), born)
            self._log(visit.step, Event.COLLECTED, question, trajectory_id)

    def _priorities(self, step: int, new: Sequence[tuple[int, FreshRow]]) -> list[float]:
        """Of birth, one for each row; NaN where units are not drawn by priority, or by one of the user's own."""
        rules = self.rules
        if not isinstance(rules, UnitPlace) or rules.priority not in PRIORITIES or not new:
            return [math.nan] * len(new)
        rows = [row for _, row in new]
        units = [rows] if rules.draws_groups else [[row] for row in rows]
        found = [PRIORITIES[rules.priority](born_unit(step, own)) for own in units]
        return found * len(rows) if rules.draws_groups else found

    def _trim_question(self, step: int, question: int) -> None:
        """Evict by the named rule until the question holds no more than it may."""
        excess = int(self.rows.held[question]) - self.rules.max_per_question
        if self.rules.max_per_question and excess > 0:
            for trajectory_id in self._leaving(self.rows.by_question([question])[question], excess, groups=False):
                self._evict(step, trajectory_id)

    def _trim_store(self, step: int) -> None:
        """Evict units by the named rule until the store holds no more than its capacity."""
        if not self.rules.capacity:
            return
        units = self._units()
        if len(units) > self.rules.capacity:
            for unit in self._leaving(units, len(units) - self.rules.capacity, groups=self.rules.draws_groups):
                for trajectory_id in self._members(unit):
                    self._evict(step, trajectory_id)

    def _leaving(self, units: Int64[np.ndarray, " units"], num: int, *, groups: bool) -> list[int]:
        rows, keys = self.rows.all, np.zeros(len(units))
        if isinstance(self.rules, UnitPlace):
            keys = self.rules.keys(rows["priority"][units], rows["step_born"][units])
        return leaving(self.rules.eviction, rows, units, keys, num, groups=groups).tolist()

    def _evict(self, step: int, trajectory_id: int) -> None:
        """Drop a live trajectory; with its last one the question leaves the buffer."""
        question = self.rows.evict(trajectory_id)
        if not self.rows.held[question]:
            self.questions.place(question, None)
        self._log(step, Event.EVICTED, question, trajectory_id)

    def readmit(self, step: int, rng: np.random.Generator) -> list[str]:
        """Every `readmit_every` steps, readmit the set fraction of the retired, rounded up; returns their ids.

        They come to bucket K-1 where their trajectories are stored.
        """
        retired = np.flatnonzero(self.questions.retired)
        if not self.rules.readmits_at(step) or not len(retired):
            return []
        num = math.ceil(self.rules.readmit_fraction * len(retired))
        returning = np.sort(retired[rng.choice(len(retired), size=num, replace=False)]).tolist()
        for question in returning:
            self.questions.retired[question] = False
            stored = bool(self.rows.held[question])
            self.questions.place(question, BucketKey(self.group_size - 1, self.group_size) if stored else None)
            self._log(step, Event.READMITTED, question)
        return [self.questions.ids[question] for question in returning]

    def _log_visit(self, visit: Visit, key: BucketKey) -> None:
        """Log a graded group, whatever becomes of it."""
        row = {
            "step": visit.step,
            "question_id": visit.question_id,
            "k": key.success_count,
            "num_fresh_successes": visit.num_fresh_successes,
            "num_members": key.num_members,
            "verifier_failed": visit.verifier_failed,
            "alpha": visit.alpha,
            "beta": visit.beta,
        }
        self._writer.append(VISITS, row)

    def _log(self, step: int, event: Event, question: int, trajectory_id: int | None = None) -> None:
        """Append an event with the bucket that the question is in after it."""
        key = self.questions.bucket(question)
        row = {
            "step": step,
            "event": event.value,
            "question_id": self.questions.ids[question],
            "trajectory_id": trajectory_id,
            "bucket": None if key is None else key.success_count,
            "num_members": None if key is None else key.num_members,
        }
        self._writer.append(EVENTS, row)


def born_unit(step: int, rows: Sequence[FreshRow]) -> BornUnit:
    """Rows of one visit as the unit whose priority is wanted."""
    return BornUnit(
        step=step,
        rewards=np.array([row.reward for row in rows], dtype=np.float64),
        advantages=np.array([row.advantage for row in rows], dtype=np.float64),
        logprobs=[row.behaviour_logprobs for row in rows],
    )


def token_hash(token_ids: Int32[np.ndarray, " tokens"]) -> int:
    """64-bit fingerprint of a response (the start of its SHA-256): few bodies are read to find exact duplicates."""
    return int.from_bytes(sha256(np.ascontiguousarray(token_ids).data).digest()[:8], "little", signed=True)

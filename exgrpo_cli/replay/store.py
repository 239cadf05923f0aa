"""The experience store of a run: which rows and questions are drawn, and what every visit stores, moves and retires.

Buffer, buckets and retired set are those of the paper (arXiv 2510.02245, section 4.1). Every change is an event of the
ledger, from which `rows.py` rebuilds the state, so a resumed run draws exactly as an uninterrupted one. A unit that is
drawn from the whole store is a row, or the rows of one group under the number of the first.
"""

import json
import math
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
from jaxtyping import Int64

from exgrpo_cli.base.types import Trajectory
from exgrpo_cli.ledger import schemas
from exgrpo_cli.ledger.reader import Catalogue, read_rows
from exgrpo_cli.ledger.writer import LedgerWriter
from exgrpo_cli.replay.by_question import Bucket, Candidates, Sampler
from exgrpo_cli.replay.by_unit import DrawnUnit, UnitDraw, UnitPlace, leaving, priorities_at_birth
from exgrpo_cli.replay.place import Beginning, Place
from exgrpo_cli.replay.rows import FreshRow, StoreCounts, Visit, rebuild, token_hash


class Store(AbstractContextManager["Store"]):
    """Rows and questions of a run beside the ledger that holds them, whose writer lock is held until `close`."""

    def __init__(
        self,
        folder: Path,
        *,
        identity: schemas.LedgerIdentity,
        rules: Place,
        question_ids: Collection[str],
        barred: Collection[str] = (),
        at_step: int | None = None,
    ) -> None:
        """An empty store with a new ledger in `folder`, or the one as it was at the end of step `at_step`; what its
        ledger holds of later steps is deleted. `rules` are the settings of replay: what is stored, and what leaves; of
        the questions `barred` nothing is stored.

        Raises InputError where there is a ledger already, or it is another run's, is being written, is not whole up to
        that step or cannot be read; nothing is deleted then.
        """
        self.writer = LedgerWriter(folder, identity, at_step)
        self.folder, self.rules, self.group_size = folder, rules, identity.group_size
        self.barred = frozenset(barred)
        # A unit's priority is then its headroom as last measured.
        self._keeps_headroom = isinstance(rules, UnitPlace) and rules.priority == "headroom"
        try:
            self.restore(self.writer.catalogue, question_ids)
            self.writer.begin()
        except BaseException:
            self.close()
            raise

    def restore(self, catalogue: Catalogue, question_ids: Collection[str]) -> None:
        """Take the state that the ledger's rows add up to."""

        def read(table: str, columns: Sequence[str]) -> pa.Table:
            return read_rows(table, catalogue.parts[table], columns, dictionary=True)

        self.rows, self.questions = rebuild(read, question_ids, self.rules, self._keeps_headroom)
        if self.writer.last_step == schemas.WARM_START_STEP:
            # What another run left may be more than this one's limits allow.
            for question in np.flatnonzero(self.rows.held).tolist() if self.rules.max_per_question else ():
                self._trim_question(schemas.WARM_START_STEP + 1, question)
            self._trim_store(schemas.WARM_START_STEP + 1)

    def close(self) -> None:
        """Release the writer lock. Rows that were not flushed are gone."""
        self.writer.close()

    def __exit__(self, *error: object) -> None:
        self.close()

    def flush(self, step: int) -> None:
        """Let readers see the step, also where nothing happened in it. Raises RunError where the disk refuses."""
        self.writer.flush(step)

    def seal(self) -> None:
        """Make the steps flushed durable, so that the ledger can be cut back to here: before each checkpoint."""
        self.writer.seal()

    @property
    def retired(self) -> set[str]:
        """Ids of the retired questions."""
        return set(self.questions.ids[self.questions.retired].tolist())

    @property
    def counts(self) -> StoreCounts:
        """Sizes of the store now."""
        buffered = np.flatnonzero(self.questions.success_counts >= 0)
        sizes = np.bincount(self.questions.success_counts[buffered])
        return StoreCounts(
            num_questions=len(buffered),
            num_trajectories=int(self.rows.held[buffered].sum()),
            num_retired=int(self.questions.retired.sum()),
            buckets={k: int(sizes[k]) for k in np.flatnonzero(sizes).tolist()},
        )

    def load(self, trajectory_ids: Sequence[int]) -> list[Trajectory]:
        """Live trajectories with their bodies, bit for bit as they were recorded."""
        rows, names = self.rows, ("step_born", "weight_version", "reward", "correct", "advantage")
        return [
            Trajectory(
                trajectory_id=int(row),
                question_id=self.questions.ids[rows["question"][row]],
                token_ids=token_ids,
                behaviour_logprobs=logprobs,
                **{name: rows[name][row].item() for name in names},
            )
            for row, (token_ids, logprobs) in zip(trajectory_ids, self.writer.bodies(trajectory_ids), strict=True)
        ]

    # By question.

    def drawable(self, step: int) -> list[Bucket]:
        """Non-empty buckets in ascending order, each with its questions that may be drawn at `step`."""
        self._evict_old(step)
        return self.questions.drawable(step)

    def held_by(self, question_ids: Sequence[str]) -> list[Int64[np.ndarray, " own"]]:
        """Live rows of each question, in ascending order."""
        return self.rows.of_questions([self.questions.numbers[question_id] for question_id in question_ids])

    def candidates(self, question_ids: Sequence[str]) -> list[Candidates]:
        """The live trajectories of each question, with their last measurements."""
        names = ("num_tokens", "step_born", "entropy", "nll", "measured_version", "reward")
        return [
            Candidates(
                question_id=question_id,
                trajectory_ids=ids,
                born_version=self.rows["weight_version"][ids],
                **{name: self.rows[name][ids] for name in names},
            )
            for question_id, ids in zip(question_ids, self.held_by(question_ids), strict=True)
        ]

    def draw_questions(self, sampler: Sampler, num: int, step: int, rng: np.random.Generator) -> tuple[str, ...]:
        """Draw up to `num` distinct questions; record the probability of each bucket, and how many were drawn of it.

        Raises RunError where a sampler of the user's breaks its promises.
        """
        buckets = self.drawable(step)
        num = min(num, sum(map(len, buckets)))
        if not num:
            return ()
        draw = sampler(buckets, num, rng)
        drawn = [self.questions.bucket(self.questions.numbers[question_id]) for question_id in draw.question_ids]
        self.writer.extend(
            schemas.DRAWS,
            len(buckets),
            step=step,
            bucket=[bucket.success_count for bucket in buckets],
            num_members=[bucket.num_members for bucket in buckets],
            num_questions=[len(bucket) for bucket in buckets],
            probability=draw.probabilities,
            num_drawn=[drawn.count((bucket.success_count, bucket.num_members)) for bucket in buckets],
        )
        return draw.question_ids

    def record_choice(self, step: int, offered: Sequence[Candidates], chosen: Sequence[Sequence[int]]) -> None:
        """Record the measurements of each question's candidates, and the trajectories of them that are replayed.

        The questions of those rest afterwards.
        """
        for each, own in zip(offered, chosen, strict=True):
            columns = {name: getattr(each, name) for name in ("question_id", "entropy", "nll", "num_tokens")}
            columns |= {"trajectory_id": each.trajectory_ids, "weight_version": each.measured_version}
            chosen_of = np.isin(each.trajectory_ids, own)
            self.writer.extend(schemas.SCORES, len(each), step=step, chosen=chosen_of, **columns)
        for trajectory_id in [i for own in chosen for i in own]:
            question = int(self.rows["question"][trajectory_id])
            self._log(step, schemas.Event.SELECTED, question, trajectory_id)
            if self.rules.cooldown:
                self.questions.rests_until[question] = step + self.rules.cooldown
            self._use(step, trajectory_id)

    def record_beginning(self, group_of: Visit, beginning: Beginning) -> None:
        """Record what grew from a beginning. It is no visit: its question neither moves nor retires, and nothing is
        stored."""
        columns = {"step": group_of.step, "question_id": group_of.question_id, "trajectory_id": beginning.trajectory_id}
        columns |= {"num_tokens": len(beginning.token_ids), "k": group_of.success_count}
        self.writer.append(schemas.PREFIXES, num_members=len(group_of.rows), **columns)

    # By unit.

    def draw_units(self, place: UnitPlace, step: int, rng: np.random.Generator) -> UnitDraw:
        """A draw from the whole store by a place's priority. Raises RunError where the user's breaks its promises."""
        self._evict_old(step)
        return UnitDraw(place, self.rows, self._units(), self.questions.ids, step, rng)

    def load_units(self, drawn: Sequence[DrawnUnit]) -> list[DrawnUnit]:
        """Drawn units with their rows."""
        return [replace(unit, trajectories=tuple(self.load(self._members(unit.unit_id)))) for unit in drawn]

    def record_scan(self, step: int, scanned: Sequence[DrawnUnit]) -> None:
        """Record each scanned unit; keep the headroom just measured, and count the replay of those accepted."""
        names = ("unit_id", "priority", "probability", "weight", "drift", "headroom", "accepted")
        for unit in scanned:
            columns = {"step": step, "group_id": int(self.rows["group_id"][unit.unit_id])}
            self.writer.append(schemas.REPLAYS, **columns, **{name: getattr(unit, name) for name in names})
            if self._keeps_headroom and unit.headroom is not None:
                self.rows["priority"][unit.unit_id] = unit.headroom
            if unit.accepted:
                self._use(step, unit.unit_id)

    def _units(self) -> Int64[np.ndarray, " units"]:
        return self.rows.units(self.questions.retired, groups=self.rules.draws_groups)

    def _members(self, unit: int) -> Sequence[int]:
        """The rows of a unit."""
        return self.rows.members(np.array([unit]), groups=self.rules.draws_groups)[0]

    def _use(self, step: int, unit: int) -> None:
        """Count a replay of a unit, and evict it after its last one (`max_uses`)."""
        self.rows["uses"][unit] += 1
        if self.rows["uses"][unit] >= self.rules.max_uses > 0:
            self._evict(step, self._members(unit))

    # Visits.

    def record_visits(self, visits: Sequence[Visit], *, collecting: bool = True) -> None:
        """Record a step's visits in their order, one per question: it retires, or its eligible rows are stored and its
        bucket changes.

        Without `collecting` (before the delayed start) nothing is stored; retirement is active all the same. A failure
        of the verifier neither retires a question nor moves a bucket already set; its successes are stored, but with
        store = all or failures nothing is, since a reward that was never given would be replayed.
        """
        # A repeat renews the rest and the age of a question that is to be asked again.
        dedup = collecting and self.rules.store in ("successes", "failures") and not self.rules.rests_when_stored
        held = self.held_by([visit.question_id for visit in visits]) if dedup else [np.zeros(0, np.int64)] * len(visits)
        for visit, own in zip(visits, held, strict=True):
            self._record_visit(visit, own, collecting=collecting)

    def _record_visit(self, visit: Visit, held: Int64[np.ndarray, " held"], *, collecting: bool) -> None:
        """Record one visit; `held` are the live rows of its question, whose repeats are not stored again."""
        rules, states, question = self.rules, self.questions, self.questions.numbers[visit.question_id]
        assert not states.retired[question], f"question {visit.question_id} was retired before"
        k, members = visit.success_count, visit.num_members or self.group_size
        if rules.count_fresh_only and visit.num_replayed:
            k, members = visit.num_fresh_successes, self.group_size - visit.num_replayed
        names = ("step", "question_id", "num_fresh_successes", "verifier_failed", "alpha", "beta")
        self.writer.append(schemas.VISITS, k=k, num_members=members, **{name: getattr(visit, name) for name in names})
        if rules.retirement and k >= rules.retires_at(members) and not visit.verifier_failed:
            states.move(question, None)
            states.retired[question] = True
            self._log(visit.step, schemas.Event.RETIRED, question)
            return
        eligible = rules.lower_bound < k <= rules.upper(max(self.group_size, members))
        # Some may have left since: an earlier visit of the step filled the store.
        known = self.rows["token_hash"][held[self.rows["question"][held] == question]]
        new = self._to_store(visit, known.tolist()) if collecting and eligible else []
        bucket = states.bucket(question)
        if bucket is None and new:
            # `_collect` logs the bucket with each row.
            states.move(question, (k, members))
        elif bucket not in (None, (k, members)) and not visit.verifier_failed:
            states.move(question, (k, members))
            self._log(visit.step, schemas.Event.MOVED, question)
        self._collect(visit, question, new)
        if new and rules.cooldown and rules.rests_when_stored:
            states.rests_until[question] = visit.step + rules.cooldown
        self._trim_question(visit.step, question)
        self._trim_store(visit.step)

    def _to_store(self, visit: Visit, known: Sequence[int]) -> list[tuple[int, FreshRow]]:
        """Rows of an eligible visit that are stored, each with its fingerprint: of equal ones the first, unless its
        fingerprint is among those `known` of its question, or all rows with store = all."""
        rows, kind = [(token_hash(row.token_ids), row) for row in visit.rows], self.rules.store
        if kind == "none" or visit.question_id in self.barred or (kind != "successes" and visit.verifier_failed):
            return []
        if kind == "all":
            return rows
        first: dict[int, FreshRow] = {}
        for fingerprint, row in rows:
            if row.correct == (kind == "successes") and fingerprint not in known:
                first.setdefault(fingerprint, row)
        return list(first.items())

    def _collect(self, visit: Visit, question: int, new: Sequence[tuple[int, FreshRow]]) -> None:
        """Store rows of a question that has a bucket, as one group."""
        group = len(self.rows)
        priorities = priorities_at_birth(
            self.rules,
            np.full(len(new), group),
            visit.step,
            np.array([row.reward for _, row in new], dtype=np.float64),
            np.array([row.advantage for _, row in new], dtype=np.float64),
            lambda begin, end: [row.behaviour_logprobs for _, row in new[begin:end]],
        )
        for (fingerprint, row), priority in zip(new, priorities.tolist(), strict=True):
            born = {
                "step_born": visit.step,
                "weight_version": visit.weight_version,
                "k": visit.success_count,
                "num_tokens": len(row.token_ids),
                "token_hash": fingerprint,
                "priority": priority,
                "group_id": group,
                "correct": row.correct,
                **{name: float(getattr(row, name)) for name in ("entropy", "nll", "reward", "advantage")},
            }
            self.writer.append_trajectory(
                (row.token_ids, row.behaviour_logprobs),
                trajectory_id=len(self.rows),
                question_id=visit.question_id,
                parts=json.dumps(dict(row.parts)) if row.parts else None,
                logprob_source=schemas.NO_LOGPROBS if math.isnan(row.nll) else self.writer.identity.logprob_source,
                **born,
            )
            self._log(visit.step, schemas.Event.COLLECTED, question, self.rows.add(question, born))

    def _trim_question(self, step: int, question: int) -> None:
        """Evict by the named rule until the question holds no more than it may."""
        excess = int(self.rows.held[question]) - self.rules.max_per_question
        if self.rules.max_per_question and excess > 0:
            [held] = self.rows.of_questions([question])
            self._evict(step, leaving(self.rules, self.rows, held, excess).tolist())

    def _trim_store(self, step: int) -> None:
        """Evict units by the named rule until the store holds no more than its capacity."""
        capacity = self.rules.capacity
        if capacity and len(units := self._units()) > capacity:
            for unit in leaving(self.rules, self.rows, units, len(units) - capacity).tolist():
                self._evict(step, self._members(unit))

    def _evict_old(self, step: int) -> None:
        """Evict what is over age, oldest first; ids are in the order of birth."""
        if self.rules.max_age:
            live = self.rows.live()
            oldest = np.searchsorted(self.rows["step_born"][live], step - self.rules.max_age)
            self._evict(step, live[:oldest].tolist())

    def _evict(self, step: int, trajectory_ids: Sequence[int]) -> None:
        """Drop live trajectories; with its last one a question leaves the buffer."""
        for trajectory_id in trajectory_ids:
            question = self.rows.evict(trajectory_id)
            if not self.rows.held[question]:
                self.questions.move(question, None)
            self._log(step, schemas.Event.EVICTED, question, trajectory_id)

    def readmit(self, step: int, rng: np.random.Generator) -> list[str]:
        """Every `readmit_every` steps, readmit the set fraction of the retired, rounded up; returns their ids.

        Those with stored trajectories come to bucket K-1, the highest of questions that are not retired.
        """
        retired = np.flatnonzero(self.questions.retired)
        if not self.rules.readmit_fraction or step % self.rules.readmit_every or not len(retired):
            return []
        num = math.ceil(self.rules.readmit_fraction * len(retired))
        returning = np.sort(retired[rng.choice(len(retired), size=num, replace=False)]).tolist()
        for question in returning:
            self.questions.retired[question] = False
            self.questions.move(question, (self.group_size - 1, self.group_size) if self.rows.held[question] else None)
            self._log(step, schemas.Event.READMITTED, question)
        return self.questions.ids[returning].tolist()

    def _log(self, step: int, event: schemas.Event, question: int, trajectory_id: int | None = None) -> None:
        """Append an event with the bucket that the question is in after it."""
        bucket, members = self.questions.bucket(question) or (None, None)
        names = {"event": event.value, "question_id": self.questions.ids[question], "trajectory_id": trajectory_id}
        self.writer.append(schemas.EVENTS, step=step, bucket=bucket, num_members=members, **names)

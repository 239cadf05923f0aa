"""The experience buffer: the state machine of stored successes, buckets and retired questions (paper, section 3).

Every change is an event of the ledger, and `open` rebuilds the state from the ledger alone, so a resumed run draws
exactly as an uninterrupted one. Bodies live on disk; memory holds 76 bytes per trajectory, and up to 10 more where
units are drawn from the whole store.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType

import numpy as np
from jaxtyping import Bool

from exgrpo_cli.config.sections.replay import ReplaySettings
from exgrpo_cli.errors import InputError
from exgrpo_cli.files import write_text
from exgrpo_cli.ledger.catalogue import Catalogue, read_catalogue
from exgrpo_cli.ledger.compaction import FEWEST, compact
from exgrpo_cli.ledger.reader import read_identity
from exgrpo_cli.ledger.recovery import check_cut, cut_after
from exgrpo_cli.ledger.schemas import (
    BODIES,
    DRAWS,
    RESUME_FIELDS,
    SCORES,
    TABLES,
    WARM_START_STEP,
    LedgerIdentity,
)
from exgrpo_cli.ledger.writer import IDENTITY_FILE, LedgerWriter, create_folders, lock_ledger
from exgrpo_cli.replay.buffer_state import BufferState
from exgrpo_cli.replay.drawing import selection
from exgrpo_cli.replay.drawing.priorities import PRIORITIES
from exgrpo_cli.replay.drawing.sampling import Draw, check_draw, resolve_sampler
from exgrpo_cli.replay.drawing.selection import Candidates, resolve_metric
from exgrpo_cli.replay.drawing.units import DrawnUnit, ScannedUnit
from exgrpo_cli.replay.eviction import EVICTIONS
from exgrpo_cli.replay.protocol import BufferCounts, Choice, Offer, ReplayUnit
from exgrpo_cli.replay.question_states import BucketKey, NamedQuestions
from exgrpo_cli.replay.visits import FreshRow, Visit, VisitOutcome, born_unit, counted, token_hash
from exgrpo_cli.replay.warm_start import WarmStartReport, read_experience
from exgrpo_cli.types import Trajectory


class ExperienceBuffer:
    """Made by `create` or `open`; holds the ledger's writer lock until `close`."""

    def __init__(
        self,
        folder: Path,
        writer: LedgerWriter,
        rules: ReplaySettings,
        question_ids: Sequence[str],
        catalogue: Catalogue,
    ) -> None:
        self.folder = folder
        self.rules = rules
        self.group_size = writer.identity.group_size
        self._writer = writer
        self._question_ids = question_ids
        self._sampler = resolve_sampler(rules.sampler, rules.mu, rules.sigma)
        self._metric = resolve_metric(rules.metric)
        self._evicts = EVICTIONS[rules.eviction]
        self._priority = PRIORITIES.get(rules.priority)
        self._state = BufferState(catalogue, writer, question_ids, rules)
        self._scanned: dict[int, DrawnUnit] = {}

    @classmethod
    def create(
        cls, folder: Path, *, identity: LedgerIdentity, rules: ReplaySettings, question_ids: Sequence[str]
    ) -> "ExperienceBuffer":
        """An empty buffer with a new ledger in `folder`, which must not hold one. Raises InputError."""
        if (folder / IDENTITY_FILE).exists():
            raise InputError(f"{folder} holds a ledger already; resume that run, or give another --output")
        create_folders(folder)
        lock = lock_ledger(folder)
        try:
            writer = LedgerWriter(folder, identity, lock, WARM_START_STEP, dict.fromkeys(TABLES, 0))
            buffer = cls(folder, writer, rules, question_ids, read_catalogue(folder))
            write_text(folder / IDENTITY_FILE, identity.to_json())
        except BaseException:
            lock.release()
            raise
        return buffer

    @classmethod
    def open(
        cls, folder: Path, *, identity: LedgerIdentity, rules: ReplaySettings, question_ids: Sequence[str], at_step: int
    ) -> "ExperienceBuffer":
        """The buffer as it was at the end of step `at_step`; what the ledger holds of later steps is deleted.

        Raises InputError where the ledger is another run's, is being written, is not whole up to that step or cannot be
        read; nothing is deleted then.
        """
        stored = read_identity(folder)
        identity.require_match(stored, str(folder), RESUME_FIELDS)
        identity = replace(identity, format=stored.format)
        lock = lock_ledger(folder)
        try:
            create_folders(folder)
            catalogue = check_cut(folder, at_step)
            writer = LedgerWriter(folder, identity, lock, at_step, catalogue.totals)
            buffer = cls(folder, writer, rules, question_ids, catalogue)
            cut_after(folder, at_step)
            return buffer
        except BaseException:
            lock.release()
            raise

    def warm_start(self, source: Path, *, max_response_tokens: int, with_retired: bool) -> WarmStartReport:
        """Copy the experience of another run's ledger into this still empty one, durably, as step 0.

        Raises InputError where tokenizer, template, K or question ids do not match.
        """
        if any(self._writer.totals.values()) or len(self._state.index):
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
        catalogue = read_catalogue(self.folder)
        self._state = BufferState(catalogue, self._writer, self._question_ids, self.rules)
        self._trim_store(WARM_START_STEP + 1)
        return experience.report

    def close(self) -> None:
        """Release the writer lock. Rows that were not flushed are gone."""
        self._writer.close()

    def __enter__(self) -> "ExperienceBuffer":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def last_step(self) -> int:
        """Last step that is durable."""
        return self._writer.last_step

    @property
    def retired(self) -> NamedQuestions:
        """Ids of the retired questions; membership costs a look-up."""
        return self._state.questions.retired

    @property
    def num_questions(self) -> int:
        """Questions in the buffer, resting ones included."""
        return self._state.questions.num_buffered

    @property
    def num_trajectories(self) -> int:
        """Trajectories of the questions in the buffer."""
        return self._state.num_trajectories

    @property
    def num_retired(self) -> int:
        """Questions that are no longer drawn from the stream."""
        return len(self._state.questions.retired)

    @property
    def index_nbytes(self) -> int:
        """Memory of the index of trajectories, and of the order that units are drawn by."""
        units = self._state.units
        return self._state.index.nbytes + (0 if units is None else units.nbytes)

    @property
    def counts(self) -> BufferCounts:
        """How much the buffer holds now."""
        return BufferCounts(
            num_questions=self.num_questions,
            num_trajectories=self.num_trajectories,
            num_retired=self.num_retired,
            buckets=self.bucket_counts(),
        )

    def bucket_counts(self) -> dict[int, int]:
        """Buffered questions by latest success count; empty buckets are absent."""
        counts: Counter[int] = Counter()
        for key, size in self._state.questions.sizes().items():
            counts[key.success_count] += size
        return dict(counts)

    def readmit(self, step: int, rng: np.random.Generator) -> list[str]:
        """Every `readmit_every` steps, let the set fraction of the retired, rounded up, come back.

        They come to bucket K-1 where their trajectories are stored.
        """
        if not self.rules.readmits_at(step):
            return []
        retired = self._state.questions.retired
        num = math.ceil(self.rules.readmit_fraction * len(retired))
        returning = (
            sorted(retired[int(rank)] for rank in rng.choice(len(retired), size=num, replace=False)) if num else []
        )
        for question_id in returning:
            key = BucketKey(self.group_size - 1, self.group_size)
            self._state.readmit(step, self._state.questions.number(question_id), key)
        return returning

    def offer(self, num: int, step: int, weight_version: int, rng: np.random.Generator) -> Offer:
        """Draw up to `num` questions, with their candidates and the bodies of those to be measured for a choice.

        Raises RunError where a custom sampler breaks its promises.
        """
        drawn = self.draw(num, step, rng).question_ids
        return self._offered(tuple(self.candidates(question_id) for question_id in drawn), weight_version)

    def offer_joining(self, question_ids: Sequence[str], step: int, weight_version: int) -> Offer:
        """What those of the questions that hold enough rows have to offer for a join."""
        self._begin(step)
        candidates = []
        for question_id in question_ids:
            number = self._number(question_id)
            if self._state.questions.is_drawable(number) and self._state.index.count(number) >= self.rules.min_stored:
                candidates.append(self.candidates(question_id))
        return self._offered(tuple(candidates), weight_version)

    def _offered(self, candidates: tuple[Candidates, ...], weight_version: int) -> Offer:
        if not self.rules.needs_scores:
            return Offer(candidates=candidates)
        stale = [int(i) for each in candidates for i in each.trajectory_ids[self.stale(each, weight_version)]]
        return Offer(candidates=candidates, unmeasured=tuple(self.load(stale)))

    def choose_from(self, candidates: Sequence[Candidates], rng: np.random.Generator) -> Choice:
        """The rows to replay of each question, by the rules' metric and direction."""
        num, direction = self.rules.per_question, self.rules.direction
        positions = tuple(
            tuple(selection.choose_several(each, self._metric, direction, rng, num=num)) for each in candidates
        )
        chosen = [int(each.trajectory_ids[at]) for each, own in zip(candidates, positions, strict=True) for at in own]
        return Choice(positions=positions, trajectories=tuple(self.load(chosen)))

    def record_replay(self, step: int, candidates: Sequence[Candidates], choice: Choice | None) -> None:
        """Record what was measured of the candidates and which are replayed: none of them where `choice` is None."""
        chosen = choice.positions if choice is not None else [()] * len(candidates)
        for each, positions in zip(candidates, chosen, strict=True):
            self.record_scores(step, each, *positions)
        if choice is not None:
            self.record_selected(step, [trajectory.trajectory_id for trajectory in choice.trajectories])

    def scan(self, num: int, step: int, rng: np.random.Generator) -> tuple[ReplayUnit, ...]:
        """The next units in the order drawn, with their rows; those of earlier calls are left out until `end_scan`.

        Raises RunError where a priority of the user's own breaks its promises.
        """
        assert self._state.units is not None
        if not self._scanned:
            self._begin(step)
        drawn = self._state.units.draw(num, step, rng)
        self._scanned |= {unit.unit_id: unit for unit in drawn}
        members = [self._state.units.members(unit.unit_id) for unit in drawn]
        rows = iter(self.load([trajectory_id for own in members for trajectory_id in own]))
        return tuple(
            ReplayUnit(drawn=unit, trajectories=tuple(next(rows) for _ in own))
            for unit, own in zip(drawn, members, strict=True)
        )

    def end_scan(self, step: int, verdicts: Sequence[ScannedUnit]) -> None:
        """Record what became of the units scanned, in their order."""
        assert self._state.units is not None
        for verdict in verdicts:
            self._state.replay_unit(step, self._scanned[verdict.unit_id], verdict)
        self._scanned = {}
        self._state.units.end_draw()

    def record_visits(self, visits: Sequence[Visit], *, collecting: bool) -> None:
        """Record each visit of a step, in their order."""
        for visit in visits:
            self.record_visit(visit, collecting=collecting)

    def available(self, step: int) -> int:
        """Questions that may be drawn at this step: buffered, rested, with a trajectory that is not over age."""
        self._begin(step)
        return self._state.questions.num_drawable

    def draw(self, num: int, step: int, rng: np.random.Generator) -> Draw:
        """Draw up to `num` distinct questions. Raises RunError where a custom sampler breaks its promises."""
        self._begin(step)
        offered = self._state.questions.drawable()
        if num <= 0 or not offered:
            return Draw(question_ids=(), buckets=(), probabilities={})
        buckets = [bucket for _, bucket in offered]
        num = min(num, self._state.questions.num_drawable)
        drawn = check_draw(self._sampler(buckets, num, rng), buckets, num, self.rules.sampler)
        keys = [
            self._state.questions.bucket(self._state.questions.number(question_id))
            for question_id in drawn.question_ids
        ]
        probabilities: dict[int, float] = {}
        for (key, bucket), probability in zip(offered, drawn.probabilities.tolist(), strict=True):
            probabilities[key.success_count] = probabilities.get(key.success_count, 0.0) + probability
            self._writer.append(
                DRAWS,
                {
                    "step": step,
                    "bucket": key.success_count,
                    "num_members": key.num_members,
                    "num_questions": len(bucket),
                    "probability": probability,
                    "num_drawn": keys.count(key),
                },
            )
        return Draw(
            question_ids=drawn.question_ids,
            buckets=tuple(key.success_count for key in keys if key is not None),
            probabilities=probabilities,
        )

    def candidates(self, question_id: str) -> Candidates:
        """The stored trajectories of a question, with their last measurements."""
        return self._state.index.candidates(self._number(question_id), question_id)

    def stale(self, candidates: Candidates, weight_version: int) -> Bool[np.ndarray, " candidates"]:
        """Which candidates must be measured under the current weights before `choose`."""
        return candidates.stale(weight_version, self.rules.max_score_staleness)

    def choose(self, candidates: Candidates, rng: np.random.Generator) -> int:
        """Position of the candidate to replay, by the rules' metric and direction, the lowest id of equals."""
        return selection.choose(candidates, self._metric, self.rules.direction, rng)

    def load(self, trajectory_ids: Sequence[int]) -> list[Trajectory]:
        """Live trajectories with their bodies, bit for bit as they were recorded."""
        births = self._state.index.births(trajectory_ids)
        return [
            Trajectory(
                trajectory_id=int(trajectory_id),
                question_id=self._state.questions.ids[question],
                token_ids=token_ids,
                behaviour_logprobs=logprobs,
                step_born=step_born,
                weight_version=version,
                reward=reward,
                advantage=advantage,
            )
            for trajectory_id, (token_ids, logprobs), question, step_born, version, reward, advantage in zip(
                trajectory_ids,
                self._state.bodies(trajectory_ids),
                *births,
                *self._state.index.outcomes(trajectory_ids),
                strict=True,
            )
        ]

    def record_scores(self, step: int, candidates: Candidates, *chosen: int) -> None:
        """One row per candidate of a question, as measured when it was chosen from.

        `chosen` are the positions of those that are replayed.
        """
        self._state.index.measure(
            candidates.trajectory_ids,
            entropy=candidates.entropy,
            nll=candidates.nll,
            measured_version=candidates.measured_version,
        )
        for position in range(len(candidates)):
            self._writer.append(
                SCORES,
                {
                    "step": step,
                    "question_id": candidates.question_id,
                    "trajectory_id": int(candidates.trajectory_ids[position]),
                    "weight_version": int(candidates.measured_version[position]),
                    "entropy": float(candidates.entropy[position]),
                    "nll": float(candidates.nll[position]),
                    "num_tokens": int(candidates.num_tokens[position]),
                    "chosen": position in chosen,
                },
            )

    def record_selected(self, step: int, trajectory_ids: Sequence[int]) -> None:
        """The trajectories that are replayed in this step; their questions rest afterwards."""
        for trajectory_id in trajectory_ids:
            self._state.select(step, trajectory_id)

    def record_visit(self, visit: Visit, *, collecting: bool = True) -> VisitOutcome:
        """Retire the question, or store what is eligible and move its bucket to the latest success count.

        Without `collecting` (before the delayed start) nothing is stored; retirement is active all the same. A failure
        of the verifier neither retires a question nor moves a bucket already set; its successes are stored, but with
        store = all nothing is, for a reward that nobody gave would be replayed.
        """
        question = self._number(visit.question_id)
        assert not self._state.questions.is_retired(question), f"question {visit.question_id} was retired before"
        key = counted(visit, self.group_size, fresh_only=self.rules.count_fresh_only)
        self._state.note_visit(visit, key)
        retires = self.rules.retirement and key.success_count >= self.rules.retires_at(key.num_members)
        if retires and not visit.verifier_failed:
            self._state.retire(visit.step, question)
            return VisitOutcome(retired=True, bucket=None, collected=(), num_duplicates=0, num_evicted=0)
        eligible = self.rules.lower_bound < key.success_count <= self.rules.upper(max(self.group_size, key.num_members))
        new, num_duplicates = self._to_store(question, visit) if collecting and eligible else ([], 0)
        bucket = self._state.questions.bucket(question)
        if bucket is None and new:
            self._state.enter(question, key)
        elif bucket not in (None, key) and not visit.verifier_failed:
            self._state.move(visit.step, question, key)
        collected = self._collect(visit, question, new)
        num_evicted = self._trim(visit.step, question) + self._trim_store(visit.step)
        bucket = self._state.questions.bucket(question)
        return VisitOutcome(
            retired=False,
            bucket=None if bucket is None else bucket.success_count,
            collected=collected,
            num_duplicates=num_duplicates,
            num_evicted=num_evicted,
        )

    def _to_store(self, question: int, visit: Visit) -> tuple[list[tuple[int, FreshRow]], int]:
        """Rows of an eligible visit that are stored, each with its fingerprint, and the number of duplicates."""
        match self.rules.store:
            case "successes":
                return self._without_duplicates(question, [row for row in visit.rows if row.reward > 0])
            case "all" if not visit.verifier_failed:
                return [(token_hash(row.token_ids), row) for row in visit.rows], 0
        return [], 0

    def _collect(self, visit: Visit, question: int, new: Sequence[tuple[int, FreshRow]]) -> tuple[int, ...]:
        """Store rows as one group, and let them be drawn."""
        priorities = self._priorities(visit.step, [row for _, row in new])
        collected: list[int] = []
        for (fingerprint, row), priority in zip(new, priorities, strict=True):
            group = collected[0] if collected else None
            collected.append(self._state.collect(visit, question, row, fingerprint, group=group, priority=priority))
        self._state.admit(collected)
        return tuple(collected)

    def _priorities(self, step: int, rows: Sequence[FreshRow]) -> list[float]:
        """Of birth, one for each row; NaN where units are not drawn by priority, or by one of the user's own."""
        if self._priority is None or not self.rules.draws_units or not rows:
            return [math.nan] * len(rows)
        if self.rules.draws_groups:
            return [self._priority(born_unit(step, rows))] * len(rows)
        return [self._priority(born_unit(step, [row])) for row in rows]

    def flush(self, step: int) -> None:
        """Make the step durable, also where nothing happened in it. Raises RunError where the disk refuses."""
        for part in self._writer.flush(step):
            self._state.add_part(part)

    def compact(self, kept_checkpoints: Sequence[int], *, fewest: int = FEWEST) -> None:
        """Merge runs of at least `fewest` small parts between the steps of kept checkpoints.

        What is newer than all kept checkpoints stays as it is, and the ledger can still be cut back to each of them.
        """
        if compact(self.folder, self._writer.identity, kept_checkpoints, fewest=fewest):
            self._state.replace_parts(read_catalogue(self.folder).parts[BODIES])

    def _begin(self, step: int) -> None:
        """Let rested questions be drawn again and evict what is over age; idempotent within a step."""
        self._state.questions.wake(step)
        if self.rules.max_age:
            for trajectory_id in self._state.index.born_before(step - self.rules.max_age):
                self._state.evict(step, trajectory_id)

    def _number(self, question_id: str) -> int:
        if question_id not in self._state.questions:
            raise InputError(f"question {question_id} is not in the question file of this run")
        return self._state.questions.number(question_id)

    def _without_duplicates(
        self, question: int, successes: Sequence[FreshRow]
    ) -> tuple[list[tuple[int, FreshRow]], int]:
        """Successes that are not stored yet, each with its fingerprint, and the number of the others."""
        stored = self._state.index.by_hash(question) if successes else {}
        new: list[tuple[int, FreshRow]] = []
        for success in successes:
            fingerprint = token_hash(success.token_ids)
            like = [other.token_ids for known, other in new if known == fingerprint]
            like += [token_ids for token_ids, _ in self._state.bodies(stored.get(fingerprint, []))]
            if not any(np.array_equal(success.token_ids, token_ids) for token_ids in like):
                new.append((fingerprint, success))
        return new, len(successes) - len(new)

    def _trim(self, step: int, question: int) -> int:
        """Evict by the named rule until the question holds no more than it may; returns how many went."""
        excess = self._state.index.count(question) - self.rules.max_per_question if self.rules.max_per_question else 0
        for _ in range(excess):
            candidates = self._state.index.candidates(question, self._state.questions.ids[question])
            if self._state.units is not None:
                candidates = replace(candidates, priority=self._state.units.keys(candidates.trajectory_ids))
            position = self._evicts(candidates, self._state.index.hashes(candidates.trajectory_ids))
            self._state.evict(step, int(candidates.trajectory_ids[position]))
        return max(excess, 0)

    def _trim_store(self, step: int) -> int:
        """Evict units by the named rule until the store holds no more than its capacity; returns how many rows went."""
        units, num = self._state.units, 0
        if units is None:
            return 0
        for unit in units.excess():
            for trajectory_id in units.members(unit):
                self._state.evict(step, trajectory_id)
                num += 1
        return num

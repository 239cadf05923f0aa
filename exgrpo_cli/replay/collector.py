"""What a visit changes in the buffer: its question retires or moves, and what is eligible is stored."""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from exgrpo_cli.config.sections.replay import ReplaySettings
from exgrpo_cli.replay.buffer_state import BufferState
from exgrpo_cli.replay.drawing.priorities import PRIORITIES
from exgrpo_cli.replay.eviction import EVICTIONS
from exgrpo_cli.replay.visits import FreshRow, Visit, VisitOutcome, born_unit, counted, token_hash


class Collector:
    """Takes in visits, and evicts what no longer fits."""

    def __init__(self, state: BufferState, rules: ReplaySettings, group_size: int) -> None:
        self._state = state
        self._rules = rules
        self._group_size = group_size
        self._evicts = EVICTIONS[rules.eviction]
        self._priority = PRIORITIES.get(rules.priority)

    def record(self, visit: Visit, *, collecting: bool) -> VisitOutcome:
        """Retire the question, or store what is eligible and move its bucket to the latest success count.

        Without `collecting` (before the delayed start) nothing is stored; retirement is active all the same. A failure
        of the verifier neither retires a question nor moves a bucket already set; its successes are stored, but with
        store = all nothing is, since a reward that was never given would be replayed.
        """
        question = self._state.number(visit.question_id)
        assert not self._state.questions.is_retired(question), f"question {visit.question_id} was retired before"
        key = counted(visit, self._group_size, fresh_only=self._rules.count_fresh_only)
        self._state.note_visit(visit, key)
        retires = self._rules.retirement and key.success_count >= self._rules.retires_at(key.num_members)
        if retires and not visit.verifier_failed:
            self._state.retire(visit.step, question)
            return VisitOutcome(retired=True, bucket=None, collected=(), num_duplicates=0, num_evicted=0)
        eligible = (
            self._rules.lower_bound < key.success_count <= self._rules.upper(max(self._group_size, key.num_members))
        )
        new, num_duplicates = self._to_store(question, visit) if collecting and eligible else ([], 0)
        bucket = self._state.questions.bucket(question)
        if bucket is None and new:
            self._state.enter(question, key)
        elif bucket not in (None, key) and not visit.verifier_failed:
            self._state.move(visit.step, question, key)
        collected = self._collect(visit, question, new)
        num_evicted = self._trim(visit.step, question) + self.trim_store(visit.step)
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
        match self._rules.store:
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
        if self._priority is None or not self._rules.draws_units or not rows:
            return [math.nan] * len(rows)
        if self._rules.draws_groups:
            return [self._priority(born_unit(step, rows))] * len(rows)
        return [self._priority(born_unit(step, [row])) for row in rows]

    def _without_duplicates(
        self, question: int, successes: Sequence[FreshRow]
    ) -> tuple[list[tuple[int, FreshRow]], int]:
        """Successes that are not stored yet, each with its fingerprint, and the number of the others."""
        stored = self._state.index.by_hash(question) if successes and self._state.index.count(question) else {}
        new: list[tuple[int, FreshRow]] = []
        for success in successes:
            fingerprint = token_hash(success.token_ids)
            like = [other.token_ids for known, other in new if known == fingerprint]
            if fingerprint in stored:
                like += [token_ids for token_ids, _ in self._state.bodies(stored[fingerprint])]
            if not any(np.array_equal(success.token_ids, token_ids) for token_ids in like):
                new.append((fingerprint, success))
        return new, len(successes) - len(new)

    def _trim(self, step: int, question: int) -> int:
        """Evict by the named rule until the question holds no more than it may; returns how many went."""
        excess = self._state.index.count(question) - self._rules.max_per_question if self._rules.max_per_question else 0
        for _ in range(excess):
            candidates = self._state.index.candidates(question, self._state.questions.ids[question])
            if self._state.units is not None:
                candidates = replace(candidates, priority=self._state.units.keys(candidates.trajectory_ids))
            position = self._evicts(candidates, self._state.index.column("token_hash", candidates.trajectory_ids))
            self._state.evict(step, int(candidates.trajectory_ids[position]))
        return max(excess, 0)

    def trim_store(self, step: int) -> int:
        """Evict units by the named rule until the store holds no more than its capacity; returns how many rows went."""
        units, num = self._state.units, 0
        if units is None:
            return 0
        for unit in units.excess():
            for trajectory_id in units.members(unit):
                self._state.evict(step, trajectory_id)
                num += 1
        return num

"""Any sequence of visits, draws by priority, gates, evictions and resumes, against a plain list of units."""

import math
import shutil
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
import small_ledger
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from store_calls import record, row_of, visit_of

from exgrpo_cli.replay import append, store

K = 3
QUESTIONS = ("a", "b", "c", "d")
LOGPROB = np.float32(np.log(0.3))
PROBABILITY = float(np.exp(np.float64(LOGPROB)))
"""Of every stored token under the policy that sampled it."""

RULES = st.fixed_dictionaries(
    {
        "unit": st.sampled_from(["row", "group"]), "priority": st.sampled_from(["advantage", "headroom", "latest"]),
        "draw": st.sampled_from(["top", "proportional"]), "age_decay": st.sampled_from([0.0, 2.0]),
        "capacity": st.sampled_from([2, 4, 100]), "eviction": st.sampled_from(["oldest", "lowest-priority"]),
        "max_uses": st.sampled_from([0, 2]), "max_age": st.sampled_from([0, 3]), "retirement": st.booleans(),
        "bias_correction": st.sampled_from([0.0, 0.4]),
    }
)  # fmt: skip


@dataclass
class Unit:
    """What the definitions say of a unit."""

    number: int
    num_rows: int
    question: str
    born: int
    priority: float
    uses: int = 0


@dataclass
class Reference:
    """A list of units, sorted anew for every question that is asked of it."""

    rules: append.Append
    barred: tuple[str, ...] = ()
    units: list[Unit] = field(default_factory=list)
    retired: set[str] = field(default_factory=set)
    next_row: int = 0

    def key(self, unit: Unit) -> float:
        return unit.priority if not self.rules.age_decay else math.log(unit.priority) + unit.born / self.rules.age_decay

    def begin(self, step: int) -> None:
        if self.rules.max_age:
            self.units = [unit for unit in self.units if step - unit.born <= self.rules.max_age]

    def visit(self, question: str, rewards: list[float], step: int) -> None:
        k = int(sum(rewards))
        if self.rules.retirement and k == K:
            self.retired.add(question)
            self.units = [unit for unit in self.units if unit.question != question]
        if not 0 < k < K or question in self.barred:
            return
        advantages = [reward - k / K for reward in rewards]
        # Of one row; a group's is the mean over its rows, all of one length.
        headrooms = [1 - PROBABILITY if advantage > 0 else PROBABILITY for advantage in advantages]
        own = {"headroom": headrooms, "advantage": [abs(a) + 1e-6 for a in advantages], "latest": [float(step)] * K}
        of_rows = own[self.rules.priority]
        if self.rules.draws_groups:
            self.units.append(Unit(self.next_row, K, question, step, float(np.mean(of_rows))))
        else:
            self.units += [Unit(self.next_row + i, 1, question, step, own) for i, own in enumerate(of_rows)]
        self.next_row += K
        while len(self.units) > self.rules.capacity:
            by_priority = self.rules.eviction == "lowest-priority"
            self.units.remove(min(self.units, key=lambda unit: (self.key(unit) if by_priority else 0, unit.number)))

    def scanned(self, unit: Unit, *, accepted: bool, headroom: float) -> None:
        if self.rules.priority == "headroom":
            unit.priority = headroom
        unit.uses += accepted
        if accepted and unit.uses == self.rules.max_uses:
            self.units.remove(unit)


class Machine(RuleBasedStateMachine):
    """One run's store beside the reference."""

    @initialize(drawn=RULES, barred=st.sampled_from([(), (), QUESTIONS[:1], QUESTIONS[:2]]))
    def start(self, drawn: dict, barred: tuple[str, ...]) -> None:
        if drawn["draw"] == "top":
            drawn["bias_correction"] = 0.0
        rules = append.Append(store="all", max_drift=1.0, **drawn)
        self.folder = Path(tempfile.mkdtemp())
        self.reference = Reference(rules, barred)
        identity = replace(small_ledger.IDENTITY, group_size=K)
        self.shared = {"identity": identity, "rules": rules, "question_ids": QUESTIONS, "barred": barred}
        self.buffer = store.Store(self.folder / "replay", **self.shared)
        self.step = 1

    def teardown(self) -> None:
        if hasattr(self, "buffer"):
            self.buffer.close()
            shutil.rmtree(self.folder)

    @rule(
        groups=st.lists(
            st.tuples(st.sampled_from(QUESTIONS), st.sampled_from([0, 1, 1, 2, 2, K])), min_size=1, max_size=3
        ),
        # One of 99 shows the whole store.
        waves=st.lists(st.sampled_from([1, 2, 3, 99]), max_size=3),
        verdicts=st.lists(st.tuples(st.booleans(), st.sampled_from([0.1, 0.3, 0.55, 0.7])), min_size=9, max_size=9),
        seed=st.integers(0, 99),
    )
    def one_step(
        self, groups: list[tuple[str, int]], waves: list[int], verdicts: list[tuple[bool, float]], seed: int
    ) -> None:
        """Draw in waves, judge what was drawn, then store."""
        rng = np.random.default_rng(seed)
        if waves:
            self.reference.begin(self.step)
        left = {unit.number: unit for unit in self.reference.units}
        whole, judged = dict(left), []
        draw = self.buffer.draw_units(self.reference.rules, self.step, rng) if waves else None
        for num in waves:
            drawn = draw.take(num)
            self.check_draw([unit.unit_id for unit in drawn], num, left)
            for unit in drawn:
                self.check_chance(unit, whole)
                del left[unit.unit_id]
                judged.append(unit)
        scanned = [
            replace(unit, accepted=accepted, drift=0.0, headroom=headroom)
            for unit, (accepted, headroom) in zip(judged, verdicts, strict=False)
        ]
        self.buffer.record_scan(self.step, scanned)
        for unit in scanned:
            self.reference.scanned(whole[unit.unit_id], accepted=unit.accepted, headroom=unit.headroom)
        for question, k in groups:
            if question not in self.reference.retired:
                self.visit(question, [1.0] * k + [0.0] * (K - k))
        self.buffer.flush(self.step)
        self.step += 1

    def check_draw(self, drawn: list[int], num: int, left: dict[int, Unit]) -> None:
        assert len(drawn) == min(num, len(left)) == len(set(drawn))
        if self.reference.rules.draw == "top":
            order = sorted(left.values(), key=lambda unit: (-self.reference.key(unit), -unit.born, unit.number))
            assert drawn == [unit.number for unit in order[:num]]

    def check_chance(self, drawn: object, whole: dict[int, Unit]) -> None:
        """P = p / sum over the whole store, and weights (P_min / P)^b, ages counted."""
        rules = self.reference.rules
        fading = {
            n: math.exp(-(self.step - u.born) / rules.age_decay) if rules.age_decay else 1 for n, u in whole.items()
        }
        aged = {number: unit.priority * fading[number] for number, unit in whole.items()}
        own = aged[drawn.unit_id]
        assert drawn.priority == pytest.approx(own, rel=1e-9)
        if rules.draw == "proportional":
            assert drawn.probability == pytest.approx(own / sum(aged.values()), rel=1e-9)
            assert drawn.weight == pytest.approx((min(aged.values()) / own) ** rules.bias_correction, rel=1e-9)

    def visit(self, question: str, rewards: list[float]) -> None:
        k = int(sum(rewards))
        rows = [
            row_of(self.step, member, logprob=LOGPROB, reward=reward, advantage=reward - k / K)
            for member, reward in enumerate(rewards)
        ]
        record(self.buffer, visit_of(question, self.step, rows))
        self.reference.visit(question, rewards, self.step)

    @rule()
    def resume(self) -> None:
        self.buffer.seal()
        self.buffer.close()
        self.buffer = store.Store(self.folder / "replay", at_step=self.step - 1, **self.shared)

    @invariant()
    def holds_as_much(self) -> None:
        if hasattr(self, "buffer"):
            assert self.buffer.counts.num_trajectories == sum(unit.num_rows for unit in self.reference.units)
            assert set(self.buffer.retired) == self.reference.retired


TestUnits = Machine.TestCase
TestUnits.settings = settings(max_examples=12, stateful_step_count=10, deadline=None)

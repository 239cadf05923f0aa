"""Any sequence of visits, draws, checkpoints and resumes, against a reference written straight from the definition."""

import copy
import math
import shutil
import tempfile
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from small_ledger import IDENTITY, K
from store_calls import available, candidates_of, chosen_of, draw, record, replay, row_of, visit_of

from exgrpo_cli.replay import replace, store

QUESTIONS = tuple(f"q{number}" for number in range(5))
GroupValues = tuple[str, int, list[int], bool, bool, bool]
GROUPS = st.tuples(
    st.sampled_from(QUESTIONS),
    st.sampled_from([0, 1, 1, 2, 2, 3, 3, K]),
    # The words stand for whole responses: few different ones, so that duplicates are common.
    st.lists(st.integers(0, 5), min_size=K, max_size=K),
    st.booleans(),
    st.sampled_from([False, False, False, True]),
    st.sampled_from([True, True, True, False]),
)
"""Question, k, responses, whether experiential, whether the verifier failed, whether the run collects."""

RULES = st.fixed_dictionaries(
    {
        "lower_bound": st.sampled_from([0, 0, 1]), "upper_bound": st.sampled_from([2, K - 1, K]),
        "retirement": st.booleans(), "count_fresh_only": st.booleans(),
        "max_per_question": st.sampled_from([0, 0, 2]), "max_age": st.sampled_from([0, 0, 2]),
        "cooldown": st.sampled_from([0, 1, 3]),
    }
)  # fmt: skip


@dataclass
class Reference:
    """Dictionaries and lists, no index, no ledger."""

    rules: replace.Replace
    barred: tuple[str, ...] = ()
    """Visited, retired and re-admitted as others, never stored, so never drawn."""
    stored: dict[str, list[tuple[int, int, tuple[int, ...]]]] = field(default_factory=lambda: defaultdict(list))
    """(trajectory id, step born, token ids) of each question, retired ones included."""
    bucket: dict[str, tuple[int, int]] = field(default_factory=dict)
    retired: set[str] = field(default_factory=set)
    last_replay: dict[str, int] = field(default_factory=dict)
    next_id: int = 0

    def begin(self, step: int) -> None:
        if self.rules.max_age:
            for question, held in self.stored.items():
                held[:] = [entry for entry in held if step - entry[1] <= self.rules.max_age]
                if not held:
                    self.bucket.pop(question, None)

    def visit(self, visit: store.Visit, *, collecting: bool) -> None:
        question = visit.question_id
        k, members = visit.success_count, K
        if self.rules.count_fresh_only and visit.num_replayed:
            k, members = visit.num_fresh_successes, K - 1
        if self.rules.retirement and k == members and not visit.verifier_failed:
            self.retired.add(question)
            self.bucket.pop(question, None)
            return
        if collecting and question not in self.barred and self.rules.lower_bound < k <= self.rules.upper_bound:
            for success in visit.rows:
                tokens = tuple(success.token_ids.tolist())
                if tokens not in [entry[2] for entry in self.stored[question]]:
                    self.stored[question].append((self.next_id, visit.step, tokens))
                    self.next_id += 1
        if self.stored[question] and (question not in self.bucket or not visit.verifier_failed):
            self.bucket[question] = (k, members)
        if self.rules.max_per_question:
            self.stored[question][:] = self.stored[question][-self.rules.max_per_question :]

    def drawable(self, step: int) -> set[str]:
        rest = self.rules.cooldown
        return {q for q in self.bucket if not rest or step > self.last_replay.get(q, step - rest - 1) + rest}


class BufferMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        # In memory where that exists: every step is synced, and this test is not about the disk.
        memory = Path("/dev/shm")
        self.folder = Path(tempfile.mkdtemp(prefix="exgrpo-replay-", dir=memory if memory.is_dir() else None))
        self.step = 1
        self.rng = np.random.default_rng(0)
        self.has_pending = False

    @initialize(settings=RULES, barred=st.sampled_from([(), (), QUESTIONS[:1], QUESTIONS[:3]]))
    def start(self, settings: dict[str, int], barred: tuple[str, ...]) -> None:
        self.rules = replace.Replace(readmit_fraction=0.5, readmit_every=1, sampler="uniform", **settings)
        self.shared = {"identity": IDENTITY, "rules": self.rules, "question_ids": QUESTIONS, "barred": barred}
        self.buffer = store.Store(self.folder, **self.shared)
        self.reference = Reference(self.rules, barred)
        self.kept = {0: (copy.deepcopy(self.reference), copy.deepcopy(self.rng))}

    @rule(groups=st.lists(GROUPS, min_size=2, max_size=8), num=st.integers(0, 4), readmits=st.booleans())
    def live_a_step(self, groups: list[GroupValues], num: int, readmits: bool) -> None:
        """Re-admission, draw, visits, flush: the order of a training step."""
        if readmits:
            self.readmit()
        if num:
            self.replay(num)
        for values in groups:
            self.visit(*values)
        self.finish_step()

    @rule(group=GROUPS)
    def visit_alone(self, group: GroupValues) -> None:
        self.has_pending = True
        self.visit(*group)

    def visit(
        self, question: str, k: int, words: list[int], experiential: bool, verifier_failed: bool, collecting: bool
    ) -> None:
        if question in self.reference.retired:
            return
        # A replayed trajectory exists and is correct, so such a group has k >= 1.
        experiential = experiential and question in self.reference.bucket and k >= 1
        fresh = k - 1 if experiential else k
        rows = [row_of(*range(word + 1), logprob=-0.1 * self.step, entropy=float(word)) for word in words[:fresh]]
        more = {"success_count": k, "num_replayed": int(experiential), "verifier_failed": verifier_failed}
        visit = visit_of(question, self.step, rows, **more)
        record(self.buffer, visit, collecting=collecting)
        self.reference.visit(visit, collecting=collecting)

    def replay(self, num: int) -> None:
        self.reference.begin(self.step)
        expected = self.reference.drawable(self.step)
        assert available(self.buffer, self.step) == len(expected)
        drawn = draw(self.buffer, num, self.step, self.rng)
        assert len(drawn) == min(num, len(expected)) and set(drawn) <= expected - set(self.reference.barred)
        for question in drawn:
            candidates = candidates_of(self.buffer, question)
            [chosen] = chosen_of(self.buffer, candidates, self.rng)
            replay(self.buffer, self.step, candidates, chosen)
            self.reference.last_replay[question] = self.step

    def readmit(self) -> None:
        expected = math.ceil(0.5 * len(self.reference.retired))
        back = self.buffer.readmit(self.step, self.rng)
        assert len(back) == expected and set(back) <= self.reference.retired
        for question in back:
            self.reference.retired.remove(question)
            if self.reference.stored[question]:
                self.reference.bucket[question] = (K - 1, K)

    def finish_step(self) -> None:
        self.buffer.flush(self.step)
        self.step += 1
        self.has_pending = False

    @rule(data=st.data())
    def resume(self, data: st.DataObject) -> None:
        at_step = data.draw(st.sampled_from(sorted(self.kept)), label="at_step")
        self.buffer.close()
        self.buffer = store.Store(self.folder, at_step=at_step, **self.shared)
        self.step = at_step + 1
        self.has_pending = False
        self.kept = {step: state for step, state in self.kept.items() if step <= at_step}
        self.reference, self.rng = copy.deepcopy(self.kept[at_step])

    @rule()
    def reopen_draws_the_same(self) -> None:
        """The state that lived through the run and the one rebuilt from the ledger draw and choose alike."""
        self.checkpoint()
        lived = copy.deepcopy(self.rng)
        first = draw(self.buffer, 3, self.step, lived)
        chosen = [chosen_of(self.buffer, candidates_of(self.buffer, question), lived) for question in first]
        self.buffer.close()
        self.buffer = store.Store(self.folder, at_step=self.step - 1, **self.shared)
        rebuilt = copy.deepcopy(self.rng)
        assert draw(self.buffer, 3, self.step, rebuilt) == first
        again = [chosen_of(self.buffer, candidates_of(self.buffer, question), rebuilt) for question in first]
        assert again == chosen
        # Those draws began the step, so what is over age is gone.
        self.reference.begin(self.step)
        self.has_pending = True

    @rule()
    def checkpoint(self) -> None:
        """From here a run can be resumed."""
        if self.has_pending:
            self.finish_step()
        self.buffer.seal()
        self.kept[self.step - 1] = copy.deepcopy((self.reference, self.rng))

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "buffer"):
            return
        reference, buffer = self.reference, self.buffer
        assert set(buffer.retired) == reference.retired
        assert buffer.counts.num_questions == len(reference.bucket)
        assert buffer.counts.num_trajectories == sum(len(reference.stored[question]) for question in reference.bucket)
        assert buffer.counts.buckets == Counter(k for k, _ in reference.bucket.values())
        for question, held in reference.stored.items():
            ids = [entry[0] for entry in held]
            assert candidates_of(buffer, question).trajectory_ids.tolist() == ids
            for trajectory, (_, born, tokens) in zip(buffer.load(ids), held, strict=True):
                assert (trajectory.step_born, tuple(trajectory.token_ids.tolist())) == (born, tokens)
                assert (trajectory.behaviour_logprobs == np.float32(-0.1 * born)).all()

    def teardown(self) -> None:
        if hasattr(self, "buffer"):
            # What the ledger tells adds up to the same state.
            self.checkpoint()
            self.buffer.close()
            self.buffer = store.Store(self.folder, at_step=self.step - 1, **self.shared)
            self.agrees()
            self.buffer.close()
        shutil.rmtree(self.folder)


BufferMachine.TestCase.settings = settings(max_examples=30, stateful_step_count=15, deadline=None)
TestBuffer = BufferMachine.TestCase

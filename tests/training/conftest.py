"""What tests of the loop share: verdicts given by hand where a run would grade, and the mini-batches that a policy is
given, no row of which is in any table."""

from collections.abc import Callable, Sequence

import pytest

from exgrpo_cli.algo.batching import MiniBatch
from exgrpo_cli.base.types import Verdict
from exgrpo_cli.engines.policy.policy import Policy, UpdateReport
from exgrpo_cli.grading import GradingItem, GradingPool


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> list[MiniBatch]:
    """The mini-batches that the policy is given."""
    seen: list[MiniBatch] = []
    update = Policy.update

    def note(policy: Policy, batch: MiniBatch) -> UpdateReport:
        seen.append(batch)
        return update(policy, batch)

    monkeypatch.setattr(Policy, "update", note)
    return seen


@pytest.fixture
def verdicts(monkeypatch: pytest.MonkeyPatch) -> Callable[[Sequence[Sequence[int | None]], int], None]:
    """`verdicts(rounds, K)`: each call of the graders finds so many of K right, the first of a group; None: all of them
    time out.

    The gold answers, which a run grades first, are told by their number: it must not be a multiple of K.
    """
    check_answers = GradingPool.grade

    def group(count: int | None, size: int) -> list[Verdict]:
        if count is None:
            return [Verdict.TIMEOUT] * size
        return [Verdict.CORRECT] * count + [Verdict.WRONG] * (size - count)

    def give(rounds: Sequence[Sequence[int | None]], group_size: int) -> None:
        calls = iter(rounds)

        def grade(pool: GradingPool, items: Sequence[GradingItem]) -> list[Verdict]:
            if len(items) % group_size:
                return check_answers(pool, items)
            counts = next(calls)
            assert len(items) == group_size * len(counts)
            return [verdict for count in counts for verdict in group(count, group_size)]

        monkeypatch.setattr(GradingPool, "grade", grade)

    return give

"""What tests of the loop share: verdicts given by hand where a run would grade, and the mini-batches that a policy is
given, no row of which is in any table."""

from collections.abc import Callable, Sequence

import pytest

from exgrpo_cli.algo.batching import MiniBatch
from exgrpo_cli.base.types import Grade, Verdict
from exgrpo_cli.engines.policy.policy import Policy, UpdateReport
from exgrpo_cli.training.state import Parts
from exgrpo_cli.training.step import rollouts
from exgrpo_cli.training.step.groups import UnderWay


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
    """`verdicts(rounds, K)`: in each round so many rollouts of each group are right out of K, the first ones; None: all
    of them time out.
    """
    really = rollouts.grade

    def group(count: int | None, size: int) -> list[Grade]:
        if count is None:
            return [Grade.of(Verdict.TIMEOUT)] * size
        return [Grade.of(Verdict.CORRECT)] * count + [Grade.of(Verdict.WRONG)] * (size - count)

    def give(rounds: Sequence[Sequence[int | None]], group_size: int) -> None:
        calls = iter(rounds)

        def grade(parts: Parts, groups: Sequence[UnderWay], begun: rollouts.Begun) -> None:
            really(parts, groups, begun)
            for own, count in zip(groups, next(calls), strict=True):
                assert len(own.rollouts) == group_size
                for member, given in enumerate(group(count, group_size)):
                    own.grades[member] = own.grades[member][0], given

        monkeypatch.setattr(rollouts, "grade", grade)

    return give

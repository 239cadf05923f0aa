"""Verdicts given by hand where a run would grade."""

from collections.abc import Iterator, Sequence

import pytest

from exgrpo_cli.base.types import Verdict
from exgrpo_cli.grading import GradingItem, GradingPool


def give_verdicts(monkeypatch: pytest.MonkeyPatch, rounds: Sequence[Sequence[int | None]], group_size: int) -> None:
    """Each call of the graders finds so many of K right, the first of a group; None: all of them time out.

    The gold answers, which a run grades first, are told by their number: it must not be a multiple of K.
    """
    calls: Iterator[Sequence[int | None]] = iter(rounds)
    check_answers = GradingPool.grade

    def grade(pool: GradingPool, items: Sequence[GradingItem]) -> list[Verdict]:
        if len(items) % group_size:
            return check_answers(pool, items)
        counts = next(calls)
        assert len(items) == group_size * len(counts)
        verdicts: list[Verdict] = []
        for count in counts:
            right = 0 if count is None else count
            others = Verdict.TIMEOUT if count is None else Verdict.WRONG
            verdicts += [Verdict.CORRECT] * right + [others] * (group_size - right)
        return verdicts

    monkeypatch.setattr(GradingPool, "grade", grade)

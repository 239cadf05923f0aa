"""Tables of answers and their verdicts, one per grader, with the awkward ones."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from grading_pools import ANY, plain, pool_of
from grading_table import VERDICTS

from exgrpo_cli.base.data import tables
from exgrpo_cli.base.types import Verdict
from exgrpo_cli.grading import GradingItem, GradingPool

CORRECT, WRONG, NO_ANSWER, UNPARSABLE = Verdict.CORRECT, Verdict.WRONG, Verdict.NO_ANSWER, Verdict.UNPARSABLE_GOLD

CAPITALS = ("Paris", "London", "Rome", "Berlin")
LONG = [
    # Longer than the bound, at once; the explanation around a box may be as long as it likes.
    ("math", "7", r"\boxed{" + "7" * 2001 + "}", NO_ANSWER),
    ("math", "7", r"\boxed{" + "{" * 100_000 + "7" + "}" * 100_000 + "}", NO_ANSWER),
    # Without a box the answer is at the end, which has to be of words.
    ("math", "370", "because 3 " * 1000 + "\nThe answer is 370.", CORRECT),
    ("math", "370", "so 370 " * 1000 + "\nThe answer is 371.", WRONG),
    ("math", "7", "7" * 2001, NO_ANSWER),
    ("math", "7", "because " * 1000 + r"\boxed{7}", CORRECT),
    ("choice", "C", "x " * 5000 + "\nAnswer: C", CORRECT),
    ("choice", "C", "answer: " + "C" * 5000, NO_ANSWER),
    ("choice", "C", "answer: C\n" + "x " * 500_000, NO_ANSWER),
    ("choice", "C", "answer: B" + " x" * 500_000 + "\nanswer: C", CORRECT),
    ("exact", "Monday", "M" * 2001, NO_ANSWER),
]


@pytest.fixture(scope="module")
def math_pool() -> Iterator[GradingPool]:
    with pool_of("math") as pool:
        yield pool


@pytest.mark.parametrize("grader", ["math", "choice", "exact", "oat"])
def test_a_response_gets_the_verdict_of_the_table(math_pool: GradingPool, grader: str) -> None:
    table = [row for row in VERDICTS if row["grader"] == grader]
    table += [
        {"gold": gold, "response": response, "verdict": verdict} for of, gold, response, verdict in LONG if of == grader
    ]
    assert len(table) >= 8
    usual = CAPITALS if grader == "choice" else None
    items = [
        GradingItem(
            gold=row["gold"],
            response=row["response"],
            finished=True,
            answer_format=replace(ANY, requires_box=row.get("boxed", False)),
            options=row.get("options", usual),
        )
        for row in table
    ]
    found = math_pool.grade(items, grader=grader)
    assert [(row, said) for row, said in zip(table, found, strict=True) if said != row["verdict"]] == []


def test_audit_of_golds(math_pool: GradingPool) -> None:
    golds = {gold: Verdict[name] for name, own in tables(__file__, "golds.toml").items() for gold in own}
    assert dict(zip(golds, math_pool.verify_gold(list(golds)), strict=True)) == golds
    with pool_of("choice") as pool:
        assert pool.verify_gold(["C", "(b)", "42"]) == [CORRECT, CORRECT, UNPARSABLE]
    with pool_of("exact") as pool:
        # No answer of 2,001 characters is read, so the last gold could never be met.
        assert pool.verify_gold(["anything", " ", "M" * 2001]) == [CORRECT, UNPARSABLE, NO_ANSWER]


def test_identical_pairs_are_graded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with pool_of("math") as pool:
        held: list[Any] = []
        send = pool._send
        monkeypatch.setattr(pool, "_send", lambda line, job: held.append((line, job)))
        same = [pool.submit(plain(r"\boxed{z+y+x}", "x+y+z")) for _ in range(3)]
        # All three wait for one answer of the worker, which gets its task only now.
        assert len(held) == 1 and same[0] is same[1] is same[2]
        monkeypatch.undo()
        send(*held[0])
        assert same[0].result().verdict is CORRECT
        # Known by now: no waiting at all.
        assert pool.submit(plain(r"So $\boxed{z+y+x}$.", "x+y+z")).done()

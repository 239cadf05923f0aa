"""Tables of answers and their verdicts, one per grader, with the awkward ones."""

import sys
from collections.abc import Iterator
from typing import Any

import pytest
from grading_pools import pool_of
from grading_table import VERDICTS

from exgrpo_cli.base.types import AnswerFormat, Verdict
from exgrpo_cli.grading import GradingItem, GradingPool
from exgrpo_cli.grading.notation import plain_notation

CORRECT, WRONG, NO_ANSWER, UNPARSABLE = Verdict.CORRECT, Verdict.WRONG, Verdict.NO_ANSWER, Verdict.UNPARSABLE_GOLD
ANYWHERE = AnswerFormat(opens_think=False, requires_box=False, require_eos=False)
BOXED = AnswerFormat(opens_think=False, requires_box=True, require_eos=False)

CAPITALS = ("Paris", "London", "Rome", "Berlin")
LONG = [
    # Longer than the bound, at once; the explanation around a box may be as long as it likes.
    ("math", "7", r"\boxed{" + "7" * 2001 + "}", NO_ANSWER),
    ("math", "7", r"\boxed{" + "{" * 100_000 + "7" + "}" * 100_000 + "}", NO_ANSWER),
    ("math", "7", "because " * 1000 + "7", NO_ANSWER),
    ("math", "7", "because " * 1000 + r"\boxed{7}", CORRECT),
    ("choice", "C", "x " * 5000 + "\nAnswer: C", CORRECT),
    ("choice", "C", "answer: " + "C" * 5000, NO_ANSWER),
    ("exact", "Monday", "M" * 2001, NO_ANSWER),
]


def item(gold: str, response: str, **changes: object) -> GradingItem:
    fields = {"gold": gold, "response": response, "finished": True, "answer_format": ANYWHERE} | changes
    return GradingItem(**fields)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def math_pool() -> Iterator[GradingPool]:
    with pool_of("math") as pool:
        yield pool


@pytest.mark.parametrize("grader", ["math", "choice", "exact", "oat"])
def test_a_response_gets_the_verdict_of_the_table(math_pool: GradingPool, grader: str) -> None:
    table = [(row["gold"], row["response"], Verdict(row["verdict"])) for row in VERDICTS if row["grader"] == grader]
    table += [(gold, response, verdict) for of, gold, response, verdict in LONG if of == grader]
    assert len(table) >= 8
    items = [item(gold, response, options=CAPITALS if grader == "choice" else None) for gold, response, _ in table]
    found = math_pool.grade(items, grader=grader)
    assert [(*row, said) for row, said in zip(table, found, strict=True) if said is not row[2]] == []


def test_choice_without_known_options_goes_by_letters_alone() -> None:
    with pool_of("choice") as pool:
        items = [item("J", r"\boxed{J}"), item("C", r"\boxed{C) anything}"), item("C", "Rome")]
        assert pool.grade(items) == [CORRECT, CORRECT, NO_ANSWER]


def test_numbered_options_that_are_numbers_are_meant_by_their_label() -> None:
    numbers = ("30", "3", "1", "2")
    with pool_of("choice") as pool:
        items = [item("3", response, options=numbers) for response in ("ANSWER: 3", "ANSWER: 2", "3) 1", "30", "C")]
        assert pool.grade(items) == [CORRECT, WRONG, CORRECT, WRONG, CORRECT]
        lettered = [item("B", response, options=numbers) for response in ("3", "B. 3", "ANSWER: 2")]
        assert pool.grade(lettered) == [CORRECT, CORRECT, WRONG]
        vitamins = [item("A", response, options=("C", "D", "A", "b")) for response in ("ANSWER: A", "C", "A. C", "b")]
        assert pool.grade(vitamins) == [CORRECT, WRONG, CORRECT, WRONG]


def test_the_line_that_a_choice_question_demands_counts_without_a_box(math_pool: GradingPool) -> None:
    responses = {
        "so\nANSWER: C": CORRECT,
        "so\n**Answer: B**": WRONG,
        "so\nThe answer is (C).": CORRECT,
        "so\n<answer>C</answer>": CORRECT,
        'so\n"answer": "C"': CORRECT,
        "so it is C": NO_ANSWER,
        "Answer: C\nor not": NO_ANSWER,
    }
    items = [item("C", response, options=CAPITALS, answer_format=BOXED) for response in responses]
    assert math_pool.grade(items) == list(responses.values())
    # Without options a template that asks for a box wants one.
    assert math_pool.grade([item("C", "ANSWER: C", answer_format=BOXED)]) == [NO_ANSWER]
    # A gold that is a letter and no more, as of a file whose options were not recognised.
    assert math_pool.grade([item("C", "ANSWER: C"), item("C", "The answer is (B).")]) == [CORRECT, WRONG]


def test_math_grades_a_question_with_options_by_them(math_pool: GradingPool) -> None:
    responses = {r"\boxed{C}": CORRECT, r"\boxed{Rome}": CORRECT, "ANSWER: (B)": WRONG, r"\boxed{Oslo}": NO_ANSWER}
    items = [item("C", response, options=CAPITALS) for response in responses]
    assert math_pool.grade(items) == list(responses.values())
    assert math_pool.same_answer([(r"\boxed{C}", "Rome"), (r"\boxed{C}", "Paris")], CAPITALS) == [True, False]


def test_audit_of_golds(math_pool: GradingPool) -> None:
    golds = {
        "5": CORRECT,
        r"\frac{1}{2}": CORRECT,
        r"(-\infty, 2) \cup (3, \infty)": CORRECT,
        "1<x<2": CORRECT,
        "": UNPARSABLE,
        "5.": CORRECT,
        # math-verify keeps its text, which only the very same text would match.
        r"\text{x": UNPARSABLE,
        # Parses to zoo, which equals nothing.
        r"\frac{1}{0}": WRONG,
    }
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
        same = [pool.submit(item("x+y+z", r"\boxed{z+y+x}")) for _ in range(3)]
        # All three wait for one answer of the worker, which gets its task only now.
        assert len(held) == 1 and same[0] is same[1] is same[2]
        monkeypatch.undo()
        send(*held[0])
        assert same[0].result() is CORRECT
        # Known by now: no waiting at all.
        assert pool.submit(item("x+y+z", r"So $\boxed{z+y+x}$.")).done()


@pytest.mark.parametrize("answer", ["," * 1999, "7" + " " * 1998 + "x", r"7\text{ }" * 250, "x," * 1000])
def test_an_answer_of_nothing_but_marks_is_brought_to_plain_notation_in_few_steps(answer: str) -> None:
    looks = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal looks
        looks += event == "c_call"

    sys.setprofile(count)
    try:
        plain_notation.__wrapped__(answer)
    finally:
        sys.setprofile(None)
    # Each a regular expression that reads the text once: a mark taken away at a time made it thousands.
    assert looks < 1000

"""The grader in the manner of Oat's: what it forgives beyond math-verify, and what it does not."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
import sympy.physics.units  # noqa: F401 - evaluates the names of its units when it is first used
from grading_pools import TOWER, boxed, pool_of
from sympy.parsing import sympy_parser
from sympy.parsing.sympy_parser import implicit_multiplication_application, parse_expr, standard_transformations

from exgrpo_cli.base.types import Verdict
from exgrpo_cli.grading import GradingPool, mathematics, oat


@pytest.fixture(scope="module")
def pool() -> Iterator[GradingPool]:
    with pool_of("oat") as opened:
        yield opened


FORMULAS = (
    "1+x", "2x", "1/2x", "(x+1)(x-1)", "x(y+1)", "-x^2", "2^-1", "2^3^2", "5!", "sqrt(3)/2", "2sqrt(3)", "2pi", "pi x",
    "2.5", "2e5", ".5", "xy", "ln(2)", "--3", "3-+2", "(2)(3)", "2(3)4", "3!^2", "sqrt(2)^2", "x-(-1)", "2 ^ - x",
)  # fmt: skip
NO_FORMULAS = (
    "", "(", "1+", "()", "x=5", "1,2", "x.real", "__import__('os')", "2//3", "[1]", "x<y", "2**", "*2", "2!!",
    "lambda:1", "(" * 500 + "1" + ")" * 500, "x^" * 500 + "x",
    # Python reads integers of at most 4,300 digits.
    "9" * 5000,
)  # fmt: skip


@pytest.mark.parametrize("text", FORMULAS)
def test_a_formula_is_what_sympy_reads(text: str) -> None:
    rules = (*standard_transformations, implicit_multiplication_application)
    assert oat.read_formula(text) == parse_expr(text.replace("^", "**"), transformations=rules)


@pytest.mark.parametrize("text", NO_FORMULAS)
def test_anything_else_is_no_formula(text: str) -> None:
    with pytest.raises(oat.NotAFormulaError):
        oat.read_formula(text)


@pytest.mark.parametrize(
    ("gold", "answer", "verdict"),
    [
        (r"2\pi", "2", Verdict.WRONG),
        (r"3\times 4", "34", Verdict.WRONG),
        (r"(-\infty, 2]", "(-, 2]", Verdict.WRONG),
        (r"2\pi", "2pi", Verdict.CORRECT),
        (r"3\times 4", "3*4", Verdict.CORRECT),
    ],
)  # fmt: skip
def test_signs_are_read_by_their_names(gold: str, answer: str, verdict: Verdict) -> None:
    assert oat.grade(gold, answer) is verdict


def test_nothing_of_an_answer_is_evaluated_but_numerals(monkeypatch: pytest.MonkeyPatch) -> None:
    # math-verify has sympy evaluate numerals with operators between them, and nothing that holds a letter.
    evaluated: list[str] = []
    real = sympy_parser.stringify_expr

    def watched(text: str, *places: Any) -> Any:
        evaluated.append(text)
        return real(text, *places)

    monkeypatch.setattr(sympy_parser, "stringify_expr", watched)
    answers = ("x+1+aa", "__import__('os').system('id')", "1+1", "xx(x)", "x.y", "(xx,x+x)", "x if x else 1", "3*4/5+1")
    for answer in answers:
        oat.grade("x + 1", answer)
        mathematics.grade_box("x+1", answer)
    assert evaluated
    assert all(re.fullmatch(r"[0-9().+*/\s-]*", text) for text in evaluated), evaluated


def test_a_hostile_answer_is_killed_like_any_other() -> None:
    with pool_of("oat", deadline_seconds=1) as pool:
        assert pool.grade([boxed("7", TOWER)]) == [Verdict.TIMEOUT]


def test_golds(pool: GradingPool) -> None:
    assert pool.verify_gold(["7", r"\frac{1}{2}", " "]) == [Verdict.CORRECT, Verdict.CORRECT, Verdict.UNPARSABLE_GOLD]

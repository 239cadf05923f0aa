"""Every shortcut agrees with math-verify, called plainly, wherever it decides."""

import inspect
import itertools
import logging
import random
import sys
from collections.abc import Iterator
from functools import partial
from importlib.metadata import version

import pytest
import sympy
from latex2sympy2_extended import latex2sympy2
from math_verify import parse, parser, verify

from exgrpo_cli.base import errors, types
from exgrpo_cli.config.sections.run import GradingSettings
from exgrpo_cli.grading import plain, pool, routes
from exgrpo_cli.grading.mathematics import PATCHES_HOLD_FOR, parse_in_two_stages, surely_differ

NUMBERS = [
    "7", "+7", "-7", "−7", "007", "7.0", "7.", "0", "-0", "0.0", "0.5", ".5", "00.5", "-0.5", "1000", "1,000", "+1,000",
    "1,000.0", "01,000", "0,123", "123", "1,23", "12,345,678", "12345678", "1,234,5678", "3.50", "3.5", "3.50001",
    "3.500001", "3.5000004", "0.33333", "0.333333", "123456789012345678901234567890", "123456789012345678901234567891",
    "1234567890123456.5", "--7", "- 7", "1e3", "1 000", "1/2", "-1/2", r"\frac{1}{2}", r"\dfrac{-1}{2}",
    r"\frac{1}{-2}", r"-\frac{-1}{2}", "4/2", "2", r"\frac{70}{10}", "1/3", r"\frac{33333}{100000}", "0.03125",
    r"\frac{3333304}{10000000}", r"\tfrac{1}{32}", "1/0", r"\frac{0}{3}", "7/2", "-3.5", r"\frac{123456789}{987654321}",
    r"\frac{13717421}{109739369}", "-1000", "-1,000", "−1000", "−1,000", "−1,000.0",
]  # fmt: skip
EXPRESSIONS = [
    "7", r"\frac{3\sqrt{3}}{4}", r"\frac{3}{4}\sqrt 3", r"\sqrt{51}", r"2\sqrt{113}", r"\pi", r"-\frac{\pi}{6}",
    r"18+2\pi", "6 - 5i", "-5i+6", "x^3+3x-6", "3x+x^3-6", "(a+5)(b+2)", "ab+2a+5b+10", r"\cot x",
    r"\frac{\cos x}{\sin x}", r"e^{2}", r"\log 8", r"3\log 2", "8n^2+4n+1", "5r^5", r"50\%", "50", "0.5", "0.7500001",
    r"\frac{3}{4}", "x", "2x",
    r"\text{east}", "east", "1,-2", "(3,4]", "x=5", r"\begin{pmatrix} 1\\2 \end{pmatrix}", r"10^{20}+1-10^{20}", "1",
    r"2^{100}", r"\infty", r"\frac{1}{0}", r"\sqrt[3]{-8}", "-2", r"\sqrt{3+2\sqrt{2}}", r"1+\sqrt{2}", "3R^2", "52_8",
]  # fmt: skip


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def says_math_verify(gold: str, answer: str) -> bool:
    def read(text: str) -> list[object]:
        return parse(rf"\boxed{{{text}}}", parsing_timeout=None)

    return verify(read(gold), read(answer), timeout_seconds=None)


def test_plain_numbers_agree_with_math_verify() -> None:
    decided = [
        (gold, answer, same)
        for gold, answer in itertools.product(NUMBERS, NUMBERS)
        if (same := plain.same_plain_number(gold, answer)) is not None
    ]
    assert len(decided) > 1000
    for gold, answer, same in random.Random(0).sample(decided, 300):
        assert same == says_math_verify(gold, answer), (gold, answer)


def test_huge_integers_do_not_reach_pythons_limit() -> None:
    assert sys.get_int_max_str_digits() <= 5000
    assert plain.plain_number("7" * 5000) is None


def test_disproof_never_contradicts_math_verify() -> None:
    values = {text: parse(rf"\boxed{{{text}}}", parsing_timeout=None)[0] for text in EXPRESSIONS}
    pairs = list(itertools.product(EXPRESSIONS, EXPRESSIONS))
    refuted = [pair for pair in pairs if surely_differ(values[pair[0]], values[pair[1]])]
    assert len(refuted) > 500
    for gold, answer in random.Random(0).sample(refuted, 60):
        assert not verify(values[gold], values[answer], timeout_seconds=None), (gold, answer)


def test_disproof_leaves_alone_what_it_cannot_be_sure_of() -> None:
    x = sympy.Symbol("x", real=True)
    huge = sympy.Pow(9, sympy.Pow(9, 9, evaluate=False), evaluate=False)
    assert surely_differ(sympy.Integer(7), sympy.Integer(8))
    # A lone symbol is compared as a word; towers and infinities are out of reach; near is not far.
    assert not surely_differ(x, sympy.Integer(8)) and not surely_differ(huge, sympy.Integer(8))
    assert not surely_differ(sympy.oo, sympy.Integer(8))
    assert not surely_differ(sympy.Rational(1, 3), sympy.Float("0.333333"))


def test_two_stage_parsing_gives_the_same_expressions(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(0)
    texts = [*EXPRESSIONS, *NUMBERS]
    for _ in range(150):
        first, second = rng.choice(EXPRESSIONS), rng.choice(EXPRESSIONS)
        texts.append(first + rng.choice(["+", ",", "=", "<", r"\cup ", "^", "/", r"\le ", " "]) + second)
        cut = rng.randrange(len(first))
        texts.append(first[:cut] + first[cut + 1 :])

    def readings() -> list[str]:
        return [
            str([sympy.srepr(value) for value in parse(rf"\boxed{{{text}}}", parsing_timeout=None)]) for text in texts
        ]

    plainly = readings()
    # Both are put back after the test.
    monkeypatch.setattr(parser, "parse_latex_cached", parser.parse_latex_cached)
    monkeypatch.setattr(latex2sympy2._Latex2Sympy, "create_parser", latex2sympy2._Latex2Sympy.create_parser)
    parser.extract_latex.cache_clear()
    parse_in_two_stages()
    assert readings() == plainly


def test_what_is_patched_is_there_in_these_versions() -> None:
    # Changed by parse_in_two_stages: should one of the names go, or take other arguments, that file is to be looked at.
    assert callable(latex2sympy2._Latex2Sympy.create_parser)
    plain = parser.parse_latex_cached.__wrapped__ if hasattr(parser.parse_latex_cached, "__wrapped__") else None
    assert plain is not None and list(inspect.signature(plain).parameters) == ["latex"]
    assert next(iter(inspect.signature(latex2sympy2._Latex2Sympy.create_parser).parameters)) == "self"
    assert [version(name).rsplit(".", 1)[0] for name in PATCHES_HOLD_FOR] == list(PATCHES_HOLD_FOR.values())


def test_a_math_verify_with_other_internals_still_grades_and_says_what_is_lost(monkeypatch) -> None:
    """The supervisor finds neither the module of its parser nor that of its comparison."""
    gone = "'math_verify.grader', 'latex2sympy2_extended.latex2sympy2'"
    boot = (
        "import sys, math_verify, latex2sympy2_extended; del math_verify.grader, latex2sympy2_extended.latex2sympy2; "
        f"sys.modules |= dict.fromkeys([{gone}]); "
    )
    monkeypatch.setattr(pool, "_BOOT", boot + pool._BOOT)
    lost = r"answers take longer to read, .*latex2sympy2.*; equations without a real solution all pass .*grader"
    with pytest.warns(errors.ToolkitWarning, match=lost), pool.GradingPool(GradingSettings(workers=1)) as graders:
        pairs = [(r"\frac{1}{2}", "0.5"), (r"\sqrt{8}", r"2\sqrt{2}"), ("x^2+4=0", "x^2+9=0"), ("7", "x+1")]
        item = partial(
            routes.GradingItem,
            finished=True,
            answer_format=types.AnswerFormat(opens_think=False, requires_box=True, require_eos=False),
        )
        verdicts = graders.grade([item(gold=gold, response=rf"\boxed{{{answer}}}") for gold, answer in pairs])
    assert verdicts == [types.Verdict.CORRECT, types.Verdict.CORRECT, types.Verdict.CORRECT, types.Verdict.WRONG]

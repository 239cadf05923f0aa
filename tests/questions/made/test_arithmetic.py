"""Arithmetic questions and their traces: pools that cannot overlap, right answers, variety, and faults on purpose."""

import itertools
import re

import numpy as np
import pytest

from exgrpo_cli.base.errors import InputError
from exgrpo_cli.config.sections.data import ArithmeticSettings
from exgrpo_cli.questions.made import pools, sums

SOUND = sums.TraceMix(guessed=0.0, slipped=0.0, malformed=0.0, checked=0.5, swapped=0.25, double=0.3)


def value_of(text: str) -> int:
    """A plain reference: signed numbers, one after the other."""
    assert re.fullmatch(r"-?\d+([+-]\d+)*", text), text
    return sum(int(number) for number in re.findall(r"[+-]?\d+", text))


def expressions(level: int) -> list[str]:
    """All questions of a level, written out from their definition."""
    found = []
    for operands in itertools.product("23456789", repeat=level + 1):
        for signs in itertools.product("+-", repeat=level):
            text = operands[0] + "".join(sign + operand for sign, operand in zip(signs, operands[1:], strict=True))
            if all(value_of(text[: 2 * length + 1]) >= 0 for length in range(level + 1)):
                found.append(text)
    return found


def test_questions_carry_answer_level_and_source():
    split = sums.make_arithmetic(ArithmeticSettings(num_train=60, num_heldout=12, levels=(2, 4, 7), seed=0))
    for question in split.train + split.heldout:
        (message,) = question.prompt
        text = message.content.removesuffix("=?")
        assert message.role == "user" and message.content.endswith("=?")
        assert int(question.answer) == value_of(text)
        assert len(re.findall(r"[+-]", text)) == int(question.level) and question.source == "arithmetic"
    levels = [question.level for question in split.train]
    assert levels != sorted(levels)


def test_a_level_can_be_used_up_and_says_how_many_there_are():
    terms = [(int(text[0]), int(text[1:])) for text in expressions(1)]
    existing = sum(sums.pool_of(pair) is pools.Pool.TRAIN for pair in terms)
    # 8 x 8 sums; of the differences, those with a result of at least 0: 1 + 2 + ... + 8 = 36.
    assert len(terms) == 64 + 36 and 0 < existing < 100
    split = sums.make_arithmetic(ArithmeticSettings(num_train=existing, num_heldout=1, levels=(1,), seed=0))
    assert len({question.id for question in split.train}) == existing
    with pytest.raises(InputError, match=rf"level 1 run out at {existing} of the {existing + 1} asked for"):
        sums.make_arithmetic(ArithmeticSettings(num_train=existing + 1, num_heldout=1, levels=(1,), seed=0))


def test_every_plan_uses_every_term_once_and_ends_at_the_answer():
    rng = np.random.default_rng(1)
    for _ in range(500):
        terms = sums.draw_terms(int(rng.integers(1, 8)), pools.Pool.TRAIN, rng)
        plan = sums.draw_plan(terms, SOUND, rng)
        assert sorted(abs(term) for line in plan for term in line.terms) == sorted(abs(term) for term in terms)
        assert sorted(source for line in plan for _, source in line.results) == list(range(len(plan) - 1))
        lines, answer = sums.work_out(plan)
        assert answer == sum(terms)
        for line in lines:
            left, _, right = line.partition("=")
            assert value_of(left) == int(right)


CHAIN = (sums.Line(terms=(9, 3)), sums.Line(results=((1, 0),), terms=(-2,)))
DIFFERENCE = (sums.Line(terms=(9, 3)), sums.Line(terms=(2, 4)), sums.Line(results=((1, 0), (-1, 1))))
SWAPPED = (sums.Line(terms=(9, 3), swapped=True), sums.Line(results=((1, 0),), terms=(4,), swapped=True))


@pytest.mark.parametrize(
    ("plan", "slip", "lines"),
    [
        (CHAIN, None, ["9+3=12", "12-2=10"]),
        # A first line that is one too high makes the second one too high as well.
        (CHAIN, (0, 1), ["9+3=13", "13-2=11"]),
        (CHAIN, (1, -2), ["9+3=12", "12-2=8"]),
        (SWAPPED, None, ["3+9=12", "4+12=16"]),
        # 9+3-2-4: gains 12, losses 6, difference 6; the last line refers to both.
        (DIFFERENCE, None, ["9+3=12", "2+4=6", "12-6=6"]),
    ],
)
def test_a_plan_is_worked_out_with_its_slip(
    plan: tuple[sums.Line, ...], slip: tuple[int, int] | None, lines: list[str]
):
    assert sums.work_out(plan, slip) == (lines, int(lines[-1].partition("=")[2]))


def test_sound_traces_are_right_and_some_are_checked():
    rng = np.random.default_rng(2)
    checked = 0
    for _ in range(300):
        terms = sums.draw_terms(4, pools.Pool.WARM_START, rng)
        thinking, _, answer = sums.write_trace(terms, SOUND, rng).partition("\n</think>\n")
        assert answer == f"\\boxed{{{sum(terms)}}}"
        lines = thinking.split("\n")
        for line in lines:
            left, _, right = line.partition("=")
            assert value_of(left) == int(right), line
        checked += int(lines[-1].partition("=")[2]) != sum(terms)
    # Half of 300, within five standard deviations (5 * 8.7); a check that happens to end at the answer is not counted.
    assert 100 <= checked <= 194


@pytest.mark.parametrize(("terms", "least"), [((9, 3, -2), 9), ((9, 3, -2, -3, 6), 40)])
def test_one_question_has_many_right_derivations(terms: sums.Terms, least: int):
    rng = np.random.default_rng(3)
    assert len({sums.write_trace(terms, SOUND, rng) for _ in range(300)}) >= least


def test_faults_are_what_they_are_called():
    rng = np.random.default_rng(4)
    none = dict.fromkeys(("guessed", "slipped", "malformed"), 0.0)
    mixes = {fault: sums.TraceMix(**none | {fault: 1.0}) for fault in none}
    for _ in range(100):
        terms = sums.draw_terms(3, pools.Pool.WARM_START, rng)
        assert sums.write_trace(terms, mixes["guessed"], rng) == f"</think>\n\\boxed{{{sum(terms)}}}"
        slipped = sums.write_trace(terms, mixes["slipped"], rng)
        assert re.fullmatch(r"[^<]+\n</think>\n\\boxed\{-?\d+\}", slipped)
        assert f"\\boxed{{{sum(terms)}}}" not in slipped
        assert "\\boxed{" not in sums.write_trace(terms, mixes["malformed"], rng).partition("</think>")[2]


def test_shares_say_how_many_questions_each_level_has():
    # 10 in the proportion 1:2:4 is 1.43, 2.86, 5.71: whole parts 1, 2, 5, the two left go to .86 and .71.
    assert pools.share_out(10, (1.0, 2.0, 4.0)) == [1, 3, 6]
    assert pools.share_out(8, (1.0, 1.0, 1.0)) == [3, 3, 2]
    split = sums.make_arithmetic(
        ArithmeticSettings(num_train=10, num_heldout=7, levels=(2, 3, 4), shares=(1.0, 2.0, 4.0))
    )
    assert sorted(question.level for question in split.train) == ["2"] + ["3"] * 3 + ["4"] * 6
    assert sorted(question.level for question in split.heldout) == ["2"] + ["3"] * 2 + ["4"] * 4
    with pytest.raises(InputError, match=r"arithmetic.shares = .* a share above 0 for each of the 3 levels"):
        ArithmeticSettings(levels=(2, 3, 4), shares=(1.0, 0.0, 1.0))

"""Sums of one-digit numbers in disjoint train, held-out and warm-start pools, and step-by-step solutions of them.

Arithmetic: a question of level n has n operations on the operands 2..9, for example `9+3-2-3+6=?` (level 4); read from
left to right its value never falls below 0. A keyed hash of the expression alone says which pool it belongs to, so no
seed, size or choice of levels can make the pools overlap.

Modular: `(7+5+8)%5=?` adds n + 1 terms from 2 to 9; a guess is right one time in m, and every line of a trace can be
checked. Its metadata say what was asked, so that `exgrpo_cli.grading.verifiers` can tell a derivation from a lucky
hit.

Traces have the variety and the faults of a warm-start corpus. A derivation is first planned (which terms are added in
which line) and then worked out, so that a slip in one line carries on through the lines that use it. Plans differ in
order and in grouping: two rollouts of one question are often both right and yet different, which is what the choice
among trajectories needs.
"""

import itertools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from exgrpo_cli.base.types import Question
from exgrpo_cli.config.sections.data import ArithmeticSettings, ModularSettings
from exgrpo_cli.questions.made.pools import (
    Pool,
    Split,
    distinct,
    draw_split,
    made_question,
    pool_of_key,
    require_enough,
)

THINK_END = "</think>"

Terms = tuple[int, ...]
"""The signed operands of an expression: 9+3-2 is (9, 3, -2)."""

_OPERANDS = range(2, 10)
_POOL_KEY, _MODULAR_KEY = b"exgrpo-arithmetic", b"exgrpo-modular"
# The 100 and 1,333 expressions of these levels are listed, so that a request can be met to the last one; the 18,758 of
# level 3 and more of higher ones are drawn.
_LISTED_LEVELS = (1, 2)


def make_arithmetic(settings: ArithmeticSettings) -> Split:
    """Draw questions without repetition, each level as many as its share of them, up to one.

    Raises InputError where a level has fewer expressions than asked for.
    """
    what = "Arithmetic questions"

    def draw_one(level: int, pool: Pool, rng: np.random.Generator) -> Question:
        return _question(draw_terms(level, pool, rng), level)

    def draw(count: int, level: int, pool: Pool, rng: np.random.Generator) -> list[Question]:
        if level not in _LISTED_LEVELS:
            return distinct(what, draw_one)(count, level, pool, rng)
        listed = [terms for terms in _all_terms(level) if pool_of(terms) is pool]
        require_enough(what, level, len(listed), count)
        return [_question(listed[index], level) for index in rng.permutation(len(listed))[:count]]

    return draw_split(settings, draw, settings.shares)


def _question(terms: Terms, level: int) -> Question:
    return made_question("arithmetic", f"{expression(terms)}=?", str(sum(terms)), level=level)


def draw_terms(level: int, pool: Pool, rng: np.random.Generator) -> Terms:
    """One expression, uniform over those of this level and pool."""
    while True:
        operands = rng.integers(_OPERANDS.start, _OPERANDS.stop, size=level + 1)
        operands[1:] *= 1 - 2 * rng.integers(2, size=level)
        terms = tuple(operands.tolist())
        if _is_question(terms) and pool_of(terms) is pool:
            return terms


def expression(terms: Terms) -> str:
    """(9, 3, -2) as 9+3-2."""
    return f"{terms[0]}" + "".join(f"{term:+d}" for term in terms[1:])


def pool_of(terms: Terms) -> Pool:
    """The only pool an expression may be used in."""
    return pool_of_key(expression(terms), _POOL_KEY)


def _all_terms(level: int) -> Iterator[Terms]:
    signed = [sign * operand for operand in _OPERANDS for sign in (-1, 1)]
    for first in _OPERANDS:
        for rest in itertools.product(signed, repeat=level):
            if _is_question((first, *rest)):
                yield (first, *rest)


def _is_question(terms: Terms) -> bool:
    return min(itertools.accumulate(terms)) >= 0


def make_modular(settings: ModularSettings) -> Split:
    """Different sums, each level as often as the others, up to one; training and held-out ones share none.

    Raises InputError where a level has fewer sums than are asked for.
    """

    def draw(level: int, pool: Pool, rng: np.random.Generator) -> Question:
        terms = draw_modular_terms(level, pool, rng)
        modulus = settings.modulus
        asked = {"trace": "sum", "terms": terms, "modulus": modulus}
        answer = str(sum(terms) % modulus)
        return made_question("modular", modular_text(terms, modulus), answer, level=level, metadata=asked)

    return draw_split(settings, distinct("Sums", draw))


def draw_modular_terms(level: int, pool: Pool, rng: np.random.Generator) -> Terms:
    """`level` + 1 terms of this pool: the same sum is in the same pool whatever it is taken modulo."""
    while True:
        terms = tuple(rng.integers(_OPERANDS.start, _OPERANDS.stop, size=level + 1).tolist())
        if pool_of_key(expression(terms), _MODULAR_KEY) is pool:
            return terms


def modular_text(terms: Terms, modulus: int) -> str:
    """Text of the question: (7+5+8)%5=?"""
    return f"({expression(terms)})%{modulus}=?"


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """One line of a derivation: a signed sum of earlier results and of terms of the question."""

    results: tuple[tuple[int, int], ...] = ()
    """(sign, index of an earlier line)."""
    terms: Terms = ()
    swapped: bool = False
    """Written from the last operand to the first."""


Plan = tuple[Line, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceMix:
    """Shares of a warm-start corpus; what is left after the faults is sound."""

    guessed: float = 0.05
    """Right answer, no thinking."""
    slipped: float = 0.02
    """One wrong line, carried on to a wrong answer."""
    malformed: float = 0.05
    """Without `</think>`, without the box, or without an answer."""
    checked: float = 0.25
    """Sound or slipped traces that end with a check of the last line."""
    swapped: float = 0.12
    """Additions written with the new term first."""
    double: float = 0.1
    """Lines of a running derivation that take in two terms at once."""


def write_trace(terms: Terms, mix: TraceMix, rng: np.random.Generator, modulus: int | None = None) -> str:
    """A response to the question: what follows the opened `<think>` line, without EOS.

    With a `modulus` every result is taken modulo it; checks, which undo a line, would then not hold.
    """
    kinds = ("guessed", "slipped", "malformed", "sound")
    faults = (mix.guessed, mix.slipped, mix.malformed)
    kind = kinds[int(rng.choice(len(kinds), p=(*faults, 1 - sum(faults))))]
    if kind == "guessed":
        return f"{THINK_END}\n{_boxed(_reduced(sum(terms), modulus))}"
    plan = draw_plan(terms, mix, rng)
    slip = None
    if kind == "slipped":
        slip = (int(rng.integers(len(plan))), int(rng.choice((-10, -2, -1, 1, 2, 10))))
    lines, answer = work_out(plan, slip, modulus)
    if rng.random() < mix.checked:
        lines.append(_check(lines[-1]))
    thinking = "\n".join(lines)
    if kind == "malformed":
        return str(rng.choice(_MALFORMED)).format(thinking=thinking, end=THINK_END, answer=answer, box=_boxed(answer))
    return f"{thinking}\n{THINK_END}\n{_boxed(answer)}"


def draw_plan(terms: Terms, mix: TraceMix, rng: np.random.Generator) -> Plan:
    """One of the sound derivations of a question."""
    derive = _DERIVATIONS[int(rng.choice(len(_DERIVATIONS), p=_DERIVATION_SHARES))]
    plan = derive(terms, mix.double, rng)
    return tuple(replace(line, swapped=min(line.terms, default=0) > 0 and rng.random() < mix.swapped) for line in plan)


def work_out(plan: Plan, slip: tuple[int, int] | None = None, modulus: int | None = None) -> tuple[list[str], int]:
    """The written lines and the last result, modulo `modulus` where there is one.

    `slip` = (line, error) falsifies one result and what follows from it.
    """
    values: list[int] = []
    lines = []
    for index, line in enumerate(plan):
        operands = (*(sign * values[source] for sign, source in line.results), *line.terms)
        error = slip[1] if slip is not None and slip[0] == index else 0
        value = _reduced(sum(operands) + error, modulus)
        values.append(value)
        written = operands[::-1] if line.swapped else operands
        lines.append(f"{expression(written)}={value}")
    return lines, values[-1]


def _gains_first(terms: Terms, double: float, rng: np.random.Generator) -> Plan:
    """Terms that are added before those that are taken away."""
    return _running(_gains(terms) + _losses(terms), double, rng)


def _last_first(terms: Terms, double: float, rng: np.random.Generator) -> Plan:
    """The first term, then the others from the last one back, where that stays at 0 or above."""
    turned = (terms[0], *reversed(terms[1:]))
    return _running(turned if min(itertools.accumulate(turned)) >= 0 else terms, double, rng)


def _netted(terms: Terms, double: float, rng: np.random.Generator) -> Plan:
    """The sum of what is added less the sum of what is taken away."""
    gains, losses = _gains(terms), _losses(terms)
    if len(gains) < 2 or len(losses) < 2:
        return _running(terms, double, rng)
    up = _running(gains, double, rng)
    down = _running(tuple(-term for term in losses), double, rng)
    shifted = tuple(
        Line(results=tuple((sign, source + len(up)) for sign, source in line.results), terms=line.terms)
        for line in down
    )
    difference = Line(results=((1, len(up) - 1), (-1, len(up) + len(down) - 1)))
    return (*up, *shifted, difference)


def _running(terms: Terms, double: float, rng: np.random.Generator) -> Plan:
    """One running value that takes in a term a line, or two with probability `double`."""
    plan: list[Line] = []
    position = 0
    while position < len(terms):
        taken = 1 + int(rng.random() < double) + int(position == 0)
        results = ((1, len(plan) - 1),) if plan else ()
        plan.append(Line(results=results, terms=terms[position : position + taken]))
        position += taken
    return tuple(plan)


def _gains(terms: Terms) -> Terms:
    return tuple(term for term in terms if term > 0)


def _losses(terms: Terms) -> Terms:
    return tuple(term for term in terms if term < 0)


def _check(line: str) -> str:
    """The line undone: 12-2=10 as 10+2=12."""
    left, _, result = line.partition("=")
    first, *others = re.findall(r"[+-]?\d+", left)
    undone = "".join(f"{-int(term):+d}" for term in others)
    return f"{result}{undone}={first}"


def _reduced(value: int, modulus: int | None) -> int:
    return value if modulus is None else value % modulus


def _boxed(answer: int) -> str:
    return f"\\boxed{{{answer}}}"


_DERIVATIONS: tuple[Callable[[Terms, float, np.random.Generator], Plan], ...] = (
    _running,
    _gains_first,
    _last_first,
    _netted,
)
_DERIVATION_SHARES = (0.4, 0.2, 0.2, 0.2)
_MALFORMED = (
    "{thinking}\n{box}",
    "{thinking}\n{end}\n{answer}",
    "{thinking}\n{end}\n",
    "{thinking}\n",
)

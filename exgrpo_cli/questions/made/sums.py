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
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from exgrpo_cli.base.types import Question
from exgrpo_cli.config.sections.data import ArithmeticSettings, ModularSettings
from exgrpo_cli.questions.made.pools import Pool, Split, draw_split, made_question, pool_of_key

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

    def draws(level: int, pool: Pool, rng: np.random.Generator) -> Iterator[Question]:
        if level in _LISTED_LEVELS:
            signed = [sign * operand for operand in _OPERANDS for sign in (-1, 1)]
            every = itertools.product(_OPERANDS, *[signed] * level)
            listed = [terms for terms in every if _is_question(terms, pool)]
            drawn = (listed[index] for index in rng.permutation(len(listed)))
        else:
            drawn = (draw_terms(level, pool, rng) for _ in itertools.count())
        return (made_question("arithmetic", f"{expression(each)}=?", str(sum(each)), level=level) for each in drawn)

    return draw_split(settings, "Arithmetic questions", draws, settings.shares)


def draw_terms(level: int, pool: Pool, rng: np.random.Generator) -> Terms:
    """One expression, uniform over those of this level and pool."""
    while True:
        operands = rng.integers(_OPERANDS.start, _OPERANDS.stop, size=level + 1)
        operands[1:] *= 1 - 2 * rng.integers(2, size=level)
        terms = tuple(operands.tolist())
        if _is_question(terms, pool):
            return terms


def _is_question(terms: Terms, pool: Pool) -> bool:
    return min(itertools.accumulate(terms)) >= 0 and pool_of(terms) is pool


def expression(terms: Terms) -> str:
    """(9, 3, -2) as 9+3-2."""
    return f"{terms[0]}" + "".join(f"{term:+d}" for term in terms[1:])


def pool_of(terms: Terms) -> Pool:
    """The only pool an expression may be used in."""
    return pool_of_key(expression(terms), _POOL_KEY)


def make_modular(settings: ModularSettings) -> Split:
    """Different sums, each level as often as the others, up to one; training and held-out ones share none.

    Raises InputError where a level has fewer sums than are asked for.
    """

    modulus = settings.modulus

    def draws(level: int, pool: Pool, rng: np.random.Generator) -> Iterator[Question]:
        while True:
            terms = draw_modular_terms(level, pool, rng)
            asked = {"trace": "sum", "terms": terms, "modulus": modulus}
            answer = str(sum(terms) % modulus)
            yield made_question("modular", modular_text(terms, modulus), answer, level=level, metadata=asked)

    return draw_split(settings, "Sums", draws)


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
    faults = (mix.guessed, mix.slipped, mix.malformed)
    kind = str(rng.choice(("guessed", "slipped", "malformed", "sound"), p=(*faults, 1 - sum(faults))))
    if kind == "guessed":
        return f"{THINK_END}\n\\boxed{{{_reduced(sum(terms), modulus)}}}"
    plan = draw_plan(terms, mix, rng)
    slip = None
    if kind == "slipped":
        slip = (int(rng.integers(len(plan))), int(rng.choice((-10, -2, -1, 1, 2, 10))))
    lines, answer = work_out(plan, slip, modulus)
    if rng.random() < mix.checked:
        lines.append(_check(lines[-1]))
    thinking = "\n".join(lines)
    box = f"\\boxed{{{answer}}}"
    if kind == "malformed":
        return str(rng.choice(_MALFORMED)).format(thinking=thinking, end=THINK_END, answer=answer, box=box)
    return f"{thinking}\n{THINK_END}\n{box}"


def draw_plan(terms: Terms, mix: TraceMix, rng: np.random.Generator) -> Plan:
    """One of the sound derivations of a question.

    The terms in the order asked, or from the last one back where that stays at 0 or above; what is added before what is
    taken away; or the sum of the one less the sum of the other.
    """
    gains = tuple(term for term in terms if term > 0)
    losses = tuple(-term for term in terms if term < 0)
    turned = (terms[0], *terms[:0:-1])
    orders = {"gains first": gains + tuple(-term for term in losses)}
    if min(itertools.accumulate(turned)) >= 0:
        orders["last first"] = turned
    how = str(rng.choice(("as asked", "gains first", "last first", "netted"), p=(0.4, 0.2, 0.2, 0.2)))
    if how == "netted" and min(len(gains), len(losses)) > 1:
        up = _running(gains, mix.double, rng)
        plan = [*up, *_running(losses, mix.double, rng, len(up))]
        plan.append(Line(results=((1, len(up) - 1), (-1, len(plan) - 1))))
    else:
        plan = _running(orders.get(how, terms), mix.double, rng)
    return tuple(replace(line, swapped=min(line.terms, default=0) > 0 and rng.random() < mix.swapped) for line in plan)


def _running(terms: Terms, double: float, rng: np.random.Generator, start: int = 0) -> list[Line]:
    """Lines from number `start` on: one running value that takes in a term a line, or two with probability `double`."""
    plan: list[Line] = []
    position = 0
    while position < len(terms):
        taken = 1 + int(rng.random() < double) + int(position == 0)
        results = ((1, start + len(plan) - 1),) if plan else ()
        plan.append(Line(results=results, terms=terms[position : position + taken]))
        position += taken
    return plan


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


def _check(line: str) -> str:
    """The line undone: 12-2=10 as 10+2=12."""
    left, _, result = line.partition("=")
    first, *others = re.findall(r"[+-]?\d+", left)
    undone = "".join(f"{-int(term):+d}" for term in others)
    return f"{result}{undone}={first}"


def _reduced(value: int, modulus: int | None) -> int:
    return value if modulus is None else value % modulus


_MALFORMED = ("{thinking}\n{box}", "{thinking}\n{end}\n{answer}", "{thinking}\n{end}\n", "{thinking}\n")

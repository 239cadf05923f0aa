"""Arithmetic questions: running sums of graded difficulty in disjoint train, held-out and warm-start pools.

A question of level n has n operations on the operands 2..9, for example `9+3-2-3+6=?` (level 4); read from left to
right its value never falls below 0. A keyed hash of the expression alone says which pool it belongs to, so no seed,
size or choice of levels can make the pools overlap.
"""

import itertools
from collections.abc import Iterator

import numpy as np

from exgrpo_cli.base.errors import InputError
from exgrpo_cli.base.types import Question
from exgrpo_cli.config.sections.data import ArithmeticSettings
from exgrpo_cli.questions.made.pools import Pool, Split, draw_split, made_question, pool_of_key

SOURCE = "arithmetic"

Terms = tuple[int, ...]
"""The signed operands of an expression: 9+3-2 is (9, 3, -2)."""

_OPERANDS = range(2, 10)
_POOL_KEY = b"exgrpo-arithmetic"
# Below this many expressions of a level all are listed, so that a request can be met to the last one; above it they
# are drawn at random, where a pool is too large for any sensible request to come near its end.
_MAX_LISTED = 5_000


def make_questions(settings: ArithmeticSettings) -> Split:
    """Draw questions without repetition, each level as many as its share of them, up to one.

    Raises InputError, with the number that exist, where a level has fewer expressions than asked for.
    """

    def draw(count: int, level: int, pool: Pool, rng: np.random.Generator) -> list[Question]:
        drawn = _draw_distinct(count, level, pool, rng)
        return [made_question(SOURCE, f"{expression(terms)}=?", str(sum(terms)), level=level) for terms in drawn]

    return draw_split(settings, draw, settings.shares)


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


def count_expressions(level: int) -> int:
    """How many expressions of a level there are, over all pools."""
    ways = dict.fromkeys(_OPERANDS, 1)
    for _ in range(level):
        longer: dict[int, int] = {}
        for value, count in ways.items():
            for operand, sign in itertools.product(_OPERANDS, (-1, 1)):
                if value + sign * operand >= 0:
                    longer[value + sign * operand] = longer.get(value + sign * operand, 0) + count
        ways = longer
    return sum(ways.values())


def _draw_distinct(count: int, level: int, pool: Pool, rng: np.random.Generator) -> list[Terms]:
    existing = count_expressions(level)
    if existing <= _MAX_LISTED:
        listed = [terms for terms in _all_terms(level) if pool_of(terms) is pool]
        _check_supply(count, level, pool, len(listed), "")
        return [listed[index] for index in rng.permutation(len(listed))[:count]]
    # Half of the pool can be drawn in fewer than two attempts a question; the rest is left as out of reach. In whole
    # numbers, since those of high levels are beyond any float.
    _check_supply(count, level, pool, existing * len(pool.value) // 32, "about ")
    drawn: dict[Terms, None] = {}
    while len(drawn) < count:
        drawn[draw_terms(level, pool, rng)] = None
    return list(drawn)


def _check_supply(count: int, level: int, pool: Pool, supply: int, hedge: str) -> None:
    if count > supply:
        name = pool.name.lower().replace("_", "-")
        raise InputError(
            f"Arithmetic level {level} has {hedge}{supply} {name} questions, {count} were asked for: "
            f"ask for fewer or use higher levels."
        )


def _all_terms(level: int) -> Iterator[Terms]:
    signed = [sign * operand for operand in _OPERANDS for sign in (-1, 1)]
    for first in _OPERANDS:
        for rest in itertools.product(signed, repeat=level):
            if _is_question((first, *rest)):
                yield (first, *rest)


def _is_question(terms: Terms) -> bool:
    return min(itertools.accumulate(terms)) >= 0

"""Arithmetic questions: running sums of graded difficulty in disjoint train, held-out and warm-start pools.

A question of level n has n operations on the operands 2..9, for example `9+3-2-3+6=?` (level 4); read from left to
right its value never falls below 0. A keyed hash of the expression alone says which pool it belongs to, so no seed,
size or choice of levels can make the pools overlap.
"""

import hashlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np

from exgrpo_cli.config.sections.data import ArithmeticSettings
from exgrpo_cli.data.question_file.identity import question_id
from exgrpo_cli.errors import InputError
from exgrpo_cli.types import Message, Question

SOURCE = "arithmetic"

Terms = tuple[int, ...]
"""The signed operands of an expression: 9+3-2 is (9, 3, -2)."""

_OPERANDS = range(2, 10)
_POOL_KEY = b"exgrpo-arithmetic"
# Below this many expressions of a level all are listed, so that a request can be met to the last one; above it they
# are drawn at random, where a pool is too large for any sensible request to come near its end.
_MAX_LISTED = 5_000


class Pool(Enum):
    """Who may see an expression; the value is the range of its sixteen hash residues."""

    TRAIN = range(0, 10)
    HELDOUT = range(10, 13)
    WARM_START = range(13, 16)


@dataclass(frozen=True, kw_only=True, slots=True)
class ArithmeticSplit:
    """Questions of the same levels in equal shares, no expression in both lists."""

    train: list[Question]
    heldout: list[Question]


def make_questions(settings: ArithmeticSettings) -> ArithmeticSplit:
    """Draw questions without repetition, each level as many as its share of them, up to one.

    Raises InputError, with the number that exist, where a level has fewer expressions than asked for.
    """
    rng = np.random.default_rng([settings.seed, 0])
    heldout_rng = np.random.default_rng([settings.seed, 1])
    return ArithmeticSplit(
        train=_draw_questions(settings.num_train, settings, Pool.TRAIN, rng),
        heldout=_draw_questions(settings.num_heldout, settings, Pool.HELDOUT, heldout_rng),
    )


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
    digest = hashlib.blake2b(expression(terms).encode(), digest_size=8, key=_POOL_KEY).digest()
    residue = int.from_bytes(digest, "big") % 16
    return next(pool for pool in Pool if residue in pool.value)


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


def share_out(count: int, shares: Sequence[float]) -> list[int]:
    """`count` in whole parts in proportion to `shares`; what rounding leaves goes to the largest remainders."""
    exact = [count * share / sum(shares) for share in shares]
    parts = [int(part) for part in exact]
    by_remainder = sorted(range(len(exact)), key=lambda index: parts[index] - exact[index])
    for index in by_remainder[: count - sum(parts)]:
        parts[index] += 1
    return parts


def _draw_questions(count: int, settings: ArithmeticSettings, pool: Pool, rng: np.random.Generator) -> list[Question]:
    levels = settings.levels
    drawn: list[Question] = []
    for level, part in zip(levels, share_out(count, settings.shares or [1.0] * len(levels)), strict=True):
        drawn += [_question(terms, level) for terms in _draw_distinct(part, level, pool, rng)]
    return [drawn[index] for index in rng.permutation(len(drawn))]


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


def _question(terms: Terms, level: int) -> Question:
    prompt = (Message(role="user", content=f"{expression(terms)}=?"),)
    answer = str(sum(terms))
    return Question(id=question_id(prompt, answer), prompt=prompt, answer=answer, source=SOURCE, level=str(level))

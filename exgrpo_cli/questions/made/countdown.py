"""Countdown: make a target of given numbers, for example `2,3,4,8=26?` by `8*3+4-2`.

There are thousands of ways to try and few that fit, so a solution that was found once says what trying again would take
long to say. A question of level n has n numbers, from 1 to 9 where nothing else is said, each to be used once, with
+ - * / and brackets; any expression that gives the target is right (`exgrpo_cli.grading.verifiers`).
"""

from collections.abc import Iterator, Sequence
from itertools import permutations
from typing import NamedTuple
from zlib import crc32

import numpy as np

from exgrpo_cli.base.types import Question
from exgrpo_cli.config.sections.data import CountdownSettings
from exgrpo_cli.questions.made.pools import Pool, Split, draw_split, made_question, pool_of_key

SOURCE = "countdown"
_USUAL = 9
"""Largest number where nothing else is said: there are so few questions then that held-out ones of two seeds share."""
_STUDIES = 8
"""Parts of the other held-out questions, of which each seed has one."""
_LARGEST = 99
"""No value on the way to a target exceeds it."""
_POOL_KEY = b"exgrpo-countdown"


class Attempt(NamedTuple):
    """Numbers in the order in which they are used, the signs between them, and the value after each sign."""

    numbers: tuple[int, ...]
    signs: tuple[str, ...]
    values: tuple[int, ...]

    @property
    def result(self) -> int:
        """Value of the expression."""
        return self.values[-1]

    def lines(self) -> list[str]:
        """One operation a line: 8*3=24, 24+4=28, 28-2=26."""
        starts = (self.numbers[0], *self.values[:-1])
        steps = zip(starts, self.signs, self.numbers[1:], self.values, strict=True)
        return [f"{start}{sign}{number}={value}" for start, sign, number, value in steps]

    def expression(self) -> str:
        """All of it at once, with brackets where a sum is multiplied: (8+4)*3-2."""
        text, is_sum = str(self.numbers[0]), False
        for sign, number in zip(self.signs, self.numbers[1:], strict=True):
            text = f"({text})*{number}" if sign == "*" and is_sum else f"{text}{sign}{number}"
            is_sum = sign != "*"
        return text


def make_countdown(settings: CountdownSettings) -> Split:
    """Different targets of different numbers, each level as often as the others, up to one.

    Raises InputError where a level has fewer than are asked for.
    """

    def draws(level: int, pool: Pool, rng: np.random.Generator) -> Iterator[Question]:
        while True:
            attempt = draw_solved(level, pool, rng, settings.largest)
            asked = {"verifier": SOURCE, "numbers": sorted(attempt.numbers), "target": attempt.result}
            text = prompt_text(attempt.numbers, attempt.result)
            own = pool is not Pool.HELDOUT or crc32(text.encode()) % _STUDIES == settings.seed % _STUDIES
            if settings.largest <= _USUAL or (max(attempt.numbers) > _USUAL and own):
                yield made_question(SOURCE, text, attempt.expression(), level=level, metadata=asked)

    return draw_split(settings, "Countdown questions", draws)


def draw_solved(level: int, pool: Pool, rng: np.random.Generator, largest: int = _USUAL) -> Attempt:
    """An attempt that defines a question of this pool: its result is the target, so there is a solution."""
    while True:
        attempt = draw_attempt(tuple(rng.integers(1, largest + 1, size=level).tolist()), rng)
        if attempt.result > 0 and pool_of_key(prompt_text(attempt.numbers, attempt.result), _POOL_KEY) is pool:
            return attempt


def draw_attempt(numbers: tuple[int, ...], rng: np.random.Generator) -> Attempt:
    """The numbers in any order with any signs, every value between 0 and 99."""
    while True:
        order = [numbers[place] for place in rng.permutation(len(numbers))]
        signs = tuple(str(sign) for sign in rng.choice(("+", "-", "*"), size=len(numbers) - 1))
        values = [order[0]]
        for sign, number in zip(signs, order[1:], strict=True):
            last = values[-1]
            values.append({"+": last + number, "-": last - number, "*": last * number}[sign])
        if all(0 <= value <= _LARGEST for value in values):
            return Attempt(numbers=tuple(order), signs=signs, values=tuple(values[1:]))


def solve(numbers: Sequence[tuple[int, str]], target: int) -> str | None:
    """An expression of all numbers, each with its text, that gives the target, whole on the way; None without one."""
    if len(numbers) == 1:
        return numbers[0][1] if numbers[0][0] == target else None
    for one, other in permutations(range(len(numbers)), 2):
        (a, left), (b, right) = numbers[one], numbers[other]
        rest = [number for place, number in enumerate(numbers) if place not in (one, other)]
        results = [(a - b, "-"), *([(a + b, "+"), (a * b, "*")] if one < other else [])]
        results += [(a // b, "/")] if b and a % b == 0 else []
        for value, sign in results:
            if (found := solve([*rest, (value, f"({left}{sign}{right})")], target)) is not None:
                return found
    return None


def prompt_text(numbers: tuple[int, ...], target: int) -> str:
    """Text of the question: 2,3,4,8=26?"""
    return f"{','.join(str(number) for number in sorted(numbers))}={target}?"


def write_search(solution: Attempt, failures: int, rng: np.random.Generator) -> str:
    """Thinking that ends with the solution: up to `failures` attempts that miss the target come before it."""
    attempts = [draw_attempt(solution.numbers, rng) for _ in range(int(rng.integers(failures + 1)))]
    missed = [line for attempt in attempts if attempt.result != solution.result for line in (*attempt.lines(), "no")]
    return "\n".join([*missed, *solution.lines()])

"""Check every line of a worked answer, where the question lets it, to tell luck from reasoning.

A running sum (`questions.made.arithmetic`) or a sum modulo m (`questions.made.modular`) is worked out
validly when each line takes numbers that are at hand, terms of the question not yet used or results of earlier lines,
when what it says is true, and when the last result uses up everything and is the boxed answer. The order and the
grouping are free; what is taken away may be added up first and taken away together. Lines after the last result, such
as a check of it, only have to be true.
"""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from exgrpo_cli.base.types import Question
from exgrpo_cli.grading.extract import THINK_END, last_boxed
from exgrpo_cli.grading.verifiers import read_metadata

_SUM = re.compile(r"(\d{1,9}(?:[+-]\d{1,9})+)=\?")
_LINE = re.compile(r"(-?\d{1,9}(?:[+-]\d{1,9})+)=(-?\d{1,9})")
_NUMBER = re.compile(r"[+-]?\d+")
ARITHMETIC = "arithmetic"
"""Source of running sums, as a question file has it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sum:
    """The terms that a question asks to be added up."""

    terms: tuple[int, ...]
    """Signed."""
    modulus: int | None = None


class Held(NamedTuple):
    """A number at hand: `size` (0 or more) that counts for the sum, or against it where `sign` is -1."""

    size: int
    sign: int


Line = tuple[tuple[int, ...], int]
"""Signed operands and what the line says they come to."""


def sum_asked(question: Question) -> Sum | None:
    """The sum that a question asks for, by its metadata or its text; None for any other question."""
    known = read_metadata(question.metadata)
    if known.get("trace") == "sum":
        return Sum(terms=tuple(known["terms"]), modulus=known["modulus"])
    is_plain = question.source == ARITHMETIC and not known
    asked = _SUM.fullmatch(question.prompt[-1].content) if is_plain else None
    return Sum(terms=_numbers(asked[1])) if asked else None


def valid_trace(question: Question, response: str) -> bool | None:
    """Whether the working of `response` holds; None where the question's cannot be checked."""
    asked = sum_asked(question)
    if asked is None:
        return None
    thinking, ended, answer = response.partition(THINK_END)
    lines = _lines(thinking) if ended else None
    result = _result(lines, Counter(_held(term, 1) for term in asked.terms), asked.modulus) if lines else None
    return result is not None and last_boxed(answer) == str(result)


def _lines(thinking: str) -> list[Line] | None:
    """None where a line is no equation of sums."""
    read = [_LINE.fullmatch(text.strip()) for text in thinking.strip().splitlines()]
    return None if None in read else [(_numbers(line[1]), int(line[2])) for line in read if line]


def _result(lines: Sequence[Line], at_hand: Counter[Held], modulus: int | None) -> int | None:
    """The number that the lines come to; None where one of them does not hold, or where they leave something over."""
    if at_hand.total() == 1:
        ((size, sign),) = at_hand.elements()
        return sign * size if all(_is_true(line, modulus) for line in lines) else None
    if not lines or not _is_true(lines[0], modulus):
        return None
    operands, value = lines[0]
    # A line adds up what counts for the sum, or, modulo nothing, what counts against it.
    for sign in (1,) if modulus else (1, -1):
        taken = Counter(_held(operand, sign) for operand in operands)
        if taken <= at_hand:
            result = _result(lines[1:], at_hand - taken + Counter([_held(value, sign)]), modulus)
            if result is not None:
                return result
    return None


def _held(value: int, sign: int) -> Held:
    return Held(size=abs(value), sign=sign if value > 0 else -sign if value < 0 else 1)


def _is_true(line: Line, modulus: int | None) -> bool:
    operands, value = line
    return value == (sum(operands) % modulus if modulus else sum(operands))


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in _NUMBER.findall(text))

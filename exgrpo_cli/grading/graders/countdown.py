"""The verifier of countdown answers: an expression of the given numbers, each used once, that comes to the target.

The expression is read by a parser of its own, digits, + - * / and brackets, and worked out in fractions: nothing that a
model wrote is ever evaluated as code.
"""

import re
from collections import Counter
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from exgrpo_cli.base.types import Verdict

NAME = "countdown"
_MOST_CHARS = 200
"""Bounds the depth of brackets too."""
_TOKENS = re.compile(r"\s*(?:(\d{1,6})|([-+*/()]))")


class _NoExpression(Exception):
    """The answer is not an expression, or divides by zero."""


def grade_countdown(metadata: Mapping[str, Any], answer: str) -> Verdict:
    """Whether `answer` uses `metadata["numbers"]`, each once, and comes to `metadata["target"]`.

    What is no expression is WRONG, what is empty NO_ANSWER.
    """
    if not answer.strip():
        return Verdict.NO_ANSWER
    try:
        value, numbers = _worked_out(answer)
    except _NoExpression:
        return Verdict.WRONG
    fits = numbers == Counter(metadata["numbers"]) and value == metadata["target"]
    return Verdict.CORRECT if fits else Verdict.WRONG


def _worked_out(text: str) -> tuple[Fraction, Counter[int]]:
    """The value of an expression and the numbers that it is made of."""
    tokens = _tokens(text)
    value = _sum(tokens)
    if tokens:
        raise _NoExpression
    return value, Counter(int(number) for number in re.findall(r"\d+", text))


def _tokens(text: str) -> list[str]:
    """Numbers, signs and brackets, last one first."""
    text = text.strip()
    if len(text) > _MOST_CHARS:
        raise _NoExpression
    tokens, end = [], 0
    while end < len(text):
        match = _TOKENS.match(text, end)
        if match is None:
            raise _NoExpression
        tokens.append(match[1] or match[2])
        end = match.end()
    return tokens[::-1]


def _sum(tokens: list[str]) -> Fraction:
    value = _product(tokens)
    while tokens and tokens[-1] in "+-":
        sign = 1 if tokens.pop() == "+" else -1
        value += sign * _product(tokens)
    return value


def _product(tokens: list[str]) -> Fraction:
    value = _factor(tokens)
    while tokens and tokens[-1] in "*/":
        sign, factor = tokens.pop(), _factor(tokens)
        if sign == "/" and factor == 0:
            raise _NoExpression
        value = value * factor if sign == "*" else value / factor
    return value


def _factor(tokens: list[str]) -> Fraction:
    if not tokens:
        raise _NoExpression
    token = tokens.pop()
    if token.isdigit():
        return Fraction(int(token))
    if token != "(":
        raise _NoExpression
    value = _sum(tokens)
    if not tokens or tokens.pop() != ")":
        raise _NoExpression
    return value

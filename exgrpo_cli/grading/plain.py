"""Plain numbers compared without a parser, only where math-verify is certain to agree.

Integers, short decimals and fractions of integers make up most answers; comparing them takes microseconds instead of a
trip to a worker. Whatever the patterns below do not cover goes to math-verify: `+1,000` is a set for it, `1,23` and
`−1,000` with the minus of print too, `0,123` a decimal comma, `7.` a string.
"""

import re
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

from exgrpo_cli.base import data, types

# Python refuses to read integers of more than 4,300 digits.
_MAX_DIGITS = 1000
# math-verify rounds to 6 places where a decimal takes part: with at most 5 places, and few enough digits for a double,
# rounding changes nothing about the decimal.
_MAX_PLACES = 5
_MAX_DECIMAL_CHARS = 14
_NEAR_A_DECIMAL = Fraction(1, 10**_MAX_PLACES)

_THOUSANDS = r"[1-9][0-9]{0,2}(?:,[0-9]{3})+"
_INTEGER = re.compile(rf"[+\-−]?[0-9]+|-?{_THOUSANDS}")
_DECIMAL = re.compile(rf"(?:[\-−]?[0-9]+|-?{_THOUSANDS})\.[0-9]{{1,{_MAX_PLACES}}}")
_FRACTION = re.compile(r"(-?)(?:\\[dt]?frac\{(-?[0-9]{1,9})\}\{(-?[0-9]{1,9})\}|([0-9]{1,9})/([0-9]{1,9}))")


def tables() -> dict[str, Any]:
    """Words, signs and patterns that the graders know; not to be changed by callers."""
    return data.tables(__file__, "tables.toml")


def patterns(module: str) -> SimpleNamespace:
    """The patterns of a module of the graders, by name."""
    return data.patterns(tables()["patterns"][module], tables()["patterns"]["pieces"])


def verdict_of(is_right: bool) -> types.Verdict:
    """CORRECT or WRONG."""
    return types.Verdict.CORRECT if is_right else types.Verdict.WRONG


def plain_number(text: str) -> Fraction | None:
    """The value of an integer, short decimal or simple fraction; None for everything else."""
    if len(text) > _MAX_DIGITS:
        return None
    if _INTEGER.fullmatch(text):
        return Fraction(int(text.replace(",", "").replace("−", "-")))
    if _DECIMAL.fullmatch(text) and len(text) <= _MAX_DECIMAL_CHARS:
        return Fraction(text.replace(",", "").replace("−", "-"))
    match = _FRACTION.fullmatch(text)
    if match is None:
        return None
    sign, numerator, denominator = match[1], match[2] or match[4], int(match[3] or match[5])
    return Fraction(int(sign + "1") * int(numerator), denominator) if denominator else None


def same_plain_number(gold: str, answer: str) -> bool | None:
    """Whether two plain numbers are equal; None unless both are plain numbers, and where rounding might decide."""
    gold_value, answer_value = plain_number(gold), plain_number(answer)
    if gold_value is None or answer_value is None:
        return None
    is_long = max(len(gold), len(answer)) > _MAX_DECIMAL_CHARS
    is_near = 0 < abs(gold_value - answer_value) < _NEAR_A_DECIMAL
    if ("." in gold or "." in answer) and (is_long or is_near):
        return None
    return gold_value == answer_value

"""Plain numbers compared without a parser, only where math-verify is certain to agree.

Integers and short decimals, a thousands comma allowed, make up most answers; comparing them takes microseconds instead
of a trip to a worker. Whatever the pattern below does not cover is None here and goes to math-verify: `+1,000` is a set
for it, `1,23` too, `0,123` a decimal comma, `7.` a string.
"""

import re
from decimal import Decimal

# math-verify rounds a decimal to 6 places: with at most 5 of them, and few enough digits for a double, equal after
# rounding means equal. Integers it compares exactly, whatever their length.
_MAX_PLACES = 5
_MAX_DECIMAL_DIGITS = 14

_INTEGER = re.compile(r"[+\-−]?[0-9]+|[\-−]?[1-9][0-9]{0,2}(?:,[0-9]{3})+")
_DECIMAL = re.compile(rf"[\-−]?(?:[0-9]+|[1-9][0-9]{{0,2}}(?:,[0-9]{{3}})+)\.[0-9]{{1,{_MAX_PLACES}}}")


def plain_number(text: str) -> Decimal | None:
    """The value of an integer or short decimal; None for everything else."""
    is_integer = _INTEGER.fullmatch(text) is not None
    if not is_integer and (_DECIMAL.fullmatch(text) is None or len(text) > _MAX_DECIMAL_DIGITS):
        return None
    return Decimal(text.replace(",", "").replace("−", "-"))


def same_plain_number(gold: str, answer: str) -> bool | None:
    """Whether two plain numbers are equal; None unless both are plain numbers.

    An integer is compared with a decimal only while it, too, has few enough digits for a double.
    """
    gold_value = plain_number(gold)
    if gold_value is None:
        return None
    answer_value = plain_number(answer)
    if answer_value is None:
        return None
    has_decimal = "." in gold or "." in answer
    if has_decimal and max(len(gold), len(answer)) > _MAX_DECIMAL_DIGITS:
        return None
    return gold_value == answer_value

"""Numbers that math-verify misreads, compared by what they say: in another base, or as a power of ten.

Its parser drops a subscript, so 4343 in base 7 would be 4343 in base 6.
"""

import re
from fractions import Fraction

from exgrpo_cli.grading.graders.plain import plain_number

_BASE_OF_WORD = {
    "two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8, "nine": 9, "ten": 10, "eleven": 11,
    "twelve": 12, "sixteen": 16,
}  # fmt: skip
_BASED = re.compile(
    r"\(?\s*(?:\\(?:text|mathrm)\s*\{)?((?=[A-Fa-f]*[0-9]|(?-i:[A-F]{2}))[0-9A-Fa-f]+(?:\.[0-9A-Fa-f]+)?)\}?\s*\)?\s*"
    r"_\s*\{?\s*(?:\\(?:text|mathrm)\s*\{)?\s*\(?(?:base\s*\}?\s*)?([0-9]{1,2}|[a-z]{1,8})\)?\s*\}{0,2}",
    re.IGNORECASE,
)
_DIGITS = re.compile(r"\(?([0-9A-Fa-f]+)\)?")
_POWER_OF_TEN = re.compile(
    r"([+-]?[0-9]{1,15}(?:\.[0-9]{1,15})?)(?:\s*(?:\\times|\\cdot|\*)\s*10\s*\^\s*\{?\s*([+-]?[0-9]{1,3})\s*\}?|[eE]([+-]?[0-9]{1,3}))"
)
_FAR = Fraction(1, 10_000)
_PLAIN_DECIMAL = re.compile(r"[+-]?[0-9]{1,15}\.[0-9]{1,15}")


def same_based_number(gold: str, answer: str) -> bool | None:
    """Whether two numbers have equal digits and no different bases; None unless one of them names its base.

    An answer without a base stands in that of its gold, and so the other way round: which one a question asks for is
    not for the gold to say.
    """
    gold_digits, gold_base = _read(gold)
    answer_digits, answer_base = _read(answer)
    if gold_base is None and answer_base is None:
        return None
    if gold_digits is None or answer_digits is None:
        return None
    bases_agree = None in (gold_base, answer_base) or gold_base == answer_base
    return bases_agree and gold_digits == answer_digits


def same_value(gold: str, answer: str) -> bool | None:
    """Whether two numbers, of which one has a power of ten or many places, are equal; None where that is not certain.

    Equal is exactly equal, and different by more than a ten thousandth of the larger one: math-verify rounds decimals
    to six places, so that 0.0000672 would be 0.0000673.
    """
    gold_value, answer_value = _value(gold), _value(answer)
    if gold_value is None or answer_value is None:
        return None
    if gold_value == answer_value:
        return True
    is_far = abs(gold_value - answer_value) > _FAR * max(abs(gold_value), abs(answer_value))
    return False if is_far else None


def _read(text: str) -> tuple[str | None, int | str | None]:
    based = _BASED.fullmatch(text)
    if based is None:
        bare = _DIGITS.fullmatch(text)
        return (_evened(bare[1]) if bare else None), None
    base = int(based[2]) if based[2].isdigit() else _BASE_OF_WORD.get(based[2].lower(), based[2])
    if not based[1].replace(".", "").isdigit() and not (isinstance(base, int) and base > 10):
        return None, None
    return _evened(based[1]), base


def _evened(digits: str) -> str:
    return digits.upper().lstrip("0") or "0"


def _value(text: str) -> Fraction | None:
    power = _POWER_OF_TEN.fullmatch(rf"1 \cdot {text}" if text.startswith("10^") else text)
    if power:
        return Fraction(power[1]) * Fraction(10) ** int(power[2] or power[3])
    return Fraction(text) if _PLAIN_DECIMAL.fullmatch(text) else plain_number(text)

"""Bases, powers of ten and units, which stand beside a number.

math-verify drops a subscript, so that 4343 in base 7 would be 4343 in base 6, rounds decimals to six places, and drops
whatever stands in `\\text{}` at the end: 18 cm^3 would be 18 cm^2, and 20 dollars 20 cents. Here only units of the
table count; every other word is dropped as before.
"""

import re
from collections import Counter
from fractions import Fraction
from typing import NamedTuple

from exgrpo_cli.grading.plain import patterns, plain_number, tables

_BASE_OF_WORD = {name: base for base, name in enumerate(tables()["words"]["bases"].split(), start=2)} | {"sixteen": 16}
_RE = patterns("quantities")
_FAR = Fraction(1, 10_000)


def same_based_number(gold: str, answer: str) -> bool | None:
    """Whether two numbers have equal digits and no different bases; None unless one of them names its base.

    An answer without a base stands in that of its gold, and so the other way round: which one a question asks for is
    not for the gold to say.
    """
    gold_digits, gold_base = _read(gold)
    answer_digits, answer_base = _read(answer)
    if (gold_base is None and answer_base is None) or gold_digits is None or answer_digits is None:
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
    based = _RE.based.fullmatch(text)
    if based is None:
        bare = _RE.digits.fullmatch(text)
        return (_evened(bare[1]) if bare else None), None
    base = int(based[2]) if based[2].isdigit() else _BASE_OF_WORD.get(based[2].lower(), based[2])
    if not based[1].replace(".", "").isdigit() and not (isinstance(base, int) and base > 10):
        return None, None
    return _evened(based[1]), base


def _evened(digits: str) -> str:
    return digits.upper().lstrip("0") or "0"


def _value(text: str) -> Fraction | None:
    power = _RE.power_of_ten.fullmatch(rf"1 \cdot {text}" if text.startswith("10^") else text)
    if power:
        return Fraction(power[1]) * Fraction(10) ** int(power[2] or power[3])
    return Fraction(text) if _RE.plain_decimal.fullmatch(text) else plain_number(text)


_SYMBOLS: dict[str, tuple[dict[str, int], Fraction]] = {}
"""Exponents of dimensions, and the size in metres, seconds, grams, dollars, ..., of the symbol of a unit."""
_NAMES: dict[str, str] = {}
"""Symbol by name."""
for _dimensions, _units in tables()["units"].items():
    _powers = {name: int(power or 1) for name, _, power in (each.partition("^") for each in _dimensions.split())}
    for _symbol, (_size, *_names) in _units.items():
        _SYMBOLS[_symbol] = _powers, Fraction(_size)
        _NAMES.update(dict.fromkeys(_names, _symbol))
_WRAPPER = r"\\(?:text|textrm|textbf|textit|mathrm|mathbf|mathit|mbox|operatorname)"
_BARE_NAMES = "|".join(sorted((name + "s?" for name in _NAMES if len(name) > 2), key=len, reverse=True))
_BARE_TAIL = re.compile(
    rf"(?<=[0-9}})\s])\s*((?:square |cubic |sq\.? |cu\.? )?(?:mm|cm|dm|km|kg|mg|ft|{_BARE_NAMES})"
    rf"(?:\s*\^\s*\{{?[0-9]\}}?)?(?:\s*(?:/|\bper\b)\s*(?:h|s|{_BARE_NAMES}))?)$"
)
_SCALES = {"c": "celsius", "f": "fahrenheit"}
_PREFIXES = {"square": 2, "sq": 2, "cubic": 3, "cu": 3}
_SUFFIXES = {"squared": 2, "cubed": 3}


class Unit(NamedTuple):
    """A product of powers of lengths, times, masses and what else is counted."""

    dimensions: tuple[tuple[str, int], ...]
    """Exponent of each, in order of their names."""
    factor: Fraction
    """The unit in metres, seconds, grams, dollars, ..."""


def split_unit(text: str) -> tuple[str, Unit | None]:
    """The text before the unit, and the unit; the whole text and None where it ends in none of the table's."""
    degrees = _RE.degrees.search(text)
    if degrees and text[: degrees.start()].strip():
        scale = _SCALES.get((degrees["scale"] or "").lower(), "degree")
        return text[: degrees.start()].strip(), _unit(scale)
    counted = _RE.behind_number.fullmatch(text)
    if counted:
        return counted[1], _unit(counted[2])
    text = _RE.fraction.sub(r"\1/\2", text)
    for start in re.finditer(_WRAPPER, text):
        head = text[: start.start()].strip()
        if head and _RE.tail.fullmatch(text, start.start()):
            unit = _unit(_RE.wrapped.sub(r" \1 ", text[start.start() :]))
            return (text, None) if unit is None else (head, unit)
    bare = _BARE_TAIL.search(text)
    unit = _unit(bare[1]) if bare else None
    return (text, None) if bare is None or unit is None else (text[: bare.start()].strip(), unit)


def _unit(text: str) -> Unit | None:
    text = _RE.scale.sub(lambda found: _SCALES[found[1][0].lower()], text)
    tokens = list(_RE.token.finditer(text))
    if sum(len(token[0]) for token in tokens) != len(text):
        return None
    parts: list[tuple[str, int]] = []
    sign, pending, may_be_raised = 1, 1, False
    for token in tokens:
        word, exponent, slash, _ = token.groups()
        if slash or word == "per":
            sign, may_be_raised = -1, False
        elif word in _PREFIXES:
            pending = _PREFIXES[word]
        elif exponent or word in _SUFFIXES:
            if not may_be_raised:
                return None
            symbol, power = parts.pop()
            parts.append((symbol, power * int(exponent or _SUFFIXES[word])))
            may_be_raised = False
        elif word:
            name = word.lower()
            symbol = word if word in _SYMBOLS else _NAMES.get(name) or _NAMES.get(name.removesuffix("s"), "")
            if not symbol:
                return None
            parts.append((symbol, sign * pending))
            pending, may_be_raised = 1, True
    return _product(parts) if parts else None


def _product(parts: list[tuple[str, int]]) -> Unit:
    powers: Counter[str] = Counter()
    factor = Fraction(1)
    for symbol, power in parts:
        dimensions, size = _SYMBOLS[symbol]
        factor *= size**power
        for name, own in dimensions.items():
            powers[name] += own * power
    return Unit(dimensions=tuple(sorted((name, power) for name, power in powers.items() if power)), factor=factor)

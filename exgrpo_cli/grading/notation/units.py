"""Units at the end of an answer: told from the rest, and compared where both sides name one.

math-verify drops whatever stands in `\\text{}` at the end, so that 18 cm^3 would be 18 cm^2. Here only units of the
table count; every other word is dropped as before.
"""

import re
from dataclasses import dataclass
from fractions import Fraction

_LENGTHS = {
    "mm": Fraction(1, 1000), "cm": Fraction(1, 100), "dm": Fraction(1, 10), "m": Fraction(1), "km": Fraction(1000),
    "in": Fraction(254, 10000), "ft": Fraction(3048, 10000), "yd": Fraction(9144, 10000), "mi": Fraction(1609344, 1000),
}  # fmt: skip
_TIMES = {"ms": Fraction(1, 1000), "s": Fraction(1), "min": Fraction(60), "h": Fraction(3600), "day": Fraction(86400)}
_MASSES = {"mg": Fraction(1, 1000), "g": Fraction(1), "kg": Fraction(1000)}
_NAMES = {
    "millimeter": "mm", "millimetre": "mm", "centimeter": "cm", "centimetre": "cm", "decimeter": "dm",
    "decimetre": "dm", "meter": "m", "metre": "m", "kilometer": "km", "kilometre": "km", "inch": "in",
    "inche": "in", "foot": "ft", "feet": "ft", "yard": "yd", "mile": "mi", "second": "s", "sec": "s", "minute": "min",
    "hour": "h", "hr": "h", "milligram": "mg", "gram": "g", "kilogram": "kg", "day": "day",
    "millisecond": "ms",
}  # fmt: skip
_SYMBOLS: dict[str, tuple[str, Fraction]] = {
    **{symbol: ("length", factor) for symbol, factor in _LENGTHS.items()},
    **{symbol: ("time", factor) for symbol, factor in _TIMES.items()},
    **{symbol: ("mass", factor) for symbol, factor in _MASSES.items()},
}
_WRAPPER = r"\\(?:text|textrm|textbf|textit|mathrm|mathbf|mathit|mbox)"
_WRAPPED = re.compile(rf"{_WRAPPER}\s*\{{((?:[^{{}}]|\{{[^{{}}]*\}})*)\}}")
_TAIL = re.compile(
    rf"(?:{_WRAPPER}\s*\{{(?:[^{{}}]|\{{[^{{}}]*\}})*\}}|\^\s*(?:\{{\s*)?-?[0-9](?:\s*\}})?|\\cdot(?![a-z])|[\s/*.])+"
)
_BARE_TAIL = re.compile(
    r"(?<=[0-9})\s])\s*((?:square |cubic |sq\.? |cu\.? )?(?:mm|cm|dm|km|kg|mg|ft|"
    + "|".join(sorted((name + "s?" for name in _NAMES if len(name) > 2), key=len, reverse=True))
    + r")(?:\s*\^\s*\{?[0-9]\}?)?)$"
)
_TOKEN = re.compile(r"([A-Za-z]+)\.?|\^\s*\{?\s*(-?[0-9])\s*\}?|(/)|(\\cdot|[\s*.]+)")
_PREFIXES = {"square": 2, "sq": 2, "cubic": 3, "cu": 3}
_SUFFIXES = {"squared": 2, "cubed": 3}


@dataclass(frozen=True, slots=True)
class Unit:
    """A product of powers of lengths, times and masses."""

    dimensions: tuple[tuple[str, int], ...]
    """Exponent of each, in order of their names."""
    factor: Fraction
    """The unit in metres, seconds and grams."""


def split_unit(text: str) -> tuple[str, Unit | None]:
    """What stands before the unit, and the unit; the whole text and None where it ends in none of the table's."""
    for start in re.finditer(_WRAPPER, text):
        head = text[: start.start()].strip()
        if head and _TAIL.fullmatch(text, start.start()):
            unit = _unit(_WRAPPED.sub(r" \1 ", text[start.start() :]))
            return (text, None) if unit is None else (head, unit)
    bare = _BARE_TAIL.search(text)
    unit = _unit(bare[1]) if bare else None
    return (text, None) if bare is None or unit is None else (text[: bare.start()].strip(), unit)


def _unit(text: str) -> Unit | None:
    powers: dict[str, int] = {}
    factor = Fraction(1)
    sign, pending = 1, 1
    last: tuple[str, Fraction, int] | None = None
    for word, exponent, slash, _ in _tokens(text):
        if slash or word == "per":
            sign, last = -1, None
        elif word in _PREFIXES:
            pending = _PREFIXES[word]
        elif exponent or word in _SUFFIXES:
            if last is None:
                return None
            kind, size, power = last
            # The unit was counted once when it was read.
            more = power * ((int(exponent) if exponent else _SUFFIXES[word]) - 1)
            powers[kind] += more
            factor *= size**more
            last = None
        elif word:
            known = _SYMBOLS.get(_symbol(word))
            if known is None:
                return None
            kind, size = known
            power = sign * pending
            powers[kind] = powers.get(kind, 0) + power
            factor *= size**power
            last, pending = (kind, size, power), 1
    dimensions = tuple(sorted((kind, power) for kind, power in powers.items() if power))
    return Unit(dimensions=dimensions, factor=factor) if powers else None


def _tokens(text: str) -> list[tuple[str, str, str, str]]:
    tokens, place = [], 0
    while place < len(text):
        match = _TOKEN.match(text, place)
        if match is None:
            return [("?", "", "", "")]
        tokens.append((match[1] or "", match[2] or "", match[3] or "", match[4] or ""))
        place = match.end()
    return tokens


def _symbol(word: str) -> str:
    if word in _SYMBOLS:
        return word
    name = word.lower()
    return _NAMES.get(name) or _NAMES.get(name.removesuffix("s"), "")

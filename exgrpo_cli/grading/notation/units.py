"""Units at the end of an answer: told from the rest, and compared where both sides name one.

math-verify drops whatever stands in `\\text{}` at the end, so that 18 cm^3 would be 18 cm^2, and 20 dollars 20 cents.
Here only units of the table count; every other word is dropped as before.
"""

import re
from dataclasses import dataclass
from fractions import Fraction

Dimensions = dict[str, int]
"""Exponent of each dimension."""

_LENGTH, _TIME, _MASS, _VOLUME = {"length": 1}, {"time": 1}, {"mass": 1}, {"length": 3}
_FORCE = {"mass": 1, "length": 1, "time": -2}
_SPEED = {"length": 1, "time": -1}
_MILE, _HOUR, _LITRE, _POUND = Fraction(1609344, 1000), Fraction(3600), Fraction(1, 1000), Fraction(45359237, 100_000)
_GALLON = Fraction(3785411784, 10**12)
_SYMBOLS: dict[str, tuple[Dimensions, Fraction]] = {
    **{name: (_LENGTH, Fraction(factor)) for name, factor in (
        ("mm", "0.001"), ("cm", "0.01"), ("dm", "0.1"), ("m", "1"), ("km", "1000"), ("in", "0.0254"), ("ft", "0.3048"),
        ("yd", "0.9144"), ("mi", "1609.344"),
    )},
    **{name: (_TIME, Fraction(factor)) for name, factor in (
        ("ms", "0.001"), ("s", "1"), ("min", "60"), ("h", "3600"), ("day", "86400"), ("week", "604800"),
    )},
    # Neither is a fixed number of days.
    "month": ({"calendar": 1}, Fraction(1)), "year": ({"calendar": 1}, Fraction(12)),
    **{name: (_MASS, Fraction(factor)) for name, factor in (("mg", "0.001"), ("g", "1"), ("kg", "1000"))},
    "lb": (_MASS, _POUND), "oz": (_MASS, _POUND / 16), "ton": ({"tons": 1}, Fraction(1)),
    "mL": (_VOLUME, _LITRE / 1000), "cL": (_VOLUME, _LITRE / 100), "L": (_VOLUME, _LITRE),
    "cc": (_VOLUME, Fraction(1, 10**6)), "gal": (_VOLUME, _GALLON), "qt": (_VOLUME, _GALLON / 4),
    "pt": (_VOLUME, _GALLON / 8), "cup": (_VOLUME, _GALLON / 16),
    "mph": (_SPEED, _MILE / _HOUR), "kph": (_SPEED, 1000 / _HOUR),
    "N": (_FORCE, Fraction(1000)), "kN": (_FORCE, Fraction(10**6)),
    "J": ({**_FORCE, "length": 2}, Fraction(1000)), "kJ": ({**_FORCE, "length": 2}, Fraction(10**6)),
    "W": ({"mass": 1, "length": 2, "time": -3}, Fraction(1000)),
    "kW": ({"mass": 1, "length": 2, "time": -3}, Fraction(10**6)),
    "dollar": ({"dollars": 1}, Fraction(1)), "cent": ({"dollars": 1}, Fraction(1, 100)),
    "euro": ({"euros": 1}, Fraction(1)),
    "degree": ({"degrees": 1}, Fraction(1)), "rad": ({"radians": 1}, Fraction(1)),
    "celsius": ({"celsius": 1}, Fraction(1)), "fahrenheit": ({"fahrenheit": 1}, Fraction(1)),
}  # fmt: skip
_NAMES = {
    "millimeter": "mm", "millimetre": "mm", "centimeter": "cm", "centimetre": "cm", "decimeter": "dm",
    "decimetre": "dm", "meter": "m", "metre": "m", "kilometer": "km", "kilometre": "km", "inch": "in",
    "inche": "in", "foot": "ft", "feet": "ft", "yard": "yd", "mile": "mi", "second": "s", "sec": "s", "minute": "min",
    "hour": "h", "hr": "h", "milligram": "mg", "gram": "g", "kilogram": "kg", "day": "day",
    "millisecond": "ms", "week": "week", "month": "month", "year": "year", "yr": "year", "pound": "lb", "lb": "lb",
    "ounce": "oz", "ton": "ton", "liter": "L", "litre": "L", "l": "L",
    "milliliter": "mL", "millilitre": "mL", "ml": "mL",
    "gallon": "gal", "quart": "qt", "pint": "pt", "cup": "cup", "mph": "mph", "kph": "kph", "kmph": "kph", "kmh": "kph",
    "newton": "N", "joule": "J", "watt": "W", "kilowatt": "kW", "dollar": "dollar", "cent": "cent", "euro": "euro",
    "degree": "degree", "radian": "rad", "celsius": "celsius", "fahrenheit": "fahrenheit",
}  # fmt: skip
_WRAPPER = r"\\(?:text|textrm|textbf|textit|mathrm|mathbf|mathit|mbox|operatorname)"
_WRAPPED = re.compile(rf"{_WRAPPER}\s*\{{((?:[^{{}}]|\{{[^{{}}]*\}})*)\}}")
_TAIL = re.compile(
    rf"(?:{_WRAPPER}\s*\{{(?:[^{{}}]|\{{[^{{}}]*\}})*\}}|\^\s*(?:\{{\s*)?-?[0-9](?:\s*\}})?|\\cdot(?![a-z])|[\s/*.])+"
)
_DEGREES = re.compile(rf"\s*\^\s*\{{?\s*\\circ\s*\}}?\s*(?:(?:{_WRAPPER}\s*\{{)?\s*(?P<scale>[CF])\.?\s*\}}?)?\s*$")
_SCALE = re.compile(r"\bdegrees?\s+(c|f|celsius|fahrenheit)\b", re.IGNORECASE)
_FRACTION = re.compile(
    rf"\\frac\s*\{{\s*({_WRAPPER}\s*\{{[^{{}}]*\}}(?:\^\{{?[0-9]\}}?)?)\s*\}}"
    rf"\s*\{{\s*({_WRAPPER}\s*\{{[^{{}}]*\}}(?:\^\{{?[0-9]\}}?)?)\s*\}}\s*$"
)
_BARE_TAIL = re.compile(
    r"(?<=[0-9})\s])\s*((?:square |cubic |sq\.? |cu\.? )?(?:mm|cm|dm|km|kg|mg|ft|"
    + "|".join(sorted((name + "s?" for name in _NAMES if len(name) > 2), key=len, reverse=True))
    + r")(?:\s*\^\s*\{?[0-9]\}?)?)$"
)
_BEHIND_NUMBER = re.compile(r"(-?[0-9][0-9.,]*)\s*(m|s|g|h|l|L|in|lbs?|oz|yd|mi|hr|yr|min)\.?")
_TOKEN = re.compile(r"([A-Za-z]+)\.?|\^\s*\{?\s*(-?[0-9])\s*\}?|(/)|(\\cdot|[\s*.~]+)")
_PREFIXES = {"square": 2, "sq": 2, "cubic": 3, "cu": 3}
_SUFFIXES = {"squared": 2, "cubed": 3}


@dataclass(frozen=True, slots=True)
class Unit:
    """A product of powers of lengths, times, masses and what else is counted."""

    dimensions: tuple[tuple[str, int], ...]
    """Exponent of each, in order of their names."""
    factor: Fraction
    """The unit in metres, seconds, grams, dollars, ..."""


def split_unit(text: str) -> tuple[str, Unit | None]:
    """What stands before the unit, and the unit; the whole text and None where it ends in none of the table's."""
    degrees = _DEGREES.search(text)
    if degrees and text[: degrees.start()].strip():
        scale = {"C": "celsius", "F": "fahrenheit"}.get(degrees["scale"], "degree")
        return text[: degrees.start()].strip(), _unit(scale)
    counted = _BEHIND_NUMBER.fullmatch(text)
    if counted:
        return counted[1], _unit(counted[2])
    text = _FRACTION.sub(r"\1/\2", text)
    for start in re.finditer(_WRAPPER, text):
        head = text[: start.start()].strip()
        if head and _TAIL.fullmatch(text, start.start()):
            unit = _unit(_WRAPPED.sub(r" \1 ", text[start.start() :]))
            return (text, None) if unit is None else (head, unit)
    bare = _BARE_TAIL.search(text)
    unit = _unit(bare[1]) if bare else None
    return (text, None) if bare is None or unit is None else (text[: bare.start()].strip(), unit)


def _unit(text: str) -> Unit | None:
    powers: Dimensions = {}
    factor = Fraction(1)
    sign, pending = 1, 1
    last: tuple[Dimensions, Fraction, int] | None = None
    for word, exponent, slash, _ in _tokens(_SCALE.sub(lambda found: _SCALES[found[1][0].lower()], text)):
        if slash or word == "per":
            sign, last = -1, None
        elif word in _PREFIXES:
            pending = _PREFIXES[word]
        elif exponent or word in _SUFFIXES:
            if last is None:
                return None
            dimensions, size, power = last
            # The unit was counted once when it was read.
            more = power * ((int(exponent) if exponent else _SUFFIXES[word]) - 1)
            _multiply(powers, dimensions, more)
            factor *= size**more
            last = None
        elif word:
            known = _SYMBOLS.get(_symbol(word))
            if known is None:
                return None
            dimensions, size = known
            power = sign * pending
            _multiply(powers, dimensions, power)
            factor *= size**power
            last, pending = (dimensions, size, power), 1
    found = tuple(sorted((kind, power) for kind, power in powers.items() if power))
    return Unit(dimensions=found, factor=factor) if powers else None


_SCALES = {"c": "celsius", "f": "fahrenheit"}


def _multiply(powers: Dimensions, by: Dimensions, times: int) -> None:
    for kind, power in by.items():
        powers[kind] = powers.get(kind, 0) + power * times


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

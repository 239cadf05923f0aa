r"""What an equation says of a quantity, and its name: `12` and `P(4)` of `P(4)=12`.

math-verify takes a letter before "=" for a name. A value such as `f(1)=2` it solves as an equation without unknowns, so
that `f(1)=3` would be equal to it.
"""

import re
from string import ascii_uppercase

_INDEX = r"(?:_(?:[0-9A-Za-z]|\{[^{}]*\}))?"
_QUANTITY = (
    rf"(?:[A-Za-z]|\\(?:alpha|beta|gamma|delta|theta|lambda|mu|rho|sigma|(?:var)?phi|omega)(?![A-Za-z]))\s*'*{_INDEX}"
)
_VALUE = re.compile(rf"([fghpqEFGHNPQRSTV]'*{_INDEX}(?:\^\s*(?:\{{-1\}}|'+))?)\s*\(([^()=]*)\)\s*")
_NAME = re.compile(
    rf"(?:{_QUANTITY}|{_VALUE.pattern}|m?\\(?:angle|triangle)\s*[A-Z]{{1,3}}|\|?[A-Z]{{2,3}}\|?|\\text\s*\{{[^{{}}]*\}}|"
    rf"\\(?:sin|cos|tan|cot)\s*(?:\\angle\s*)?{_QUANTITY}|\\frac\s*\{{d[a-z]\}}\s*\{{d[a-z]\}})\s*"
)
_EQUALS = re.compile(r"(?<![<>!:=])=(?!=)")
_APPROXIMATELY = re.compile(r"\\approx(?![A-Za-z])")
_DECIMAL = re.compile(r"-?[0-9]+\.[0-9]+")
_POINT = re.compile(r"[A-Z]\s*=?\s*(\([^()]*,[^()]*\))")
_NAMED_TUPLE = re.compile(r"\([A-Za-z](?:\s*,\s*[A-Za-z])+\)\s*=\s*(\([^()]*,[^()]*\))")
_TUPLE = re.compile(r"\([^()]*,[^()]*\)")
_SET_TO = re.compile(r"([A-Za-z])\s*=\s*([^=,;]*[^=,;\s])\s*")
_LETTER = re.compile(r"(?<!\\)(?<![A-Za-z])[A-Za-z]")
_LONE_LETTER = re.compile(r"(?<![A-Za-z\\])[A-Za-z](?![A-Za-z])")
_PLAIN_QUANTITY = re.compile(r"([A-Za-z])(_\{?[0-9A-Za-z]\}?)?\s*")


def split_name(text: str) -> tuple[str, str] | None:
    """Name and value of an equation; None where the text is no equation, or of no name. Sums of numbers are names."""
    sides = _EQUALS.split(text)
    if len(sides) != 2 or not sides[1].strip():
        return None
    is_name = _NAME.fullmatch(sides[0]) or (sides[0].strip() and not _LETTER.search(text))
    return (sides[0].strip(), sides[1].strip()) if is_name else None


def without_name(gold: str, answer: str) -> tuple[str, str]:
    """The value of the side that names it where the other one is no equation."""
    if "=" in gold and "=" in answer:
        return gold, answer
    return tuple(named[1] if (named := split_name(side)) else side for side in (gold, answer))  # type: ignore[return-value]


def without_approximation(gold: str, answer: str) -> tuple[str, str]:
    r"""Of `2\pi \approx 6.28` the side to be compared with the other text: the approximation with a decimal."""

    def one_side(text: str, other: str) -> str:
        sides = [side.strip() for side in _APPROXIMATELY.split(text)]
        if len(sides) != 2 or not all(sides):
            return text
        return sides[1] if _NAME.fullmatch(sides[0]) or _DECIMAL.fullmatch(other) else sides[0]

    return one_side(gold, answer), one_side(answer, gold)


def as_tuples(gold: str, answer: str) -> tuple[str, str]:
    """Both as tuples where one of them is: `A(1,2)` without its name, `b=2, a=1` in the order of the alphabet."""

    if _NAMED_TUPLE.fullmatch(gold) is None or _NAMED_TUPLE.fullmatch(answer) is None:
        gold, answer = (_NAMED_TUPLE.sub(r"\1", side) for side in (gold, answer))

    def one_side(text: str, other: str) -> str:
        if not _TUPLE.fullmatch(other):
            return text
        point = _POINT.fullmatch(text)
        if point:
            return point[1]
        values = [_SET_TO.fullmatch(part.strip()) for part in re.split(r"[,;]|\\text\s*\{\s*and\s*\}|\band\b", text)]
        if len(values) < 2 or None in values or len({value[1] for value in values if value}) < len(values):
            return text
        return f"({','.join(value[2] for value in sorted(filter(None, values), key=lambda value: value[1]))})"

    return one_side(gold, answer), one_side(answer, gold)


def without_shared_name(gold: str, answer: str) -> tuple[str, str, bool | None]:
    """What two sides say of the same quantity: `n` and `n+1` of `N=n` and `N=n+1`; False where they cannot agree.

    The parser takes capital letters for small ones, reads n=n and n=n+1, and calls such equations equal. Where a side
    speaks of its own name in the other case, it is not asked.
    """
    golds, answers = split_name(gold), split_name(answer)
    if golds is None or answers is None:
        return gold, answer, None
    if not _LETTER.search(golds[0] + answers[0]) or _evened(golds[0]) == _evened(answers[0]):
        names = _PLAIN_QUANTITY.fullmatch(golds[0])
        speaks_of_itself = names and names[1] in _LONE_LETTER.findall(f"{golds[1]} {answers[1]}")
        return (gold, answer, None) if speaks_of_itself else (golds[1], answers[1], None)
    values = _VALUE.fullmatch(golds[0]), _VALUE.fullmatch(answers[0])
    if values[0] and values[1] and values[0][1] == values[1][1]:
        has_digit = any(char.isdigit() for char in values[0][2] + values[1][2])
        return gold, answer, False if has_digit else None
    quantities = _PLAIN_QUANTITY.fullmatch(golds[0]), _PLAIN_QUANTITY.fullmatch(answers[0])
    if not (quantities[0] and quantities[1] and quantities[0][1].lower() == quantities[1][1].lower()):
        return gold, answer, None
    if quantities[0][2] != quantities[1][2]:
        return gold, answer, None
    names_used = {quantities[0][1], quantities[1][1]}
    if names_used.intersection(_LONE_LETTER.findall(f"{golds[1]} {answers[1]}")):
        return gold, answer, False
    return golds[1], answers[1], None


def with_told_cases(gold: str, answer: str) -> tuple[str, str]:
    """Both with an index at each capital letter whose small one stands beside it: to the parser N-n would be 0."""
    both = _letters_in_both_cases(gold) or _letters_in_both_cases(answer)
    if not both:
        return gold, answer

    def told(text: str) -> str:
        return _CAPITAL.sub(lambda found: f"{found[1]}_{{1}}" if found[1] in both else found[0], text)

    return told(gold), told(answer)


def _letters_in_both_cases(text: str) -> frozenset[str]:
    letters = frozenset(_CAPITAL.sub(lambda found: found[1] or "", text))
    return frozenset(letter for letter in letters if letter in ascii_uppercase and letter.lower() in letters)


_CAPITAL = re.compile(
    r"\\(?:text[a-z]*|[mh]box|math[a-z]+|operatorname)\s*\{[^{}]*\}|\\[A-Za-z]+|[A-Za-z]{3,}|([A-Z])(?!\s*[_'(])"
)


def _evened(name: str) -> str:
    return re.sub(r"[\s{}]", "", name)

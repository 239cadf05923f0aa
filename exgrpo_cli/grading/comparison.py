"""Compare a gold and a boxed answer in plain notation before a parser sees them.

It decides where math-verify is certain to agree, and where it is known to be wrong: equal texts that it cannot read,
bases, units, repeated roots, an option's letter before its text, names of quantities, words that exclude each other.
"""

import re
from collections import Counter
from collections.abc import Callable
from fractions import Fraction
from string import ascii_uppercase

from exgrpo_cli.grading import contradictions, notation, plain
from exgrpo_cli.grading.quantities import Unit, same_based_number, same_value, split_unit

Compared = bool | tuple[str, str] | None
"""Whether a gold and an answer are the same, or what of the two is left to compare; None: nothing to say."""


def compare_texts(gold: str, answer: str) -> bool | tuple[str, str]:
    """Compare two texts in plain notation as far as that takes no parser: a verdict, or the two texts for a parser."""
    for step in _STEPS:
        found = step(gold, answer)
        if isinstance(found, bool):
            return found
        if found is not None:
            gold, answer = found
    return gold, answer


_RE = plain.patterns("comparison")


def _without_modulus(gold: str, answer: str) -> Compared:
    """The number that stands for a class of remainders where the gold names no modulus: 17 (mod 10) is not yet 7."""
    if "mod" in gold or "mod" not in answer:
        return None
    return gold, _RE.residue_class.sub("", answer)


def _without_labels(gold: str, answer: str) -> Compared:
    """Both without the letter of an option before its text; a letter alone is compared with the letter there is."""
    gold_letter, answer_letter = _RE.option.fullmatch(gold), _RE.option.fullmatch(answer)
    gold_label, gold_rest = _split_label(gold, answer)
    answer_label, answer_rest = _split_label(answer, gold)
    if gold_letter and answer_label:
        return gold_letter[1] == answer_label.upper()
    if gold_label and answer_letter:
        return gold_label.upper() == answer_letter[1]
    if gold_letter and not answer_letter and _RE.several.search(answer):
        return False
    return notation.same_text(gold_rest, answer_rest) or (gold_rest, answer_rest)


def _split_label(text: str, other: str) -> tuple[str | None, str]:
    match = _RE.label.fullmatch(text)
    label = (match[1] or match[2] or match[3]) if match else None
    # A small letter may be a factor.
    is_factor = label is not None and label.islower() and label in _RE.lone_letter.findall(other)
    return (label, match[4].strip()) if match and not is_factor else (None, text)


def has_letter(text: str) -> bool:
    """Whether a letter stands for a quantity somewhere, rather than for a command."""
    return _RE.letter.search(text) is not None


def _split_name(text: str) -> tuple[str, str] | None:
    """Name and value of an equation; None where the text is no equation, or of no name. Sums of numbers are names."""
    sides = _RE.equals.split(text)
    if len(sides) != 2 or not sides[1].strip():
        return None
    is_name = _RE.name.fullmatch(sides[0]) or (sides[0].strip() and not _RE.letter.search(text))
    return (sides[0].strip(), sides[1].strip()) if is_name else None


def _without_name(gold: str, answer: str) -> Compared:
    """The value of the side that names it where the other one is no equation."""
    if "=" in gold and "=" in answer:
        return None
    return (_split_name(gold) or (gold, gold))[1], (_split_name(answer) or (answer, answer))[1]


def _without_named_tuple(gold: str, answer: str) -> Compared:
    if _RE.named_tuple.fullmatch(gold) and _RE.named_tuple.fullmatch(answer):
        return None
    return _RE.named_tuple.sub(r"\1", gold), _RE.named_tuple.sub(r"\1", answer)


def _as_tuple(text: str, other: str) -> str:
    """A tuple where the other text is one: `A(1,2)` without its name, `b=2, a=1` in the order of the alphabet.

    Where the other lists several, solutions of several quantities are tuples too.
    """
    solutions = _RE.either.split(text)
    if len(solutions) > 1 and _RE.tuples.fullmatch(other):
        return ",".join(_as_tuple(solution.strip(), "(,)") for solution in solutions)
    if not _RE.tuple.fullmatch(other):
        return text
    if point := _RE.point.fullmatch(text):
        return point[1]
    values = [_RE.set_to.fullmatch(part.strip()) for part in re.split(r"[,;]|\\text\s*\{\s*and\s*\}|\band\b", text)]
    by_name = {value[1]: value[2] for value in values if value}
    return f"({','.join(by_name[name] for name in sorted(by_name))})" if len(by_name) == len(values) > 1 else text


def _as_tuples(gold: str, answer: str) -> Compared:
    return _as_tuple(gold, answer), _as_tuple(answer, gold)


def _without_shared_name(gold: str, answer: str) -> Compared:
    """The values that both sides give one quantity: `n` and `n+1` of `N=n` and `N=n+1`; False where they cannot agree.

    The parser takes capital letters for small ones, reads n=n and n=n+1, and calls such equations equal. Where a side
    speaks of its own name in the other case, it is not asked.
    """
    golds, answers = _split_name(gold), _split_name(answer)
    if golds is None or answers is None:
        return None
    lone = set(_RE.lone_letter.findall(f"{golds[1]} {answers[1]}"))
    quantities = _RE.plain_quantity.fullmatch(golds[0]), _RE.plain_quantity.fullmatch(answers[0])
    if not _RE.letter.search(golds[0] + answers[0]) or _even(golds[0]) == _even(answers[0]):
        return None if quantities[0] and quantities[0][1] in lone else (golds[1], answers[1])
    values = _RE.value.fullmatch(golds[0]), _RE.value.fullmatch(answers[0])
    if values[0] and values[1] and values[0][1] == values[1][1]:
        return False if any(char.isdigit() for char in values[0][2] + values[1][2]) else None
    if not (quantities[0] and quantities[1] and quantities[0][1].lower() == quantities[1][1].lower()):
        return None
    if quantities[0][2] != quantities[1][2]:
        return None
    return False if {quantities[0][1], quantities[1][1]} & lone else (golds[1], answers[1])


def _with_told_cases(gold: str, answer: str) -> Compared:
    """Both with an index at each capital letter whose small one stands beside it: to the parser N-n would be 0."""
    both = _letters_in_both_cases(gold) or _letters_in_both_cases(answer)

    def told(text: str) -> str:
        return _RE.capital.sub(lambda found: f"{found[1]}_{{1}}" if found[1] in both else found[0], text)

    return (told(gold), told(answer)) if both else None


def _letters_in_both_cases(text: str) -> frozenset[str]:
    letters = frozenset(_RE.capital.sub(lambda found: found[1] or "", text))
    return frozenset(letter for letter in letters if letter in ascii_uppercase and letter.lower() in letters)


_OPENING, _CLOSING = frozenset(("(", "[", "{", r"\{")), frozenset((")", "]", "}", r"\}"))
_FEWEST_IN_ORDER = 4


def _loses_roots(gold: str, answer: str) -> bool:
    """Whether the gold lists something more than once, and the answer does not list it just as often.

    Of a list without braces or brackets, `1, 1, 2`; a set in braces counts nothing twice. Where what the two list
    cannot be matched by its text or its value, only how often things occur is compared.
    """
    golds = Counter(map(_key, _items(gold)))
    if plain.plain_number(gold) is not None or max(golds.values()) == 1:
        return False
    answers = Counter(map(_key, _items(answer)))
    return golds != answers if golds.keys() == answers.keys() else sorted(golds.values()) != sorted(answers.values())


def _reorders(gold: str, answer: str) -> bool:
    """Whether the gold lists four whole numbers or more, none below zero, up and down, and the answer in another order.

    Such golds are sequences; roots come in order, or with their opposites.
    """
    golds, answers = ([plain.plain_number(item) for item in _items(side)] for side in (gold, answer))
    values = [value for value in golds if value is not None and value >= 0 and value.denominator == 1]
    if not _FEWEST_IN_ORDER <= len(golds) == len(values) == len(answers) or None in answers:
        return False
    in_order = sorted(values)
    return values not in (in_order, in_order[::-1]) and answers != golds and Counter(answers) == Counter(golds)


def _regroups(gold: str, answer: str) -> bool:
    """Whether two lists of solutions, `x=1, y=2 or x=3, y=4`, hold the same equations in other groups."""
    golds, answers = ([Counter(map(_even, _items(part))) for part in _RE.either.split(side)] for side in (gold, answer))
    if len(golds) != len(answers) or len(golds) < 2 or sum(golds, Counter()) != sum(answers, Counter()):
        return False
    return any(golds.count(group) != answers.count(group) for group in golds)


def _as_shares(gold: str, answer: str) -> Compared:
    """Ratios of three parts or more as tuples of their parts over the first one; False where only one is such a ratio,
    or one of another number of parts."""
    shares = []
    for text in (gold, answer):
        parts = [part.strip() for part in text.split(":")]
        if len(parts) >= 3 and all(parts) and _RE.parts.fullmatch(text):
            shares.append("({})".format(",".join(rf"\frac{{{part}}}{{{parts[0]}}}" for part in parts[1:])))
    if len(shares) == 2:
        return (shares[0], shares[1]) if gold.count(":") == answer.count(":") else False
    return False if shares else None


def _even(item: str) -> str:
    return re.sub(r"[\s{}]", "", item)


def _items(text: str) -> list[str]:
    """The parts between commas, "and" and "or" outside all brackets."""
    items, depth, start = [], 0, 0
    for match in _RE.separator.finditer(text):
        if match[0] in _OPENING:
            depth += 1
        elif match[0] in _CLOSING:
            depth -= 1
        elif depth == 0:
            items.append(text[start : match.start()])
            start = match.end()
    items.append(text[start:])
    return [item.strip() for item in items if item.strip()] or [""]


def _key(item: str) -> object:
    # Without braces \\sqrt2 and \\sqrt{2} are one.
    item = _RE.solved_for.sub("", item, count=1)
    value = plain.plain_number("".join(item.split()))
    return _even(item) if value is None else value


def _in_same_unit(gold: str, answer: str) -> Compared:
    """Both without their units, the answer in that of the gold; no comparison where only one of them names a unit."""
    gold_head, gold_unit = split_unit(gold)
    answer_head, answer_unit = split_unit(answer)
    if (gold_unit and _RE.percent.search(answer)) or (answer_unit and _RE.percent.search(gold)):
        return False
    ratio = _ratio(gold, gold_unit, answer, answer_unit)
    if ratio is None:
        return False
    value = plain.plain_number(answer_head)
    if isinstance(ratio, str):
        answer_head = rf"{ratio} \cdot ({answer_head})"
    elif ratio != 1 and value is not None:
        answer_head = str(value * ratio)
    elif ratio != 1:
        answer_head = rf"\frac{{{ratio.numerator}}}{{{ratio.denominator}}} \cdot ({answer_head})"
    return gold_head, answer_head


def _ratio(gold: str, gold_unit: Unit | None, answer: str, answer_unit: Unit | None) -> Fraction | str | None:
    """Units of the gold in one of the answer, as LaTeX if irrational; 1 where one has none, None where they do not fit.

    An angle without a unit in which pi stands is in radians.
    """
    sides = ((gold, gold_unit), (answer, answer_unit))
    in_degrees = [unit is not None and unit.dimensions == (("degrees", 1),) for _, unit in sides]
    in_radians = [unit.dimensions == (("radians", 1),) if unit else r"\pi" in text for text, unit in sides]
    if in_degrees[0] and in_radians[1]:
        return r"\frac{180}{\pi}"
    if in_radians[0] and in_degrees[1]:
        return r"\frac{\pi}{180}"
    if gold_unit is None or answer_unit is None:
        return Fraction(1)
    return answer_unit.factor / gold_unit.factor if gold_unit.dimensions == answer_unit.dimensions else None


def _same_per_cent(gold: str, answer: str) -> bool:
    """Whether a gold in per cent is met by its number, or by what it is as a share; False where unsure."""
    if not _RE.percent.search(gold):
        return False
    per_cent, value = (plain.plain_number(_RE.percent.sub("", side).strip()) for side in (gold, answer))
    if per_cent is None or value is None:
        return False
    return value == per_cent or (value == per_cent / 100 and not _RE.percent.search(answer))


def _is_more_than_all(gold: str, answer: str) -> bool:
    """Whether an answer in per cent would be a share of more than the whole: 700 % is no 7."""
    if _RE.percent.search(gold) or not _RE.percent.search(answer):
        return False
    value, per_cent = plain.plain_number(gold), plain.plain_number(_RE.percent.sub("", answer).strip())
    return value is not None and per_cent is not None and abs(value) > 1 and per_cent != value


def _same(test: Callable[[str, str], bool]) -> Callable[[str, str], Compared]:
    """A step that knows only of texts that are the same."""
    return lambda gold, answer: test(gold, answer) or None


def _other(test: Callable[[str, str], bool]) -> Callable[[str, str], Compared]:
    """A step that knows only of texts that are not the same."""
    return lambda gold, answer: False if test(gold, answer) else None


_STEPS: tuple[Callable[[str, str], Compared], ...] = (
    _same(notation.same_text),
    _without_named_tuple,
    _without_modulus,
    _as_tuples,
    _without_labels,
    _without_shared_name,
    _without_name,
    _same(notation.same_text),
    plain.same_plain_number,
    same_based_number,
    _other(contradictions.contradict),
    _other(_is_more_than_all),
    _other(_regroups),
    _other(_reorders),
    _as_shares,
    _in_same_unit,
    _other(_loses_roots),
    plain.same_plain_number,
    _same(notation.same_text),
    same_value,
    _same(_same_per_cent),
    _with_told_cases,
)

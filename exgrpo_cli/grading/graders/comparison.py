"""What can be said of a gold and a boxed answer before a parser sees them.

It decides where math-verify is certain to agree, and where it is known to be wrong: equal texts that it cannot read,
bases, units, repeated roots, an option's letter before its text.
"""

import re
from dataclasses import dataclass
from fractions import Fraction

from exgrpo_cli.grading.graders.plain import plain_number, same_plain_number
from exgrpo_cli.grading.notation.contrasts import contradict
from exgrpo_cli.grading.notation.lists import as_shares, loses_roots, regroups
from exgrpo_cli.grading.notation.names import (
    as_tuples,
    with_told_cases,
    without_approximation,
    without_name,
    without_shared_name,
)
from exgrpo_cli.grading.notation.notation import same_text
from exgrpo_cli.grading.notation.numerals import same_based_number, same_value
from exgrpo_cli.grading.notation.units import Unit, split_unit

_FONT = r"\\(?:text|textbf|mathrm|mathbf|mbox)\s*"
_LETTER = re.compile(rf"(?:{_FONT}\{{\s*)?\(?([A-J])\)?[.]?\s*\}}?")
_OPERATOR = r"(?:cup|cap|cdot|times|div|setminus|to|implies|land|lor|in|subset|le|ge|leq|geq|ne|neq)(?![A-Za-z])"
_SEVERAL = re.compile(r"[,;/&]|\b(?:and|or)\b")
_PERCENT = re.compile(r"\\?%\s*$|\bper\s?cent\b\s*\}?\s*$")
_LABEL = re.compile(
    rf"(?:{_FONT}\{{\s*\(?([A-J])\s*(?:\)[.:]?|[.:])\s*\}}|\{{?\(?([A-J])\)\}}?(?=\s*(?:[0-9]|\\(?!{_OPERATOR})))|([A-J])[.:](?=\s))\s*([^+*/^_=,;&\s].*)",
    re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class Compared:
    """What is left to compare, and what is known by now."""

    gold: str
    answer: str
    is_same: bool | None
    """None where only a parser can tell."""


def compare_texts(gold: str, answer: str) -> Compared:
    """Compare two texts in plain notation as far as that takes no parser."""
    if same_text(gold, answer):
        return Compared(gold, answer, True)
    gold, answer, is_same = _without_labels(*as_tuples(*without_approximation(gold, answer)))
    if is_same is None:
        gold, answer, is_same = without_shared_name(gold, answer)
        gold, answer = without_name(gold, answer)
    if is_same is None and same_text(gold, answer):
        is_same = True
    if is_same is None:
        is_same = same_plain_number(gold, answer)
    if is_same is None:
        is_same = same_based_number(gold, answer)
    if is_same is None and (contradict(gold, answer) or regroups(gold, answer)):
        is_same = False
    if is_same is None:
        gold, answer, is_same = _as_shares(gold, answer)
    if is_same is not None:
        return Compared(gold, answer, is_same)
    gold, answer, is_same = _in_same_unit(gold, answer)
    if is_same is None and loses_roots(gold, answer):
        is_same = False
    if is_same is None:
        is_same = same_plain_number(gold, answer)
    if is_same is None and same_text(gold, answer):
        is_same = True
    if is_same is None:
        is_same = same_value(gold, answer)
    if is_same is None and _same_per_cent(gold, answer):
        is_same = True
    return Compared(*with_told_cases(gold, answer), is_same)


def _as_shares(gold: str, answer: str) -> tuple[str, str, bool | None]:
    """Ratios of three parts as tuples; False where the other side has another number of parts."""
    shares = as_shares(gold), as_shares(answer)
    if shares[0] and shares[1]:
        return shares[0], shares[1], None if gold.count(":") == answer.count(":") else False
    return gold, answer, False if shares[0] or shares[1] else None


def _same_per_cent(gold: str, answer: str) -> bool:
    """Whether a gold in per cent is met by its number, or by what it is as a share; False where unsure."""
    if not _PERCENT.search(gold):
        return False
    per_cent, value = (plain_number(_PERCENT.sub("", side).strip()) for side in (gold, answer))
    if per_cent is None or value is None:
        return False
    return value == per_cent or (value == per_cent / 100 and not _PERCENT.search(answer))


def _without_labels(gold: str, answer: str) -> tuple[str, str, bool | None]:
    """Both without the letter of an option before its text; a letter alone is compared with the letter there is."""
    gold_letter, answer_letter = _LETTER.fullmatch(gold), _LETTER.fullmatch(answer)
    gold_label, gold_rest = _split_label(gold)
    answer_label, answer_rest = _split_label(answer)
    if gold_letter and answer_label:
        return gold, answer, gold_letter[1] == answer_label
    if gold_label and answer_letter:
        return gold, answer, gold_label == answer_letter[1]
    if gold_letter and not answer_letter and _SEVERAL.search(answer):
        return gold, answer, False
    return gold_rest, answer_rest, same_text(gold_rest, answer_rest) or None


def _split_label(text: str) -> tuple[str | None, str]:
    match = _LABEL.fullmatch(text)
    return (match[1] or match[2] or match[3], match[4].strip()) if match else (None, text)


def _in_same_unit(gold: str, answer: str) -> tuple[str, str, bool | None]:
    """Both without their units, the answer in that of the gold; no comparison where only one of them names a unit."""
    gold_head, gold_unit = split_unit(gold)
    answer_head, answer_unit = split_unit(answer)
    if (gold_unit and _PERCENT.search(answer)) or (answer_unit and _PERCENT.search(gold)):
        return gold, answer, False
    ratio = _ratio(gold, gold_unit, answer, answer_unit)
    if ratio is None:
        return gold, answer, False
    value = plain_number(answer_head)
    if isinstance(ratio, Fraction) and ratio != 1 and value is not None:
        answer_head = str(value * ratio)
    elif isinstance(ratio, Fraction) and ratio != 1:
        answer_head = rf"\frac{{{ratio.numerator}}}{{{ratio.denominator}}} \cdot ({answer_head})"
    elif isinstance(ratio, str):
        answer_head = rf"{ratio} \cdot ({answer_head})"
    return gold_head, answer_head, None


def _ratio(gold: str, gold_unit: Unit | None, answer: str, answer_unit: Unit | None) -> Fraction | str | None:
    """Units of the gold in one of the answer, as LaTeX if irrational; 1 where one has none, None where they do not fit.

    An angle without a unit in which pi stands is in radians.
    """
    in_degrees = [unit is not None and unit.dimensions == (("degrees", 1),) for unit in (gold_unit, answer_unit)]
    in_radians = [
        unit.dimensions == (("radians", 1),) if unit is not None else r"\pi" in text
        for text, unit in ((gold, gold_unit), (answer, answer_unit))
    ]
    if in_degrees[0] and in_radians[1]:
        return r"\frac{180}{\pi}"
    if in_radians[0] and in_degrees[1]:
        return r"\frac{\pi}{180}"
    if gold_unit is None or answer_unit is None:
        return Fraction(1)
    return answer_unit.factor / gold_unit.factor if gold_unit.dimensions == answer_unit.dimensions else None

"""What can be said of a gold and a boxed answer before a parser sees them.

It decides where math-verify is certain to agree, and where it is known to be wrong: equal texts that it cannot read,
bases, units, repeated roots, an option's letter before its text.
"""

import re
from dataclasses import dataclass

from exgrpo_cli.grading.graders.plain import plain_number, same_plain_number
from exgrpo_cli.grading.notation.lists import loses_roots
from exgrpo_cli.grading.notation.notation import same_text
from exgrpo_cli.grading.notation.numerals import same_based_number, same_value
from exgrpo_cli.grading.notation.units import split_unit

_FONT = r"\\(?:text|textbf|mathrm|mathbf|mbox)\s*"
_LETTER = re.compile(rf"(?:{_FONT}\{{\s*)?\(?([A-J])\)?[.]?\s*\}}?")
_LONE_LETTER = re.compile(r"(?<![A-Za-z\\])[A-Za-z](?![A-Za-z])")
_NAME = re.compile(r"^[A-Za-z](?:_\{?[0-9A-Za-z]\}?)?\s*=\s*")
_ASSIGNMENT = re.compile(r"([A-Za-z])(_\{?[0-9A-Za-z]\}?)?\s*=((?:[^=<>≤≥\\]|\\(?![lgn]eq?(?![A-Za-z])))+)")
_LABEL = re.compile(
    rf"(?:{_FONT}\{{\s*\(?([A-J])\s*(?:\)[.:]?|[.:])\s*\}}|\{{?\(?([A-J])\)\}}?(?=\s*[0-9\\])|([A-J])[.:](?=\s))\s*([^+*/^_=\s].*)",
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
    gold, answer, is_same = _without_labels(gold, answer)
    if is_same is None:
        gold, answer, is_same = _without_shared_name(gold, answer)
    if is_same is None:
        is_same = same_plain_number(*_without_name(gold, answer))
    if is_same is None:
        is_same = same_based_number(gold, answer)
    if is_same is not None:
        return Compared(gold, answer, is_same)
    gold, answer, is_same = _in_same_unit(gold, answer)
    if is_same is None and loses_roots(gold, answer):
        is_same = False
    if is_same is None:
        is_same = same_plain_number(gold, answer)
    if is_same is None and same_text(*_without_name(gold, answer)):
        is_same = True
    if is_same is None:
        is_same = same_value(gold, answer)
    return Compared(gold, answer, is_same)


def _without_labels(gold: str, answer: str) -> tuple[str, str, bool | None]:
    """Both without the letter of an option before its text; a letter alone is compared with the letter there is."""
    gold_letter, answer_letter = _LETTER.fullmatch(gold), _LETTER.fullmatch(answer)
    gold_label, gold_rest = _split_label(gold)
    answer_label, answer_rest = _split_label(answer)
    if gold_letter and answer_label:
        return gold, answer, gold_letter[1] == answer_label
    if gold_label and answer_letter:
        return gold, answer, gold_label == answer_letter[1]
    return gold_rest, answer_rest, same_text(gold_rest, answer_rest) or None


def _split_label(text: str) -> tuple[str | None, str]:
    match = _LABEL.fullmatch(text)
    return (match[1] or match[2] or match[3], match[4].strip()) if match else (None, text)


def _without_shared_name(gold: str, answer: str) -> tuple[str, str, bool | None]:
    """What two sides say of the same quantity: `n` and `n+1` where they are `N=n` and `N=n+1`.

    The parser takes capital letters for small ones, reads n=n and n=n+1, and calls such equations equal. Where a side
    speaks of its own name in the other case, it is not asked.
    """
    golds, answers = _ASSIGNMENT.fullmatch(gold), _ASSIGNMENT.fullmatch(answer)
    if not (golds and answers and golds[1].lower() == answers[1].lower() and golds[2] == answers[2]):
        return gold, answer, None
    names = {golds[1], answers[1]}
    if names.intersection(_LONE_LETTER.findall(f"{golds[3]} {answers[3]}")):
        return gold, answer, False if len(names) > 1 else None
    return golds[3].strip(), answers[3].strip(), same_text(golds[3].strip(), answers[3].strip()) or None


def _without_name(gold: str, answer: str) -> tuple[str, str]:
    """`x = 5` without its `x =` where the other side has no equation."""
    if "=" in gold and "=" not in answer:
        return _NAME.sub("", gold, count=1), answer
    return gold, _NAME.sub("", answer, count=1) if "=" not in gold else answer


def _in_same_unit(gold: str, answer: str) -> tuple[str, str, bool | None]:
    """Both without their units, the answer in that of the gold; no comparison where only one of them names a unit."""
    gold_head, gold_unit = split_unit(gold)
    answer_head, answer_unit = split_unit(answer)
    if gold_unit is not None and answer_unit is not None:
        if gold_unit.dimensions != answer_unit.dimensions:
            return gold, answer, False
        ratio = answer_unit.factor / gold_unit.factor
        value = plain_number(answer_head)
        if ratio != 1 and value is not None:
            answer_head = str(value * ratio)
        elif ratio != 1:
            answer_head = rf"\frac{{{ratio.numerator}}}{{{ratio.denominator}}} \cdot ({answer_head})"
    return gold_head, answer_head, None

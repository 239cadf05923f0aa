"""Find what two texts contradict each other in though math-verify drops it: words, marks, names, moduli, dots."""

import re

from exgrpo_cli.grading.plain import tables

_CONTRASTS = [frozenset(words.split()) for words in tables()["words"]["exclude_each_other"]]
_JOINING = frozenset(("and", "or"))
_HALF_OF_THE_DAY = re.compile(r"\b([ap])\.?\s?m\b\.?", re.IGNORECASE)
_COMMAND = re.compile(r"\\[A-Za-z]+")
_RELATION = re.compile(r"[<>]|\\(?:le|ge|leq|geq)(?![A-Za-z])")
_MARKS = [re.compile(pattern) for pattern in tables()["words"]["marks"]]
"""Primes, transposes and arrows, which both sides have or neither."""
_CAPITALS = re.compile(r"[A-Z]{3,}")
_SMALL_WORD = re.compile(r"(?=.*[aeiou])[a-z]{4,}")
_ONLY_WORDS = re.compile(r"(?:\\text\s*\{\s*)?[A-Za-z ]{3,}\}?")
_ANGLE = re.compile(r"\\angle\s*\{?\s*([A-Z])\s*([A-Z])\s*([A-Z])")
_ANGLE_OR_SIDE = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)\s*[({]?\s*([A-Za-z])(?![A-Za-z])")
_DOTS = re.compile(r",\s*\\ldots")
_MODULUS = re.compile(r"\\p?mod \{([^{}]*)\}")
_DENYING = frozenset(tables()["words"]["denying"].split())
_ADDED = [re.compile(pattern) for pattern in (r"\bor\s+(?:more|less|fewer|greater)\b", r"[0-9]\s*'")]
"""Bounds, and feet or minutes, which an answer may not name alone."""
_CLOSED_AT_INFINITY = re.compile(r"\[\s*-\s*\\infty|\\infty\s*\]")


def contradict(gold: str, answer: str) -> bool:
    """Whether two texts differ in something that math-verify does not look at."""
    if (_CAPITALS.fullmatch(gold) and _CAPITALS.fullmatch(answer)) or (_is_word(gold) and _is_word(answer)):
        # An order, as of runners, or a word: not a product.
        return gold != answer
    if any(marks.findall(gold) != marks.findall(answer) for marks in _MARKS):
        return True
    if _differ_in_names(gold, answer) or bool(_DOTS.search(gold)) is not bool(_DOTS.search(answer)):
        return True
    # Some golds close an interval at infinity, which no answer should.
    if _CLOSED_AT_INFINITY.search(answer) and not _CLOSED_AT_INFINITY.search(gold):
        return True
    golds, answers = _words(gold), _words(answer)
    if (answers - golds) & _DENYING or any(added.search(answer) and not added.search(gold) for added in _ADDED):
        return True
    are_joined = golds & _JOINING and answers & _JOINING
    if are_joined and all(map(_RELATION.search, (gold, answer))) | all(map(_ONLY_WORDS.fullmatch, (gold, answer))):
        return not golds & answers & _JOINING
    return any(golds & words and answers & words and not golds & answers & words for words in _CONTRASTS)


def _is_word(text: str) -> bool:
    """Whether small letters are a word rather than a product, whose factors are written in order of the alphabet."""
    return bool(_SMALL_WORD.fullmatch(text)) and list(text) != sorted(text)


def _differ_in_names(gold: str, answer: str) -> bool:
    """Whether angles have other letters in the middle, moduli differ, or an angle is written as a side."""
    angles, moduli, letters = (
        [marks.findall(side) for side in (gold, answer)] for marks in (_ANGLE, _MODULUS, _ANGLE_OR_SIDE)
    )
    if len(angles[0]) == len(angles[1]) and any(
        one not in (other, other[::-1]) for one, other in zip(*angles, strict=True)
    ):
        return True
    if moduli[0] and moduli[1] and moduli[0] != moduli[1]:
        return True
    cases = [{letter.lower() for letter in side} for side in letters]
    return cases[0] == cases[1] and set(letters[0]) != set(letters[1])


def _words(text: str) -> frozenset[str]:
    plain = _COMMAND.sub(" ", _HALF_OF_THE_DAY.sub(r" \1m ", text))
    return frozenset(word.lower() for word in re.findall("[A-Za-z]{2,}", plain))

"""Find what two texts contradict each other in though math-verify drops it: words, marks, names, moduli, dots."""

import re

from exgrpo_cli.grading.plain import patterns, tables

_CONTRASTS = [frozenset(words.split()) for words in tables()["words"]["exclude_each_other"]]
_JOINING = frozenset(("and", "or"))
_RE = patterns("contradictions")
_MARKS = [re.compile(pattern) for pattern in tables()["words"]["marks"]]
"""Primes, transposes and arrows, which both sides have or neither."""
_DENYING = frozenset(tables()["words"]["denying"].split())
_ADDED = [re.compile(pattern) for pattern in (r"\bor\s+(?:more|less|fewer|greater)\b", r"[0-9]\s*'")]
"""Bounds, and feet or minutes, which an answer may not name alone."""


def contradict(gold: str, answer: str) -> bool:
    """Whether two texts differ in something that math-verify does not look at."""
    if (_RE.capitals.fullmatch(gold) and _RE.capitals.fullmatch(answer)) or (_is_word(gold) and _is_word(answer)):
        # An order, as of runners, or a word: not a product.
        return gold != answer
    if any(marks.findall(gold) != marks.findall(answer) for marks in _MARKS):
        return True
    if _differ_in_names(gold, answer) or bool(_RE.dots.search(gold)) is not bool(_RE.dots.search(answer)):
        return True
    # Some golds close an interval at infinity, which no answer should.
    if _RE.closed_at_infinity.search(answer) and not _RE.closed_at_infinity.search(gold):
        return True
    golds, answers = _words(gold), _words(answer)
    if (answers - golds) & _DENYING or any(added.search(answer) and not added.search(gold) for added in _ADDED):
        return True
    are_joined, both = golds & _JOINING and answers & _JOINING, (gold, answer)
    if are_joined and (all(map(_RE.relation.search, both)) or all(map(_RE.only_words.fullmatch, both))):
        return not golds & answers & _JOINING
    return any(golds & words and answers & words and not golds & answers & words for words in _CONTRASTS)


def _is_word(text: str) -> bool:
    """Whether small letters are a word rather than a product, whose factors are written in order of the alphabet."""
    return bool(_RE.small_word.fullmatch(text)) and list(text) != sorted(text)


def _differ_in_names(gold: str, answer: str) -> bool:
    """Whether angles have other letters in the middle, moduli differ, or an angle is written as a side."""
    names = (_RE.angle, _RE.modulus, _RE.angle_or_side)
    angles, moduli, letters = ([marks.findall(side) for side in (gold, answer)] for marks in names)
    pairs = list(zip(*angles, strict=True)) if len(angles[0]) == len(angles[1]) else []
    if any(one not in (other, other[::-1]) for one, other in pairs) or (all(moduli) and moduli[0] != moduli[1]):
        return True
    cases = [{letter.lower() for letter in side} for side in letters]
    return cases[0] == cases[1] and set(letters[0]) != set(letters[1])


def _words(text: str) -> frozenset[str]:
    plain = _RE.command.sub(" ", _RE.half_of_the_day.sub(r" \1m ", text))
    return frozenset(word.lower() for word in re.findall("[A-Za-z]{2,}", plain))

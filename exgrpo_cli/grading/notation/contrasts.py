"""What math-verify drops though it decides: words that exclude each other, primes, transposes, the order of letters,
dots, moduli, brackets at infinity."""

import re

_CONTRASTS = tuple(
    frozenset(words.split())
    for words in (
        "am pm",
        "ad bc",
        "north south east west northeast northwest southeast southwest",
        "even odd",
        "increase decrease",
        "increasing decreasing",
        "positive negative",
        "left right",
        "above below",
        "clockwise counterclockwise",
        "profit loss",
        "least most",
        "maximum minimum",
        "rational irrational",
        "converges diverges",
        "true false",
        "yes no",
        "before after",
        "inside outside",
    )
)
_JOINING = frozenset(("and", "or"))
_HALF_OF_THE_DAY = re.compile(r"\b([ap])\.?\s?m\b\.?", re.IGNORECASE)
_COMMAND = re.compile(r"\\[A-Za-z]+")
_WORD = re.compile(r"[A-Za-z]{2,}")
_RELATION = re.compile(r"[<>]|\\(?:le|ge|leq|geq)(?![A-Za-z])")
_PRIMES = re.compile(r"(?<=[A-Za-z)])(?:'+(?![A-Za-z])|\^\s*\{?\s*(?:\\prime)+)")
_TRANSPOSE = re.compile(r"(?<=[A-Z)])\^\s*\{?\s*(?:T(?![A-Za-z0-9])|\\top|\\intercal)")
_LETTERS = re.compile(r"[A-Z]{3,}")
_SMALL_WORD = re.compile(r"[a-z]{4,}")
_VOWEL = re.compile("[aeiou]")
_ONLY_WORDS = re.compile(r"(?:\\text\s*\{\s*)?[A-Za-z ]{3,}\}?")
_ANGLE = re.compile(r"\\angle\s*\{?\s*([A-Z])\s*([A-Z])\s*([A-Z])")
_ARROW = re.compile(r"\\(?:vec|overrightarrow)\s*\{\s*([A-Z]\s*[A-Z])\s*\}")
_ANGLE_OR_SIDE = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)\s*[({]?\s*([A-Za-z])(?![A-Za-z])")
_DOTS = re.compile(r",\s*\\ldots")
_MODULUS = re.compile(r"\\mod \{([^{}]*)\}")
_CLOSED_AT_INFINITY = re.compile(r"\[\s*-\s*\\infty|\\infty\s*\]")


def contradict(gold: str, answer: str) -> bool:
    """Whether two texts differ in something that math-verify does not look at."""
    if (_LETTERS.fullmatch(gold) and _LETTERS.fullmatch(answer)) or (_is_word(gold) and _is_word(answer)):
        # An order, as of runners, or a word: not a product.
        return gold != answer
    if any(marks.findall(gold) != marks.findall(answer) for marks in (_PRIMES, _TRANSPOSE, _ARROW)):
        return True
    if _differ_in_names(gold, answer) or bool(_DOTS.search(gold)) is not bool(_DOTS.search(answer)):
        return True
    # Some golds close an interval at infinity, which no answer should.
    if _CLOSED_AT_INFINITY.search(answer) and not _CLOSED_AT_INFINITY.search(gold):
        return True
    golds, answers = _words(gold), _words(answer)
    are_joined = golds & _JOINING and answers & _JOINING
    if are_joined and all(map(_RELATION.search, (gold, answer))) | all(map(_ONLY_WORDS.fullmatch, (gold, answer))):
        return not golds & answers & _JOINING
    return any(golds & words and answers & words and not golds & answers & words for words in _CONTRASTS)


def _is_word(text: str) -> bool:
    """Whether small letters are a word rather than a product, whose factors are written in order of the alphabet."""
    return bool(_SMALL_WORD.fullmatch(text) and _VOWEL.search(text)) and list(text) != sorted(text)


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
    return frozenset(word.lower() for word in _WORD.findall(plain))

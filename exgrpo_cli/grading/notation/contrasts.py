"""What math-verify drops though it decides: words that exclude each other, primes, transposes, the order of letters."""

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


def contradict(gold: str, answer: str) -> bool:
    """Whether two texts differ in something that math-verify does not look at."""
    if _LETTERS.fullmatch(gold) and _LETTERS.fullmatch(answer):
        # An order, as of runners: not a product.
        return gold != answer
    if any(marks.findall(gold) != marks.findall(answer) for marks in (_PRIMES, _TRANSPOSE)):
        return True
    golds, answers = _words(gold), _words(answer)
    if _RELATION.search(gold) and _RELATION.search(answer) and golds & _JOINING and answers & _JOINING:
        return not golds & answers & _JOINING
    return any(golds & words and answers & words and not golds & answers & words for words in _CONTRASTS)


def _words(text: str) -> frozenset[str]:
    plain = _COMMAND.sub(" ", _HALF_OF_THE_DAY.sub(r" \1m ", text))
    return frozenset(word.lower() for word in _WORD.findall(plain))

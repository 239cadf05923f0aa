"""Roots that are listed more than once: math-verify reads a list as a set and loses how often."""

import re
from collections import Counter

from exgrpo_cli.grading.graders.plain import plain_number

_SEPARATOR = re.compile(r"\\text\s*\{\s*,?\s*(?:and|or)\s*\}|\b(?:and|or)\b|[,;]|\\[{}]|[()\[\]{}]")
_OPENING, _CLOSING = frozenset(("(", "[", "{", r"\{")), frozenset((")", "]", "}", r"\}"))
_NAME = re.compile(r"[A-Za-z](?:_\{?[0-9A-Za-z]\}?)?\s*=\s*")

_OR = re.compile(r"\\text\s*\{\s*,?\s*or\s*\}|\bor\b|;")
_PARTS = re.compile(r"[^=<>|,;]*")


def loses_roots(gold: str, answer: str) -> bool:
    """Whether the gold lists something more than once, and the answer does not list it just as often.

    Of a list without braces or brackets, `1, 1, 2`; a set in braces counts nothing twice. Where what the two list
    cannot be matched by its text or its value, only how often things occur is compared.
    """
    golds = Counter(map(_key, _items(gold)))
    if plain_number(gold) is not None:
        return False
    if max(golds.values()) == 1:
        return False
    answers = Counter(map(_key, _items(answer)))
    if golds.keys() == answers.keys():
        return golds != answers
    return sorted(golds.values()) != sorted(answers.values())


def regroups(gold: str, answer: str) -> bool:
    """Whether two lists of solutions, `x=1, y=2 or x=3, y=4`, hold the same equations in other groups."""
    golds, answers = ([Counter(map(_even, _items(part))) for part in _OR.split(side)] for side in (gold, answer))
    if len(golds) != len(answers) or len(golds) < 2 or sum(golds, Counter()) != sum(answers, Counter()):
        return False
    return any(golds.count(group) != answers.count(group) for group in golds)


def as_shares(text: str) -> str | None:
    """A ratio of three parts or more as the tuple of its parts over the first one; None for anything else."""
    parts = [part.strip() for part in text.split(":")]
    if len(parts) < 3 or not all(parts) or not _PARTS.fullmatch(text):
        return None
    return "({})".format(",".join(rf"\frac{{{part}}}{{{parts[0]}}}" for part in parts[1:]))


def _even(item: str) -> str:
    return re.sub(r"[\s{}]", "", item)


def _items(text: str) -> list[str]:
    """What stands between commas, "and" and "or" outside all brackets."""
    items, depth, start = [], 0, 0
    for match in _SEPARATOR.finditer(text):
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
    text = _even(_NAME.sub("", item, count=1))
    value = plain_number("".join(_NAME.sub("", item, count=1).split()))
    return text if value is None else value

"""Texts as words and n-grams, for telling questions that are almost the same."""

import re
from collections.abc import Sequence

from exgrpo_cli.questions.question_file.identity import normalised

# Words and numbers, and the signs without which 1+2 and 1-2 would read alike; mark-up and punctuation fall away.
_WORD = re.compile(r"\w+|[+\-*/^=<>]")


def words_of(text: str) -> tuple[str, ...]:
    """Lower-case words, numbers and operation signs of a text."""
    return tuple(_WORD.findall(normalised(text).lower()))


def ngrams(words: Sequence[str], size: int) -> set[str]:
    """Distinct runs of `size` words; the whole text where it is shorter, nothing where it is empty."""
    if not words:
        return set()
    return {" ".join(words[start : start + size]) for start in range(max(1, len(words) - size + 1))}

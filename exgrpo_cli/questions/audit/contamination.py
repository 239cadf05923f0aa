"""Contamination: how much of an evaluation question stands word for word in a training question.

overlap(q, b) = |n-grams of q that are n-grams of b| / |n-grams of b|, over distinct word n-grams. A benchmark question
of fewer than n words counts only where the whole text is the same, because a short phrase stands in many questions.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from exgrpo_cli.questions.audit.words import ngrams, words_of


@dataclass(frozen=True, kw_only=True, slots=True)
class Overlap:
    """The benchmark question nearest to a training question."""

    benchmark: str
    text: str
    share: float
    """Of the benchmark question's n-grams, from 0 to 1."""


class BenchmarkIndex:
    """Word n-grams of evaluation questions, each with the questions it is in."""

    def __init__(self, benchmarks: Mapping[str, Sequence[str]], *, size: int) -> None:
        """`benchmarks`: name to question texts; `size`: n, in words."""
        self._size = size
        self._texts: list[tuple[str, str]] = []
        self._num_grams: list[int] = []
        self._holders: defaultdict[str, list[int]] = defaultdict(list)
        self._short: dict[tuple[str, ...], int] = {}
        for name, texts in benchmarks.items():
            for text in texts:
                self._add(name, text)

    def _add(self, name: str, text: str) -> None:
        index, words = len(self._texts), words_of(text)
        self._texts.append((name, text))
        if len(words) < self._size:
            self._short.setdefault(words, index)
            self._num_grams.append(0)
            return
        grams = ngrams(words, self._size)
        self._num_grams.append(len(grams))
        for gram in sorted(grams):
            self._holders[gram].append(index)

    def nearest(self, text: str) -> Overlap | None:
        """The benchmark question with the largest overlap; None without a common n-gram."""
        words = words_of(text)
        if words in self._short:
            name, same = self._texts[self._short[words]]
            return Overlap(benchmark=name, text=same, share=1.0)
        if len(words) < self._size:
            return None
        shared = Counter(index for gram in ngrams(words, self._size) for index in self._holders.get(gram, ()))
        if not shared:
            return None
        # The lowest index among equals, so that the answer does not depend on the order of a set.
        best = max(sorted(shared), key=lambda index: shared[index] / self._num_grams[index])
        name, text_of_best = self._texts[best]
        return Overlap(benchmark=name, text=text_of_best, share=shared[best] / self._num_grams[best])

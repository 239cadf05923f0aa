"""The audit of a question set: each check finds reasons to leave questions out or to mark them, with examples.

Contamination: overlap(q, b) = |n-grams of q that are n-grams of b| / |n-grams of b|, over distinct word n-grams. A
benchmark question of fewer than n words counts only where the whole text is the same, because a short phrase stands in
many questions.

Near duplicates: each text is the set of its word trigrams; two texts of Jaccard similarity s fall into a common bucket
of MinHash with probability 1 - (1 - s^4)^8, 0.985 at s = 0.8, and every pair found is then compared exactly.
"""

import re
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np

from exgrpo_cli.base.errors import InputError
from exgrpo_cli.base.types import Question
from exgrpo_cli.grading import GradingPool, plain
from exgrpo_cli.questions.question_file import normalised, question_text

Progress = Callable[[int, int, str], None]
"""(done, total, what)."""
Reason = tuple[str, str]
"""Why a question is left out, and an example for the report."""
Check = Callable[[Sequence[Question]], Iterable[Reason | None]]
"""From questions to the reason to leave each out, or None."""

_MAX_EXAMPLES = 3
_EXAMPLE_CHARS = 160
_CHUNK = 1024
_GOLD_REASONS = plain.tables()["gold_reasons"]
# Words and numbers, and the signs without which 1+2 and 1-2 would read alike; mark-up and punctuation fall away.
_WORD = re.compile(r"\w+|[+\-*/^=<>]")
_NUM_BANDS, _BAND_ROWS = 8, 4
_PRIME = np.uint64((1 << 61) - 1)
_LOW_BITS = np.uint64((1 << 32) - 1)
# Texts of fewer trigrams share most of them by chance: 9+4=? and 9+4+9=? are two questions.
_MIN_TRIGRAMS = 12
# A bucket of questions that all look alike is compared with its first few: the report counts, it does not cluster.
_MAX_COMPARED = 4
# The beginnings of longer texts stand for them: a trigram costs 32 numbers, and 2.9 million of them took 2 GB and most
# of the half minute that one row of 20 MB needed.
_MAX_CHARS = 100_000


class Tally(Counter[str]):
    """Counts by reason, in order of their first appearance, with up to three examples of each."""

    def __init__(self) -> None:
        super().__init__()
        self.examples: defaultdict[str, list[str]] = defaultdict(list)

    def add(self, reason: str, example: str) -> None:
        """Count `reason` once more; keep `example`, cut to a line, while there are few."""
        self[reason] += 1
        if len(self.examples[reason]) < _MAX_EXAMPLES:
            self.examples[reason].append(one_line(example))

    def to_json(self) -> dict[str, Any]:
        """As reports and the file's metadata keep it."""
        return {reason: {"count": count, "examples": self.examples[reason]} for reason, count in self.items()}

    def lines(self) -> list[str]:
        """As the report shows it."""
        lines = []
        for reason, count in self.items():
            lines += [f"    {count:>6,} {reason}", *(f"             {example}" for example in self.examples[reason])]
        return lines


def one_line(text: str) -> str:
    """A text on one line, cut to the length of an example."""
    # No more than is shown is looked at: a text may have many million characters.
    text = " ".join(text[: 4 * _EXAMPLE_CHARS].split())
    return text if len(text) <= _EXAMPLE_CHARS else text[: _EXAMPLE_CHARS - 3] + "..."


def sift(questions: Sequence[Question], check: Check, what: str, tally: Tally, progress: Progress) -> list[Question]:
    """Questions without a reason to leave them out; the others are counted."""
    kept = []
    for start in range(0, len(questions), _CHUNK):
        progress(start, len(questions), what)
        chunk = questions[start : start + _CHUNK]
        for question, reason in zip(chunk, check(chunk), strict=True):
            if reason is None:
                kept.append(question)
            else:
                tally.add(*reason)
    progress(len(questions), len(questions), what)
    return kept


def gold_reasons(questions: Sequence[Question], pool: GradingPool) -> list[Reason | None]:
    """The reason why the gold of a question does not verify against itself; None where it does."""
    verdicts = pool.verify_gold([each.answer for each in questions], [each.metadata for each in questions])
    return [
        (_GOLD_REASONS[verdict], f"{question.id}: {question.answer}") if verdict in _GOLD_REASONS else None
        for question, verdict in zip(questions, verdicts, strict=True)
    ]


def check_golds(questions: Sequence[Question], pool: GradingPool) -> None:
    """Raises InputError naming the first question whose gold answer does not verify against itself, and their number.

    A gold the verifier cannot finish is refused as well: no answer to it could ever be graded.
    """
    reasons = gold_reasons(questions, pool)
    bad = [(question, reason[0]) for question, reason in zip(questions, reasons, strict=True) if reason is not None]
    if bad:
        question, reason = bad[0]
        first = f"the first being {question.answer!r} of question {question.id}: {reason}"
        bad_golds = f"{len(bad)} of {len(questions)} gold answers cannot be verified"
        raise InputError(f"{bad_golds}, {first}. Run `exgrpo prepare` on the file to leave them out.")


class BenchmarkIndex:
    """Word n-grams of evaluation questions, each with the questions it is in."""

    def __init__(self, benchmarks: Mapping[str, Sequence[str]], *, size: int) -> None:
        """`benchmarks`: name to question texts; `size`: n, in words."""
        self._size = size
        self._texts = [(name, text) for name, texts in benchmarks.items() for text in texts]
        self._num_grams: list[int] = []
        self._holders: defaultdict[str, list[int]] = defaultdict(list)
        for index, (_, text) in enumerate(self._texts):
            grams = ngrams(words_of(text), size)
            self._num_grams.append(len(grams))
            for gram in grams:
                self._holders[gram].append(index)

    def nearest(self, text: str) -> tuple[str, str, float] | None:
        """Benchmark, text and overlap (0 to 1) of the question with the largest one; None without a common n-gram."""
        grams = ngrams(words_of(text), self._size)
        shared = Counter(index for gram in grams for index in self._holders.get(gram, ()))
        if not shared:
            return None
        # The lowest index among equals, so that the answer does not depend on the order of a set.
        overlap, negated = max((count / self._num_grams[index], -index) for index, count in shared.items())
        return *self._texts[-negated], overlap

    def reasons(self, questions: Sequence[Question], threshold: float) -> list[Reason | None]:
        """The reason to leave a question out whose overlap is at least `threshold`."""
        reasons: list[Reason | None] = []
        for question in questions:
            benchmark, text, overlap = self.nearest(question_text(question)) or ("", "", 0.0)
            example = f"{question.id} ({overlap:.0%} of the n-grams): {text}"
            reasons.append((f"contaminated by {benchmark}", example) if overlap >= threshold else None)
        return reasons


def mark_near_duplicates(questions: Sequence[Question], tally: Tally, progress: Progress, *, threshold: float) -> None:
    """Count the same text with another answer, and almost the same text; all of them stay."""
    what = "looking for near duplicates"
    progress(0, len(questions), what)
    distinct: dict[str, Question] = {}
    for question in questions:
        first = distinct.setdefault(normalised(question_text(question)).lower(), question)
        if first is not question:
            answers = f"{first.answer!r} and {question.answer!r}"
            tally.add("same question, different answers", f"{first.id}, {question.id} ({answers})")
    asked = list(distinct.values())
    for one, other, similarity in near_duplicates([question_text(question) for question in asked], threshold=threshold):
        example = f"{asked[one].id}, {asked[other].id} ({similarity:.0%}): {question_text(asked[other])}"
        tally.add("almost the same question", example)
    progress(len(questions), len(questions), what)


def near_duplicates(texts: Sequence[str], *, threshold: float) -> list[tuple[int, int, float]]:
    """Places (first, second) and Jaccard similarity of pairs that are almost the same.

    For each text of a dozen trigrams and more the most similar earlier one of at least `threshold`, if any.
    """
    # The same hashes every time: the report must not depend on a seed that was not set. Multipliers below 2^29 keep
    # multiplier * hash + offset inside 64 bits for hashes of 32 bits.
    rng = np.random.default_rng(0)
    multipliers = rng.integers(1, 1 << 29, size=_NUM_BANDS * _BAND_ROWS, dtype=np.uint64) | np.uint64(1)
    offsets = rng.integers(0, 1 << 60, size=_NUM_BANDS * _BAND_ROWS, dtype=np.uint64)
    buckets: defaultdict[tuple[int, bytes], list[int]] = defaultdict(list)
    pairs = []
    for second, text in enumerate(texts):
        grams = _trigrams(text)
        if len(grams) < _MIN_TRIGRAMS:
            continue
        hashes = np.fromiter((zlib.crc32(gram.encode()) for gram in grams), dtype=np.uint64, count=len(grams))
        signature = ((hashes[:, None] * multipliers + offsets) % _PRIME & _LOW_BITS).min(axis=0)
        alike = [buckets[band, part.tobytes()] for band, part in enumerate(np.split(signature, _NUM_BANDS))]
        candidates = {first: _trigrams(texts[first]) for first in dict.fromkeys(chain.from_iterable(alike))}
        scored = [(len(grams & other) / len(grams | other), -first) for first, other in candidates.items()]
        similarity, negated = max(scored, default=(-1.0, 0))
        if similarity >= threshold:
            pairs.append((-negated, second, similarity))
        for bucket in alike:
            if len(bucket) < _MAX_COMPARED:
                bucket.append(second)
    return pairs


def _trigrams(text: str) -> set[str]:
    return ngrams(words_of(text[:_MAX_CHARS]), 3)


def words_of(text: str) -> tuple[str, ...]:
    """Lower-case words, numbers and operation signs of a text."""
    return tuple(_WORD.findall(normalised(text).lower()))


def ngrams(words: Sequence[str], size: int) -> set[str]:
    """Distinct runs of `size` words; the whole text where it is shorter, nothing where it is empty."""
    if not words:
        return set()
    return {" ".join(words[start : start + size]) for start in range(max(1, len(words) - size + 1))}

"""Near duplicates: questions that share most of their words, found by MinHash and confirmed by Jaccard similarity.

Each text is the set of its word trigrams; two texts of Jaccard similarity s fall into a common bucket with probability
1 - (1 - s^4)^8, 0.985 at s = 0.8, and every pair found is then compared exactly.
"""

import zlib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import UInt64

from exgrpo_cli.questions.audit.words import ngrams, words_of

_TRIGRAM = 3
_NUM_BANDS, _BAND_ROWS = 8, 4
_PRIME = (1 << 61) - 1
_HASH_BITS = 32
# Texts of fewer trigrams share most of them by chance: 9+4=? and 9+4+9=? are two questions.
_MIN_TRIGRAMS = 12
# A bucket of questions that all look alike is compared with its first few: the report counts, it does not cluster.
_MAX_COMPARED = 4
# The beginnings of longer texts stand for them: a trigram costs 32 numbers, and 2.9 million of them took 2 GB and most
# of the half minute that one row of 20 MB needed.
_MAX_CHARS = 100_000


@dataclass(frozen=True, kw_only=True, slots=True)
class NearPair:
    """Two questions that are almost the same, by their places; `first` < `second`."""

    first: int
    second: int
    similarity: float
    """Jaccard similarity of their word trigrams."""


def near_duplicates(texts: Sequence[str], *, threshold: float) -> list[NearPair]:
    """For each text of a dozen trigrams and more the most similar earlier one of at least `threshold`, if any."""
    multipliers, offsets = _hash_family()
    buckets: defaultdict[tuple[int, bytes], list[int]] = defaultdict(list)
    pairs = []
    for second, text in enumerate(texts):
        grams = _trigrams(text)
        if len(grams) < _MIN_TRIGRAMS:
            continue
        signature = _signature(grams, multipliers, offsets)
        keys = [(band, signature[band].tobytes()) for band in range(_NUM_BANDS)]
        candidates = dict.fromkeys(first for key in keys for first in buckets[key][:_MAX_COMPARED])
        others = {first: _trigrams(texts[first]) for first in candidates}
        scored = [(len(grams & other) / len(grams | other), -first) for first, other in others.items()]
        if scored and max(scored)[0] >= threshold:
            similarity, negated = max(scored)
            pairs.append(NearPair(first=-negated, second=second, similarity=similarity))
        for key in keys:
            if len(buckets[key]) < _MAX_COMPARED:
                buckets[key].append(second)
    return pairs


def _trigrams(text: str) -> set[str]:
    return ngrams(words_of(text[:_MAX_CHARS]), _TRIGRAM)


def _hash_family() -> tuple[UInt64[np.ndarray, " hashes"], UInt64[np.ndarray, " hashes"]]:
    # The same family every time: the report must not depend on a seed that was not set.
    rng = np.random.default_rng(0)
    count = _NUM_BANDS * _BAND_ROWS
    # Multipliers below 2^29 keep multiplier * hash + offset inside 64 bits for hashes of 32 bits.
    return (
        rng.integers(1, 1 << 29, size=count, dtype=np.uint64) | np.uint64(1),
        rng.integers(0, 1 << 60, size=count, dtype=np.uint64),
    )


def _signature(
    grams: set[str], multipliers: UInt64[np.ndarray, " hashes"], offsets: UInt64[np.ndarray, " hashes"]
) -> UInt64[np.ndarray, "bands rows"]:
    hashes = np.fromiter((zlib.crc32(gram.encode()) for gram in grams), dtype=np.uint64, count=len(grams))
    mixed = (hashes[:, None] * multipliers + offsets) % np.uint64(_PRIME) & np.uint64((1 << _HASH_BITS) - 1)
    smallest: UInt64[np.ndarray, hashes] = mixed.min(axis=0)
    return smallest.reshape(_NUM_BANDS, _BAND_ROWS)

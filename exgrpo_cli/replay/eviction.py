"""What goes when a question holds more trajectories than it may (`replay.max_per_question`, `replay.eviction`)."""

from collections.abc import Callable

import numpy as np
from jaxtyping import Int64

from exgrpo_cli.replay.drawing.selection import Candidates

Eviction = Callable[[Candidates, Int64[np.ndarray, " candidates"]], int]
"""Candidates and the fingerprints of their tokens in, position of the one that goes out; of equals the oldest."""


def _oldest(candidates: Candidates, fingerprints: Int64[np.ndarray, " candidates"]) -> int:
    return 0


def _highest_entropy(candidates: Candidates, fingerprints: Int64[np.ndarray, " candidates"]) -> int:
    """By the last measurement of each, which may stem from different weight versions."""
    return int(np.argmax(candidates.entropy))


def _longest(candidates: Candidates, fingerprints: Int64[np.ndarray, " candidates"]) -> int:
    return int(np.argmax(candidates.num_tokens))


def _random(candidates: Candidates, fingerprints: Int64[np.ndarray, " candidates"]) -> int:
    """The lowest fingerprint goes, so what stays is a uniform sample of all that was ever collected.

    Drawing the loser afresh each time would favour the newest. Bottom-k sampling (Cohen & Kaplan 2007).
    """
    return int(np.argmin(fingerprints))


def _lowest_priority(candidates: Candidates, fingerprints: Int64[np.ndarray, " candidates"]) -> int:
    return int(np.argmin(candidates.priority))


EVICTIONS: dict[str, Eviction] = {
    "oldest": _oldest,
    "highest-entropy": _highest_entropy,
    "longest": _longest,
    "random": _random,
    "lowest-priority": _lowest_priority,
}

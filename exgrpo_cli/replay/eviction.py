"""What goes when a question holds more trajectories than it may (`replay.max_per_question`, `replay.eviction`)."""

from collections.abc import Callable

import numpy as np
from jaxtyping import Int64

from exgrpo_cli.replay.drawing.selection import Candidates

Eviction = Callable[[Candidates, Int64[np.ndarray, " candidates"]], int]
"""Candidates and the fingerprints of their tokens in, position of the one that goes out; of equals the oldest."""


EVICTIONS: dict[str, Eviction] = {
    "oldest": lambda candidates, fingerprints: 0,
    # By the last measurement of each, which may stem from different weight versions.
    "highest-entropy": lambda candidates, fingerprints: int(np.argmax(candidates.entropy)),
    "longest": lambda candidates, fingerprints: int(np.argmax(candidates.num_tokens)),
    # The lowest fingerprint goes, so what stays is a uniform sample of all that was ever collected: drawing the loser
    # afresh each time would favour the newest. Bottom-k sampling (Cohen & Kaplan 2007).
    "random": lambda candidates, fingerprints: int(np.argmin(fingerprints)),
    "lowest-priority": lambda candidates, fingerprints: int(np.argmin(candidates.priority)),
}

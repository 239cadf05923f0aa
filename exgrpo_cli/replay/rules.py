"""The rules of a buffer: what is stored, for how long, and how it is drawn. The defaults are the paper's."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int64

from exgrpo_cli.config.names import DIRECTIONS, METRICS, PREFIX, SAMPLERS
from exgrpo_cli.errors import InputError, nearest
from exgrpo_cli.replay.selection import Candidates


@dataclass(frozen=True, kw_only=True, slots=True)
class BufferRules:
    """Plain values; `validate` refuses what cannot work."""

    lower_bound: int = 0
    """A visit stores its successes when lower_bound < k <= upper_bound."""
    upper_bound: int | None = None
    """None: K - 1."""
    retirement: bool = True
    """A question solved by its whole group leaves buffer and stream."""
    count_fresh_only: bool = False
    """An experiential group counts its K - 1 fresh members only, its pass rate is k'/(K-1), it retires at K - 1."""
    max_per_question: int = 0
    """Most trajectories stored per question; 0: unbounded."""
    eviction: str = "oldest"
    """Which one goes when there are more: one of EVICTIONS."""
    max_age: int = 0
    """Trajectories older than this many steps are evicted; 0: never."""
    cooldown: int = 0
    """Steps that a replayed question rests before it can be drawn again; 0: none."""
    readmit_fraction: float = 0.0
    """Share of the retired questions that comes back each time (the paper tried 0.1, which hurt)."""
    readmit_every: int = 0
    """Steps between re-admissions; 0: never."""
    sampler: str = "normal"
    """How questions are drawn: one of SAMPLERS, or python:module:function."""
    sampler_mu: float = 0.5
    sampler_sigma: float = 0.125
    """Of the sampler `normal`, both on the accuracy scale."""
    metric: str = "ent"
    """How a trajectory is selected: one of METRICS, or python:module:function."""
    direction: str = "min"
    max_staleness: int = 0
    """Weight versions by which a stored measurement may lag before it is taken again; 0: exact."""

    def upper(self, group_size: int) -> int:
        return group_size - 1 if self.upper_bound is None else self.upper_bound

    def validate(self, group_size: int) -> None:
        """Raise InputError naming the first setting that cannot work with K = group_size."""
        upper = self.upper(group_size)
        if not 0 <= self.lower_bound < upper <= group_size:
            raise InputError(
                f"replay bounds ({self.lower_bound}, {upper}] do not fit a group of {group_size}: "
                f"0 <= lower_bound < upper_bound <= {group_size} must hold"
            )
        for name in ("max_per_question", "max_age", "cooldown", "readmit_every", "max_staleness"):
            if getattr(self, name) < 0:
                raise InputError(f"replay.{name} = {getattr(self, name)} is negative; 0 turns it off")
        if not 0 <= self.readmit_fraction <= 1:
            raise InputError(f"replay.readmit_fraction = {self.readmit_fraction} is not between 0 and 1")
        if self.sampler_sigma <= 0:
            raise InputError(f"replay.sampler_sigma = {self.sampler_sigma} must be positive, on the accuracy scale")
        _require_known("eviction", self.eviction, tuple(EVICTIONS))
        _require_known("sampler", self.sampler, SAMPLERS)
        _require_known("metric", self.metric, METRICS)
        _require_known("direction", self.direction, DIRECTIONS)


def _require_known(setting: str, value: str, known: tuple[str, ...]) -> None:
    custom = setting in ("sampler", "metric") and value.startswith(PREFIX)
    if value not in known and not custom:
        raise InputError(f"replay.{setting} = {value!r} is not known.{nearest(value, known)}")


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


EVICTIONS: dict[str, Eviction] = {
    "oldest": _oldest,
    "highest-entropy": _highest_entropy,
    "longest": _longest,
    "random": _random,
}

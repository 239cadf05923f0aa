"""Visits: what a graded group tells the buffer about its question."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256

import numpy as np
from jaxtyping import Float32, Int32

from exgrpo_cli.replay.drawing.priorities import BornUnit
from exgrpo_cli.replay.question_states import BucketKey


@dataclass(frozen=True, kw_only=True, slots=True)
class FreshRow:
    """A fresh rollout that its visit may store."""

    token_ids: Int32[np.ndarray, " tokens"]
    behaviour_logprobs: Float32[np.ndarray, " tokens"]
    """The very array that serves as pi_old in this step."""
    entropy: float
    """Mean token entropy under the policy that sampled it, in nats; NaN where it was not measured."""
    nll: float
    """Mean negative log-likelihood under that policy, in nats; NaN where the log-probs are, which were not recorded."""
    reward: float = 1.0
    advantage: float = math.nan
    """As this step trains on it; NaN where it was not recorded."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Visit:
    """One graded group."""

    question_id: str
    step: int
    weight_version: int
    success_count: int
    """k over the members that count: all K where replayed rows stand in for some, else the fresh ones."""
    num_fresh_successes: int
    """Successes among the fresh members."""
    num_replayed: int
    """Members of the group that stored rows stood in for."""
    verifier_failed: bool
    """A verdict was a timeout or a crash: k is then a lower bound."""
    rows: Sequence[FreshRow]
    """The fresh members; those without a reward may be left out where only successes are stored."""
    num_members: int | None = None
    """Members that count, where they are neither K nor what replay left of K: a visit of another program."""
    alpha: float | None = None
    beta: float | None = None
    """What the question's history says of its pass rate after this visit, where a run keeps one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VisitOutcome:
    """What the buffer made of a visit."""

    retired: bool
    bucket: int | None
    """The question's bucket afterwards; None outside the buffer."""
    collected: tuple[int, ...]
    """Ids of the trajectories stored, also of those evicted again at once."""
    num_duplicates: int
    num_evicted: int


def counted(visit: Visit, group_size: int, *, fresh_only: bool) -> BucketKey:
    """Successes that count, and out of how many: k of K, or with `fresh_only` k' of the fresh members."""
    if fresh_only and visit.num_replayed:
        return BucketKey(visit.num_fresh_successes, group_size - visit.num_replayed)
    return BucketKey(visit.success_count, visit.num_members or group_size)


def born_unit(step: int, rows: Sequence[FreshRow]) -> BornUnit:
    """Rows of one visit as a unit that a priority is asked about."""
    return BornUnit(
        step=step,
        rewards=np.array([row.reward for row in rows], dtype=np.float64),
        advantages=np.array([row.advantage for row in rows], dtype=np.float64),
        logprobs=[row.behaviour_logprobs for row in rows],
    )


def token_hash(token_ids: Int32[np.ndarray, " tokens"]) -> int:
    """64-bit fingerprint of a response (the start of its SHA-256): few bodies are read to find exact duplicates."""
    return int.from_bytes(sha256(np.ascontiguousarray(token_ids).data).digest()[:8], "little", signed=True)

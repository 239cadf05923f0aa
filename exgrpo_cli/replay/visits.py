"""Visits: what a graded group tells the buffer about its question."""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256

import numpy as np
from jaxtyping import Float32, Int32

from exgrpo_cli.replay.question_states import BucketKey


@dataclass(frozen=True, kw_only=True, slots=True)
class Success:
    """A fresh rollout with reward 1."""

    token_ids: Int32[np.ndarray, " tokens"]
    behaviour_logprobs: Float32[np.ndarray, " tokens"]
    """The very array that serves as pi_old in this step."""
    entropy: float
    """Mean token entropy under the policy that sampled it, in nats; NaN where nobody measured it."""
    nll: float
    """Mean negative log-likelihood under that policy, in nats."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Visit:
    """One graded group."""

    question_id: str
    step: int
    weight_version: int
    success_count: int
    """k over all K members, the replayed one included."""
    num_fresh_successes: int
    """Successes among the fresh members: k, or k - 1 for an experiential group."""
    experiential: bool
    """One member of the group was replayed."""
    verifier_failed: bool
    """A verdict was a timeout or a crash: k is then a lower bound."""
    successes: Sequence[Success]
    """The fresh ones."""


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
    """Successes that count, and out of how many: k of K, or with `fresh_only` k' of K-1 for an experiential group."""
    if fresh_only and visit.experiential:
        return BucketKey(visit.num_fresh_successes, group_size - 1)
    return BucketKey(visit.success_count, group_size)


def token_hash(token_ids: Int32[np.ndarray, " tokens"]) -> int:
    """64-bit fingerprint of a response (the start of its SHA-256): few bodies are read to find exact duplicates."""
    return int.from_bytes(sha256(np.ascontiguousarray(token_ids).data).digest()[:8], "little", signed=True)

"""Trajectory selection: which of a question's stored trajectories is replayed.

The paper replays the one with the lowest H(o; pi_theta), the mean token entropy under the current policy (section 3).
A metric gives one score per candidate and a direction says which end is taken; ties go to the lowest trajectory id.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
from jaxtyping import Bool, Float32, Float64, Int32, Int64

from exgrpo_cli.base.errors import InputError, RunError, nearest
from exgrpo_cli.config.names import PREFIX, replay_function


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidates:
    """The trajectories of one question that may be replayed, in ascending order of id."""

    MEASURES: ClassVar[tuple[str, ...]] = (
        "num_tokens",
        "step_born",
        "born_version",
        "entropy",
        "nll",
        "measured_version",
        "reward",
        "priority",
    )

    question_id: str
    trajectory_ids: Int64[np.ndarray, " candidates"]
    num_tokens: Int32[np.ndarray, " candidates"]
    """Response tokens, the EOS included."""
    step_born: Int32[np.ndarray, " candidates"]
    born_version: Int32[np.ndarray, " candidates"]
    """Weight version that sampled it; -1 where that was another run's."""
    entropy: Float64[np.ndarray, " candidates"]
    """Mean over its tokens of the full-vocabulary entropy, in nats, as last measured."""
    nll: Float64[np.ndarray, " candidates"]
    """Mean over its tokens of the negative log-likelihood, in nats, as last measured."""
    measured_version: Int32[np.ndarray, " candidates"]
    """Weight version of that measurement."""
    reward: Float32[np.ndarray, " candidates"]
    priority: Float64[np.ndarray, " candidates"]
    """Of the unit drawn by priority that each belongs to; NaN where none is."""

    def __len__(self) -> int:
        return len(self.trajectory_ids)

    def measured(
        self,
        where: Bool[np.ndarray, " candidates"],
        *,
        entropy: Float64[np.ndarray, " measured"],
        nll: Float64[np.ndarray, " measured"],
        weight_version: int,
    ) -> "Candidates":
        """A copy in which the candidates at `where` carry new measurements, given in their order."""
        entropies, nlls, versions = self.entropy.copy(), self.nll.copy(), self.measured_version.copy()
        entropies[where], nlls[where], versions[where] = entropy, nll, weight_version
        return replace(self, entropy=entropies, nll=nlls, measured_version=versions)

    def stale(self, weight_version: int, max_staleness: int) -> Bool[np.ndarray, " candidates"]:
        """Which measurements are more than `max_staleness` weight versions old, missing, or another run's."""
        age = weight_version - self.measured_version
        return (age > max_staleness) | (self.measured_version < 0) | ~np.isfinite(self.entropy + self.nll)


Metric = Callable[[Candidates, np.random.Generator], Float64[np.ndarray, " candidates"]]
"""Candidates of one question and the run's generator in, one finite score per candidate out."""


def mean_entropy(candidates: Candidates, rng: np.random.Generator) -> Float64[np.ndarray, " candidates"]:
    """H(o; pi_theta), the paper's metric."""
    return candidates.entropy


def total_entropy(candidates: Candidates, rng: np.random.Generator) -> Float64[np.ndarray, " candidates"]:
    """Sum over tokens of the entropy: prefers short trajectories; near to what the released code computes."""
    return candidates.entropy * candidates.num_tokens


def perplexity(candidates: Candidates, rng: np.random.Generator) -> Float64[np.ndarray, " candidates"]:
    """exp of the mean negative log-likelihood."""
    return np.exp(candidates.nll)


def length(candidates: Candidates, rng: np.random.Generator) -> Float64[np.ndarray, " candidates"]:
    """Response tokens."""
    return candidates.num_tokens.astype(np.float64)


def uniformly(candidates: Candidates, rng: np.random.Generator) -> Float64[np.ndarray, " candidates"]:
    """A number from [0, 1) each, so that the choice is random."""
    return rng.random(len(candidates))


def reward(candidates: Candidates, rng: np.random.Generator) -> Float64[np.ndarray, " candidates"]:
    """The reward each had."""
    return candidates.reward.astype(np.float64)


def youth(candidates: Candidates, rng: np.random.Generator) -> Float64[np.ndarray, " candidates"]:
    """Orders as the age does, from the youngest: its age is the step of the draw less the step of its birth."""
    return -candidates.step_born.astype(np.float64)


METRICS: dict[str, Metric] = {
    "ent": mean_entropy,
    "ent-sum": total_entropy,
    "ppl": perplexity,
    "length": length,
    "random": uniformly,
    "reward": reward,
    "age": youth,
}


def resolve_metric(name: str) -> Metric:
    """The metric of a setting: one of METRICS, or the user's `python:module:function`. Raises InputError."""
    if name.startswith(PREFIX):
        return replay_function("replay.metric", name)
    if name not in METRICS:
        raise InputError(f"replay.metric = {name!r} is not known.{nearest(name, tuple(METRICS))}")
    return METRICS[name]


def choose(
    candidates: Candidates, metric: Metric, direction: str, rng: np.random.Generator, *, num: int = 1
) -> list[int]:
    """Positions of the `num` candidates of lowest ("min") or highest ("max") score, best first, the first of equals.

    All of them, if fewer. Raises RunError where the metric does not give one finite score per candidate.
    """
    scores = np.asarray(metric(candidates, rng), dtype=np.float64)
    if scores.shape != (len(candidates),):
        raise RunError(
            f"replay.metric gave scores of shape {scores.shape} for the {len(candidates)} candidates "
            f"of question {candidates.question_id}; it must return one score per candidate"
        )
    if not np.isfinite(scores).all():
        position = int(np.flatnonzero(~np.isfinite(scores))[0])
        raise RunError(
            f"replay.metric gave {scores[position]} for trajectory {candidates.trajectory_ids[position]} "
            f"of question {candidates.question_id}; scores must be finite"
        )
    return np.argsort(scores if direction == "min" else -scores, kind="stable")[:num].tolist()

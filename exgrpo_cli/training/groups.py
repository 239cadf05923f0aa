"""A question's group of a step: its fresh rollouts, the trajectory replayed with them, and the rows they train.

Axes: K members; an experiential group has K-1 fresh members and the replayed trajectory as its last.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float32, Float64, Int32

from exgrpo_cli.algo.batching import TrainingRow
from exgrpo_cli.types import GradedRollout, Question, TokenScores, TokenSequence, Trajectory, Verdict

Advantage = Callable[[Float64[np.ndarray, " rollouts"]], Float64[np.ndarray, " rollouts"]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Replayed:
    """The trajectory chosen for an experiential question, and the denominator of its importance ratio."""

    trajectory: Trajectory
    behaviour_logprobs: np.ndarray
    """The trajectory's own; this step's pi_old in the ablation without importance correction."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """All members of one question in one step."""

    question: Question
    prompt_ids: Int32[np.ndarray, " prompt_tokens"]
    fresh: tuple[GradedRollout, ...]
    scores: tuple[TokenScores, ...]
    """Of the fresh members under pi_old."""
    replayed: Replayed | None = None
    tis_cap: float | None = None
    """With it the behaviour policy is the rollout engine's; None takes pi_old for it."""

    @property
    def num_fresh_correct(self) -> int:
        return sum(member.verdict is Verdict.CORRECT for member in self.fresh)

    @property
    def success_count(self) -> int:
        """k, the replayed success included."""
        return self.num_fresh_correct + (self.replayed is not None)

    @property
    def num_members(self) -> int:
        return len(self.fresh) + (self.replayed is not None)

    @property
    def is_mixed(self) -> bool:
        """Whether some members are right and some are not: without that a group's mean teaches nothing."""
        return 0 < self.success_count < self.num_members

    @property
    def verifier_failed(self) -> bool:
        return any(member.verdict.is_verifier_failure for member in self.fresh)

    def rewards(self) -> Float64[np.ndarray, " members"]:
        replayed = [1.0] if self.replayed is not None else []
        return np.array([member.reward for member in self.fresh] + replayed)

    def behaviour_logprobs(self) -> list[Float32[np.ndarray, " tokens"]]:
        """Of each fresh member, under the policy that counts as the one it was sampled from."""
        if self.tis_cap is None:
            return [scores.logprobs for scores in self.scores]
        return [member.rollout.engine_logprobs for member in self.fresh]

    def importance_weights(self) -> list[Float32[np.ndarray, " tokens"] | None]:
        """Of each fresh member: min(pi_old / pi_engine, tis_cap), token by token (truncated importance sampling)."""
        if self.tis_cap is None:
            return [None] * len(self.fresh)
        # The cap bounds the logarithm too, so that nothing overflows in exp.
        cap = np.float32(np.log(self.tis_cap))
        return [
            np.exp(np.minimum(scores.logprobs - member.rollout.engine_logprobs, cap))
            for member, scores in zip(self.fresh, self.scores, strict=True)
        ]

    def rows(self, advantage: Advantage) -> list[TrainingRow]:
        """The group's training rows, advantages taken over all its members (paper, section 3.3)."""
        advantages = advantage(self.rewards())
        rows = [
            TrainingRow(
                sequence=TokenSequence(prompt_ids=self.prompt_ids, response_ids=member.rollout.token_ids),
                advantage=float(value),
                behaviour_logprobs=scores.logprobs,
                replayed=False,
                importance_weights=weights,
            )
            for member, scores, weights, value in zip(
                self.fresh, self.scores, self.importance_weights(), advantages[: len(self.fresh)], strict=True
            )
        ]
        if self.replayed is not None:
            rows.append(
                TrainingRow(
                    sequence=TokenSequence(prompt_ids=self.prompt_ids, response_ids=self.replayed.trajectory.token_ids),
                    advantage=float(advantages[-1]),
                    behaviour_logprobs=self.replayed.behaviour_logprobs,
                    replayed=True,
                )
            )
        return rows

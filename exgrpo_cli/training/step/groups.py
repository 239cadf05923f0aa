"""A question's group of a step: its fresh rollouts, the stored rows replayed with them, and the rows they train.

Axes: members = the fresh rollouts, then the replayed rows. These stand in for as many of K rollouts (an experiential
group), or stand beside K of them (a joined one).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from jaxtyping import Float32, Float64, Int32

from exgrpo_cli.algo.batching import TrainingRow
from exgrpo_cli.base.types import GradedRollout, Question, TokenScores, TokenSequence, Trajectory, Verdict

Advantage = Callable[[Float64[np.ndarray, " rollouts"]], Float64[np.ndarray, " rollouts"]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Replayed:
    """A stored trajectory to train on again, and the denominator of its importance ratio."""

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
    replayed: tuple[Replayed, ...] = ()
    """Stored rows of the question."""
    joined: bool = False
    """The replayed rows stand beside K fresh ones, not in the place of some."""
    advantage_over: Literal["group", "own"] = "group"
    """Whether advantages are over all members, or over fresh and replayed ones apart."""
    tis_cap: float | None = None
    """With it the behaviour policy is the rollout engine's; None takes pi_old for it."""

    @property
    def num_fresh_correct(self) -> int:
        """Right rollouts among the fresh ones."""
        return sum(member.verdict is Verdict.CORRECT for member in self.fresh)

    @property
    def is_experiential(self) -> bool:
        """Replayed rows stand in for rollouts."""
        return bool(self.replayed) and not self.joined

    @property
    def is_mixed(self) -> bool:
        """Some of its fresh rollouts are right and some are not: only such a group has advantages of its own."""
        return 0 < self.num_fresh_correct < len(self.fresh)

    @property
    def success_count(self) -> int:
        """k: over all K members where replayed rows stand in for some, else over the fresh ones."""
        standing_in = 0 if self.joined else sum(each.trajectory.reward > 0 for each in self.replayed)
        return self.num_fresh_correct + standing_in

    @property
    def verifier_failed(self) -> bool:
        """Whether a fresh rollout's verdict says more of the verifier than of the response."""
        return any(member.verdict.is_verifier_failure for member in self.fresh)

    def rewards(self) -> Float64[np.ndarray, " members"]:
        """Of all members, fresh ones first."""
        return np.array([member.reward for member in self.fresh] + [each.trajectory.reward for each in self.replayed])

    def advantages(self, advantage: Advantage) -> Float64[np.ndarray, " members"]:
        """Of all members, over all of them (paper, section 3.3) or over each kind apart."""
        rewards = self.rewards()
        if self.advantage_over == "group" or not self.replayed:
            return advantage(rewards)
        return np.concatenate([advantage(rewards[: len(self.fresh)]), advantage(rewards[len(self.fresh) :])])

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
        """The group's training rows, the replayed ones last."""
        advantages = self.advantages(advantage).tolist()
        fresh = [
            TrainingRow(
                sequence=TokenSequence(prompt_ids=self.prompt_ids, response_ids=member.rollout.token_ids),
                advantage=value,
                behaviour_logprobs=scores.logprobs,
                replayed=False,
                importance_weights=weights,
            )
            for member, scores, weights, value in zip(
                self.fresh, self.scores, self.importance_weights(), advantages[: len(self.fresh)], strict=True
            )
        ]
        replayed = [
            replayed_row(each, self.prompt_ids, value)
            for each, value in zip(self.replayed, advantages[len(self.fresh) :], strict=True)
        ]
        return [*fresh, *replayed]


def replayed_row(
    replayed: Replayed, prompt_ids: Int32[np.ndarray, " prompt_tokens"], advantage: float, weight: float = 1.0
) -> TrainingRow:
    """A stored row to train on; `weight` multiplies its advantage."""
    num_tokens = len(replayed.trajectory.token_ids)
    return TrainingRow(
        sequence=TokenSequence(prompt_ids=prompt_ids, response_ids=replayed.trajectory.token_ids),
        advantage=advantage,
        behaviour_logprobs=replayed.behaviour_logprobs,
        replayed=True,
        importance_weights=None if weight == 1.0 else np.full(num_tokens, weight, dtype=np.float32),
    )

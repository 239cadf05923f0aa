"""A question's group of a step: its fresh rollouts, the stored rows replayed with them, and the rows they train.

Axes: members = the fresh rollouts, then the replayed rows. These stand in for as many of K rollouts (an experiential
group), or stand beside K of them (a joined one).
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float32, Float64, Int32

from exgrpo_cli.algo.advantages import SuccessHistory
from exgrpo_cli.algo.batching import TrainingRow
from exgrpo_cli.base.types import GradedRollout, Question, TokenScores, TokenSequence, Verdict
from exgrpo_cli.replay.place import Replayed
from exgrpo_cli.replay.store import FreshRow, Visit

Advantage = Callable[[Float64[np.ndarray, " rollouts"]], Float64[np.ndarray, " rollouts"]]
"""Rewards of a group in, advantages out, in the same order."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """All members of one question in one step."""

    question: Question
    prompt_ids: Int32[np.ndarray, " prompt_tokens"]
    fresh: tuple[GradedRollout, ...]
    scores: tuple[TokenScores, ...]
    """Scores of the fresh members under pi_old, in their order."""
    replayed: tuple[Replayed, ...] = ()
    """Stored rows of the question."""
    joined: bool = False
    """The replayed rows stand beside K fresh ones, not in the place of some."""
    own_advantages: bool = False
    """Advantages are over fresh and replayed members apart, not over all."""
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
        """Some of its fresh rollouts are right and some are not; else their mean as baseline leaves no advantage."""
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

    def advantages(self, advantage: Advantage) -> Float64[np.ndarray, " members"]:
        """Advantages, fresh members first: over all members (eq. 2 and section 4.2 of the paper) or each kind apart."""
        fresh = [each.verdict.reward for each in self.fresh]
        rewards = np.array(fresh + [each.trajectory.reward for each in self.replayed])
        if not (self.own_advantages and self.replayed):
            return advantage(rewards)
        return np.concatenate([advantage(rewards[: len(self.fresh)]), advantage(rewards[len(self.fresh) :])])

    def behaviour_logprobs(self) -> list[Float32[np.ndarray, " tokens"]]:
        """Log-probs of each fresh member, under the policy that counts as the one it was sampled from."""
        if self.tis_cap is None:
            return [scores.logprobs for scores in self.scores]
        return [member.rollout.engine_logprobs for member in self.fresh]

    def importance_weights(self) -> list[Float32[np.ndarray, " tokens"] | None]:
        """Truncated importance weights of each fresh member: min(pi_old / pi_engine, tis_cap), token by token."""
        if self.tis_cap is None:
            return [None] * len(self.fresh)
        # The cap bounds the logarithm too, so that nothing overflows in exp.
        cap = np.float32(np.log(self.tis_cap))
        return [
            np.exp(np.minimum(scores.logprobs - member.rollout.engine_logprobs, cap))
            for member, scores in zip(self.fresh, self.scores, strict=True)
        ]

    def rows(self, advantage: Advantage) -> list[TrainingRow]:
        """The group's training rows, the replayed ones last; `advantage` makes advantages of all rewards."""
        advantages = iter(self.advantages(advantage).tolist())
        fresh = [
            TrainingRow(
                sequence=TokenSequence(prompt_ids=self.prompt_ids, response_ids=member.rollout.token_ids),
                advantage=next(advantages),
                behaviour_logprobs=scores.logprobs,
                replayed=False,
                importance_weights=weights,
            )
            for member, scores, weights in zip(self.fresh, self.scores, self.importance_weights(), strict=True)
        ]
        return [*fresh, *(replayed_row(each, self.prompt_ids, next(advantages)) for each in self.replayed)]

    def visit(self, step: int, weight_version: int, advantage: Advantage, history: SuccessHistory | None) -> Visit:
        """The outcome for the store: fresh rollouts with the log-probs of the policy that counts as their sampler, and
        the advantages that this step trains on."""
        advantages = iter(self.advantages(advantage).tolist())
        return Visit(
            question_id=self.question.id,
            step=step,
            weight_version=weight_version,
            success_count=self.success_count,
            num_fresh_successes=self.num_fresh_correct,
            num_replayed=0 if self.joined else len(self.replayed),
            verifier_failed=self.verifier_failed,
            rows=[
                FreshRow(
                    token_ids=member.rollout.token_ids,
                    behaviour_logprobs=behaviour,
                    entropy=scores.mean_entropy,
                    nll=scores.mean_nll,
                    reward=member.verdict.reward,
                    advantage=next(advantages),
                )
                for member, scores, behaviour in zip(self.fresh, self.scores, self.behaviour_logprobs(), strict=True)
            ],
            alpha=history.alpha if history else None,
            beta=history.beta if history else None,
        )


def replayed_row(
    replayed: Replayed, prompt_ids: Int32[np.ndarray, " prompt_tokens"], advantage: float | None = None
) -> TrainingRow:
    """A stored row to train on, without an `advantage` with that of its birth.

    An unrecorded one is 0: it comes with the surrogate that reads none, and NaN would spread through its gradient.
    """
    num_tokens, weight = len(replayed.trajectory.token_ids), replayed.weight
    if advantage is None:
        advantage = float(np.nan_to_num(replayed.trajectory.advantage))
    return TrainingRow(
        sequence=TokenSequence(prompt_ids=prompt_ids, response_ids=replayed.trajectory.token_ids),
        advantage=advantage,
        behaviour_logprobs=replayed.behaviour_logprobs,
        replayed=True,
        importance_weights=None if weight == 1.0 else np.full(num_tokens, weight, dtype=np.float32),
    )

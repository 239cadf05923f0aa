"""A question's group of a step: its fresh rollouts, the stored rows replayed with them, and the rows they train.

Axes: members = the fresh rollouts, then the replayed rows. These stand in for as many of K rollouts (an experiential
group), or stand beside K of them (a joined one).
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Float32, Float64, Int32

from exgrpo_cli.algo.advantages import SuccessHistory
from exgrpo_cli.algo.batching import TrainingRow
from exgrpo_cli.base.types import Grade, GradedRollout, Question, Rollout, TokenScores, TokenSequence, Verdict
from exgrpo_cli.replay.place import Beginning, Replayed
from exgrpo_cli.replay.store import FreshRow, Visit

Advantage = Callable[[Float64[np.ndarray, " rollouts"]], Float64[np.ndarray, " rollouts"]]
"""Rewards of a group in, advantages out, in the same order."""


NO_SCORES = TokenScores(logprobs=np.zeros(0, dtype=np.float32), entropies=np.zeros(0, dtype=np.float32))


@dataclass(kw_only=True, slots=True, eq=False)
class UnderWay:
    """A question's group while its rollouts are sampled: in one step or, with `rollout.carry_over`, in several."""

    question_id: str
    replayed: tuple[Replayed, ...] = ()
    """Stored rows that stand in for rollouts."""
    beginning: Beginning | None = None
    """First tokens of a stored row, with which all its rollouts begin."""
    rollouts: list[Rollout] = field(default_factory=list)
    """All of them as far as they are; none before the first step."""
    scores: list[TokenScores] = field(default_factory=list)
    """Log-probs and entropies of their tokens, each under pi_old of the step that sampled it."""
    grades: dict[int, tuple[str, Grade]] = field(default_factory=dict)
    """Text and grade of those that have ended, by member."""

    @property
    def begun(self) -> list[int]:
        """Tokens of a stored row that all its rollouts begin with."""
        return self.beginning.token_ids.tolist() if self.beginning else []

    def graded(self) -> tuple[GradedRollout, ...]:
        """The rollouts of a complete group with their grades."""
        found = ((rollout, *self.grades[member]) for member, rollout in enumerate(self.rollouts))
        return tuple(GradedRollout(rollout=rollout, text=text, grade=grade) for rollout, text, grade in found)


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
    beginning: Beginning | None = None
    """First tokens of a stored row: the end of `prompt_ids`, and how each fresh response begins."""
    joined: bool = False
    """The replayed rows stand beside K fresh ones, not in the place of some."""
    own_advantages: bool = False
    """Advantages are over fresh and replayed members apart, not over all."""
    gate: float = 1.0
    """Factor of its advantages by the question's history."""
    tis_cap: float | None = None
    """With it the behaviour policy is the rollout engine's; None takes pi_old for it."""

    @property
    def members(self) -> list[Replayed]:
        """The replayed rows that train: all but those that a fork leaves out."""
        return [each for each in self.replayed if not each.left_out]

    @property
    def num_fresh_correct(self) -> int:
        """Right rollouts among the fresh ones."""
        return sum(member.verdict is Verdict.CORRECT for member in self.fresh)

    @property
    def rewards(self) -> list[float]:
        """Rewards of the fresh members."""
        return [member.grade.reward for member in self.fresh]

    @property
    def is_experiential(self) -> bool:
        """Replayed rows stand in for rollouts, or begin them."""
        return (bool(self.replayed) and not self.joined) or self.beginning is not None

    @property
    def is_mixed(self) -> bool:
        """Rewards of its fresh rollouts differ; else their mean as baseline leaves no advantage."""
        return len(set(self.rewards)) > 1

    @property
    def success_count(self) -> int:
        """k: over all K members where replayed rows stand in for some, else over the fresh ones."""
        standing_in = 0 if self.joined else sum(each.trajectory.correct for each in self.members)
        return self.num_fresh_correct + standing_in

    @property
    def verifier_failed(self) -> bool:
        """Whether a fresh rollout's verdict says more of the verifier than of the response."""
        return any(member.verdict.is_verifier_failure for member in self.fresh)

    def advantages(self, advantage: Advantage) -> Float64[np.ndarray, " members"]:
        """Advantages, fresh members first: over all members (eq. 2 and section 4.2 of the paper) or each kind apart."""
        rewards = np.array(self.rewards + [each.trajectory.reward for each in self.members])
        if not (self.own_advantages and self.members):
            return self.gate * advantage(rewards)
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
                rollout=member.rollout,
            )
            for member, scores, weights in zip(self.fresh, self.scores, self.importance_weights(), strict=True)
        ]
        advantage_of = [(each, 0.0 if each.left_out else next(advantages)) for each in self.replayed]
        return [*fresh, *(replayed_row(each, self.prompt_ids, own) for each, own in advantage_of)]

    def visit(self, step: int, advantage: Advantage, history: SuccessHistory | None) -> Visit:
        """The outcome for the store: fresh rollouts with the log-probs of the policy that counts as their sampler, and
        the advantages that this step trains on."""
        advantages, rollouts = iter(self.advantages(advantage).tolist()), [member.rollout for member in self.fresh]
        return Visit(
            question_id=self.question.id,
            step=step,
            # That of the oldest token, where several steps have sampled the group.
            weight_version=min(min({own.weight_version, *dict(own.earlier)}) for own in rollouts),
            success_count=self.success_count,
            num_fresh_successes=self.num_fresh_correct,
            num_replayed=0 if self.joined else len(self.members),
            verifier_failed=self.verifier_failed,
            rows=[
                FreshRow(
                    token_ids=member.rollout.token_ids,
                    behaviour_logprobs=behaviour,
                    entropy=scores.mean_entropy,
                    nll=scores.mean_nll,
                    reward=member.grade.reward,
                    correct=member.verdict is Verdict.CORRECT,
                    parts=member.grade.parts,
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
        left_out=replayed.left_out,
    )

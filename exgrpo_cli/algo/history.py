"""A question's own past as the baseline of its rewards (arXiv 2603.18444).

Each question keeps a discounted Beta count of its successes and failures, this visit's included, so that a question
that is always solved keeps teaching for as long as its past says otherwise. The paper widened its clip together with
this, which confounds its comparison; here the clip is the study's.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Float64

from exgrpo_cli.algo.advantages import STD_EPSILON


class SuccessHistory(NamedTuple):
    """Discounted counts of one question: alpha for successes, beta for failures; (1, 1) before its first visit."""

    alpha: float = 1.0
    beta: float = 1.0

    def after(self, num_correct: int, num_rollouts: int, discount: float) -> "SuccessHistory":
        """alpha <- d alpha + S, beta <- d beta + K - S."""
        return SuccessHistory(discount * self.alpha + num_correct, discount * self.beta + num_rollouts - num_correct)

    @property
    def pass_rate(self) -> float:
        """p = alpha / (alpha + beta)."""
        return self.alpha / (self.alpha + self.beta)


def history_advantages(
    rewards: Float[np.ndarray, " rollouts"], history: SuccessHistory
) -> Float64[np.ndarray, " rollouts"]:
    """A_i = r_i - p: not zero where all rewards are equal."""
    return rewards.astype(np.float64) - history.pass_rate


def normalised_history_advantages(
    rewards: Float[np.ndarray, " rollouts"], history: SuccessHistory
) -> Float64[np.ndarray, " rollouts"]:
    """A_i = (r_i - p) / (sqrt(p (1 - p)) + eps)."""
    p = history.pass_rate
    return history_advantages(rewards, history) / (np.sqrt(p * (1 - p)) + STD_EPSILON)

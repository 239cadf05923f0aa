"""Advantages: how much better each rollout did than its group, or than its question's own past (arXiv 2603.18444).

The past is a discounted Beta count of successes and failures, this visit's included, so that a question that is always
solved keeps teaching for as long as its past says otherwise. That paper widened its clip together with this, which
confounds its comparison; here the clip is the study's.

Axes: rollouts = all K members of one group, the replayed one included.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Float32, Float64

STD_EPSILON = 1e-6
"""Keeps the normalised form finite in a group of equal rewards; GRPO's own constant."""


def centred_advantages(rewards: Float[np.ndarray, " rollouts"]) -> Float64[np.ndarray, " rollouts"]:
    """A_i = r_i - mean(r): the Dr.GRPO form (arXiv 2503.20783), which weighs easy and hard questions alike.

    A group of equal rewards gives exact zeros.
    """
    wide = rewards.astype(np.float64)
    return wide - wide.mean()


def normalised_advantages(rewards: Float[np.ndarray, " rollouts"]) -> Float64[np.ndarray, " rollouts"]:
    """A_i = (r_i - mean(r)) / (std(r) + eps): the GRPO form (arXiv 2402.03300, eq. 3), std over K - 1.

    A group of equal rewards gives exact zeros, and so does a group of one, whose std is undefined.
    """
    centred = centred_advantages(rewards)
    if len(centred) < 2:
        return centred
    return centred / (centred.std(ddof=1) + STD_EPSILON)


def beside_a_success(
    rewards: Float[np.ndarray, " rollouts"], form: Callable[[np.ndarray], np.ndarray]
) -> Float64[np.ndarray, " rollouts"]:
    """Advantages of a `form` with a virtual reward of 1 beside the group's (NGRPO, arXiv 2509.18851).

    Below 0 where all rewards are 0, exact zeros where all are 1.
    """
    return form(np.append(rewards, 1.0))[:-1]


def confidence_advantages(
    rewards: Float[np.ndarray, " rollouts"],
    form: Callable[[np.ndarray], np.ndarray],
    logprobs: Sequence[Float32[np.ndarray, " _"]],
    all_wrong_weight: float,
) -> Float64[np.ndarray, " rollouts"]:
    """Advantages of a `form` of rewards less the confidence in wrong answers (LENS, arXiv 2510.08696, section 5.1).

    r_i <- r_i - (1 - r_i) / K * c_i / (D - c_i), c = pi_old^(1 / tokens) by `logprobs`; D = 2 max(c), or where it is
    more K / sum(r / pi_old). Where all rewards are 0, `all_wrong_weight` times the centred form.
    """
    wide, totals = rewards.astype(np.float64), np.array([own.sum(dtype=np.float64) for own in logprobs])
    confidence = np.exp(totals / [len(own) for own in logprobs])
    solved, difficulty = wide.max() > 0, 2 * confidence.max()
    if solved:
        # Cut before exp: below e^-600 pi_old is as good as 0, and its inverse stays finite.
        difficulty = max(difficulty, len(wide) / (wide @ np.exp(-totals.clip(min=-600.0))))
    calibrated = wide - (1 - wide).clip(min=0) / len(wide) * confidence / (difficulty - confidence)
    return form(calibrated) if solved else all_wrong_weight * centred_advantages(calibrated)


class SuccessHistory(NamedTuple):
    """Discounted counts of one question: alpha for successes, beta for failures; (1, 1) before its first visit."""

    alpha: float = 1.0
    beta: float = 1.0

    def after(self, rewards: float, num_rollouts: int, discount: float) -> "SuccessHistory":
        """alpha <- d alpha + S, beta <- d beta + K - S, S the sum of the rewards: of right and wrong the successes."""
        return SuccessHistory(discount * self.alpha + rewards, discount * self.beta + num_rollouts - rewards)

    @property
    def pass_rate(self) -> float:
        """p = alpha / (alpha + beta)."""
        return self.alpha / (self.alpha + self.beta)


def slope_of_pass_at_k(history: SuccessHistory, k: int) -> float:
    """E[k (1 - p)^(k - 1)] = k B(alpha, beta + k - 1) / B(alpha, beta), p ~ Beta(alpha, beta) of whole successes: the
    gain of pass@k by p, exactly 1 before the first visit."""
    beta = history.beta
    rest = math.prod((beta + j) / (beta + j + k - 1) for j in range(1, round(history.alpha)))
    return k * beta / (beta + k - 1) * rest


GATES: dict[str, Callable[[SuccessHistory, int], float]] = {
    "none": lambda history, k: 1.0,
    "unsolved": lambda history, k: float(history.alpha == 1),
    "boundary": lambda history, k: min(1.0, slope_of_pass_at_k(history, k)),
}
"""Factor of a group's advantages by the question's undiscounted history before this visit, and k, by the gate's name
(arXiv 2606.15455)."""


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

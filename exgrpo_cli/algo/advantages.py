"""How much better each rollout did than its group.

Axes: rollouts = all K members of one group, the replayed one included.
"""

import numpy as np
from jaxtyping import Float, Float64

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

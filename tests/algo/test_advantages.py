"""Advantages by hand."""

import numpy as np
from numpy.testing import assert_allclose, assert_array_equal

from exgrpo_cli.algo.advantages import (
    beside_a_success,
    centred_advantages,
    confidence_advantages,
    normalised_advantages,
)


def test_centred_advantages_subtract_the_mean_of_the_whole_group() -> None:
    # Mean 3/8.
    rewards = np.array([1, 0, 0, 1, 0, 0, 0, 1], dtype=np.float32)
    assert_array_equal(centred_advantages(rewards), [0.625, -0.375, -0.375, 0.625, -0.375, -0.375, -0.375, 0.625])


def test_normalised_advantages_divide_by_the_sample_deviation() -> None:
    # Mean 1/4; squares 9/16 + 3 * 1/16 = 3/4; over K - 1 = 3: variance 1/4, deviation 1/2.
    assert_allclose(normalised_advantages(np.array([1.0, 0, 0, 0])), [1.5, -0.5, -0.5, -0.5], rtol=1e-5)


def test_a_virtual_success_lowers_what_a_group_without_one_did() -> None:
    """Of four zeros and a one: mean 1/5, squares 4/25 + 16/25 = 4/5, over 4: variance 1/5."""
    for form, wrong in ((centred_advantages, -0.2), (normalised_advantages, -0.2 / np.sqrt(0.2))):
        assert_allclose(beside_a_success(np.zeros(4), form), np.full(4, wrong), rtol=1e-5)
        assert_array_equal(beside_a_success(np.ones(4), form), np.zeros(4))
    assert_allclose(beside_a_success(np.array([1.0, 0, 0]), centred_advantages), [0.5, -0.5, -0.5])


def test_wrong_answers_cost_by_the_confidence_in_them() -> None:
    """By the mean log-prob of a token, whatever the length of an answer."""

    def found(rewards: list[float], *answers: tuple[float, int], weight: float = 1.0) -> np.ndarray:
        logprobs = [np.full(tokens, np.log(probability), dtype=np.float32) for probability, tokens in answers]
        return confidence_advantages(np.array(rewards, dtype=float), centred_advantages, logprobs, weight)

    # D = 1.6: -(.8 / .8) / 2 = -1/2 and -(.4 / 1.2) / 2 = -1/6 of mean -1/3.
    assert_allclose(found([0, 0], (0.8, 2), (0.4, 5)), [-1 / 6, 1 / 6], rtol=1e-6)
    assert_allclose(found([0, 0], (0.8, 2), (0.4, 5), weight=0.5), [-1 / 12, 1 / 12], rtol=1e-6)
    # Right by one token of .9: D = 3 / (1 / .9) = 2.7, above 2 * .9; -(.3 / 2.4) / 3 and -(.6 / 2.1) / 3.
    rewards, wrong = [1, 0, 0], ((0.3, 2), (0.6, 4))
    assert_allclose(found(rewards, (0.9, 1), *wrong), centred_advantages(np.array([1, -1 / 24, -2 / 21])), rtol=1e-6)
    # By many tokens pi_old is as good as 0: D = 1.8; -(.3 / 1.5) / 3 and -(.6 / 1.2) / 3.
    for tokens in (40, 20_000):
        long = found(rewards, (0.9, tokens), *wrong, weight=0.5)
        assert_allclose(long, centred_advantages(np.array([1, -1 / 15, -1 / 6])), rtol=1e-6)
    assert_array_equal(found([1, 1], (0.8, 2), (0.4, 5)), [0, 0])
    assert_array_equal(found([0, 0], (0.8, 2), (0.8, 2)), [0, 0])


def test_equal_rewards_give_exact_zeros() -> None:
    # 0.1 is no binary fraction: the mean of seven must not leave a rest.
    for rewards in (np.ones(8), np.zeros(8), np.full(8, 0.1), np.array([1.0])):
        assert_array_equal(centred_advantages(rewards), np.zeros(len(rewards)))
        assert_array_equal(normalised_advantages(rewards), np.zeros(len(rewards)))

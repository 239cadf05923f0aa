"""Advantages by hand."""

import numpy as np
from numpy.testing import assert_allclose, assert_array_equal

from exgrpo_cli.algo.advantages import beside_a_success, centred_advantages, normalised_advantages


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


def test_equal_rewards_give_exact_zeros() -> None:
    # 0.1 is no binary fraction: the mean of seven must not leave a rest.
    for rewards in (np.ones(8), np.zeros(8), np.full(8, 0.1), np.array([1.0])):
        assert_array_equal(centred_advantages(rewards), np.zeros(len(rewards)))
        assert_array_equal(normalised_advantages(rewards), np.zeros(len(rewards)))

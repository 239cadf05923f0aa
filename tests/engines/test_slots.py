"""Slots of decoded rows: who moves where, and which rows attend together."""

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from exgrpo_cli.engines.hf.cache import AttentionCall, attention_calls, length_class, regroup


def test_length_classes_are_powers_of_two_from_64_on_halved_among_many_rows() -> None:
    lengths = np.array([1, 2, 8, 63, 64, 90, 91, 127, 128, 255, 256])
    classes = length_class(lengths)
    assert_array_equal(classes - classes[0], [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 3])
    # 64 * sqrt(2) is 90.5, 128 * sqrt(2) 181.
    classes = length_class(np.concatenate([lengths, np.full(128, 181), [182]]))
    assert_array_equal(classes[:11] - classes[0], [0, 0, 0, 0, 1, 1, 2, 2, 3, 4, 5])
    assert_array_equal(classes[-2:] - classes[0], [3, 4])


def test_only_rows_in_the_wrong_run_move() -> None:
    # Classes 8 8 7 7 6 6; the second row leaves: one row of class 7 and one of class 6 shift up by one run.
    lengths = np.array([200, 190, 80, 100, 20, 40])
    alive = np.array([True, False, True, True, True, True])
    order, run_starts = regroup(lengths, alive)
    # One of class 7 into slot 1, and one of class 6 into the slot it left.
    assert (order[:5] != np.arange(5)).sum() == 2
    assert_array_equal(run_starts, [0, 1, 3])


@pytest.mark.parametrize("seed", range(20))
def test_regrouped_rows_are_the_living_ones_in_order_of_class(seed: int) -> None:
    rng = np.random.default_rng(seed)
    lengths, alive = rng.integers(1, 500, 30), rng.random(30) < rng.choice([0.0, 0.3, 0.9, 1.0])
    order, run_starts = regroup(lengths, alive)
    kept = order[: alive.sum()]
    assert sorted(order.tolist()) == list(range(30))
    assert sorted(kept.tolist()) == np.flatnonzero(alive).tolist(), "every living row once, no dead one"
    classes = length_class(lengths[kept])
    assert (np.diff(classes) <= 0).all()
    assert_array_equal(run_starts, [i for i in range(len(kept)) if i == 0 or classes[i] != classes[i - 1]])


def test_calls_merge_where_one_more_costs_more_than_the_columns() -> None:
    # 100 rows of 200 columns and 100 of 20: together 40,000 cells, apart 22,000.
    lengths = np.repeat([199, 19], 100)
    assert attention_calls(lengths, np.array([0, 100])) == [AttentionCall(0, 100, 200), AttentionCall(100, 200, 20)]
    # Two rows of each: 800 cells against 440, not worth a call of 500.
    assert attention_calls(np.repeat([199, 19], 2), np.array([0, 2])) == [AttentionCall(0, 4, 200)]
    # On a GPU a call has to save 32,768 cells: 100 rows of each save 18,000, 200 of each 36,000.
    assert attention_calls(lengths, np.array([0, 100]), "cuda") == [AttentionCall(0, 200, 200)]
    assert len(attention_calls(np.repeat([199, 19], 200), np.array([0, 200]), "cuda")) == 2

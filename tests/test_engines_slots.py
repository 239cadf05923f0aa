"""Slots of decoded rows: who moves where, and which rows attend together."""

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from exgrpo_cli.engines.slot_order import AttentionChunk, attention_chunks, length_class, regroup


def test_length_classes_are_powers_of_two() -> None:
    classes = length_class(np.array([1, 2, 3, 4, 7, 8, 63, 64]))
    assert_array_equal(classes - classes[0], [0, 1, 1, 2, 2, 3, 5, 6])


def test_only_rows_in_the_wrong_run_move() -> None:
    # Classes 7 7 6 6 5 5; the second row leaves: one row of class 6 and one of class 5 shift up by one run.
    lengths = np.array([100, 90, 40, 50, 20, 30])
    alive = np.array([True, False, True, True, True, True])
    moves = regroup(lengths, alive)
    assert len(moves.sources) == 2, "one of class 6 into slot 1, and one of class 5 into the slot it left"
    assert_array_equal(moves.run_starts, [0, 1, 3])


@pytest.mark.parametrize("seed", range(20))
def test_regrouped_rows_are_the_living_ones_in_order_of_class(seed: int) -> None:
    rng = np.random.default_rng(seed)
    lengths, alive = rng.integers(1, 200, 30), rng.random(30) < rng.choice([0.0, 0.3, 0.9, 1.0])
    moves = regroup(lengths, alive)
    slots = np.arange(30)
    slots[moves.targets] = moves.sources
    kept = slots[: alive.sum()]
    assert sorted(kept.tolist()) == np.flatnonzero(alive).tolist(), "every living row once, no dead one"
    classes = length_class(lengths[kept])
    assert (np.diff(classes) <= 0).all()
    assert_array_equal(moves.run_starts, [i for i in range(len(kept)) if i == 0 or classes[i] != classes[i - 1]])


def test_chunks_merge_where_a_call_costs_more_than_the_columns() -> None:
    # 100 rows of 200 columns and 100 of 20: together 40,000 cells, apart 22,000.
    lengths = np.repeat([199, 19], 100)
    apart = (AttentionChunk(start=0, stop=100, span=200), AttentionChunk(start=100, stop=200, span=20))
    assert attention_chunks(lengths, np.array([0, 100])) == apart
    # Five rows of each: 2,000 cells against 1,100, not worth a call of 1,024.
    assert attention_chunks(np.repeat([199, 19], 5), np.array([0, 5])) == (AttentionChunk(start=0, stop=10, span=200),)

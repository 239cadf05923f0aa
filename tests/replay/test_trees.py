"""The two trees that units are drawn by, against plain lists."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exgrpo_cli.replay.drawing.trees import FAN, OrderTree, SumTree


def test_a_target_finds_the_unit_in_whose_part_of_the_sum_it_lies() -> None:
    tree = SumTree(np.array([0.0, 2.0, 0.0, 1.0, 3.0]))
    assert tree.total == 6
    assert tree.find(np.array([0.0, 1.9, 2.0, 2.9, 3.0, 5.9])).tolist() == [1, 1, 3, 3, 4, 4]
    tree.set(np.array([1, 2]), np.array([0.0, 1.0]))
    assert tree.find(np.array([0.0, 0.9, 1.0, 4.9])).tolist() == [2, 2, 3, 4]


def test_a_unit_without_weight_is_never_found() -> None:
    rng = np.random.default_rng(0)
    weights = rng.random(FAN**2 + 5) * (rng.random(FAN**2 + 5) < 0.1)
    tree = SumTree(weights)
    # The very end of the sum as well, where sums of another order may differ in their last digit.
    targets = np.append(rng.random(2000), [0.0, np.nextafter(1.0, 0.0)]) * tree.total
    assert (weights[tree.find(targets)] > 0).all()


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_trees_that_changed_equal_those_built_at_once(data: st.DataObject) -> None:
    """Bit for bit, whatever came before; the order is that of a plain sort."""
    size = data.draw(st.sampled_from([3, FAN, FAN + 1, 2 * FAN**2]))
    keys = np.zeros(size)
    present = np.zeros(size, dtype=bool)
    born = np.arange(size) // 4 * 1.0
    sums, order = SumTree(keys), OrderTree(present, lambda units: (keys[units], born[units]))
    for _ in range(data.draw(st.integers(1, 6))):
        units = np.unique(data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=8)))
        keys[units] = data.draw(st.lists(st.sampled_from([0.1, 0.2, 0.7]), min_size=len(units), max_size=len(units)))
        present[units] = data.draw(st.lists(st.booleans(), min_size=len(units), max_size=len(units)))
        sums.set(units, np.where(present[units], keys[units], 0.0))
        order.set(units, present[units])
    rebuilt = SumTree(np.where(present, keys, 0.0))
    assert sums.total == rebuilt.total
    assert (sums.weights == rebuilt.weights).all()
    plain = sorted(np.flatnonzero(present).tolist(), key=lambda unit: (-keys[unit], -born[unit], unit))
    num = data.draw(st.integers(1, 12))
    assert order.first(num).tolist() == plain[:num]
    assert OrderTree(present, lambda units: (keys[units], born[units])).first(num).tolist() == plain[:num]


@pytest.mark.parametrize("num", [0, 5])
def test_nothing_present(num: int) -> None:
    empty = OrderTree(np.zeros(0, dtype=bool), lambda units: (units * 1.0, units * 1.0))
    assert empty.first(num).tolist() == []
    assert SumTree(np.zeros(0)).total == 0

"""Rollout seeds depend on what is sampled and on nothing else."""

import itertools

from exgrpo_cli.base.types import rollout_seed


def test_seeds_are_63_bit_and_stable():
    # Written down once: a change would make every resumed run and evaluation sample anew.
    assert rollout_seed(0, "q", 0, 0) == 5638524543636157463
    assert all(0 <= rollout_seed(s, "q", v, m) < 2**63 for s in range(5) for v in range(5) for m in range(5))


def test_each_key_moves_the_seed_and_neighbours_do_not_run_together():
    numbers = (0, 1, 2, 11, 111)
    keys = list(itertools.product(numbers, ("a", "b", "ab", "1", "11"), numbers, numbers))
    assert len({rollout_seed(*key) for key in keys}) == len(keys)

"""Rollout seeds depend on what is sampled and on nothing else."""

from exgrpo_cli.base.types import rollout_seed


def test_seeds_are_63_bit_and_stable():
    # Written down once: a change would make every resumed run and evaluation sample anew.
    assert rollout_seed(0, "q", 0, 0) == 5638524543636157463
    assert all(0 <= rollout_seed(s, "q", v, m) < 2**63 for s in range(5) for v in range(5) for m in range(5))


def test_each_key_moves_the_seed():
    keys = [(s, q, v, m) for s in range(4) for q in ("a", "b", "ab") for v in range(4) for m in range(4)]
    assert len({rollout_seed(*key) for key in keys}) == len(keys)


def test_neighbouring_values_do_not_run_together():
    assert rollout_seed(1, "1", 1, 11) != rollout_seed(1, "1", 11, 1)
    assert rollout_seed(1, "11", 1, 1) != rollout_seed(11, "1", 1, 1)

"""Mini-batches of whole groups and micro-batches with few pad tokens."""

from dataclasses import replace

import numpy as np
import pytest

from exgrpo_cli.algo import batching
from exgrpo_cli.algo.batching import MiniBatch, TrainingRow, micro_batches, packed_batches, split_minibatches
from exgrpo_cli.base.types import TokenSequence


def row(group: int, replayed: bool = False, num_tokens: int = 2) -> TrainingRow:
    tokens = np.full(num_tokens, group, dtype=np.int32)
    return TrainingRow(
        sequence=TokenSequence(prompt_ids=tokens[:1], response_ids=tokens),
        advantage=0.5,
        behaviour_logprobs=np.zeros(num_tokens, dtype=np.float32),
        replayed=replayed,
    )


def groups_of(num_fresh: int, num_experiential: int, size: int = 4) -> list[list[TrainingRow]]:
    fresh = [[row(index) for _ in range(size)] for index in range(num_fresh)]
    mixed = [
        [row(num_fresh + index, replayed=member == 0) for member in range(size)] for index in range(num_experiential)
    ]
    return fresh + mixed


def split(groups: list[list[TrainingRow]], num_minibatches: int, seed: int = 0) -> list[MiniBatch]:
    rng = np.random.default_rng(seed)
    return split_minibatches(groups, num_minibatches=num_minibatches, max_response_tokens=9, clip=False, rng=rng)


def group_ids(batch: MiniBatch) -> list[int]:
    return [int(member.sequence.response_ids[0]) for member in batch.rows]


@pytest.mark.parametrize(
    ("num_fresh", "num_experiential", "num_minibatches"), [(8, 8, 2), (9, 4, 3), (5, 6, 4), (7, 0, 2)]
)
def test_whole_groups_with_equal_shares(num_fresh: int, num_experiential: int, num_minibatches: int) -> None:
    batches = split(groups_of(num_fresh, num_experiential), num_minibatches)
    assert len(batches) == num_minibatches
    assert sorted(index for batch in batches for index in group_ids(batch)) == sorted(
        [*range(num_fresh + num_experiential)] * 4
    )
    for batch in batches:
        assert all(group_ids(batch).count(index) == 4 for index in group_ids(batch))
        assert (batch.num_rollouts, batch.max_response_tokens, batch.clip) == (len(batch.rows), 9, False)
    sizes = [len(batch.rows) // 4 for batch in batches]
    experiential = [sum(member.replayed for member in batch.rows) for batch in batches]
    assert max(sizes) - min(sizes) <= 1
    assert max(experiential) - min(experiential) <= 1


def test_the_order_comes_from_the_generator() -> None:
    groups = groups_of(6, 6)
    first, again, other = ([group_ids(batch) for batch in split(groups, 2, seed)] for seed in (0, 0, 1))
    assert first == again != other
    # The odd group does not always go to the first update.
    assert {len(split(groups_of(3, 0), 2, seed)[0].rows) for seed in range(20)} == {4, 8}


def test_fewer_groups_than_minibatches_leaves_none_empty() -> None:
    assert [len(batch.rows) for batch in split(groups_of(2, 0), 4)] == [4, 4] and split([], 4) == []


def test_rows_left_out_do_not_move_the_others() -> None:
    """Mini-batches have the rows that they had but for these, which no denominator counts; one without any is none."""
    groups = groups_of(5, 4)
    without = [[replace(each, left_out=each.replayed and at == 6) for each in own] for at, own in enumerate(groups)]
    whole, left = split(groups, 3), split(without, 3)
    kept = [
        [each for each in batch.rows if not (each.replayed and each.sequence.response_ids[0] == 6)] for batch in whole
    ]
    assert [len(batch.rows) for batch in left] == [len(rows) for rows in kept] == [batch.num_rollouts for batch in left]
    assert [group_ids(batch) for batch in left] == [
        [int(each.sequence.response_ids[0]) for each in rows] for rows in kept
    ]
    assert sum(batch.num_replayed for batch in left) == 3
    [batch] = split([[row(0)], [replace(row(1, replayed=True), left_out=True)]], 2)
    assert group_ids(batch) == [0]


def test_micro_batches_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    def cut(lengths: list[int], budget: int, small: int = 0) -> list[list[int]]:
        monkeypatch.setattr(batching, "SMALL_MICRO_BATCH", small)
        return micro_batches(lengths, budget, max_padding=0.05)

    # Sorted 10 10 9 4 4: three rows of 10 fit 30 tokens with one pad in 30 (3 %); a 4 would waste 7 of 40.
    assert cut([4, 10, 9, 10, 4], 40) == [[1, 3, 2], [0, 4]]
    # A budget of 20 holds two rows of 10.
    assert cut([4, 10, 9, 10, 4], 20) == [[1, 3], [2], [0, 4]]
    # Rows beyond the budget stand alone.
    assert cut([50, 60, 5], 20) == [[1], [0], [2]] and cut([], 20) == []
    # 20 + 10 tokens: 25 % padding, but a second pass over the model would cost more than 10 pad tokens.
    assert cut([20, 10], 1000, small=512) == [[0, 1]]


def test_padding_of_a_step_is_below_five_percent() -> None:
    lengths = np.random.default_rng(0).integers(30, 76, size=256).tolist()
    batches = micro_batches(lengths, 16_384, max_padding=0.05)
    assert sorted(index for batch in batches for index in batch) == list(range(256))
    padded = sum(len(batch) * max(lengths[index] for index in batch) for batch in batches)
    # All in one micro-batch, 30 % would be pad tokens: the bound is what keeps them out.
    assert (padded - sum(lengths)) / padded < 0.05 < 0.25 < 1 - sum(lengths) / (256 * max(lengths))


def sequence(prompt: int, num_tokens: int) -> TokenSequence:
    """A prompt of four tokens and a response."""
    return TokenSequence(
        prompt_ids=np.full(4, prompt, dtype=np.int32), response_ids=np.zeros(num_tokens, dtype=np.int32)
    )


def test_packed_batches_by_hand() -> None:
    rows = [sequence(1, 3), sequence(2, 6), sequence(1, 4), sequence(2, 1)]
    # Prompt 1: 4 + 2 + 3 = 9 inputs; prompt 2: 4 + 5 + 0 = 9.
    assert packed_batches(rows, 18) == [[0, 2, 1, 3]]
    assert packed_batches(rows, 17) == [[0, 2], [1, 3]] == packed_batches(rows, 9)
    # With room for 8, the second row of prompt 1 needs its prompt again: 4 + 3. Rows of 9 inputs stand alone.
    assert packed_batches(rows, 8) == [[0], [2], [1], [3]]
    assert packed_batches(rows, 1) == [[0], [2], [1], [3]] and packed_batches([], 8) == []
    # A prompt that is the shared beginning alone, with a response of one token, adds no input.
    alike = [replace(row, prompt_ids=np.arange(40 + row.prompt_ids[0], dtype=np.int32)) for row in (rows[3], rows[0])]
    assert packed_batches([replace(rows[3], prompt_ids=np.arange(40, dtype=np.int32)), *alike], 50) == [[0, 1, 2]]

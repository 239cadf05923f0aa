"""The proof of a sync, on plain tensors: shards, bit patterns, what is checked and what is reported."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from exgrpo_cli.engines.vllm.canary import (
    Canary,
    SentWeights,
    bit_checksum,
    checked_parameters,
    require_arrived,
    require_equal_logprobs,
    shard,
)
from exgrpo_cli.errors import RunError

SENT = {
    "embed.weight": torch.arange(10.0).view(5, 2),
    "o_proj.weight": torch.arange(8.0).view(2, 4),
    "q_proj.weight": torch.ones(2, 2),
    "norm.weight": torch.tensor([1.0, 2.0]),
}
NAMES = frozenset(SENT)


def engine(rank: int) -> dict[str, Tensor]:
    """Two ranks: the vocabulary of 5 padded to 6 and cut, the output projection cut by columns, q fused, norm whole."""
    padded = torch.cat([SENT["embed.weight"], torch.zeros(1, 2)])
    return {
        "embed.weight": padded[3 * rank : 3 * rank + 3].clone(),
        "o_proj.weight": SENT["o_proj.weight"][:, 2 * rank : 2 * rank + 2].clone(),
        "qkv_proj.weight": torch.empty(0),
        "norm.weight": SENT["norm.weight"].clone(),
    }


def sync(held: dict[str, Tensor], rank: int, weights: Iterator[tuple[str, Tensor]]) -> None:
    sent = SentWeights(weights, checked_parameters(NAMES, held), rank)
    for _ in sent:
        pass
    require_arrived(sent, NAMES, held)


@pytest.mark.parametrize("rank", [0, 1])
def test_every_rank_compares_its_own_shards_without_padding(rank: int) -> None:
    held = engine(rank)
    assert list(checked_parameters(NAMES, held)) == ["embed.weight", "o_proj.weight", "norm.weight"]
    sync(held, rank, iter(SENT.items()))
    held["embed.weight"][1, 0] += 1
    with pytest.raises(RunError, match=r"weight 'embed\.weight' did not reach the rollout engine: checksum"):
        sync(held, rank, iter(SENT.items()))


def test_shards_by_hand() -> None:
    full = torch.arange(10).view(5, 2)
    assert shard(full, torch.Size([3, 2]), 0).tolist() == [[0, 1], [2, 3], [4, 5]]
    assert shard(full, torch.Size([3, 2]), 1).tolist() == [[6, 7], [8, 9]]
    assert shard(full, torch.Size([5, 1]), 1).tolist() == [[1], [3], [5], [7], [9]]
    assert shard(full, torch.Size([8, 2]), 0).tolist() == full.tolist()


def test_a_weight_that_was_not_sent_is_named() -> None:
    with pytest.raises(RunError, match=r"1 weights were not sent to the rollout engine, 'q_proj\.weight' first"):
        sync(engine(0), 0, ((name, weight) for name, weight in SENT.items() if name != "q_proj.weight"))


def test_weights_are_compared_in_the_engines_precision() -> None:
    held = {name: weight.bfloat16() for name, weight in engine(0).items()}
    sync(held, 0, iter((SENT | {"norm.weight": torch.tensor([1.0009765625, 2.0])}).items()))


def test_checksums_see_swaps_and_single_bits() -> None:
    one = torch.tensor([1.0, 2.0, 3.0])
    assert bit_checksum(one) == bit_checksum(one.clone())
    assert bit_checksum(one) != bit_checksum(one[[1, 0, 2]])
    assert bit_checksum(one) != bit_checksum(torch.nextafter(one, torch.tensor([9.0, 2.0, 3.0])))
    # 1.0 is 0x3f800000, at place 1 alone.
    assert bit_checksum(one[:1]) == 0x3F800000
    assert bit_checksum(one[:1].bfloat16()) == 0x3F80


def test_a_gap_beyond_rounding_stops_the_run() -> None:
    ours = np.array([-1.0, -2.0], dtype=np.float32)
    require_equal_logprobs(ours, ours + np.float32(5e-4), "float32")
    require_equal_logprobs(ours, ours + np.float32(0.05), "bfloat16")
    with pytest.raises(RunError, match=r"differ from the trainer's by 0\.05 on average, bound 0\.001 in float32"):
        require_equal_logprobs(ours, ours + np.float32(0.05), "float32")
    with pytest.raises(RunError, match="differ from the trainer's by nan"):
        require_equal_logprobs(ours, ours * np.float32(np.nan), "float32")


def test_the_canary_is_the_end_of_a_prompt() -> None:
    canary = Canary.of_prompt(np.arange(20, dtype=np.int32), 1.0)
    assert canary.sequence.prompt_ids.tolist() == [0, 1, 2, 3]
    assert canary.sequence.response_ids.tolist() == list(range(4, 20))
    short = Canary.of_prompt(np.array([7], dtype=np.int32), 1.0)
    assert (short.sequence.prompt_ids.tolist(), short.sequence.response_ids.tolist()) == ([7], [7])

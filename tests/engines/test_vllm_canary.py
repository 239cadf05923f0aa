"""The proof of a sync, on plain tensors: shards, fused and packed layers, bit patterns, and what is reported."""

from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from exgrpo_cli.base.errors import RunError
from exgrpo_cli.engines.vllm import proof

SENT = {
    "embed.weight": torch.arange(10.0).view(5, 2), "o_proj.weight": torch.arange(8.0).view(2, 4),
    "attn.q_proj.weight": torch.arange(16.0).view(8, 2), "attn.k_proj.weight": -torch.arange(4.0).view(2, 2),
    "norm.weight": torch.tensor([1.0, 2.0]),
}  # fmt: skip
NAMES = frozenset(SENT)


class Layer(nn.Module):
    """One of vLLM's, with what is read of it."""

    def __init__(self, weight: Tensor, sizes: list[int], kv_replicas: int = 1) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.clone(), requires_grad=False)
        self.output_partition_sizes, self.input_size_per_partition = sizes, weight.shape[1] if weight.ndim > 1 else 0
        self.num_kv_head_replicas = kv_replicas

    def pack(self, *, keep: bool) -> None:
        """Compute with a copy, as on a CPU; the parameter goes unless it is kept."""
        copy = self.weight.detach().clone()
        self.cpu_linear = copy
        self.quant_method = SimpleNamespace(apply=lambda layer, x: x @ layer.cpu_linear.T)
        if not keep:
            self.weight = nn.Parameter(copy.new_empty(0), requires_grad=False)


def engine(rank: int) -> nn.Module:
    """Two ranks: the vocabulary of 5 padded to 6 and cut, the output projection cut by columns, the queries by rows and
    fused with the keys of one head, which both ranks hold; the norm whole."""
    padded = torch.cat([SENT["embed.weight"], torch.zeros(1, 2)])
    queries = SENT["attn.q_proj.weight"][4 * rank : 4 * rank + 4]
    model = nn.Module()
    model.embed = Layer(padded[3 * rank : 3 * rank + 3], [3])
    model.o_proj = Layer(SENT["o_proj.weight"][:, 2 * rank : 2 * rank + 2], [2])
    model.attn = nn.Module()
    model.attn.qkv_proj = Layer(torch.cat([queries, SENT["attn.k_proj.weight"]]), [4, 2], kv_replicas=2)
    model.norm = Layer(SENT["norm.weight"], [])
    return model


def sync(model: nn.Module, rank: int, weights: Iterator[tuple[str, Tensor]]) -> None:
    model.packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj"]}
    held = proof.held_weights(NAMES, model, rank)
    assert held.keys() == NAMES
    sent: proof.Sent = {}
    list(proof.noted(weights, held, sent))
    proof.require_arrived(sent, NAMES, held)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("layer", "packed", "place", "name"),
    [
        ("embed", "", 1, "embed"),
        ("o_proj", "", 1, "o_proj"),
        ("norm", "", 1, "norm"),
        # A stale copy beside a parameter that arrived, as of a head with tied embeddings.
        ("o_proj", "keeping the parameter", 2, "o_proj"),
        # The parts of a fused layer: row 3 of two columns is the last of the queries, row 4 the first of the keys.
        *(("attn.qkv_proj", packed, 7, "attn.q_proj") for packed in ("", "alone")),
        *(("attn.qkv_proj", packed, 9, "attn.k_proj") for packed in ("", "alone")),
    ],
)
def test_every_rank_compares_its_own_shards_without_padding(rank, layer, packed, place, name) -> None:
    model = engine(rank)
    held = model.get_submodule(layer)
    if packed:
        held.pack(keep=packed != "alone")
    sync(model, rank, iter(SENT.items()))
    (held.cpu_linear if packed else held.weight).view(-1)[place] += 1
    with pytest.raises(RunError, match=rf"weight '{name}\.weight' did not reach the rollout engine: what is read back"):
        sync(model, rank, iter(SENT.items()))


def test_a_weight_that_was_not_sent_is_named() -> None:
    with pytest.raises(RunError, match=r"1 weights were not sent to the rollout engine, 'attn\.q_proj\.weight' first"):
        sync(engine(0), 0, ((name, weight) for name, weight in SENT.items() if name != "attn.q_proj.weight"))


def test_weights_are_compared_in_the_engines_precision() -> None:
    sync(engine(0).bfloat16(), 0, iter((SENT | {"norm.weight": torch.tensor([1.0009765625, 2.0])}).items()))


def test_checksums_see_swaps_and_single_bits() -> None:
    one = torch.tensor([1.0, 2.0, 3.0])
    assert proof.bit_checksum(one) == proof.bit_checksum(one.clone())
    assert proof.bit_checksum(one) != proof.bit_checksum(one[[1, 0, 2]])
    assert proof.bit_checksum(one) != proof.bit_checksum(torch.nextafter(one, torch.tensor([9.0, 2.0, 3.0])))
    # 1.0 is 0x3f800000, at place 1 alone.
    assert proof.bit_checksum(one[:1]) == 0x3F800000 and proof.bit_checksum(one[:1].bfloat16()) == 0x3F80


def test_a_gap_beyond_rounding_stops_the_run() -> None:
    ours = np.array([-1.0, -2.0], dtype=np.float32)
    assert proof.require_equal_logprobs(ours, ours + np.float32(5e-4), "float32") == pytest.approx(5e-4, rel=1e-3)
    with pytest.raises(RunError, match=r"differ from the trainer's by 0\.05 on average, bound 0\.001 in float32"):
        proof.require_equal_logprobs(ours, ours + np.float32(0.05), "float32")
    with pytest.raises(RunError, match="differ from the trainer's by nan"):
        proof.require_equal_logprobs(ours, ours * np.float32(np.nan), "float32")


@pytest.mark.parametrize(("first", "bound"), [(None, 0.5), (0.112, 0.448), (0.03, 0.12), (0.002, 0.05), (0.2, 0.5)])
def test_in_bfloat16_the_bound_is_measured_at_the_first_sync(first: float | None, bound: float) -> None:
    """Four times the first gap, between 0.05 and 0.5; in float32 it stays where it is."""
    ours = np.array([-1.0, -2.0], dtype=np.float32)
    proof.require_equal_logprobs(ours, ours + np.float32(0.99 * bound), "bfloat16", first)
    with pytest.raises(RunError, match=rf"bound {bound:.3g} in bfloat16"):
        proof.require_equal_logprobs(ours, ours + np.float32(1.01 * bound), "bfloat16", first)
    with pytest.raises(RunError, match=r"bound 0\.001 in float32"):
        proof.require_equal_logprobs(ours, ours + np.float32(0.002), "float32", first)


def test_the_canary_is_the_end_of_a_prompt() -> None:
    canary = proof.canary_of(np.arange(20, dtype=np.int32))
    short = proof.canary_of(np.array([7], dtype=np.int32))
    for found, prompt, response in ((canary, [0, 1, 2, 3], list(range(4, 20))), (short, [7], [7])):
        assert (found.prompt_ids.tolist(), found.response_ids.tolist()) == (prompt, response)

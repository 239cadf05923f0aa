"""Attention of our own, run inside a transformers model through its AttentionInterface.

Axes: rows = rows being decoded, heads = query heads, kv_heads = key-value heads, lists = rows times key-value heads,
span = cached columns, columns = those of one call, width = head dimension, packed = inputs of a packed micro-batch,
cells = rows of a block times its longest row.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface

from exgrpo_cli.engines.hf.slots import AttentionChunk
from exgrpo_cli.engines.model.causal_lm import CausalLM
from exgrpo_cli.errors import InputError

GROUPED_DECODING = "exgrpo_grouped_decoding"
PACKED_CAUSAL = "exgrpo_packed_causal"
UNSUPPORTED = ("softcap", "s_aux", "position_bias")
"""Arguments by which some models change what attention computes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionBlock:
    """Rows of similar length, padded on the right."""

    cells: Int[Tensor, " cells"]
    """The packed position in each cell, row by row; pad cells name any position."""
    num_rows: int


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionLayout:
    """How the rows of a packed micro-batch are gathered for attention, and its results put back."""

    blocks: tuple[AttentionBlock, ...]
    cell_of: Int[Tensor, " packed"]
    """For each packed position, one of its cells, counted over all blocks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodingCall:
    """Rows that attend in one call of every layer."""

    lists: slice
    """Their lists of keys: one per row and key-value head."""
    columns: slice
    mask: Float[Tensor, "lists 1 columns"]


def decoding_calls(
    chunks: Sequence[AttentionChunk], mask: Float[Tensor, "rows kv_heads 1 span"]
) -> tuple[DecodingCall, ...]:
    """The calls of a step whose attention mask is `mask`."""
    kv_heads, lists_mask = mask.shape[1], mask.flatten(0, 1)
    calls = []
    for chunk in chunks:
        lists, columns = slice(chunk.start * kv_heads, chunk.stop * kv_heads), slice(0, chunk.span)
        calls.append(DecodingCall(lists=lists, columns=columns, mask=lists_mask[lists, :, columns]))
    return tuple(calls)


@contextmanager
def use_attention(parts: CausalLM, name: str) -> Iterator[None]:
    """Run the body with attention `name`, and with its own again afterwards: the config is shared by all its layers."""
    config = parts.body.config
    own = config._attn_implementation
    config._attn_implementation = name
    try:
        yield
    finally:
        config._attn_implementation = own


def grouped_decoding(
    module: nn.Module,
    query: Float[Tensor, "rows heads 1 width"],
    key: Float[Tensor, "rows kv_heads span width"],
    value: Float[Tensor, "rows kv_heads span width"],
    attention_mask: Float[Tensor, "rows kv_heads 1 span"],
    scaling: float,
    calls: Sequence[DecodingCall] = (),
    **kwargs: object,
) -> tuple[Float[Tensor, "rows 1 heads width"], None]:
    """softmax(scaling * q k^T + mask) v for one new token per row, in `calls` of rows with like lengths.

    The query heads that share a key-value head are multiplied with it at once: no key or value is repeated, where
    decoding is bound by reading them.
    """
    refuse_unsupported(module, kwargs)
    if not calls:
        raise InputError(
            f"{type(module).__name__} keeps arguments from its attention; use a model of transformers' own."
        )
    rows, heads, _, width = query.shape
    kv_heads = key.shape[1]
    grouped = (query * scaling).reshape(rows * kv_heads, heads // kv_heads, width)
    keys, values = key.flatten(0, 1).transpose(1, 2), value.flatten(0, 1)
    mixed = grouped.new_empty((*grouped.shape[:2], value.shape[3]))
    for call in calls:
        scores = torch.baddbmm(call.mask, grouped[call.lists], keys[call.lists, :, call.columns])
        weights = scores.softmax(dim=-1, dtype=torch.float32).to(value.dtype)
        torch.bmm(weights, values[call.lists, call.columns], out=mixed[call.lists])
    return mixed.view(rows, 1, heads, -1), None


def packed_causal(
    module: nn.Module,
    query: Float[Tensor, "1 heads packed width"],
    key: Float[Tensor, "1 kv_heads packed width"],
    value: Float[Tensor, "1 kv_heads packed width"],
    attention_mask: None,
    scaling: float,
    layout: AttentionLayout | None = None,
    **kwargs: object,
) -> tuple[Float[Tensor, "1 packed heads width"], None]:
    """Causal attention within each row of a packed micro-batch."""
    refuse_unsupported(module, kwargs)
    if layout is None:
        raise InputError(
            f"{type(module).__name__} keeps arguments from its attention; use a model of transformers' own."
        )
    vectors = [states[0].transpose(0, 1) for states in (query, key, value)]
    results = []
    for block in layout.blocks:
        queries, keys, values = (_gather_rows(states, block) for states in vectors)
        mixed = F.scaled_dot_product_attention(queries, keys, values, is_causal=True, scale=scaling, enable_gqa=True)
        results.append(mixed.transpose(1, 2).flatten(0, 1).flatten(1))
    packed = F.embedding(layout.cell_of, torch.cat(results) if len(results) > 1 else results[0])
    return packed.view(1, len(layout.cell_of), query.shape[1], -1), None


def _gather_rows(
    states: Float[Tensor, "packed heads width"], block: AttentionBlock
) -> Float[Tensor, "rows heads columns width"]:
    # An embedding look-up, for its backward pass: many times faster on a CPU than that of index_select.
    cells = F.embedding(block.cells, states.flatten(1))
    return cells.view(block.num_rows, -1, *states.shape[1:]).transpose(1, 2)


def refuse_unsupported(module: nn.Module, arguments: dict[str, object]) -> None:
    """Raise InputError where a model asks for more than plain softmax attention."""
    for name in UNSUPPORTED:
        if arguments.get(name) is not None:
            raise InputError(
                f"{type(module).__name__} asks its attention for {name!r}, which the hf and torch engines do not "
                f"compute; use a backbone with plain softmax attention."
            )


AttentionInterface.register(GROUPED_DECODING, grouped_decoding)
AttentionInterface.register(PACKED_CAUSAL, packed_causal)

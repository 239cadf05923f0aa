"""Attention of a packed micro-batch on a GPU: FlashAttention over segments of unlike length, where nothing is padded.

A segment is a prompt, which its rows share, or the response of one row. Its queries stay where they are packed; its
keys are those of the row up to its own end, gathered behind one another. Causal attention is aligned at the end of a
segment's keys, so the first token of a response sees its whole prompt.

Axes: packed = inputs of a packed micro-batch, keys = key tokens of all segments, bounds = segments + 1, heads = query
heads, kv_heads = key-value heads, width = head dimension.
"""

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, Int32
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface

from exgrpo_cli.algo.batching import MOST_REPEATED, micro_batches
from exgrpo_cli.base.errors import InputError
from exgrpo_cli.engines.causal_lm import CausalLM, causal_attention, refuse_unsupported, to_device

try:
    # Torch's attention over rows of unequal length, from torch 2.10 on.
    from torch.nn.attention.varlen import varlen_attn
except ImportError:
    varlen_attn = None  # type: ignore[assignment]

CAUSAL = (-1, 0)
"""The window that torch takes for causal attention."""
WIDEST_HEAD = 256
"""FlashAttention's limit; narrower ones must be multiples of 8."""
LEAST_CAPABILITY = (8, 0)
"""Compute capability that FlashAttention 2 needs: Ampere."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Segments:
    """Beginnings of the segments of a packed micro-batch, and what they attend to."""

    keys: Int[Tensor, " keys"]
    """Packed positions of the keys."""
    query_bounds: Int32[Tensor, " bounds"]
    key_bounds: Int32[Tensor, " bounds"]
    most_queries: int
    most_keys: int


def takes_segments(parts: CausalLM) -> bool:
    """Whether torch has a kernel for this model's heads and precision on its device."""
    config = parts.model.config.get_text_config()
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return (
        varlen_attn is not None
        and {"scale", "window_size", "enable_gqa"} <= inspect.signature(varlen_attn).parameters.keys()
        and parts.device.type == "cuda"
        and parts.head.weight.dtype in (torch.bfloat16, torch.float16)
        and width % 8 == 0
        and width <= WIDEST_HEAD
        and getattr(config, "v_head_dim", None) is None
        and torch.cuda.get_device_capability(parts.device) >= LEAST_CAPABILITY
    )


def segments_of(pieces: Sequence[np.ndarray], keys: Sequence[np.ndarray], device: torch.device) -> Segments:
    """Segments in the order in which they are packed: their own tokens, and the packed positions of their keys."""
    # A response of one token is no input: it has no query.
    read = [(len(piece), own) for piece, own in zip(pieces, keys, strict=True) if len(piece)]
    num_queries, num_keys = [count for count, _ in read], [len(own) for _, own in read]

    def bounds(counts: Sequence[int]) -> Tensor:
        return to_device(np.cumsum([0, *counts]).astype(np.int32), device)

    return Segments(
        keys=to_device(np.concatenate([own for _, own in read]).astype(np.int64, copy=False), device),
        query_bounds=bounds(num_queries),
        key_bounds=bounds(num_keys),
        most_queries=max(num_queries),
        most_keys=max(num_keys),
    )


def attend(
    queries: Float[Tensor, "packed heads width"],
    keys: Float[Tensor, "packed kv_heads width"],
    values: Float[Tensor, "packed kv_heads width"],
    segments: Segments,
    scaling: float,
) -> Float[Tensor, "packed heads width"]:
    """Causal attention within each segment's row."""
    assert varlen_attn is not None, "rows are packed by segments only where torch can attend by them"
    mixed = varlen_attn(
        queries,
        keys.index_select(0, segments.keys),
        values.index_select(0, segments.keys),
        segments.query_bounds,
        segments.key_bounds,
        segments.most_queries,
        segments.most_keys,
        scale=scaling,
        window_size=CAUSAL,
        enable_gqa=queries.shape[1] != keys.shape[1],
    )
    assert isinstance(mixed, Tensor)
    return mixed


PACKED_CAUSAL = "exgrpo_packed_causal"
BLOCK_PADDING = 0.1
"""Pad cells allowed in an attention block: more blocks would cost more calls than they save."""
BLOCK_CELLS = 2**18
"""Largest attention block."""
MASK_CELLS = 2**24
"""Largest mask of a block: 64 MiB in float32."""


Asked = tuple[int, np.ndarray]
"""Packed positions that a row reads, and how many of them, at its end, are queries."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionBlock:
    """Rows of similar length, padded on the right."""

    num_rows: int
    columns: int
    asking: int
    visible: Bool[Tensor, "rows 1 asking columns"] | None
    """Mask of what each query sees; None where all of a row asks, and sees what is on its left."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionLayout:
    """Indices by which the rows of a packed micro-batch are gathered for attention, and its results put back."""

    blocks: tuple[AttentionBlock, ...]
    keys: Int[Tensor, " cells"]
    """The packed position in each cell, row by row and block by block; pad cells name any position."""
    queries: Int[Tensor, " query_cells"]
    """Likewise of the tokens that ask."""
    cell_of: Int[Tensor, " packed"]
    """For each packed position, one of its query cells."""


def attention_layout(
    rows: Sequence[np.ndarray], pieces: Sequence[np.ndarray], reads: Sequence[np.ndarray], device: torch.device
) -> AttentionLayout:
    """Blocks of whole `rows`, or of `pieces` (prompts and responses), each at the end of what it `reads`.

    Rows and reads are packed positions.
    """
    num_packed = sum(map(len, pieces))
    asked = [(len(row), row) for row in rows]
    if sum(map(len, rows)) > MOST_REPEATED * num_packed:
        asked = [(len(piece), read) for piece, read in zip(pieces, reads, strict=True) if len(piece)]
    # A prompt's tokens may stand in several rows with the same result: whichever is written last is read.
    cell_of = np.zeros(num_packed, dtype=np.int64)
    blocks, all_keys, all_queries, num_cells = [], [], [], 0
    for block in _similar(asked):
        columns, asking = max(len(read) for _, read in block), max(count for count, _ in block)
        keys, queries = (np.zeros((len(block), width), dtype=np.int64) for width in (columns, asking))
        for index, (count, read) in enumerate(block):
            keys[index, : len(read)] = read
            queries[index, :count] = read[-count:]
            cell_of[read[-count:]] = num_cells + index * asking + np.arange(count)
        visible = _visible(block, asking, columns)
        blocks.append(
            AttentionBlock(
                num_rows=len(block),
                columns=columns,
                asking=asking,
                visible=None if visible is None else to_device(visible, device),
            )
        )
        all_keys.append(keys.ravel())
        all_queries.append(queries.ravel())
        num_cells += queries.size
    keys, queries = (np.concatenate(cells) for cells in (all_keys, all_queries))
    return AttentionLayout(
        blocks=tuple(blocks),
        keys=to_device(keys, device),
        queries=to_device(queries, device),
        cell_of=to_device(cell_of, device),
    )


def _similar(asked: Sequence[Asked]) -> Iterator[list[Asked]]:
    """Cut into blocks by length, those that ask all that they read apart from the others."""
    whole = [each for each in asked if each[0] == len(each[1])]
    ending = [each for each in asked if each[0] < len(each[1])]
    for part, budget in (
        (whole, BLOCK_CELLS),
        (ending, min(BLOCK_CELLS, MASK_CELLS // max([1, *(count for count, _ in ending)]))),
    ):
        for block in micro_batches([len(read) for _, read in part], budget, max_padding=BLOCK_PADDING):
            yield [part[index] for index in block]


def _visible(block: Sequence[Asked], asking: int, columns: int) -> Bool[np.ndarray, "rows 1 asking columns"] | None:
    before = np.array([len(read) - count for count, read in block])
    if not before.any():
        return None
    return (np.arange(columns) <= before[:, None, None] + np.arange(asking)[:, None])[:, None]


def packed_causal(
    module: nn.Module,
    query: Float[Tensor, "1 heads packed width"],
    key: Float[Tensor, "1 kv_heads packed width"],
    value: Float[Tensor, "1 kv_heads packed width"],
    attention_mask: None,
    scaling: float,
    layout: AttentionLayout | Segments | None = None,
    **kwargs: object,
) -> tuple[Float[Tensor, "1 packed heads width"], None]:
    """Causal attention within each row of a packed micro-batch."""
    refuse_unsupported(module, kwargs)
    if layout is None:
        raise InputError(
            f"{type(module).__name__} keeps arguments from its attention; use a model of transformers' own."
        )
    packed_query, packed_key, packed_value = (states[0].transpose(0, 1) for states in (query, key, value))
    if isinstance(layout, Segments):
        return attend(packed_query, packed_key, packed_value, layout, scaling)[None], None
    # All blocks in one look-up each: backwards, one for each block would fill and add as many tensors of all tokens.
    queries = _gathered(packed_query, layout.queries, [block.num_rows * block.asking for block in layout.blocks])
    sizes = [block.num_rows * block.columns for block in layout.blocks]
    keys, values = (_gathered(states, layout.keys, sizes) for states in (packed_key, packed_value))
    results = []
    for block, *cells in zip(layout.blocks, queries, keys, values, strict=True):
        asked, read, taken = (states.view(block.num_rows, -1, *states.shape[1:]).transpose(1, 2) for states in cells)
        mixed = causal_attention(asked, read, taken, scaling, block.visible)
        results.append(mixed.transpose(1, 2).flatten(0, 1).flatten(1))
    packed = F.embedding(layout.cell_of, torch.cat(results) if len(results) > 1 else results[0])
    return packed.view(1, len(layout.cell_of), query.shape[1], -1), None


def _gathered(
    states: Float[Tensor, "packed heads width"], cells: Int[Tensor, " cells"], sizes: Sequence[int]
) -> tuple[Float[Tensor, "block_cells heads width"], ...]:
    """The states of `cells`, cut into blocks of so many."""
    # An embedding look-up, for its backward pass: many times faster on a CPU than that of index_select.
    return F.embedding(cells, states.flatten(1)).view(-1, *states.shape[1:]).split(list(sizes))


AttentionInterface.register(PACKED_CAUSAL, packed_causal)

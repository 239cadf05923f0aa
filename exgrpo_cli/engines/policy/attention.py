"""Attention of a packed micro-batch: by segments where torch has a kernel for them, else rows gathered in blocks.

Blocks hold rows of similar length, padded; results are put back where they are packed.

Axes: heads = query heads, kv_heads = key-value heads, width = head dimension, packed = inputs of a packed micro-batch,
cells = rows of a block times its longest row, columns = its longest row.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface

from exgrpo_cli.engines.model.attention import causal_attention, refuse_unsupported
from exgrpo_cli.engines.policy.segments import Segments, attend
from exgrpo_cli.errors import InputError

PACKED_CAUSAL = "exgrpo_packed_causal"


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
    vectors = (packed_query, packed_key, packed_value)
    results = []
    for block in layout.blocks:
        queries, keys, values = (_gather_rows(states, block) for states in vectors)
        mixed = causal_attention(queries, keys, values, scaling)
        results.append(mixed.transpose(1, 2).flatten(0, 1).flatten(1))
    packed = F.embedding(layout.cell_of, torch.cat(results) if len(results) > 1 else results[0])
    return packed.view(1, len(layout.cell_of), query.shape[1], -1), None


def _gather_rows(
    states: Float[Tensor, "packed heads width"], block: AttentionBlock
) -> Float[Tensor, "rows heads columns width"]:
    # An embedding look-up, for its backward pass: many times faster on a CPU than that of index_select.
    cells = F.embedding(block.cells, states.flatten(1))
    return cells.view(block.num_rows, -1, *states.shape[1:]).transpose(1, 2)


AttentionInterface.register(PACKED_CAUSAL, packed_causal)

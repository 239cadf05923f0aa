"""Attention over packed rows, by what a device has a kernel for; no way of the three needs a mask.

On a GPU it is FlashAttention over segments of unlike length, where nothing is padded. A segment is a prompt, which its
rows share, or the response of one row. Its queries stay where they are packed; its keys are those of the row up to its
own end, gathered behind one another. Causal attention is aligned at the end of a segment's keys, so the first token of
a response sees its whole prompt. On a CPU it is done by slices: of each segment among its own tokens, and of all
neighbours that read a prompt at once, where nothing is padded nor gathered. Whole rows of similar length are gathered
into padded blocks where a GPU has no kernel, and of narrow models on a CPU, whose slices are too small for a call each,
unless short responses share long prompts.

Axes: packed = inputs of the micro-batch, keys = key tokens of all segments, bounds = segments + 1, heads = query heads,
kv_heads = key-value heads, columns = tokens of a block's rows, width = head dimension.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from jaxtyping import Float, Int, Int32
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from transformers import AttentionInterface

from exgrpo_cli.algo import batching
from exgrpo_cli.engines.causal_lm import refuse_unsupported, to_device

try:
    # Torch's attention over rows of unequal length: from torch 2.12 on also of heads that share keys.
    from torch.nn.attention.varlen import varlen_attn
except ImportError:
    varlen_attn = None  # type: ignore[assignment]

PACKED_CAUSAL = "exgrpo_packed_causal"
BLOCK_PADDING = 0.1
"""Pad cells allowed in an attention block: more blocks would cost more calls than they save."""
BLOCK_CELLS = 2**18
"""Largest attention block."""
CAUSAL = (-1, 0)
"""The window that torch takes for causal attention."""
TAKES_SLICES = hasattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu")
"""Whether torch has the kernel of slices, which is not of its public names: without it rows are read in blocks."""

Ranges = tuple[range, ...]
"""Packed positions of a row, in its order."""


class Read(NamedTuple):
    """Packed positions that ask, and those of keys that each of them sees; or their own, of which none sees a later."""

    asking: range
    keys: range


class Segments(NamedTuple):
    """Beginnings of the segments of a packed micro-batch, and what they attend to."""

    keys: Int[Tensor, " keys"]
    """Packed positions of the keys."""
    bounds: tuple[Int32[Tensor, " bounds"], Int32[Tensor, " bounds"], int, int]
    """Packed positions at which their queries and their keys begin, and the most queries and keys that one has."""


class Slices(NamedTuple):
    """The reads of a packed micro-batch, for torch's kernel on CPUs."""

    reads: tuple[Read, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Blocks:
    """Indices by which whole rows are gathered for attention, padded on the right, and its results put back."""

    shapes: tuple[tuple[int, int], ...]
    """Rows and columns of each block: rows of similar length."""
    cells: Int[Tensor, " cells"]
    """The packed position in each cell, row by row and block by block; pad cells name any position."""
    cell_of: Int[Tensor, " packed"]
    """For each packed position, one of its cells."""


Layout = Blocks | Segments | Slices


def positions(ranges: Ranges) -> np.ndarray:
    """The packed positions themselves."""
    return np.concatenate([np.arange(each.start, each.stop) for each in ranges])


def segments_of(segments: Sequence[Ranges], device: torch.device) -> Segments:
    """Segments in the order in which they are packed."""
    counts = np.array([(len(ranges[-1]), sum(map(len, ranges))) for ranges in segments])
    queries, keys = (to_device(np.cumsum([0, *column]).astype(np.int32), device) for column in counts.T)
    most_queries, most_keys = counts.max(axis=0).tolist()
    read = np.concatenate([positions(ranges) for ranges in segments])
    return Segments(to_device(read, device), (queries, keys, most_queries, most_keys))


def slices_of(segments: Sequence[Ranges]) -> Slices:
    """Reads of each segment among its own tokens; and of neighbours, together, of what they have alike before them."""
    asking: dict[range, list[range]] = {}
    for *before, own in segments:
        for keys in before:
            spans = asking.setdefault(keys, [])
            begin = spans.pop().start if spans and spans[-1].stop == own.start else own.start
            spans.append(range(begin, own.stop))
    within = [Read(own, own) for *_, own in segments]
    return Slices((*within, *(Read(span, keys) for keys, spans in asking.items() for span in spans)))


def blocks_of(rows: Sequence[np.ndarray], num_packed: int, device: torch.device) -> Blocks:
    """Blocks of `rows`, which are packed positions, by length."""
    # A prompt's tokens stand in several rows with the same result: whichever is written last is read.
    cell_of = np.zeros(num_packed, dtype=np.int64)
    blocks: list[np.ndarray] = []
    num_cells = 0
    for chosen in batching.micro_batches([len(row) for row in rows], BLOCK_CELLS, max_padding=BLOCK_PADDING):
        cells = np.zeros((len(chosen), max(len(rows[index]) for index in chosen)), dtype=np.int64)
        for line, row in zip(cells, (rows[index] for index in chosen), strict=True):
            line[: len(row)] = row
            cell_of[row] = num_cells + np.arange(len(row))
            num_cells += len(line)
        blocks.append(cells)
    return Blocks(
        shapes=tuple((len(cells), cells.shape[1]) for cells in blocks),
        cells=to_device(np.concatenate([cells.ravel() for cells in blocks]), device),
        cell_of=to_device(cell_of, device),
    )


class _SlicedAttention(torch.autograd.Function):
    """Attention by slices in torch's kernel for CPUs, of states [1, heads, packed, width], without a copy of them.

    Reads of a token are softmaxes of their own; they are mixed by their sums of exponentials (arXiv 2112.05682, section
    2). Given the mixed output and the log of the whole sum, the kernel's gradient of a read is its part of the whole's.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, reads: tuple[Read, ...], scaling: float) -> Tensor:
        mixed = torch.zeros_like(query, dtype=torch.promote_types(query.dtype, torch.float32))
        sums = mixed.new_full((1, query.shape[2], query.shape[1]), -torch.inf).transpose(1, 2)
        for asking, keys in reads:
            output, own = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                _cut(query, asking), _cut(key, keys), _cut(value, keys), is_causal=asking == keys, scale=scaling
            )
            others = _cut(sums, asking)
            _cut(mixed, asking).lerp_(output.to(mixed.dtype), (own - others).sigmoid()[..., None])
            torch.logaddexp(others, own, out=others)
        result = mixed.to(query.dtype)
        ctx.save_for_backward(query, key, value, result, sums)
        ctx.reads, ctx.scaling = reads, scaling
        return result.transpose(1, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        *states, mixed, sums = ctx.saved_tensors
        gradient = gradient.contiguous().transpose(1, 2)
        found = [torch.zeros_like(each, dtype=sums.dtype) for each in states]
        for asking, keys in ctx.reads:
            spans = (asking, keys, keys)
            given = map(_cut, (gradient, *states, mixed, sums), (asking, *spans, asking, asking))
            own = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                *given, 0.0, asking == keys, scale=ctx.scaling
            )
            for whole, part, span in zip(found, own, spans, strict=True):
                _cut(whole, span).add_(part)
        return (*(whole.to(each.dtype) for whole, each in zip(found, states, strict=True)), None, None)


def _cut(states: Tensor, span: range) -> Tensor:
    return states[:, :, span.start : span.stop]


def packed_causal(
    module: nn.Module,
    query: Float[Tensor, "1 heads packed width"],
    key: Float[Tensor, "1 kv_heads packed width"],
    value: Float[Tensor, "1 kv_heads packed width"],
    attention_mask: None,
    scaling: float,
    layout: Layout | None = None,
    **kwargs: object,
) -> tuple[Float[Tensor, "1 packed heads width"], None]:
    """Causal attention within each row of a packed micro-batch."""
    refuse_unsupported(module, kwargs, layout)
    assert layout is not None
    given = (query, key, value)
    if isinstance(layout, Slices):
        width = max(query.shape[-1], value.shape[-1])
        # The kernel takes heads of one width.
        alike = [states if (lacks := width - states.shape[-1]) == 0 else F.pad(states, (0, lacks)) for states in given]
        mixed = cast(Tensor, _SlicedAttention.apply(*alike, layout.reads, scaling))
        return mixed[..., : value.shape[-1]], None
    shared = query.shape[1] // key.shape[1]
    packed_query, packed_key, packed_value = (states[0].transpose(0, 1) for states in given)
    if isinstance(layout, Segments):
        assert varlen_attn is not None, "rows are packed by segments only where torch can attend by them"
        read_keys, read_values = (states.index_select(0, layout.keys) for states in (packed_key, packed_value))
        options: dict[str, Any] = {"scale": scaling, "window_size": CAUSAL, "enable_gqa": shared > 1}
        segmented = varlen_attn(packed_query, read_keys, read_values, *layout.bounds, **options)
        return cast(Tensor, segmented)[None], None
    # All blocks in one look-up: backwards, one for each block would fill and add as many tensors of all tokens. It is
    # one of embeddings, for its backward pass: many times faster on a CPU than that of index_select.
    sizes = [num_rows * columns for num_rows, columns in layout.shapes]
    gathered = [
        F.embedding(layout.cells, states.flatten(1)).view(-1, *states.shape[1:]).split(sizes)
        for states in (packed_query, packed_key, packed_value)
    ]
    results = []
    for (num_rows, columns), *cells in zip(layout.shapes, *gathered, strict=True):
        own, read, taken = (states.view(num_rows, columns, *states.shape[1:]).transpose(1, 2) for states in cells)
        if shared > 1 and own.is_cuda and own.dtype == torch.float32:
            # No kernel takes heads that share keys there, apart from the one that writes out all scores.
            read, taken = (states.repeat_interleave(shared, dim=1) for states in (read, taken))
        mixed = F.scaled_dot_product_attention(
            own, read, taken, is_causal=True, scale=scaling, enable_gqa=own.shape[1] > read.shape[1]
        )
        results.append(mixed.transpose(1, 2).flatten(0, 1).flatten(1))
    packed = F.embedding(layout.cell_of, torch.cat(results) if len(results) > 1 else results[0])
    return packed.view(1, len(layout.cell_of), query.shape[1], -1), None


AttentionInterface.register(PACKED_CAUSAL, packed_causal)

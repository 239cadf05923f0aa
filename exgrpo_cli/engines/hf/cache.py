"""A key-value cache of slots: rows of different lengths that come and go one by one, and attention over it.

Each layer has one preallocated buffer for keys and one for values, and they grow one by one, so that little is held
twice; a slot's tokens lie at columns 0 .. length - 1. The rows in use are always the first ones, so that a decoding
step reads plain slices, and rows of like length are neighbours, which attend together and read few columns in vain.

Axes: slots = rows there is room for, rows = slots in use, heads = query heads, kv_heads = key-value heads, columns =
tokens there is room for, span = columns that some row uses, lists = rows times key-value heads, width = head dimension.
"""

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import AttentionInterface, Cache, DynamicCache

from exgrpo_cli.engines.causal_lm import refuse_unsupported

FIRST_COLUMNS = 64
"""Columns for response tokens to begin with: few, so that the rows in use lie close together in memory."""
GROWTH = 1.5
"""Factor by which the columns grow."""


class SlotCache(Cache):
    """Keys and values of all layers for up to `max_rows` rows of up to `max_columns` tokens."""

    def __init__(self, *, max_rows: int, max_columns: int) -> None:
        super().__init__(layers=[])
        self._buffers: list[Float[Tensor, "slots kv_heads columns width"]] = []
        """Keys, then values, of each layer in turn."""
        self._max_rows = max_rows
        self._max_columns = max_columns
        self._span = 0
        """Columns that the step reads, those being written among them."""

    def fill(self, prompts: DynamicCache, lengths: Sequence[int], sources: Sequence[int], first_row: int) -> None:
        """Copy prefilled prompt `sources[i]`, of `lengths[sources[i]]` tokens, into row first_row + i."""
        layers: list[Any] = prompts.layers
        states = [each for layer in layers for each in (layer.keys, layer.values)]
        if not self._buffers:
            self._allocate(states)
        self._widen(max(lengths[source] for source in sources) + 1)
        row = first_row
        for source, same in itertools.groupby(sources):
            rows, length = slice(row, row + len(list(same))), lengths[source]
            for buffer, prompt in zip(self._buffers, states, strict=True):
                buffer[rows, :, :length] = prompt[source, :, :length]
            self._mask[rows, :, :length] = 0.0
            self._mask[rows, :, length:] = self._hidden
            row = rows.stop

    def move(self, sources: Int[Tensor, " moves"], targets: Int[Tensor, " moves"], span: int) -> None:
        """Copy rows, which hold at most `span` tokens, over others; a row may be source and target."""
        # All at once: a copy for each row costs more in calls than the columns that shorter rows carry along.
        for used in (*(buffer[:, :, :span] for buffer in self._buffers), self._mask):
            used.index_copy_(0, targets, used.index_select(0, sources))

    def begin_step(self, lengths: Int[Tensor, " rows"], span: int) -> Float[Tensor, "rows kv_heads 1 span"]:
        """Point the next token of each row at its own column; returns the additive attention mask of the step."""
        self._span = span
        self._widen(span)
        # Where the new token of each row and head goes, in a layer's buffer seen as a list of vectors.
        self._places = (self._lists[: len(lengths)] + lengths[:, None]).flatten()
        self._mask.view(-1).index_fill_(0, self._places, 0.0)
        return self._mask[: len(lengths), :, None, :span]

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Write one new token per row, as transformers asks a cache, and return the columns in use."""
        used = slice(0, len(key_states)), slice(None), slice(0, self._span)
        keys, values = self._buffers[2 * layer_idx : 2 * layer_idx + 2]
        for buffer, states in ((keys, key_states), (values, value_states)):
            # One flat copy of whole vectors: several times faster than indexing rows and columns.
            buffer.view(-1, buffer.shape[3]).index_copy_(0, self._places, states.reshape(-1, buffer.shape[3]))
        return keys[used], values[used]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns in use before the token being written, as transformers asks a cache."""
        return self._span - 1

    def _allocate(self, prompts: Sequence[Tensor]) -> None:
        """Room for `max_rows` rows, with the heads, widths and dtype of a prompt's keys and values."""
        shape = self._max_rows, prompts[0].shape[1], 0
        self._buffers = [states.new_empty(*shape, states.shape[3]) for states in prompts]
        # Added to attention scores, which are at least float32: 0 at the columns of a row, the lowest number elsewhere.
        wide = torch.promote_types(prompts[0].dtype, torch.float32)
        self._hidden = torch.finfo(wide).min
        self._mask = prompts[0].new_empty(shape, dtype=wide)
        self._widen(prompts[0].shape[2] + FIRST_COLUMNS)

    def _widen(self, columns: int) -> None:
        rows, heads, now = self._mask.shape
        if columns <= now:
            return
        wider = min(self._max_columns, max(columns, int(GROWTH * now)))
        for index, buffer in enumerate(self._buffers):
            # Zeros, not garbage: a masked column has weight 0, and 0 times the NaN of uninitialised memory is NaN.
            self._buffers[index] = F.pad(buffer, (0, 0, 0, wider - now))
        self._mask = F.pad(self._mask, (0, wider - now), value=self._hidden)
        # Beginnings of the columns of each row and head, in a layer's buffer seen as a list of vectors.
        self._lists = torch.arange(rows * heads, device=self._mask.device).view(rows, heads) * wider


CALL_CELLS = 500
"""Cost of one more attention call, in cells (a row times a column) of keys and values read."""
GPU_CALL_CELLS = 2**15
"""On a GPU, by arithmetic: three launches a call take some 5 microseconds each, the keys and values of a cell (two
heads of 128 in bfloat16: 1 KiB) half a nanosecond at 2 TB/s."""
SHORT = 64
"""Rows shorter than this are one class: telling them apart saves less than moving them costs."""
MANY_ROWS = 128
"""From here on a class of half the width has rows enough to be worth its call and their moves."""


def length_class(lengths: Int[np.ndarray, " rows"]) -> Int[np.ndarray, " rows"]:
    """Rows of one class read at most twice the columns they have, among `MANY_ROWS` at most 1.4 times as many.

    Short rows are one class, whatever they read in vain.
    """
    halvings = np.log2(np.maximum(lengths, SHORT - 1))
    return np.floor(halvings if len(lengths) < MANY_ROWS else 2 * halvings).astype(np.int64)


def regroup(
    lengths: Int[np.ndarray, " rows"], alive: Bool[np.ndarray, " rows"]
) -> tuple[Int[np.ndarray, " rows"], Int[np.ndarray, " runs"]]:
    """The slot from which each slot is filled, living rows first, longest class first; and where classes begin.

    As few rows as possible move. The slots of rows that ended come last.
    """
    classes = length_class(lengths)
    counts = np.bincount(classes[alive])
    present = counts.nonzero()[0][::-1]
    sizes = counts[present]
    wanted = np.repeat(present, sizes)
    in_place = alive[: len(wanted)] & (classes[: len(wanted)] == wanted)
    elsewhere = alive.copy()
    elsewhere[: len(wanted)] &= ~in_place
    sources = elsewhere.nonzero()[0]
    order = np.arange(len(lengths))
    # Both sides hold the same number of rows of each class: sorted by class, they match one to one.
    order[(~in_place).nonzero()[0]] = sources[np.argsort(-classes[sources], kind="stable")]
    order[len(wanted) :] = (~alive).nonzero()[0]
    return order, sizes.cumsum() - sizes


class AttentionCall(NamedTuple):
    """Neighbouring slots that attend in one call, over columns 0 .. span - 1."""

    start: int
    stop: int
    span: int

    @property
    def cells(self) -> int:
        """Rows times columns."""
        return (self.stop - self.start) * self.span


def attention_calls(
    lengths: Int[np.ndarray, " rows"], run_starts: Int[np.ndarray, " runs"], device_type: str = "cpu"
) -> list[AttentionCall]:
    """The attention calls of a step in which a row of `lengths` cached tokens attends to these and to itself."""
    call_cells = CALL_CELLS if device_type == "cpu" else GPU_CALL_CELLS
    spans = np.maximum.reduceat(lengths, run_starts) + 1
    calls: list[AttentionCall] = []
    for run in map(AttentionCall, run_starts.tolist(), [*run_starts[1:].tolist(), len(lengths)], spans.tolist()):
        merged = AttentionCall(calls[-1].start, run.stop, max(calls[-1].span, run.span)) if calls else run
        if calls and merged.cells <= calls[-1].cells + run.cells + call_cells:
            calls[-1] = merged
        else:
            calls.append(run)
    return calls


GROUPED_DECODING = "exgrpo_grouped_decoding"


def grouped_decoding(
    module: nn.Module,
    query: Float[Tensor, "rows heads 1 width"],
    key: Float[Tensor, "rows kv_heads span width"],
    value: Float[Tensor, "rows kv_heads span width"],
    attention_mask: Float[Tensor, "rows kv_heads 1 span"],
    scaling: float,
    calls: Sequence[AttentionCall] = (),
    **kwargs: object,
) -> tuple[Float[Tensor, "rows 1 heads width"], None]:
    """softmax(scaling * q k^T + mask) v for one new token per row, in `calls` of rows with like lengths.

    The query heads that share a key-value head are multiplied with it at once: no key or value is repeated, where
    decoding is bound by reading them.
    """
    refuse_unsupported(module, kwargs, calls)
    rows, heads, _, width = query.shape
    kv_heads = key.shape[1]
    queries = query.reshape(rows * kv_heads, heads // kv_heads, width)
    keys, values, mask = key.flatten(0, 1).transpose(1, 2), value.flatten(0, 1), attention_mask.flatten(0, 1)
    mixed = queries.new_empty((*queries.shape[:2], values.shape[2]))
    for start, stop, span in calls:
        lists = slice(start * kv_heads, stop * kv_heads)
        scores = _scores(mask[lists, :, :span], queries[lists], keys[lists, :, :span], scaling)
        weights = scores.softmax(dim=-1, dtype=torch.float32).to(values.dtype)
        torch.bmm(weights, values[lists, :span], out=mixed[lists])
    return mixed.view(rows, 1, heads, -1), None


def _scores(
    mask: Float[Tensor, "lists 1 columns"],
    queries: Float[Tensor, "lists shared width"],
    keys: Float[Tensor, "lists width columns"],
    scaling: float,
) -> Float[Tensor, "lists shared columns"]:
    """scaling * q k^T + mask, at least in float32: the scores of models with large key biases (Qwen2.5) are tens to
    hundreds, where bfloat16 is exact to 0.25 or 0.5."""
    if queries.dtype not in (torch.bfloat16, torch.float16):
        return torch.baddbmm(mask, queries * scaling, keys)
    if queries.is_cuda:
        products = torch.bmm(queries, keys, out_dtype=torch.float32)
    else:
        # Products with another dtype than that of their factors are for CUDA alone.
        products = torch.bmm(queries.float(), keys.float())
    return products.mul_(scaling).add_(mask)


AttentionInterface.register(GROUPED_DECODING, grouped_decoding)

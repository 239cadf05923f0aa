"""A key-value cache of slots: rows of different lengths that come and go one by one.

Each layer keeps one preallocated buffer for keys and one for values, and they grow one by one, so that little is held
twice; a slot's tokens lie at columns 0 .. length - 1. The rows in use are always the first ones, so that a decoding
step reads plain slices.

Axes: slots = rows there is room for, rows = slots in use, prompts = prefilled prompts, heads = key-value heads,
columns = tokens there is room for, span = columns that some row uses, width = head dimension.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import Cache, DynamicCache, DynamicLayer

from exgrpo_cli.engines.causal_lm import to_device

FIRST_COLUMNS = 64
"""Columns for response tokens to begin with: few, so that the rows in use lie close together in memory."""
GROWTH = 1.5
"""Factor by which the columns grow."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptStates:
    """Keys and values of prefilled prompts, layer by layer, pad columns included."""

    keys: list[Float[Tensor, "prompts heads columns width"]]
    values: list[Float[Tensor, "prompts heads columns value_width"]]


def prompt_states(cache: DynamicCache) -> PromptStates:
    """What a forward pass over prompts left in `cache`."""
    layers = [layer for layer in cache.layers if isinstance(layer, DynamicLayer)]
    keys = [layer.keys for layer in layers if layer.keys is not None]
    values = [layer.values for layer in layers if layer.values is not None]
    return PromptStates(keys=keys, values=values)


@dataclass(kw_only=True, slots=True)
class Step:
    """Where a decoding step reads and writes: the same in all layers."""

    span: int = 0
    """Columns in use, those being written among them."""
    places: Int[Tensor, " lists"] = field(default_factory=lambda: torch.arange(0))
    """Where the new token of each row and head goes, in a layer's buffer seen as a list of vectors."""


class SlotLayer(DynamicLayer):
    """One layer's keys and values, written at each row's own column."""

    keys: Float[Tensor, "slots heads columns width"]
    values: Float[Tensor, "slots heads columns width"]

    def __init__(self, step: Step) -> None:
        super().__init__()
        # Not the cache, which holds its layers: a circle would keep all keys and values until Python looks for circles,
        # and with them a GPU's memory through the update.
        self._step = step
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Write one new token per row and return the columns in use."""
        used = slice(0, len(key_states)), slice(None), slice(0, self._step.span)
        for buffer, states in ((self.keys, key_states), (self.values, value_states)):
            # One flat copy of whole vectors: several times faster than indexing rows and columns.
            buffer.view(-1, buffer.shape[3]).index_copy_(0, self._step.places, states.reshape(-1, buffer.shape[3]))
        return self.keys[used], self.values[used]

    def get_seq_length(self) -> int:
        """Columns in use before the token being written, as transformers asks a cache."""
        return self._step.span - 1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Width and offset of the attention mask, as transformers asks a cache."""
        return self._step.span, 0


class SlotCache(Cache):
    """Keys and values of all layers for up to `max_rows` rows of up to `max_columns` tokens."""

    def __init__(self, *, num_layers: int, max_rows: int, max_columns: int) -> None:
        self._step = Step()
        self.slot_layers = [SlotLayer(self._step) for _ in range(num_layers)]
        super().__init__(layers=list(self.slot_layers))
        self._max_rows = max_rows
        self._max_columns = max_columns
        self._num_columns = 0

    def fill(self, prompts: PromptStates, lengths: Sequence[int], sources: Sequence[int], first_row: int) -> None:
        """Copy prefilled prompt `sources[i]`, of `lengths[sources[i]]` tokens, into row first_row + i."""
        if not self._num_columns:
            self._allocate(prompts)
        self._widen(max(lengths[source] for source in sources) + 1)
        row = first_row
        for source, same in itertools.groupby(sources):
            rows, length = slice(row, row + len(list(same))), lengths[source]
            for layer, keys, values in zip(self.slot_layers, prompts.keys, prompts.values, strict=True):
                layer.keys[rows, :, :length] = keys[source, :, :length]
                layer.values[rows, :, :length] = values[source, :, :length]
            self._mask[rows, :, :length] = 0.0
            self._mask[rows, :, length:] = self._hidden
            row = rows.stop

    def move(self, sources: Int[np.ndarray, " moves"], targets: Int[np.ndarray, " moves"], span: int) -> None:
        """Copy rows, which hold at most `span` tokens, over others; a row may be source and target."""
        rows, places = (to_device(slots, self._mask.device) for slots in (sources, targets))
        for buffer in [buffer for layer in self.slot_layers for buffer in (layer.keys, layer.values)]:
            # All at once: a copy for each row costs more in calls than the columns that shorter rows carry along.
            used = buffer[:, :, :span]
            used.index_copy_(0, places, used.index_select(0, rows))
        self._mask.index_copy_(0, places, self._mask.index_select(0, rows))

    def begin_step(self, lengths: Int[Tensor, " rows"], span: int) -> Float[Tensor, "rows heads 1 span"]:
        """Point the next token of each row at its own column; returns the additive attention mask of the step."""
        self._step.span = span
        self._widen(span)
        self._step.places = (self._lists[: len(lengths)] + lengths[:, None]).flatten()
        self._mask.view(-1).index_fill_(0, self._step.places, 0.0)
        return self._mask[: len(lengths), :, None, :span]

    def _allocate(self, prompts: PromptStates) -> None:
        """Room for `max_rows` rows, with the heads, widths and dtype of `prompts`."""
        _, heads, length, _ = prompts.keys[0].shape
        self._num_columns = min(self._max_columns, length + FIRST_COLUMNS)
        shape = self._max_rows, heads, self._num_columns
        for layer, keys, values in zip(self.slot_layers, prompts.keys, prompts.values, strict=True):
            # Zeros, not garbage: a masked column has weight 0, and 0 times the NaN of uninitialised memory is NaN.
            layer.keys = keys.new_zeros((*shape, keys.shape[3]))
            layer.values = values.new_zeros((*shape, values.shape[3]))
        # Added to attention scores, which are at least float32: 0 at the columns of a row, the lowest number elsewhere.
        wide = torch.promote_types(prompts.keys[0].dtype, torch.float32)
        self._hidden = torch.finfo(wide).min
        self._mask = prompts.keys[0].new_zeros(shape, dtype=wide)
        self._place()

    def _widen(self, columns: int) -> None:
        if columns <= self._num_columns:
            return
        wider = min(self._max_columns, max(columns, int(GROWTH * self._num_columns)))
        extra = wider - self._num_columns
        for layer in self.slot_layers:
            layer.keys = F.pad(layer.keys, (0, 0, 0, extra))
            layer.values = F.pad(layer.values, (0, 0, 0, extra))
        self._mask = F.pad(self._mask, (0, extra), value=self._hidden)
        self._num_columns = wider
        self._place()

    def _place(self) -> None:
        """Where the columns of each row and head begin, in a layer's buffer seen as a list of vectors."""
        rows, heads = self._mask.shape[:2]
        self._lists = torch.arange(rows * heads, device=self._mask.device).view(rows, heads) * self._num_columns


CALL_CELLS = 500
"""What one more attention call costs, in cells (a row times a column) of keys and values read."""
GPU_CALL_CELLS = 2**15
"""On a GPU, by arithmetic: three launches a call take some 5 microseconds each, the keys and values of a cell (two
heads of 128 in bfloat16: 1 KiB) half a nanosecond at 2 TB/s."""
SHORT = 64
"""Rows shorter than this are one class: telling them apart saves less than moving them costs."""
MANY_ROWS = 128
"""From here on a class of half the width has rows enough to be worth its call and their moves."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Regrouping:
    """Slots after rows have left."""

    sources: Int[np.ndarray, " moves"]
    targets: Int[np.ndarray, " moves"]
    run_starts: Int[np.ndarray, " runs"]
    """First slot of each run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionChunk:
    """Neighbouring slots that attend in one call, over columns 0 .. span - 1."""

    start: int
    stop: int
    span: int


def length_class(lengths: Int[np.ndarray, " rows"]) -> Int[np.ndarray, " rows"]:
    """Rows of one class read at most twice the columns they have, among `MANY_ROWS` at most 1.4 times as many.

    Short rows are one class, whatever they read in vain.
    """
    halvings = np.log2(np.maximum(lengths, SHORT - 1))
    return np.floor(halvings if len(lengths) < MANY_ROWS else 2 * halvings).astype(np.int64)


def regroup(lengths: Int[np.ndarray, " rows"], alive: Bool[np.ndarray, " rows"]) -> Regrouping:
    """Bring the living rows to the first slots, longest class first, moving as few of them as possible."""
    classes = length_class(lengths)
    counts = np.bincount(classes[alive])
    present = counts.nonzero()[0][::-1]
    sizes = counts[present]
    wanted = np.repeat(present, sizes)
    in_place = alive[: len(wanted)] & (classes[: len(wanted)] == wanted)
    elsewhere = alive.copy()
    elsewhere[: len(wanted)] &= ~in_place
    sources, targets = elsewhere.nonzero()[0], (~in_place).nonzero()[0]
    # Both sides hold the same number of rows of each class: sorted by class, they match one to one.
    sources = sources[np.argsort(-classes[sources], kind="stable")]
    return Regrouping(sources=sources, targets=targets, run_starts=sizes.cumsum() - sizes)


def attention_chunks(
    lengths: Int[np.ndarray, " rows"], run_starts: Int[np.ndarray, " runs"], device_type: str = "cpu"
) -> tuple[AttentionChunk, ...]:
    """The attention calls of a step in which a row of `lengths` cached tokens attends to these and to itself."""
    call_cells = CALL_CELLS if device_type == "cpu" else GPU_CALL_CELLS
    spans = np.maximum.reduceat(lengths, run_starts) + 1
    chunks: list[AttentionChunk] = []
    for start, stop, span in zip(run_starts, [*run_starts[1:], len(lengths)], spans, strict=True):
        run = AttentionChunk(start=int(start), stop=int(stop), span=int(span))
        if chunks and _cells(merged := _merge(chunks[-1], run)) <= _cells(chunks[-1]) + _cells(run) + call_cells:
            chunks[-1] = merged
        else:
            chunks.append(run)
    return tuple(chunks)


def widened(chunks: tuple[AttentionChunk, ...]) -> tuple[AttentionChunk, ...]:
    """The same calls over one more column."""
    return tuple(AttentionChunk(start=chunk.start, stop=chunk.stop, span=chunk.span + 1) for chunk in chunks)


def _merge(first: AttentionChunk, second: AttentionChunk) -> AttentionChunk:
    return AttentionChunk(start=first.start, stop=second.stop, span=max(first.span, second.span))


def _cells(chunk: AttentionChunk) -> int:
    return (chunk.stop - chunk.start) * chunk.span

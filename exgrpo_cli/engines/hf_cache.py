"""A key-value cache of slots: rows of different lengths that come and go one by one.

Each layer keeps one preallocated buffer; a slot's tokens lie at columns 0 .. length - 1. The rows in use are always the
first ones, so that a decoding step reads plain slices.

Axes: slots = rows there is room for, rows = slots in use, heads = key-value heads, columns = tokens there is room for,
span = columns that some row uses, width = head dimension.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor
from transformers import Cache, DynamicCache, DynamicLayer

FIRST_COLUMNS = 64
"""Columns for response tokens to begin with: few, so that the rows in use lie close together in memory."""
GROWTH = 1.5
"""Factor by which the columns grow."""


class SlotLayer(DynamicLayer):
    """One layer's keys and values, written at each row's own column."""

    keys: Float[Tensor, "slots heads columns width"]
    values: Float[Tensor, "slots heads columns width"]

    def __init__(self, cache: "SlotCache") -> None:
        super().__init__()
        self._cache = cache

    def allocate(self, slots: int, columns: int, keys: Tensor, values: Tensor) -> None:
        """Room for `slots` rows, with the heads, widths and dtype of prefilled `keys` and `values`."""
        # Zeros, not garbage: a masked column has weight 0, and 0 times the NaN of uninitialised memory is NaN.
        self.keys = keys.new_zeros((slots, keys.shape[1], columns, keys.shape[3]))
        self.values = values.new_zeros((slots, values.shape[1], columns, values.shape[3]))
        self.is_initialized = True

    def widen(self, extra: int) -> None:
        """Append `extra` empty columns."""
        self.keys, self.values = F.pad(self.keys, (0, 0, 0, extra)), F.pad(self.values, (0, 0, 0, extra))

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Write one new token per row and return the columns in use."""
        used = slice(0, len(key_states)), slice(None), slice(0, self._cache.span)
        for buffer, states in ((self.keys, key_states), (self.values, value_states)):
            # One flat copy of whole vectors: several times faster than indexing rows and columns.
            buffer.view(-1, buffer.shape[3]).index_copy_(0, self._cache.places, states.reshape(-1, buffer.shape[3]))
        return self.keys[used], self.values[used]

    def get_seq_length(self) -> int:
        return self._cache.span - 1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._cache.span, 0


class SlotCache(Cache):
    """Keys and values of all layers for up to `max_rows` rows of up to `max_columns` tokens."""

    def __init__(self, *, num_layers: int, max_rows: int, max_columns: int) -> None:
        self._slots = [SlotLayer(self) for _ in range(num_layers)]
        super().__init__(layers=list(self._slots))
        self._max_rows = max_rows
        self._max_columns = max_columns
        self._num_columns = 0
        self.span = 0
        self.places = torch.arange(0)
        """Where the new token of each row and head goes, in a layer's buffer seen as a list of vectors."""

    def fill(self, prompts: DynamicCache, sources: Int[Tensor, " rows"], first_row: int) -> None:
        """Copy prefilled prompt `sources[i]` into row first_row + i; pad columns come along and stay masked."""
        length = prompts.get_seq_length()
        prefilled = [_contents(layer) for layer in prompts.layers]
        if not self._num_columns:
            self._num_columns = min(self._max_columns, length + FIRST_COLUMNS)
            for slots, (keys, values) in zip(self._slots, prefilled, strict=True):
                slots.allocate(self._max_rows, self._num_columns, keys, values)
        self._widen(length + 1)
        target = slice(first_row, first_row + len(sources)), slice(None), slice(0, length)
        for slots, (keys, values) in zip(self._slots, prefilled, strict=True):
            slots.keys[target] = keys.index_select(0, sources)
            slots.values[target] = values.index_select(0, sources)

    def move(self, sources: Int[Tensor, " moves"], targets: Int[Tensor, " moves"], span: int) -> None:
        """Copy rows over others, up to column `span`; a row may be source and target."""
        for slots in self._slots:
            for buffer in (slots.keys, slots.values):
                used = buffer[:, :, :span]
                used.index_copy_(0, targets, used.index_select(0, sources))

    def begin_step(self, lengths: Int[Tensor, " rows"], span: int) -> Float[Tensor, "rows 1 1 span"]:
        """Point the next token of each row at its own column; returns the additive attention mask of the step."""
        self.span = span
        self._widen(span)
        num_heads = self._slots[0].keys.shape[1]
        lists = torch.arange(len(lengths) * num_heads, device=lengths.device) * self._num_columns
        self.places = lists + lengths.repeat_interleave(num_heads)
        hidden_columns = torch.arange(span, device=lengths.device) > lengths[:, None]
        mask = torch.zeros(hidden_columns.shape, device=lengths.device, dtype=self._slots[0].keys.dtype)
        return mask.masked_fill_(hidden_columns, torch.finfo(mask.dtype).min)[:, None, None]

    def _widen(self, columns: int) -> None:
        if columns <= self._num_columns:
            return
        wider = min(self._max_columns, max(columns, int(GROWTH * self._num_columns)))
        for slots in self._slots:
            slots.widen(wider - self._num_columns)
        self._num_columns = wider


def _contents(layer: object) -> tuple[Tensor, Tensor]:
    assert isinstance(layer, DynamicLayer) and layer.keys is not None and layer.values is not None
    return layer.keys, layer.values

"""A key-value cache of slots: rows of different lengths that come and go one by one, and attention over it.

Each layer has one buffer for keys and one for values; a slot's tokens lie at columns 0 .. length - 1. The rows in use
are always the first ones, so that a decoding step reads plain slices.

Axes: slots = rows there is room for, rows = slots in use, heads = query heads, kv_heads = key-value heads, columns =
tokens there is room for, span = columns that some row uses, lists = rows times key-value heads, width = head dimension.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import AttentionInterface, Cache, DynamicCache

from exgrpo_cli.base.types import SamplingParams
from exgrpo_cli.engines.causal_lm import CausalLM, reading, refuse_unsupported, to_device
from exgrpo_cli.engines.hf.prompts import Drawn, Prefilled, sample_tokens


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
        shape = self._max_rows, prompts[0].shape[1], self._max_columns
        # Zeros, not garbage: a masked column has weight 0, and 0 times the NaN of uninitialised memory is NaN.
        self._buffers = [states.new_zeros(*shape, states.shape[3]) for states in prompts]
        # Added to attention scores, which are at least float32: 0 at the columns of a row, the lowest number elsewhere.
        wide = torch.promote_types(prompts[0].dtype, torch.float32)
        self._hidden = torch.finfo(wide).min
        self._mask = prompts[0].new_full(shape, self._hidden, dtype=wide)
        # Beginnings of the columns of each row and head, in a layer's buffer seen as a list of vectors.
        lists = torch.arange(shape[0] * shape[1], device=self._mask.device)
        self._lists = lists.view(*shape[:2]) * self._max_columns


GROUPED_DECODING = "exgrpo_grouped_decoding"


def grouped_decoding(
    module: nn.Module,
    query: Float[Tensor, "rows heads 1 width"],
    key: Float[Tensor, "rows kv_heads span width"],
    value: Float[Tensor, "rows kv_heads span width"],
    attention_mask: Float[Tensor, "rows kv_heads 1 span"],
    scaling: float,
    **kwargs: object,
) -> tuple[Float[Tensor, "rows 1 heads width"], None]:
    """softmax(scaling * q k^T + mask) v for one new token per row.

    The query heads that share a key-value head are multiplied with it at once: no key or value is repeated, where
    decoding is bound by reading them.
    """
    refuse_unsupported(module, kwargs, True)
    rows, heads, _, width = query.shape
    kv_heads = key.shape[1]
    queries = query.reshape(rows * kv_heads, heads // kv_heads, width)
    keys, values, mask = key.flatten(0, 1).transpose(1, 2), value.flatten(0, 1), attention_mask.flatten(0, 1)
    weights = _scores(mask, queries, keys, scaling).softmax(dim=-1, dtype=torch.float32).to(values.dtype)
    return torch.bmm(weights, values).view(rows, 1, heads, -1), None


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


class SlotDecoder:
    """Keys and values of the rows under way, and their next tokens: a pass of the model over one token of each row.

    Rows are the first ones of `max_rows`.
    """

    def __init__(self, parts: CausalLM, params: SamplingParams, *, max_rows: int, max_columns: int) -> None:
        self._parts, self._params = parts, params
        self._cache = SlotCache(max_rows=max_rows, max_columns=max_columns)
        self._lengths = torch.zeros(max_rows, dtype=torch.long, device=parts.device)
        """Cached tokens of each row."""
        self._cached = np.zeros(max_rows, dtype=np.int64)
        """The same on the host, where the columns of a step are counted."""

    def fill(self, prefilled: Prefilled, sources: Sequence[int], first_row: int) -> None:
        """Begin row first_row + i after prompt `sources[i]` of a pass; `sources` ascend."""
        self._cache.fill(prefilled.cache, prefilled.lengths, sources, first_row)
        used = slice(first_row, first_row + len(sources))
        self._cached[used] = [prefilled.lengths[source] for source in sources]
        self._lengths[used] = to_device(self._cached[used], self._parts.device)

    def reorder(self, order: Int[np.ndarray, " rows"], num_rows: int) -> None:
        """Let row `order[i]` become row i; those behind `num_rows` have ended."""
        moved = np.flatnonzero(order[:num_rows] != np.arange(num_rows))
        sources, targets = (to_device(each, self._parts.device) for each in (order[moved], moved))
        if len(moved):
            self._cache.move(sources, targets, int(self._cached[order[moved]].max()))
            self._cached[moved], self._lengths[targets] = self._cached[order[moved]], self._lengths[sources]

    def step(self, newest: Int[Tensor, " rows"], uniforms: Float[Tensor, " rows"]) -> Drawn:
        """Read the newest token of each row; returns the next ones with their log-probs and entropies."""
        used = slice(0, len(newest))
        lengths = self._lengths[used]
        output = self._parts.body(
            input_ids=newest[:, None],
            position_ids=lengths[:, None],
            attention_mask=self._cache.begin_step(lengths, span=int(self._cached[used].max()) + 1),
            **reading(self._parts.body, self._cache),
        )
        self._cached[used] += 1
        lengths += 1
        return sample_tokens(self._parts.head(output.last_hidden_state[:, 0]), uniforms, self._params)

"""One decoding step: attention of one new token per row over keys and values in slots.

Axes: rows = rows being decoded, heads = query heads, kv_heads = key-value heads, lists = rows times key-value heads,
span = cached columns, columns = those of one call, width = head dimension.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import AttentionInterface

from exgrpo_cli.base.errors import InputError
from exgrpo_cli.engines.causal_lm import refuse_unsupported
from exgrpo_cli.engines.hf.cache import AttentionChunk

GROUPED_DECODING = "exgrpo_grouped_decoding"


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
    grouped = query.reshape(rows * kv_heads, heads // kv_heads, width)
    keys, values = key.flatten(0, 1).transpose(1, 2), value.flatten(0, 1)
    mixed = grouped.new_empty((*grouped.shape[:2], values.shape[2]))
    for call in calls:
        scores = _scores(call.mask, grouped[call.lists], keys[call.lists, :, call.columns], scaling)
        weights = scores.softmax(dim=-1, dtype=torch.float32).to(values.dtype)
        torch.bmm(weights, values[call.lists, call.columns], out=mixed[call.lists])
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

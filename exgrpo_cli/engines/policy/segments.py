"""Attention of a packed micro-batch on a GPU: FlashAttention over segments of unlike length, where nothing is padded.

A segment is a prompt, which its rows share, or the response of one row. Its queries stay where they are packed; its
keys are those of the row up to its own end, gathered behind one another. Causal attention is aligned at the end of a
segment's keys, so the first token of a response sees its whole prompt.

Axes: packed = inputs of a packed micro-batch, keys = key tokens of all segments, bounds = segments + 1, heads = query
heads, kv_heads = key-value heads, width = head dimension.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int, Int32
from torch import Tensor

from exgrpo_cli.engines.model.causal_lm import CausalLM
from exgrpo_cli.engines.model.transfer import to_device


def _find_varlen_attention() -> Callable[..., Any] | None:
    """Torch's attention over rows of unequal length; None before torch 2.10."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return varlen_attn


varlen_attn = _find_varlen_attention()

CAUSAL = (-1, 0)
"""The window that torch takes for causal attention."""
WIDEST_HEAD = 256
"""FlashAttention's limit; narrower ones must be multiples of 8."""
LEAST_CAPABILITY = (8, 0)
"""Of a GPU that FlashAttention 2 runs on: Ampere."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Segments:
    """Where the segments of a packed micro-batch begin and what they attend to."""

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
    mixed: Tensor = varlen_attn(
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
    return mixed

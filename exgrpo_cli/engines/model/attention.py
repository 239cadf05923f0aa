"""Running attention of our own inside a transformers model, through its AttentionInterface.

Axes: heads = query heads, kv_heads = key-value heads, columns = tokens of a row, asking = those
that are queries, width = head dimension.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, PreTrainedModel

from exgrpo_cli.base.errors import InputError

PLAIN_CAUSAL = "exgrpo_plain_causal"
UNSUPPORTED = ("softcap", "s_aux", "position_bias")
"""Arguments by which some models change what attention computes."""


@contextmanager
def use_attention(body: PreTrainedModel, name: str) -> Iterator[None]:
    """Run `body` with attention `name`, and with its own again afterwards: the config is shared by all its layers."""
    config = body.config
    own = config._attn_implementation
    config._attn_implementation = name
    try:
        yield
    finally:
        config._attn_implementation = own


def refuse_unsupported(module: nn.Module, arguments: dict[str, object]) -> None:
    """Raise InputError where a model asks for more than plain softmax attention."""
    for name in UNSUPPORTED:
        if arguments.get(name) is not None:
            raise InputError(
                f"{type(module).__name__} asks its attention for {name!r}, which the hf and torch engines do not "
                f"compute; use a backbone with plain softmax attention."
            )


def causal_attention(
    queries: Float[Tensor, "rows heads asking width"],
    keys: Float[Tensor, "rows kv_heads columns width"],
    values: Float[Tensor, "rows kv_heads columns width"],
    scaling: float,
    visible: Bool[Tensor, "rows 1 asking columns"] | None = None,
) -> Float[Tensor, "rows heads asking width"]:
    """Causal attention without a mask, or of what is `visible` to each query.

    Heads that share keys are told to the kernel, but on a GPU in float32 or with a mask: none there takes them apart
    from the one that writes out all scores, columns x columns of every head, so keys are repeated for another one.
    """
    shared = queries.shape[1] // keys.shape[1]
    if shared > 1 and repeats_keys(queries.device, queries.dtype, masked=visible is not None):
        keys, values = keys.repeat_interleave(shared, dim=1), values.repeat_interleave(shared, dim=1)
        shared = 1
    return F.scaled_dot_product_attention(
        queries, keys, values, visible, is_causal=visible is None, scale=scaling, enable_gqa=shared > 1
    )


def repeats_keys(device: torch.device, dtype: torch.dtype, *, masked: bool = False) -> bool:
    """Whether attention on this device has no kernel of its own for heads that share keys."""
    return device.type == "cuda" and (masked or dtype == torch.float32)


def plain_causal(
    module: nn.Module,
    query: Float[Tensor, "rows heads columns width"],
    key: Float[Tensor, "rows kv_heads columns width"],
    value: Float[Tensor, "rows kv_heads columns width"],
    attention_mask: None,
    scaling: float,
    **kwargs: object,
) -> tuple[Float[Tensor, "rows columns heads width"], None]:
    """Causal attention of rows padded on the right, which need no mask."""
    refuse_unsupported(module, kwargs)
    return causal_attention(query, key, value, scaling).transpose(1, 2).contiguous(), None


AttentionInterface.register(PLAIN_CAUSAL, plain_causal)

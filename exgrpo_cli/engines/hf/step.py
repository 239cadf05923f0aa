"""One decoding step: attention of one new token per row over keys and values in slots, and the layers around it.

Axes: rows = rows being decoded, heads = query heads, kv_heads = key-value heads, lists = rows times key-value heads,
span = cached columns, columns = those of one call, width = head dimension, hidden = model width.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.models.llama import modeling_llama as llama
from transformers.models.qwen2 import modeling_qwen2 as qwen2

from exgrpo_cli.algo.cpu import FastLinear, FusedLlamaRMSNorm
from exgrpo_cli.base.errors import InputError
from exgrpo_cli.engines.causal_lm import refuse_unsupported
from exgrpo_cli.engines.hf.cache import AttentionChunk, SlotCache

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
    return decoded(query[:, :, 0], key, value, scaling, calls).view(query.shape[0], 1, query.shape[1], -1), None


def decoded(
    queries: Float[Tensor, "rows heads width"],
    keys: Float[Tensor, "rows kv_heads span width"],
    values: Float[Tensor, "rows kv_heads span width"],
    scaling: float,
    calls: Sequence[DecodingCall],
) -> Float[Tensor, "rows hidden"]:
    """What `grouped_decoding` computes, of all heads side by side."""
    rows, heads, width = queries.shape
    kv_heads = keys.shape[1]
    grouped = queries.reshape(rows * kv_heads, heads // kv_heads, width)
    keys, values = keys.flatten(0, 1).transpose(1, 2), values.flatten(0, 1)
    mixed = grouped.new_empty((*grouped.shape[:2], values.shape[2]))
    for call in calls:
        scores = _scores(call.mask, grouped[call.lists], keys[call.lists, :, call.columns], scaling)
        weights = scores.softmax(dim=-1, dtype=torch.float32).to(values.dtype)
        torch.bmm(weights, values[call.lists, call.columns], out=mixed[call.lists])
    return mixed.view(rows, -1)


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


KNOWN = {
    llama.LlamaModel: (llama.LlamaDecoderLayer, llama.LlamaAttention, llama.LlamaMLP, llama.LlamaRMSNorm),
    qwen2.Qwen2Model: (qwen2.Qwen2DecoderLayer, qwen2.Qwen2Attention, qwen2.Qwen2MLP, qwen2.Qwen2RMSNorm),
}
"""Bodies, and the modules of their layers, whose forward passes are those of `direct_step`."""
PLAIN = (
    nn.Linear,
    FastLinear,
    FusedLlamaRMSNorm,
    nn.Embedding,
    nn.ModuleList,
    llama.LlamaRotaryEmbedding,
    qwen2.Qwen2RotaryEmbedding,
)


def decodes_directly(body: PreTrainedModel) -> bool:
    """Whether `body` is made of known modules alone, none of which is hooked or exchanged."""
    known = KNOWN.get(type(body))
    if known is None:
        return False
    layers: Any = body.layers
    activations = {type(layer.mlp.act_fn) for layer in layers}
    for module in body.modules():
        hooked = module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module)
        if hooked or not (module is body or type(module) in (*known, *PLAIN) or type(module) in activations):
            return False
    return True


def direct_step(
    body: Any,
    tokens: Int[Tensor, " rows"],
    lengths: Int[Tensor, " rows"],
    cache: SlotCache,
    calls: Sequence[DecodingCall],
) -> Float[Tensor, "rows hidden"]:
    """The last hidden states of `tokens` at positions `lengths`, for a body that `decodes_directly`.

    With one token a row the operations are small, and what lies between them is most of a step's time: calls of
    modules, look-ups in configs, queries and keys turned one after the other. Here each module's `forward` is called
    without what surrounds it, in transformers' own order. Keys and values go into `cache`.
    """
    hidden = body.embed_tokens(tokens)
    cos, sin = body.rotary_emb(hidden, lengths[:, None])
    # transformers swaps the halves of a head and negates one; here the sine has the sign, once for all layers.
    first, second = sin.chunk(2, dim=-1)
    sin = torch.cat([-first, second], dim=-1)
    for layer, states in zip(body.layers, cache.slot_layers, strict=True):
        attention, mlp = layer.self_attn, layer.mlp
        width = attention.head_dim
        normed = layer.input_layernorm.forward(hidden)
        values = attention.v_proj.forward(normed).view(len(tokens), -1, width)
        both = torch.cat([attention.q_proj.forward(normed), attention.k_proj.forward(normed)], dim=-1)
        both = both.view(len(tokens), -1, width)
        both = both * cos + both.roll(width // 2, dims=-1) * sin
        heads = both.shape[1] - values.shape[1]
        all_keys, all_values = states.update(both[:, heads:], values)
        mixed = decoded(both[:, :heads], all_keys, all_values, attention.scaling, calls)
        hidden = hidden + attention.o_proj.forward(mixed)
        normed = layer.post_attention_layernorm.forward(hidden)
        gated = mlp.act_fn.forward(mlp.gate_proj.forward(normed)) * mlp.up_proj.forward(normed)
        hidden = hidden + mlp.down_proj.forward(gated)
    return body.norm.forward(hidden)

"""A decoding step through the layers of Llama or Qwen2 by torch's operations alone, without a call of their modules.

With one token a row the operations are small, and what lies between them is most of a step's time on a CPU and of the
host's on a GPU: calls of modules, look-ups in configs, queries and keys turned one after the other. Here the
products and norms are the modules' own, without what surrounds a call of them, and the rest is computed as transformers
does it, in the same order.

Axes: rows = rows being decoded, hidden = model width, heads = query heads, kv_heads = key-value heads, width = head
dimension.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.llama import modeling_llama as llama
from transformers.models.qwen2 import modeling_qwen2 as qwen2

from exgrpo_cli.engines.hf.attention import DecodingCall, decoded
from exgrpo_cli.engines.hf.cache import SlotCache, SlotLayer
from exgrpo_cli.engines.model.fused_norm import FusedLlamaRMSNorm
from exgrpo_cli.engines.model.product_linear import ProductLinear

KNOWN = {
    llama.LlamaModel: (llama.LlamaDecoderLayer, llama.LlamaAttention, llama.LlamaMLP, llama.LlamaRMSNorm),
    qwen2.Qwen2Model: (qwen2.Qwen2DecoderLayer, qwen2.Qwen2Attention, qwen2.Qwen2MLP, qwen2.Qwen2RMSNorm),
}
"""Bodies, and the modules of their layers, whose forward passes are the ones below."""
PLAIN = (
    nn.Linear,
    ProductLinear,
    FusedLlamaRMSNorm,
    nn.Embedding,
    nn.ModuleList,
    llama.LlamaRotaryEmbedding,
    qwen2.Qwen2RotaryEmbedding,
)


def decodes_directly(body: PreTrainedModel) -> bool:
    """Whether `body` is made of the modules that are known here alone, none of which anybody listens to or changes."""
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


Operation = Callable[[Tensor], Tensor]
"""What a module computes, without the call of it: its `forward`, bound."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Layer:
    """What a layer computes with."""

    before_attention: Operation
    queries: Operation
    keys: Operation
    values: Operation
    mixed: Operation
    """From the heads' results back to the model's width."""
    width: int
    scaling: float
    """Of attention's scores."""
    before_mlp: Operation
    gate: Operation
    activation: Operation
    up: Operation
    down: Operation

    @classmethod
    def of(cls, module: Any) -> "Layer":
        """The parts of a decoder layer."""
        attention, mlp = module.self_attn, module.mlp
        return cls(
            before_attention=module.input_layernorm.forward,
            queries=attention.q_proj.forward,
            keys=attention.k_proj.forward,
            values=attention.v_proj.forward,
            mixed=attention.o_proj.forward,
            width=attention.head_dim,
            scaling=attention.scaling,
            before_mlp=module.post_attention_layernorm.forward,
            gate=mlp.gate_proj.forward,
            activation=mlp.act_fn.forward,
            up=mlp.up_proj.forward,
            down=mlp.down_proj.forward,
        )

    def step(
        self,
        hidden: Float[Tensor, "rows hidden"],
        turning: tuple[Float[Tensor, "rows 1 width"], Float[Tensor, "rows 1 width"]],
        cache: SlotLayer,
        calls: Sequence[DecodingCall],
    ) -> Float[Tensor, "rows hidden"]:
        """One token further; `turning` holds the cosines and sines of positions."""
        normed = self.before_attention(hidden)
        values = self.values(normed).view(hidden.shape[0], -1, self.width)
        both = torch.cat([self.queries(normed), self.keys(normed)], dim=-1).view(hidden.shape[0], -1, self.width)
        cos, sin = turning
        both = both * cos + both.roll(self.width // 2, dims=-1) * sin
        heads = both.shape[1] - values.shape[1]
        all_keys, all_values = cache.update(both[:, heads:], values)
        hidden = hidden + self.mixed(decoded(both[:, :heads], all_keys, all_values, self.scaling, calls))
        normed = self.before_mlp(hidden)
        return hidden + self.down(self.activation(self.gate(normed)) * self.up(normed))


class DirectBody:
    """The layers of a body that `decodes_directly`, for as long as its modules hold the same tensors."""

    def __init__(self, body: Any) -> None:
        self._embed_tokens = body.embed_tokens
        self._rotary_emb = body.rotary_emb
        self._layers = [Layer.of(module) for module in body.layers]
        self._norm = body.norm.forward

    def step(
        self,
        tokens: Int[Tensor, " rows"],
        lengths: Int[Tensor, " rows"],
        cache: SlotCache,
        calls: Sequence[DecodingCall],
    ) -> Float[Tensor, "rows hidden"]:
        """The last hidden states of `tokens`, whose positions are `lengths`; keys and values go into `cache`."""
        hidden = self._embed_tokens(tokens)
        cos, sin = self._rotary_emb(hidden, lengths[:, None])
        # transformers swaps the halves of a head and negates one; here the sine has the sign, once for all layers.
        first, second = sin.chunk(2, dim=-1)
        turning = cos, torch.cat([-first, second], dim=-1)
        for layer, states in zip(self._layers, cache.slot_layers, strict=True):
            hidden = layer.step(hidden, turning, states, calls)
        return self._norm(hidden)

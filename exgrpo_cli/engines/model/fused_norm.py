"""RMS norms of a loaded model that are computed by `algo.norms`, swapped in place.

A patch of transformers' modules: a norm's class is exchanged, so that parameters, names, hooks and the state dict stay
as they are. Those of other models are left alone: some add 1 to the weight. Holds for transformers 5.16 to 5.20.
"""

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm

from exgrpo_cli.algo.norms import rms_norm


class FusedLlamaRMSNorm(LlamaRMSNorm):
    """Llama's norm: in float32 on a CPU by `algo.norms`, else as transformers has it."""

    def forward(self, hidden_states: Float[Tensor, "*batch hidden"]) -> Float[Tensor, "*batch hidden"]:
        """(..., hidden) to (..., hidden)."""
        if hidden_states.dtype == torch.float32 and hidden_states.device.type == "cpu":
            return rms_norm(hidden_states, self.weight, self.variance_epsilon)
        normed: Tensor = super().forward(hidden_states)
        return normed


def use_fused_norms(model: nn.Module) -> None:
    """Let the norms of `model` that are known be computed by `algo.norms`, in place; others keep their own way."""
    for module in model.modules():
        # Qwen2's is Llama's under another name.
        if type(module) in (LlamaRMSNorm, Qwen2RMSNorm):
            module.__class__ = FusedLlamaRMSNorm

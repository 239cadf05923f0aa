"""The norm and its gradient against float64 and against transformers' modules."""

import pytest
import torch
import transformers
from torch import nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from exgrpo_cli.algo.cpu import FusedLlamaRMSNorm, rms_norm, use_fused_norms


def inputs(dtype=torch.float64, shape=(3, 5, 16)):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(shape, dtype=dtype, generator=generator).requires_grad_()
    weight = torch.randn(shape[-1], dtype=dtype, generator=generator).requires_grad_()
    return hidden, weight


def test_it_is_its_equation_and_its_gradient_that_of_finite_differences():
    hidden, weight = inputs()

    expected = hidden / (hidden.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight
    torch.testing.assert_close(rms_norm(hidden, weight, 1e-6), expected)
    assert torch.autograd.gradcheck(lambda x, w: rms_norm(x, w, 1e-6), (hidden, weight))


def test_gradients_that_are_not_contiguous_and_rows_of_zeros():
    hidden, weight = inputs()
    with torch.no_grad():
        hidden[1] = 0.0
    assert torch.autograd.gradcheck(lambda x, w: rms_norm(x, w, 1e-2).transpose(0, 2), (hidden, weight))
    assert not rms_norm(hidden, weight, 1e-6)[1].any()


@pytest.mark.parametrize("kind", [LlamaRMSNorm, Qwen2RMSNorm])
def test_a_swapped_norm_gives_what_it_gave(kind):
    hidden, weight = inputs(torch.float32)
    norm = kind(16, eps=1e-5)
    with torch.no_grad():
        norm.weight.copy_(weight)
    before = norm(hidden)
    (gradient,) = torch.autograd.grad(before.square().sum(), hidden)
    names = list(norm.state_dict())

    use_fused_norms(norm)

    assert type(norm) is FusedLlamaRMSNorm and list(norm.state_dict()) == names
    torch.testing.assert_close(norm(hidden), before)
    torch.testing.assert_close(torch.autograd.grad(norm(hidden).square().sum(), hidden)[0], gradient)
    assert torch.equal(norm(hidden.bfloat16()), kind.forward(norm, hidden.bfloat16()))


def test_other_norms_keep_their_own_way():
    class Shifted(LlamaRMSNorm):
        def forward(self, hidden_states):
            return super().forward(hidden_states) + 1

    model = nn.Sequential(Shifted(8), nn.LayerNorm(8), Qwen3RMSNorm(8))
    use_fused_norms(model)
    assert [type(layer) for layer in model] == [Shifted, nn.LayerNorm, Qwen3RMSNorm]


@pytest.mark.parametrize("name", ["Qwen2", "Llama"])
def test_the_norms_of_the_published_backbones_are_known(name):
    sizes = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2}
    config = getattr(transformers, f"{name}Config")(**sizes, num_attention_heads=2, num_key_value_heads=1)
    model = getattr(transformers, f"{name}ForCausalLM")(config)

    use_fused_norms(model)

    assert sum(type(module) is FusedLlamaRMSNorm for module in model.modules()) == 5

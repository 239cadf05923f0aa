"""Division by the root of the mean square (RMSNorm, arXiv 1910.07467), with a gradient of few passes.

y = x r w with r = (mean(x^2) + epsilon)^(-1/2). As torch's autograd has it, its gradient is a dozen operations over the
whole of x, each of which costs as much on a CPU as the product of a narrow layer.
"""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor


def rms_norm(
    hidden: Float[Tensor, "*batch hidden"], weight: Float[Tensor, " hidden"], epsilon: float
) -> Float[Tensor, "*batch hidden"]:
    """hidden / sqrt(mean(hidden^2) + epsilon) * weight over the last axis, in the inputs' dtype, gradients included."""
    result: Tensor = _RMSNorm.apply(hidden, weight, epsilon)
    return result


class _RMSNorm(torch.autograd.Function):
    """With g = dL/dy and n = x r: dL/dx = r (g w - n mean(g w n)), dL/dw = sum of g n over rows."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        root = torch.linalg.vector_norm(hidden, dim=-1, keepdim=True)
        inverse = root.square_().div_(hidden.shape[-1]).add_(epsilon).rsqrt_()
        ctx.save_for_backward(hidden, weight, inverse)
        return (hidden * inverse).mul_(weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        hidden, weight, inverse = ctx.saved_tensors
        grad = grads[0].contiguous()
        # That of a layer norm whose mean is 0, one kernel: r (g w - mean(g w) - n mean(g w n)).
        of_hidden, of_weight, _ = torch.ops.aten.native_layer_norm_backward(
            grad, hidden, [hidden.shape[-1]], torch.zeros_like(inverse), inverse, weight, None, [True, True, False]
        )
        means = (grad @ weight).unsqueeze(-1).div_(hidden.shape[-1])
        return of_hidden.addcmul_(means, inverse), of_weight, None

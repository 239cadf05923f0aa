"""Faster float32 matmuls on a CPU: by oneDNN where MKL leaves AVX-512 unused.

torch gives float32 matmuls to MKL, which keeps to AVX2 on processors that are not Intel's. Measured on an AMD EPYC
with AVX-512, one thread, 8,300 x 128 by 128 x 128: 90 GFLOP/s by MKL, 226 by oneDNN, which torch ships as well. On an
Intel Xeon with AVX-512 MKL is the faster one at every shape tried: 1.0 to 2.8 times, 1.2 to 4.2 times for a weight's
gradient (96 to 4,000 rows, 128 to 1,536 columns). oneDNN compiles a kernel per shape (about 0.5 ms and 0.6 MB each),
and the number of rows changes at every call; so rows go to it in blocks of a few sizes, the last one padded with rows
of zeros, whose results are dropped.

`use_fast_matmuls` exchanges the class of a loaded model's linear layers: parameters, names, hooks and the state dict
stay as they are. Holds for torch 2.9 to 2.14 and transformers 5.16 to 5.20, whose Qwen2 and Llama are made of plain
`torch.nn.Linear`. Plain references stand in the tests.

Axes: rows = all but the last axis, flattened; ins, outs = a weight's columns and rows.
"""

import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

BLOCK_ROWS = 1024
"""Rows of a full block: twice as many gain 5 %."""
FINE_ROWS, COARSE_ROWS = 32, 128
"""A last block of up to 256 rows is padded to a multiple of the first, a longer one of the second."""
FEWEST_ROWS = 64
FEWEST_OPERATIONS = 2**21
"""Multiplications of one product below which starting oneDNN costs more than it saves."""


def _onednn_pays() -> bool:
    try:
        # The processor says who made it: torch does not tell, and MKL asks it, too.
        processor = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        processor = platform.processor()
    return (
        torch.backends.mkldnn.is_available()
        and torch.backends.cpu.get_cpu_capability() == "AVX512"
        and "GenuineIntel" not in processor
        # What torch.compile emits for a linear layer on a CPU; torch's public modules have no way to it.
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )


ONEDNN = _onednn_pays()
"""Whether float32 products on this machine's CPU go to oneDNN."""


def matmul(
    left: Float[Tensor, "*batch ins"], right: Float[Tensor, "outs ins"], bias: Float[Tensor, " outs"] | None = None
) -> Float[Tensor, "*batch outs"]:
    """left @ right.T + bias, without a gradient."""
    if not _for_onednn(left, right, right.shape[0]):
        return F.linear(left, right, bias)
    rows = left.reshape(-1, left.shape[-1])
    blocks = [_onednn(block, right, bias) for block in _padded_blocks(rows)]
    results = torch.cat(blocks) if len(blocks) > 1 else blocks[0]
    return results[: len(rows)].view(*left.shape[:-1], right.shape[0])


def wide_matmul(
    left: Float[Tensor, "rows ins"], right: Float[Tensor, "outs ins"], dtype: torch.dtype
) -> Float[Tensor, "rows outs"]:
    """left @ right.T in `dtype`, without a gradient: on a GPU sums of narrow factors stay wide."""
    # Elsewhere torch has no products of another dtype than that of their factors.
    if left.device.type == "cuda" and left.dtype in (torch.bfloat16, torch.float16) and dtype == torch.float32:
        return torch.mm(left, right.t(), out_dtype=dtype)
    return matmul(left, right).to(dtype)


def transposed_matmul(left: Float[Tensor, "rows outs"], right: Float[Tensor, "rows ins"]) -> Float[Tensor, "outs ins"]:
    """left.T @ right, without a gradient: that of a weight, summed over rows."""
    if not _for_onednn(left, right, right.shape[1]):
        return left.t() @ right
    total = left.new_zeros(left.shape[1], right.shape[1])
    for one, other in zip(_padded_blocks(left), _padded_blocks(right), strict=True):
        total += _onednn(one.t(), other.t(), None)
    return total


def linear(
    inputs: Float[Tensor, "*batch ins"], weight: Float[Tensor, "outs ins"], bias: Float[Tensor, " outs"] | None = None
) -> Float[Tensor, "*batch outs"]:
    """`torch.nn.functional.linear`, gradients included."""
    if torch.is_grad_enabled() and _for_onednn(inputs, weight, weight.shape[0]):
        return _Linear.apply(inputs, weight, bias)
    return matmul(inputs, weight, bias)


class _Linear(torch.autograd.Function):
    """y = x W^T + b: dL/dx = g W, dL/dW = g^T x, dL/db = sum of g over rows."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(inputs, weight)
        return matmul(inputs, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        inputs, weight = ctx.saved_tensors
        rows = grads[0].flatten(0, -2)
        wants_inputs, wants_weight, wants_bias = ctx.needs_input_grad
        return (
            matmul(grads[0], weight.t()) if wants_inputs else None,
            transposed_matmul(rows, inputs.flatten(0, -2)) if wants_weight else None,
            rows.sum(dim=0) if wants_bias else None,
        )


def _for_onednn(rows: Tensor, other: Tensor, outs: int) -> bool:
    return (
        ONEDNN
        and rows.dtype == other.dtype == torch.float32
        and rows.device.type == "cpu"
        and rows.numel() >= FEWEST_ROWS * rows.shape[-1]
        and rows.numel() * outs >= FEWEST_OPERATIONS
    )


def _padded_blocks(rows: Tensor) -> Iterator[Tensor]:
    for block in rows.split(BLOCK_ROWS):
        missing = -len(block) % (FINE_ROWS if len(block) <= 2 * COARSE_ROWS else COARSE_ROWS)
        yield F.pad(block, (0, 0, 0, missing)) if missing else block


def _onednn(left: Tensor, right: Tensor, bias: Tensor | None) -> Tensor:
    result: Tensor = torch.ops.mkldnn._linear_pointwise(left, right, bias, "none", [], "")
    return result


class FastLinear(nn.Linear):
    """A linear layer that multiplies by `linear` below; parameters, names and results are those of nn.Linear."""

    def forward(self, inputs: Float[Tensor, "*batch ins"]) -> Float[Tensor, "*batch outs"]:
        """(..., in_features) to (..., out_features), as `nn.Linear`."""
        return linear(inputs, self.weight, self.bias)


def use_fast_matmuls(model: nn.Module) -> None:
    """Let the plain linear layers of `model` multiply by `linear` below, in place; subclasses keep their own way.

    Nothing changes where products are torch's own anyhow.
    """
    if not ONEDNN:
        return
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = FastLinear

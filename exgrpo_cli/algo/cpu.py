"""Faster float32 matmuls on a CPU: by oneDNN where it is measured to be faster than MKL.

torch gives float32 matmuls to MKL, which keeps to AVX2 on processors that are not Intel's; oneDNN, which torch ships as
well, does not. Flags do not tell which one gains: on one EPYC with AVX-512 MKL reached 90 GFLOP/s and oneDNN 226, on
another (Zen 4) oneDNN made a whole step 1.24 times as long, and on Intel Xeons it takes 1.0 to 2.8 times MKL's time. So
it is measured, once a processor. oneDNN compiles a kernel per shape (about 0.5 ms and 0.6 MB each), and the number of
rows changes at every call; so they are padded to one of a few, by rows of zeros whose results are dropped. A
packed micro-batch has such a number from the start (`missing_rows`), and is not copied.

`use_fast_matmuls` exchanges the class of a loaded model's linear layers: parameters, names, hooks and the state dict
stay as they are. Holds for torch 2.9 to 2.14 and transformers 5.16 to 5.24, whose Qwen2 and Llama are made of plain
`torch.nn.Linear`. Plain references stand in the tests.

Axes: rows = all but the last axis, flattened; ins, outs = a weight's columns and rows.
"""

import math
import time
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, cast

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from exgrpo_cli.base import errors, files
from exgrpo_cli.base.cache import cached_folder
from exgrpo_cli.base.versions import processor

PADDED_ROWS = ((256, 32), (2048, 128), (math.inf, 512))
"""Up to so many rows are padded to a multiple of so many."""
FEWEST_ROWS = 64
FEWEST_OPERATIONS = 2**21
"""Multiplications of one product below which starting oneDNN costs more than it saves."""


MEASURED = ((256, 128, 256), (512, 512, 512), (64, 576, 1536))
"""Rows, ins and outs of the products by which the choice is made."""
MEASURED_GRADIENT = (2048, 128, 256)
"""The same of a weight's gradient."""
LEAST_GAIN = 1.15
"""Least ratio of MKL's time to oneDNN's at which oneDNN is taken: more than measurements differ by."""
ROUNDS = 4


@cache
def onednn_pays() -> bool:
    """Whether float32 products on this machine's CPU go to oneDNN: measured in 50 ms, and kept for its processor."""
    # What torch.compile emits for a linear layer on a CPU; torch's public modules have no way to it.
    if not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    try:
        key = {"processor": processor(), "torch": torch.__version__, "measured": [*MEASURED, MEASURED_GRADIENT]}
        folder = cached_folder(
            name="matmuls",
            key=key,
            build=lambda folder: files.write_text(folder / "gain", f"{_gain():.3f}\n"),
            notice=lambda text: None,
        )
        return float((folder / "gain").read_text(encoding="utf-8")) >= LEAST_GAIN
    except (errors.InputError, OSError):
        return _gain() >= LEAST_GAIN


@torch.no_grad()
def _gain() -> float:
    """MKL's time over oneDNN's, the mean over the products measured; of each the best of some rounds, taken in turn.

    By one thread: several wait for one another in loops, so on a busy machine their CPU time says nothing.
    """
    generator = torch.Generator().manual_seed(0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)

    def ratio(sizes: Sequence[tuple[int, int]], ways: Sequence[Callable[[Tensor, Tensor], object]]) -> float:
        left, right = (torch.randn(size, generator=generator) for size in sizes)
        times = np.array([[_seconds(way, left, right) for way in ways] for _ in range(ROUNDS)])
        mkl, onednn = times.min(axis=0)
        return float(np.log(mkl / onednn))

    logs = [ratio([(rows, ins), (outs, ins)], [F.linear, _multiplied]) for rows, ins, outs in MEASURED]
    rows, ins, outs = MEASURED_GRADIENT
    logs.append(ratio([(rows, outs), (rows, ins)], [lambda left, right: left.t() @ right, _transposed]))
    torch.set_num_threads(threads)
    return float(np.exp(np.mean(logs)))


def _seconds(product: Callable[[Tensor, Tensor], object], left: Tensor, right: Tensor) -> float:
    started = time.process_time()
    product(left, right)
    return time.process_time() - started


def matmul(
    left: Float[Tensor, "*batch ins"], right: Float[Tensor, "outs ins"], bias: Float[Tensor, " outs"] | None = None
) -> Float[Tensor, "*batch outs"]:
    """left @ right.T + bias, without a gradient."""
    if not _for_onednn(left, right, right.shape[0]):
        return F.linear(left, right, bias)
    return _multiplied(left.reshape(-1, left.shape[-1]), right, bias).view(*left.shape[:-1], right.shape[0])


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
    return _transposed(left, right)


def _multiplied(rows: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
    return _onednn(_padded(rows), right, bias)[: len(rows)]


def _transposed(left: Tensor, right: Tensor) -> Tensor:
    return _onednn(_padded(left).t(), _padded(right).t(), None)


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
        onednn_pays()
        and rows.dtype == other.dtype == torch.float32
        and rows.device.type == "cpu"
        and rows.numel() >= FEWEST_ROWS * rows.shape[-1]
        and rows.numel() * outs >= FEWEST_OPERATIONS
    )


def missing_rows(count: int) -> int:
    """Rows by which `count` are padded for a product of oneDNN."""
    return -count % next(multiple for most, multiple in PADDED_ROWS if count <= most)


def _padded(rows: Tensor) -> Tensor:
    missing = missing_rows(len(rows))
    return F.pad(rows, (0, 0, 0, missing)) if missing else rows


def _onednn(left: Tensor, right: Tensor, bias: Tensor | None) -> Tensor:
    result: Tensor = torch.ops.mkldnn._linear_pointwise(left, right, bias, "none", [], "")
    return result


class FastLinear(nn.Linear):
    """A linear layer that multiplies by `linear` below; parameters, names and results are those of nn.Linear."""

    def forward(self, inputs: Float[Tensor, "*batch ins"]) -> Float[Tensor, "*batch outs"]:
        """(..., in_features) to (..., out_features), as `nn.Linear`."""
        return linear(inputs, self.weight, self.bias)


class RoundedLinear(nn.Linear):
    """A linear layer whose float32 matmuls have bfloat16 factors, forward and backward; their sums are float32, rounded
    once at their end. Parameters and names are those of nn.Linear."""

    def forward(self, inputs: Float[Tensor, "*batch ins"]) -> Float[Tensor, "*batch outs"]:
        """(..., in_features) to (..., out_features), as `nn.Linear`."""
        outputs = F.linear(inputs.bfloat16(), self.weight.bfloat16()).float()
        return outputs if self.bias is None else outputs + self.bias


def has_rounded_matmuls(model: nn.Module) -> bool:
    """Whether layers of `model` multiply factors rounded to bfloat16."""
    return any(isinstance(module, RoundedLinear) for module in model.modules())


def use_fast_matmuls(model: nn.Module, dtype: str = "float32") -> None:
    """Let the plain linear layers of `model` multiply by `linear` above, in place; subclasses keep their own way.

    With `dtype` "bfloat16" factors are rounded to it, but not the head's, whose logits are tens: there bfloat16 is
    exact to 0.1. Nothing changes where products are torch's own anyhow.
    """
    faster: type[nn.Linear] = RoundedLinear if dtype == "bfloat16" else FastLinear
    if faster is FastLinear and not onednn_pays():
        return
    head = cast(Any, model).get_output_embeddings()
    for module in model.modules():
        if type(module) is nn.Linear and not (faster is RoundedLinear and module is head):
            module.__class__ = faster

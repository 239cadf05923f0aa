"""What is changed inside DeepSpeed: its gradient norm is read and bounded, and one extension is never built.

Holds for DeepSpeed 0.19. None of these names is public; `tests/engines/test_sharded_policy.py` fails when one is gone.
"""

from collections.abc import Iterable
from contextlib import redirect_stdout
from io import StringIO
from typing import Any

import torch
from torch import Tensor

SHARED_MEMORY_EXTENSION = "deepspeed_shm_comm"


def skip_shared_memory_extension(deepspeed: Any) -> None:
    """Never build shared memory beside gloo: minutes of compiling at first use, and a build cut short blocks others."""
    deepspeed.ops.__compatible_ops__[SHARED_MEMORY_EXTENSION] = False


def without_prints() -> redirect_stdout[StringIO]:
    """Standard output is data; DeepSpeed prints what it does there for stage 1 of a bfloat16 model."""
    return redirect_stdout(StringIO())


class BoundedNorm:
    """DeepSpeed's gradient norm, remembered, and reported as invalid beyond a bound.

    DeepSpeed skips a step whose norm is invalid, and cleans up behind it; it knows no bound of its own.
    """

    def __init__(self, optimizer: Any, bound: float) -> None:
        """Watch `optimizer`, one of DeepSpeed's; a norm above `bound` skips its step."""
        self.latest = 0.0
        """Norm of the latest step, before clipping; infinite where it was invalid."""
        self._bound = bound
        # Stages 1 and 2 compute the norm over all groups at once, stage 3 group by group. For stage 1 of a bfloat16
        # model an optimizer of its own asks for gradients and takes their norm: that of one number is the number.
        if hasattr(optimizer, "scaled_global_norm"):
            whole = optimizer.scaled_global_norm
            optimizer.scaled_global_norm = lambda *args, **kwargs: self._checked([whole(*args, **kwargs)])[0]
        elif hasattr(optimizer, "_get_norm_groups"):
            groups = optimizer._get_norm_groups
            optimizer._get_norm_groups = lambda: self._checked(groups())
        else:
            gradients = optimizer.get_grads_for_norm
            optimizer.get_grads_for_norm = lambda for_clipping=False: (
                gradients(for_clipping=True) if for_clipping else (self._checked([_norm(gradients()[0])]), {})
            )

    def _checked(self, norms: list[Any]) -> list[Any]:
        stacked = torch.stack([torch.as_tensor(norm, dtype=torch.float32) for norm in norms])
        invalid = bool((~torch.isfinite(stacked) | (stacked < 0)).any())
        self.latest = float("inf") if invalid else float(stacked.norm())
        return [torch.full_like(stacked[0], float("inf"))] if self.latest > self._bound else norms


def _norm(tensors: Iterable[Tensor]) -> Tensor:
    return torch.stack([tensor.norm() for tensor in tensors]).norm()

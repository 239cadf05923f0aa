"""Arrays of the host to the policy's device, without making the host wait for what the device has queued."""

import numpy as np
import torch
from torch import Tensor


def to_device(array: np.ndarray, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """`array` on `device`, of its own dtype or of `dtype`; on a CPU it shares memory with `array` where it can.

    A copy from memory that is not pinned, or one that converts on its way, makes a GPU's host wait.
    """
    host = torch.from_numpy(array)
    if dtype is not None:
        host = host.to(dtype)
    if device.type == "cuda":
        host = host.pin_memory()
    return host.to(device, non_blocking=True)

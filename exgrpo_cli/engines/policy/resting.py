"""Tensors that only updates need, kept in main memory between updates (`optim.offload_during_rollouts`)."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


class RestingTensors:
    """Optimizer state and master weights: on the device from `wake` to `rest`, in pinned main memory otherwise."""

    def __init__(self, tensors: Callable[[], Sequence[Tensor]], device: torch.device) -> None:
        """`tensors` gives what there is by now, what is added later behind what was there before."""
        self._tensors = tensors
        self._device = device
        self._hosts: list[Tensor] = []
        """Room in main memory, kept: pinning it takes longer than copying."""
        self._resting = 0
        """Tensors that are in main memory now."""

    @torch.no_grad()
    def rest(self) -> None:
        """Move all there is to main memory; its bits stay the same."""
        tensors = self._tensors()[self._resting :]
        for tensor in tensors:
            self._hosts += [] if self._resting < len(self._hosts) else [_room_for(tensor)]
            tensor.data = self._hosts[self._resting].copy_(tensor.data)
            self._resting += 1

    @torch.no_grad()
    def wake(self) -> None:
        """Move what rests back to the device."""
        for tensor, host in zip(self._tensors()[: self._resting], self._hosts, strict=False):
            tensor.data = torch.empty_like(host, device=self._device).copy_(host, non_blocking=True)
        self._resting = 0


def _room_for(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda, requires_grad=False)

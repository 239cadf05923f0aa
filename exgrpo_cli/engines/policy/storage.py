"""A policy's state off its device: in main memory between updates, and read back from files."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError

import torch
from safetensors import SafetensorError
from torch import Tensor

from exgrpo_cli.base.errors import InputError, first_line


class OffloadedTensors:
    """Optimizer state and master weights, in pinned main memory from `offload` to `load`.

    `optim.offload_during_rollouts`: only updates need them.
    """

    def __init__(self, tensors: Callable[[], Sequence[Tensor]], device: torch.device) -> None:
        """`tensors` gives what there is by now, what is added later behind what was there before."""
        self._tensors = tensors
        self._device = device
        self._hosts: list[Tensor] = []
        """Room in main memory, kept: pinning it takes longer than copying."""
        self._num_offloaded = 0

    @torch.no_grad()
    def offload(self) -> None:
        """Move all there is to main memory; its bits stay the same."""
        for tensor in self._tensors()[self._num_offloaded :]:
            if self._num_offloaded == len(self._hosts):
                room = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda, requires_grad=False)
                self._hosts.append(room)
            tensor.data = self._hosts[self._num_offloaded].copy_(tensor.data)
            self._num_offloaded += 1

    @torch.no_grad()
    def load(self) -> None:
        """Move what is in main memory back to the device."""
        for tensor, host in zip(self._tensors()[: self._num_offloaded], self._hosts, strict=False):
            tensor.data = torch.empty_like(host, device=self._device).copy_(host, non_blocking=True)
        self._num_offloaded = 0


@contextmanager
def reading_file(path: Path) -> Iterator[None]:
    """Raises InputError naming the file where it is missing, cut short or damaged."""
    damage = OSError, SafetensorError, RuntimeError, UnpicklingError, EOFError, ValueError, KeyError, TypeError
    try:
        yield
    except damage as error:
        # What torch advises for such a file would run whatever code is in it.
        reason = "more than tensors is in it" if isinstance(error, UnpicklingError) else first_line(error)
        raise InputError(
            f"{path} cannot be read ({reason}): restore it from a copy, or remove this checkpoint to resume "
            "from the one before."
        ) from error

"""What a phase takes: seconds, and the most memory that was in use, of a GPU or, on a CPU, by this process."""

import ctypes
import resource
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from exgrpo_cli.algo.cpu import matmul
from exgrpo_cli.base.types import TokenSequence
from exgrpo_cli.machine.memory import Shape

MATRIX_ROWS = {"cpu": 1024, "cuda": 8192}
"""Rows and columns of the product whose speed stands for what the device can do."""
PRODUCTS = 5
_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


@dataclass(frozen=True, kw_only=True, slots=True)
class Phase:
    """One phase of one step."""

    name: str
    step: int
    """From 1; 0 is before the first."""
    seconds: float
    peak_bytes: int
    """Most memory in use, beyond what there was before the model was loaded: on a GPU that of other processes, and this
    one's CUDA context."""


class Meter:
    """Times phases and reads their memory."""

    def __init__(self, device: torch.device) -> None:
        """Begin to count memory here: what is taken so far is not the run's, on a GPU that others use too."""
        self.phases: list[Phase] = []
        self.step = 0
        self._device = device
        self._before = self._taken()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Work to be measured."""
        if self._device.type == "cuda":
            # What torch keeps afterwards is then the most that this phase has taken.
            torch.cuda.empty_cache()
        elif _CLEAR.exists():
            # What is free goes back to the system, and the mark down to what is left.
            ctypes.CDLL(None).malloc_trim(0)
            _CLEAR.write_text("5")
        started = time.perf_counter()
        yield
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        seconds = time.perf_counter() - started
        self.phases.append(
            Phase(name=name, step=self.step, seconds=seconds, peak_bytes=max(0, self._taken() - self._before))
        )

    def seconds(self, name: str) -> float:
        """Of the latest phase of that name; 0 where there was none."""
        return next((phase.seconds for phase in reversed(self.phases) if phase.name == name), 0.0)

    def peak(self, name: str) -> int:
        """Most memory over all phases of that name, in bytes."""
        return max((phase.peak_bytes for phase in self.phases if phase.name == name), default=0)

    def _taken(self) -> int:
        if self._device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self._device)
            return total - free
        return _resident_peak()


def _resident_peak() -> int:
    """Most bytes this process had in main memory since the mark was last cleared, or ever where it cannot be."""
    if _STATUS.exists():
        line = next(line for line in _STATUS.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@torch.no_grad()
def product_speed(device: torch.device, dtype: torch.dtype) -> float:
    """Floating point operations a second of a large matrix product, the best of a few."""
    size = MATRIX_ROWS[device.type]
    matrix, best = torch.ones(size, size, dtype=dtype, device=device), float("inf")
    for _ in range(PRODUCTS):
        started = time.perf_counter()
        matmul(matrix, matrix)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - started)
    return 2 * size**3 / best


def forward_operations(body: nn.Module, shape: Shape, groups: Sequence[Sequence[TokenSequence]]) -> int:
    """Operations of one forward pass over `groups`, each of one prompt; a backward pass takes twice as many.

    Two for each weight that a token is multiplied with, the head's for response tokens alone, and causal attention.
    """
    embedded = shape.vocab_size * shape.hidden_size
    matrices = sum(parameter.numel() for parameter in body.parameters()) - embedded
    responses = sum(len(row.response_ids) for group in groups for row in group)
    inputs = responses + sum(len(group[0].prompt_ids) for group in groups)
    lengths = [len(row.prompt_ids) + len(row.response_ids) for group in groups for row in group]
    attention = 2 * shape.num_layers * shape.query_size * sum(length**2 for length in lengths)
    return 2 * matrices * inputs + 2 * embedded * responses + attention

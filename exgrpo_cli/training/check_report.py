"""Measures of a check (seconds and memory by phase, floating point operations), and its report: lines and JSON."""

import ctypes
import resource
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from exgrpo_cli.algo.cpu import matmul
from exgrpo_cli.base.types import TokenSequence
from exgrpo_cli.machine.memory import Shape, size

ROOM = 0.1
SLACK_BYTES = 2**29
"""What may be measured above the plan: a tenth, and half a gibibyte for what is too small to be planned."""
LONG_SECONDS = 600
REST = "loading and all else"
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """Memory of one part of a step, per rank, in bytes."""

    part: str
    planned: int
    """For the rows of the check."""
    measured: int
    """The most that a rank had."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunPeaks:
    """What a plan comes to on a rank, in bytes."""

    rollouts: int
    update: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Speed:
    """How fast the second step went, all ranks together."""

    part: str
    tokens_per_second: float
    utilisation: float | None
    """Operations of the model a second over those of a large matrix product on the same device; None for rollouts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckReport:
    """Two steps of a configuration on this machine."""

    backbone: str
    engines: str
    device: str
    versions: dict[str, str]
    lengths: str
    """Of prompts and responses, and how many rows."""
    memory: tuple[Memory, ...]
    memory_is_judged: bool
    """Whether clearly more than planned is a problem: on a GPU alone."""
    planned_for_run: RunPeaks | None
    """The plan that `--dry-run` prints; None where it is the one of the check."""
    speeds: tuple[Speed, ...]
    phases: tuple[Phase, ...]
    """Of the main rank."""
    seconds: float
    """From before the weights are made to after the last measurement."""
    faults_caught: tuple[str, ...]
    logprob_gap: float | None
    """Mean over fresh tokens of both steps."""
    problems: tuple[str, ...]
    """Empty when all is well."""

    def to_json(self) -> dict[str, Any]:
        """What `--json` prints."""
        return asdict(self) | {"well": not self.problems}

    def lines(self) -> list[str]:
        """For people, one fact a line, the verdict last."""
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        gap = "not measured" if self.logprob_gap is None else f"{self.logprob_gap:.2g} a token"
        return [
            f"exgrpo check of {self.backbone}, {self.engines}, on {self.device}",
            f"with       {versions}",
            f"lengths    {self.lengths}",
            *(f"memory     {_memory(each, judged=self.memory_is_judged)}" for each in self.memory),
            *self._plan_lines(),
            *(f"speed      {_speed(each)}" for each in self.speeds),
            *self._time_lines(),
            f"canary     stopped the run for: {', '.join(self.faults_caught) or 'nothing'}",
            f"log-probs  of rollout engine and trainer differ by {gap}",
            *(f"problem    {problem}" for problem in self.problems),
            f"verdict    {f'{len(self.problems)} problems, see above' if self.problems else 'all is well'}",
        ]

    def _plan_lines(self) -> list[str]:
        if (run := self.planned_for_run) is None:
            return []
        return [
            "note       the plan above is of this check, its rows and no validation; the run is planned at "
            f"{size(run.rollouts)} during rollouts and {size(run.update)} during the update (--dry-run)"
        ]

    def _time_lines(self) -> list[str]:
        """Seconds of both steps by phase."""
        names = dict.fromkeys(phase.name for phase in self.phases)
        seconds = {name: sum(phase.seconds for phase in self.phases if phase.name == name) for name in names}
        seconds[REST] = self.seconds - sum(seconds.values())
        parts = ", ".join(f"{name} {taken:.1f} s" for name, taken in seconds.items())
        lines = [f"time       {self.seconds:.1f} s: {parts}"]
        if self.seconds > LONG_SECONDS:
            longest = max(seconds, key=lambda name: seconds[name])
            lines.append(f"note       this took more than ten minutes, most of them for {longest}")
        return lines


def allowed(planned: int) -> int:
    """The most bytes that count as `planned` when they are measured."""
    return int((1 + ROOM) * planned) + SLACK_BYTES


def _memory(memory: Memory, *, judged: bool) -> str:
    bound = f", up to {size(allowed(memory.planned))} is as planned" if judged else ""
    return f"{memory.part}: {size(memory.measured)}; planned {size(memory.planned)}{bound}"


def _speed(speed: Speed) -> str:
    share = "" if speed.utilisation is None else f", {speed.utilisation:.0%} of a large matrix product's FLOP/s"
    return f"{speed.part}: {speed.tokens_per_second:,.0f} tokens/s{share}"

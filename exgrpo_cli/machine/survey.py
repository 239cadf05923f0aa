"""Cores, memory, GPUs, threads and installed versions of this machine."""

import os
import re
import resource
import sys
from dataclasses import dataclass
from pathlib import Path

from exgrpo_cli.base.errors import InputError
from exgrpo_cli.base.versions import has_gpu_device, usable_cores


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """One visible accelerator."""

    name: str
    memory_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """The resources a run may use."""

    cores: int
    """CPU cores this process may run on."""
    memory_bytes: int
    """Main memory, or the container's limit where that is lower."""
    gpus: tuple[Gpu, ...]


def survey_machine(*, look_for_gpus: bool = True) -> Machine:
    """Look at the machine this process runs on."""
    return Machine(cores=usable_cores(), memory_bytes=usable_memory(), gpus=visible_gpus() if look_for_gpus else ())


def cards_of(cards: str) -> tuple[Gpu, ...]:
    """GPUs to plan for: "24" is one of 24 GB, "8x80" are eight of 80 GB.

    Raises InputError for any other text.
    """
    written = re.fullmatch(r"(?:([1-9]\d{0,2})x)?([1-9]\d{0,3})", cards.strip())
    if written is None:
        raise InputError(f"--gpu {cards!r} is no card: write the GB of one, such as 24, or of several, such as 8x80.")
    return (Gpu(name=f"{written[2]} GB", memory_bytes=int(written[2]) * 10**9),) * int(written[1] or 1)


def usable_memory(cgroup_limit: Path = Path("/sys/fs/cgroup/memory.max")) -> int:
    """Main memory in bytes, or the limit of this control group where that is lower."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = cgroup_limit.read_text().strip() if cgroup_limit.is_file() else "max"
    return physical if limit == "max" else min(physical, int(limit))


def visible_gpus() -> tuple[Gpu, ...]:
    """GPUs that torch can use, in its order; it is imported where there may be one."""
    if not has_gpu_device():
        return ()
    import torch

    if not torch.cuda.is_available():
        return ()
    properties = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return tuple(Gpu(name=each.name, memory_bytes=each.total_memory) for each in properties)


def choose_threads(requested: int, cores: int | None = None, *, processes: int = 1) -> int:
    """Threads for torch: `requested` when above 0, else each process's part of half of `cores` (None: the usable ones).

    OpenMP threads that share a busy core wait for each other in spin loops and can fall to a hundredth of their speed.
    Half the cores leave room for the graders and for a neighbour; and the choice depends on the machine alone, not on
    its load of the moment, because another number of threads sums in another order and gives other last bits.
    """
    return requested or max(1, (cores or usable_cores()) // (2 * processes))


def peak_memory_bytes() -> int:
    """Most memory this process has held: on the GPU where there is one, else resident in main memory."""
    import torch

    if torch.cuda.is_available():
        return int(torch.cuda.max_memory_allocated())
    # In bytes on a Mac, in KiB elsewhere.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)

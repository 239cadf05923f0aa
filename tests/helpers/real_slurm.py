"""A real Slurm of one node, from Debian's packages, for tests that are run by hand."""

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from two_ranks import free_port

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol")
SEARCHED = f"{os.environ['PATH']}:/usr/sbin"
CONFIG = Path(__file__).with_name("slurm.conf").read_text()
"""No accounting, which would need a database: submitit then knows a task's end by what it leaves behind."""


def why_not() -> str:
    """What keeps Slurm from being started here; empty where nothing does."""
    missing = [name for name in PROGRAMS if shutil.which(name, path=SEARCHED) is None]
    if missing:
        return f"no {', '.join(missing)}: apt-get install slurm-wlm munge"
    return "" if os.geteuid() == 0 else "slurmd wants to be root"


@contextmanager
def real_slurm(setenv: Callable[[str, str], None]) -> Iterator[None]:
    """munged, slurmctld and slurmd of this test alone, with all their files in one folder."""
    setenv("PATH", SEARCHED)
    # Not below pytest's own folder, which others must not enter: munge refuses such a place for its socket.
    folder = Path(f"/tmp/exgrpo-slurm-{os.getpid()}")
    folder.mkdir(mode=0o755)
    for name in ("spool", "state"):
        (folder / name).mkdir()
    config = folder / "slurm.conf"
    ports = [free_port(), free_port()]
    config.write_text(CONFIG.format(host=socket.gethostname(), ports=ports, cpus=os.cpu_count(), folder=folder))
    setenv("SLURM_CONF", str(config))
    key = folder / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    files = {"key-file": key, "socket": folder / "munge.socket", "pid-file": folder / "munged.pid"}
    files |= {"log-file": folder / "munge.log", "seed-file": folder / "munge.seed"}
    subprocess.run(["munged", "--force", *(f"--{name}={path}" for name, path in files.items())], check=True)
    for name in ("slurmctld", "slurmd"):
        subprocess.run([name, "-L", str(folder / f"{name}.log")], check=True)
    try:
        wait_until(lambda: "idle" in subprocess.run(["sinfo"], capture_output=True, text=True, check=False).stdout)
        yield
    finally:
        # Steps outlive their slurmd: none must be left when it is stopped.
        subprocess.run(["scancel", "--user", "root"], check=False)
        wait_until(lambda: not subprocess.run(["squeue", "-h"], capture_output=True, check=False).stdout)
        for name in ("slurmd", "slurmctld", "munged"):
            pid = folder / f"{name}.pid"
            if pid.is_file():
                os.kill(int(pid.read_text()), signal.SIGTERM)
                wait_until(lambda pid=pid: not pid.is_file() or not Path(f"/proc/{pid.read_text().strip()}").exists())
        shutil.rmtree(folder)


def wait_until(holds: Callable[[], bool]) -> None:
    """Wait, a minute at most."""
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.2)

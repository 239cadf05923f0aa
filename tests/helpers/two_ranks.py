"""Starting two real ranks: one job of `rank_worker.py`, or a run as if on two hosts."""

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from processes import python

WORKER = Path(__file__).parent / "rank_worker.py"


TORCHRUN = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def two_ranks(job: str, folder: Path, launcher: Sequence[str] = TORCHRUN) -> subprocess.CompletedProcess[str]:
    paths = [str(Path(__file__).parents[2]), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    variables = {"PYTHONPATH": os.pathsep.join(paths)}
    return python("-m", *launcher, WORKER, job, folder, variables=variables, timeout=240)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return int(probe.getsockname()[1])


def agents(arguments: list[str], folders: Sequence[Path]) -> list[subprocess.Popen[str]]:
    """One torchrun agent of one rank per folder, as if each were a host of its own, at work in its folder."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", str(len(folders)), "--nproc-per-node", "1"]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{free_port()}", "--rdzv-id", "hosts"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return [
        subprocess.Popen([*command, "-m", "exgrpo_cli", "train", *arguments], cwd=folder, text=True, **pipes)
        for folder in folders
    ]

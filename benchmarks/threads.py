"""Seconds of a default training step with one and two threads, beside an idle and a busy second core.

    python benchmarks/threads.py

One run on two cores whose steps take the four conditions in turn. A core is kept busy by a process that counts; the
run's graders wait for most of a step, as always. Says something on an otherwise idle machine alone: the load average is
printed.
"""

import argparse
import itertools
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from exgrpo_cli.base.reporter import SilentReporter
from exgrpo_cli.config.layers import build_config
from exgrpo_cli.training.run import train

# At this learning rate nothing is learned, so lengths stay as they are.
SETTINGS = (
    "optim.learning_rate=1e-9",
    "validation.every=0",
    "data.heldout=none",
    "run.plots=false",
    "run.threads=1",
    "run.save_every=1000000",
)
CONDITIONS = tuple(itertools.product((1, 2), (False, True)))
"""Threads, and whether another process keeps a core busy."""


class Turning(SilentReporter):
    """Notes each step's seconds and prepares the next condition."""

    def __init__(self, neighbour: int) -> None:
        self.taken: dict[tuple[int, bool], list[float]] = {condition: [] for condition in CONDITIONS}
        self._neighbour = neighbour
        self._turn = 0

    def step(self, line: Mapping[str, Any], total: int) -> None:
        """The first step of all, which warms up, does not count."""
        if self._turn:
            self.taken[CONDITIONS[self._turn % len(CONDITIONS)]].append(line["time/step"])
        self._turn += 1
        threads, busy = CONDITIONS[self._turn % len(CONDITIONS)]
        torch.set_num_threads(threads)
        os.kill(self._neighbour, signal.SIGCONT if busy else signal.SIGSTOP)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10, help="steps of each condition")
    options = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))[:2]
    os.sched_setaffinity(0, cores)
    print(f"load average before {os.getloadavg()[0]:.1f}", flush=True)
    neighbour = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        neighbour.send_signal(signal.SIGSTOP)
        turning = Turning(neighbour.pid)
        config = build_config(assignments=[*SETTINGS, f"run.steps={options.rounds * len(CONDITIONS) + 1}"])
        with tempfile.TemporaryDirectory() as folder:
            train(config, Path(folder) / "run", reporter=turning)
    finally:
        neighbour.kill()
        neighbour.wait()
    for (threads, busy), seconds in turning.taken.items():
        core = "busy" if busy else "idle"
        print(f"threads {threads}, second core {core}: {statistics.median(seconds):.2f} s a step "
              f"(best {min(seconds):.2f})")  # fmt: skip


if __name__ == "__main__":
    main()

"""What commands cost beside the steps of a run: wall and CPU seconds with those of their children, medians.

    python benchmarks/start.py [--python OTHER/.venv/bin/python] [--commands doctor study] [--repeats 3]

A run of a study is measured by difference: studies of two and of twelve runs of one small step, one run at a time. One
thread; a first start, which is not counted, warms the files and builds the tiny backbone.
"""

import argparse
import ctypes
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

SMALL = ("run.steps=1", "rollout.questions_per_step=2", "rollout.group_size=2")
SMALL += ("validation.max_questions=2", "validation.samples=1")
PR_SET_CHILD_SUBREAPER = 36
COMMANDS: dict[str, tuple[str, ...]] = {
    "help": ("--help",),
    "dry-run": ("train", "--dry-run"),
    "doctor": ("doctor",),
    "prepare": ("prepare",),
    "train": ("train", "--quiet", *(f"--set={each}" for each in SMALL)),
    "evaluate": ("evaluate", "arithmetic", "--model", "tiny", "--max-tokens", "1"),
    "sample": ("sample", "tiny", "1+2=?", "--max-tokens", "1"),
}
STUDY = ("ablate", "--methods", "grpo,exgrpo", "--jobs", "1", *(f"--set={each}" for each in SMALL))


def measure(python: str, arguments: tuple[str, ...]) -> tuple[float, float]:
    """Wall and CPU seconds of one command in an empty folder. Raises SystemExit where it fails."""
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        before, begin = os.times(), time.perf_counter()
        done = subprocess.run(
            [python, "-m", "exgrpo_cli", *arguments], cwd=folder, env=environment, capture_output=True, text=True
        )
        wall = time.perf_counter() - begin
        # The server of a study's runs ends a moment after the study.
        with suppress(ChildProcessError):
            while True:
                os.wait()
        after = os.times()
    if done.returncode:
        raise SystemExit(f"exgrpo {' '.join(arguments)}: {done.stderr}")
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    return wall, cpu


def main() -> None:
    # Processes whose parent has ended come here, with their times.
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [*COMMANDS, "study"]
    parser.add_argument("--python", default=sys.executable, help="interpreter of the checkout to measure")
    parser.add_argument("--commands", nargs="+", choices=names, default=names)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    python = str(Path(options.python).absolute())
    result = {}
    for name in options.commands:
        measure(python, COMMANDS["help"])
        if name == "study":
            parts = [
                [measure(python, (*STUDY, "--seeds", seeds)) for _ in range(options.repeats)] for seeds in ("1", "6")
            ]
            two, twelve = ([statistics.median(column) for column in zip(*part, strict=True)] for part in parts)
            wall, cpu = ((b - a) / 10 for a, b in zip(two, twelve, strict=True))
        else:
            measure(python, COMMANDS[name])
            runs = [measure(python, COMMANDS[name]) for _ in range(options.repeats)]
            wall, cpu = (statistics.median(column) for column in zip(*runs, strict=True))
        result[name] = {"wall_seconds": round(wall, 2), "cpu_seconds": round(cpu, 2)}
        if not options.json:
            print(f"{name:<10} {wall:8.2f} s wall {cpu:8.2f} s CPU", flush=True)
    if options.json:
        print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()

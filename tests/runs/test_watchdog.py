"""The watchdog: real processes that hang, and what they leave behind."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from exgrpo_cli.runs.watchdog import Watchdog

HANG = """
import sys, time
from pathlib import Path
from exgrpo_cli.runs.watchdog import Watchdog

def wait_for_nobody(seconds):
    # In pieces, so that it is not over the moment that a stopped process goes on.
    for _ in range(20):
        time.sleep(seconds / 20)

rank = int(sys.argv[2])
with Watchdog(Path(sys.argv[1]), rank=rank, seconds=float(sys.argv[3])) as watchdog:
    with watchdog.phase("step"), watchdog.phase("rollout"):
        print("in", flush=True)
        wait_for_nobody(1.0 if sys.argv[4] == "ending" else 60)
"""


def rank(folder: Path, number: int, seconds: float, kind: str = "") -> subprocess.Popen[str]:
    command = [sys.executable, "-c", HANG, str(folder), str(number), str(seconds), kind]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "in\n"
    return process


def test_a_phase_past_its_deadline_ends_the_rank_with_its_name_and_leaves_the_stacks_of_all_that_hang(tmp_path):
    late = [rank(tmp_path, number, 1.0) for number in range(2)]
    for number, process in enumerate(late):
        _, error = process.communicate(timeout=60)
        assert process.returncode == 1
        assert error.startswith(f"exgrpo: rank {number} has been in phase 'rollout' for ")
        assert "run.phase_timeout" in error and error.count("\n") == 1
        stacks = (tmp_path / "stacks" / f"rank-{number}.txt").read_text()
        assert f"UTC: rank {number} has been in phase 'rollout' for " in stacks and "wait_for_nobody" in stacks


def test_the_time_for_which_a_terminal_stopped_the_process_does_not_count(tmp_path):
    """Ctrl-Z, and fg after longer than any deadline."""
    stopped = rank(tmp_path, 0, 3.0, "ending")
    stopped.send_signal(signal.SIGTSTP)
    os.waitpid(stopped.pid, os.WUNTRACED)
    time.sleep(3.2)
    stopped.send_signal(signal.SIGCONT)
    _, error = stopped.communicate(timeout=60)
    assert (stopped.returncode, error) == (0, "")


def test_phases_that_end_in_time_leave_nothing(tmp_path):
    """All together they take longer than one may."""
    with Watchdog(tmp_path, rank=0, seconds=2.0) as watchdog:
        for _ in range(8):
            with watchdog.phase("update"):
                time.sleep(0.3)
    assert list(tmp_path.iterdir()) == []


def test_a_rank_that_does_not_see_the_run_folder_makes_none(tmp_path):
    """Hosts need no shared file system."""
    with Watchdog(tmp_path / "elsewhere", rank=1, seconds=1.0) as watchdog, watchdog.phase("update"):
        pass
    assert list(tmp_path.iterdir()) == []

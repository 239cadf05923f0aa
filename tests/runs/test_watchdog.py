"""The watchdog: real processes that hang, and what they leave behind."""

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
    time.sleep(seconds)

rank = int(sys.argv[2])
with Watchdog(Path(sys.argv[1]), rank=rank, seconds=[1.0, 600.0][rank]) as watchdog:
    with watchdog.phase("step"), watchdog.phase("rollout"):
        print("in", flush=True)
        wait_for_nobody(60)
"""


def rank(folder: Path, number: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", HANG, str(folder), str(number)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "in\n"
    return process


def test_a_phase_past_its_deadline_ends_the_rank_with_its_name_and_the_stacks_of_all_ranks(tmp_path):
    patient, late = rank(tmp_path, 1), rank(tmp_path, 0)
    _, error = late.communicate(timeout=60)
    assert late.returncode == 1
    assert error.startswith("exgrpo: rank 0 has been in phase 'rollout' for ")
    assert "run.phase_timeout" in error
    assert error.count("\n") == 1
    assert "wait_for_nobody" in (tmp_path / "stacks" / "rank-0.txt").read_text()
    other = tmp_path / "stacks" / "rank-1.txt"
    for _ in range(600):
        if other.exists() and "wait_for_nobody" in other.read_text():
            break
        time.sleep(0.1)
    assert "wait_for_nobody" in other.read_text()
    patient.kill()
    patient.communicate()


def test_phases_that_end_in_time_leave_nothing(tmp_path):
    with Watchdog(tmp_path, rank=0, seconds=0.2) as watchdog:
        for _ in range(8):
            with watchdog.phase("update"):
                time.sleep(0.05)
    assert list(tmp_path.iterdir()) == []


def test_a_request_of_an_earlier_run_is_forgotten(tmp_path):
    (tmp_path / "stacks").mkdir()
    (tmp_path / "stacks" / "wanted").touch()
    with Watchdog(tmp_path, rank=0, seconds=5.0), Watchdog(tmp_path, rank=1, seconds=5.0):
        time.sleep(1.5)
    assert [path.name for path in (tmp_path / "stacks").iterdir()] == []

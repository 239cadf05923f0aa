"""A study that is killed under way gives the report of one that ran through."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

ARMS = ["--methods", "exgrpo,grpo", "--seeds", "2", "--jobs", "2", "--equal", "steps"]
SMALL = (
    "arithmetic.levels=[2]", "arithmetic.num_train=60", "arithmetic.num_heldout=20", "rollout.questions_per_step=8",
    "replay.start_threshold=0.05", "run.steps=6", "run.save_every=2", "run.threads=1", "run.plots=false",
    "validation.samples=2", "validation.every=2", "validation.train_questions=10",
)  # fmt: skip
TIMES = ("seconds", "training_seconds", "wall_seconds")


def ablate(output: Path, backbone: Path) -> list[str]:
    settings = [part for text in (*SMALL, f"backbone.source={backbone}") for part in ("--set", text)]
    return [sys.executable, "-m", "exgrpo_cli", "ablate", *ARMS, "--output", str(output), *settings]


def without_times(value: Any) -> Any:
    """The report but for how long things took."""
    if isinstance(value, dict):
        return {key: without_times(item) for key, item in value.items() if key not in TIMES}
    return value


@pytest.mark.slow
def test_a_study_killed_under_way_gives_the_same_report(small_backbone: Path, tmp_path: Path) -> None:
    through, study = tmp_path / "through" / "study", tmp_path / "study"
    subprocess.run(ablate(through, small_backbone), check=True, capture_output=True)
    process = subprocess.Popen(ablate(study, small_backbone), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    journal = study / "exgrpo" / "seed-0" / "metrics.jsonl"
    deadline = time.monotonic() + 200
    while not (journal.is_file() and len(journal.read_text().splitlines()) >= 3):
        assert process.poll() is None and time.monotonic() < deadline, "the study ended before it could be killed"
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    # Its runs see that their parent is gone, save and stop; whoever holds a folder's lock is still there.
    again = subprocess.run(ablate(study, small_backbone), capture_output=True, text=True, check=False)
    while "another process" in again.stderr and time.monotonic() < deadline:
        time.sleep(2)
        again = subprocess.run(ablate(study, small_backbone), capture_output=True, text=True, check=False)
    assert again.returncode == 0, again.stderr
    resumed, whole = (without_times(json.loads((each / "results.json").read_text())) for each in (study, through))
    assert resumed == whole

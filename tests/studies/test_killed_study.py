"""A study that is killed under way, and one spread over two machines, give the report of one that ran through."""

import json
import os
import shutil
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


def ablate(output: Path, backbone: Path, *more: str) -> list[str]:
    settings = [part for text in (*SMALL, f"backbone.source={backbone}") for part in ("--set", text)]
    return [sys.executable, "-m", "exgrpo_cli", "ablate", *ARMS, "--output", str(output), *settings, *more]


def without_times(value: Any) -> Any:
    """The report but for how long things took."""
    if isinstance(value, dict):
        return {key: without_times(item) for key, item in value.items() if key not in TIMES}
    return value


def compared(study: Path) -> Any:
    return without_times(json.loads((study / "results.json").read_text()))


@pytest.fixture(scope="module")
def through(small_backbone: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study that ran through, in a folder that the others' have the name of."""
    study = tmp_path_factory.mktemp("through") / "study"
    subprocess.run(ablate(study, small_backbone), check=True, capture_output=True)
    return study


@pytest.mark.slow
def test_a_study_killed_under_way_gives_the_same_report(through: Path, small_backbone: Path, tmp_path: Path) -> None:
    study = tmp_path / "study"
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
    assert compared(study) == compared(through)


@pytest.mark.slow
def test_runs_of_another_machine_count_by_their_results_alone(
    through: Path, small_backbone: Path, tmp_path: Path
) -> None:
    """All result files of one arm and one seed of the other are carried over: one run is left to do."""
    carried = tmp_path / "carried"
    shutil.copytree(through / "results", carried)
    (carried / "exgrpo-1.result.json").unlink()
    study = tmp_path / "study"
    plan = subprocess.run(
        ablate(study, small_backbone, "--results", str(carried), "--dry-run", "--json"), capture_output=True, check=True
    )
    left = [(run["arm"], run["seed"]) for run in json.loads(plan.stdout)["runs"] if run["state"] != "finished"]
    assert left == [("exgrpo", 1)]
    subprocess.run(ablate(study, small_backbone, "--results", str(carried)), check=True, capture_output=True)
    report, whole = compared(study), compared(through)
    # Where the questions of two runs part is read from their ledgers; of the baseline there is none here.
    assert report["arms"]["exgrpo"].pop("fresh_questions_part") == {}
    assert set(whole["arms"]["exgrpo"].pop("fresh_questions_part")) == {"0", "1"}
    assert report == whole
    assert not (study / "grpo").exists() and len(list((study / "results").iterdir())) == 4
    result = json.loads((study / "results" / "exgrpo-1.result.json").read_text())
    memorised = result["memorising"]
    assert memorised["trained_questions"] >= memorised["replayed_questions"] > 0
    assert memorised["replayed"]["questions"] + memorised["rolled_out"]["questions"] <= 10
    text = (study / "study.json").read_text()
    assert json.loads(text)["arms"][0]["baseline"] == "grpo"

"""docs/trl_replay.py in real TRL, in an environment of its own."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SETTINGS = """
arithmetic.levels=[2] arithmetic.num_train=60 arithmetic.num_heldout=20 data.heldout=none rollout.questions_per_step=8
replay.start_threshold=0 grading.grader=exact run.steps=5 run.threads=1 run.plots=false
"""


@pytest.fixture(scope="module")
def trl_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    wanted = ["trl==1.16.0", "-c", ROOT / "constraints.txt", "-e", ROOT]
    subprocess.run([folder / "bin" / "python", "-m", "pip", "install", "-q", *wanted], check=True)
    return folder / "bin" / "python"


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("method", "settings"), [("exgrpo", ()), ("headroom-drift", ("replay.max_drift=0.05",))])
def test_the_same_rollouts_give_the_same_draws_and_losses(
    method, settings, trl_python, small_backbone, tmp_path
) -> None:
    """exgrpo's own loop is given TRL's rollouts, and the weights before each of its updates."""
    command = [trl_python, ROOT / "tests" / "helpers" / "trl_steps.py", small_backbone, tmp_path, method]
    done = subprocess.run([*command, *SETTINGS.split(), *settings], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert [drawn for _, drawn in told["trl"]] == [drawn for _, drawn in told["own"]]
    assert sum(drawn for _, drawn in told["own"]) > 10
    losses = [loss for loss, _ in told["own"]]
    assert [loss for loss, _ in told["trl"]] == pytest.approx(losses, abs=1e-6) and max(map(abs, losses)) > 1e-3

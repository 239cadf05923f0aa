"""Systems that are not Linux: what they lack is hidden here, and what they get to read is said."""

from pathlib import Path

import pytest
from conftest import SMALL_RUN
from processes import python

from exgrpo_cli.commands import run
from exgrpo_cli.config.layers import build_config
from exgrpo_cli.machine.settle import require_runnable, settle
from exgrpo_cli.machine.survey import survey_machine

LIKE_A_MAC = {"PYTHONPATH": str(Path(__file__).parents[1] / "helpers" / "like_a_mac")}


@pytest.mark.engines
def test_a_run_is_trained_looked_at_asked_and_scored_without_proc(tmp_path: Path, small_backbone: Path) -> None:
    """No /proc, no affinity, no limits on memory: graders have their deadlines of wall time."""
    settings = [f"--set={each}" for each in (*SMALL_RUN, "grading.grader=math", "run.steps=1")]
    commands = (
        ["train", "--backbone", str(small_backbone), "--output", "run", *settings],
        ["replay-stats", "run", "--no-plots"],
        ["sample", "run", "1+2=?"],
        ["evaluate", "arithmetic", "--model", "run", "--samples", "1", "--output", "scores"],
    )
    for command in commands:
        done = python("-m", "exgrpo_cli", *command, variables=LIKE_A_MAC, cwd=tmp_path)
        assert done.returncode == 0, (command, done.stderr)
    assert (tmp_path / "run" / "summary.json").is_file() and (tmp_path / "run" / "model" / "config.json").is_file()


def test_proc_is_hidden_there() -> None:
    program = "import os; open('/proc/self/statm')"
    done = python("-c", program, variables=LIKE_A_MAC)
    assert "FileNotFoundError" in done.stderr


def test_the_gpu_of_a_mac_is_refused_where_there_is_none(workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in (["train", "--device", "mps"], ["sample", "tiny", "1+1=?", "--device", "mps"]):
        assert run(command) == 2
        assert "use --device cpu." in capsys.readouterr().err.splitlines()[-1]
    assert not any(workdir.iterdir())


def test_the_gpu_of_a_mac_is_planned_for_as_one_process_of_main_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "darwin")
    monkeypatch.setattr("platform.machine", lambda: "arm64")
    config, plan = settle(build_config(assignments=["run.device=mps"]), survey_machine(look_for_gpus=False))
    require_runnable(plan)
    assert (config.run.device, config.run.nproc, config.backbone.dtype) == ("mps", 1, "float32")
    assert not plan.on_gpu and config.rollout.logprobs == "trainer"
    assert not list(plan.missing)
    for other in ("run.nproc=2", "rollout.engine=vllm", "optim.engine=deepspeed"):
        plan = settle(build_config(assignments=["run.device=mps", other]), survey_machine(look_for_gpus=False))[1]
        assert "trains in one process, by the engines hf and torch" in plan.missing[0]


def test_windows_is_told_of_wsl() -> None:
    program = "import sys; from exgrpo_cli.main import main; sys.platform = 'win32'; main()"
    done = python("-c", program)
    assert (done.returncode, done.stdout) == (1, "")
    [line] = done.stderr.splitlines()
    assert line.startswith("exgrpo: ") and "WSL" in line

"""`exgrpo train --check` and `doctor --smoke`: two real steps with random weights, and what they say of a fault."""

import json
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from exgrpo_cli.base.errors import RunError
from exgrpo_cli.commands import run
from exgrpo_cli.engines.hf.generator import HFGenerator
from exgrpo_cli.ranks import Ranks
from exgrpo_cli.training.check import Meter, noting
from exgrpo_cli.training.check_report import CheckReport, Memory, Phase

OUT = "out of memory in step 0, after loading: tried to allocate 2.00 GiB"
SMALL = [
    part
    for setting in (
        "rollout.questions_per_step=2", "rollout.group_size=4", "rollout.max_response_tokens=12",
        "data.max_prompt_tokens=10", "run.threads=1", "tiny.hidden_size=64", "tiny.num_heads=2",
    )
    for part in ("--set", setting)
]  # fmt: skip


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def test_a_check_measures_two_steps_and_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["train", "--check", "--json", "--quiet", *SMALL]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["well"] and report["problems"] == []
    phases = [(phase["step"], phase["name"]) for phase in report["phases"]]
    assert phases == [(step, name) for step in (1, 2) for name in ("rollouts", "asleep", "scoring", "update", "sync")]
    memory = {each["part"]: each for each in report["memory"]}
    assert list(memory) == ["rollouts", "asleep", "scoring", "update", "sync"]
    # Growth of this process: none where an earlier test has left as much memory behind.
    assert memory["update"]["measured"] >= 0
    planned = {name: each["planned"] for name, each in memory.items()}
    assert planned["update"] > planned["scoring"] > planned["asleep"] == planned["sync"] > 0
    assert planned["rollouts"] > planned["sync"]
    # The run validates with 2,400 rows, 512 at a time, where the check has 8; updates are those of the check.
    assert report["planned_for_run"]["rollouts"] > 5 * planned["rollouts"]
    assert report["planned_for_run"]["update"] == planned["update"]
    assert report["seconds"] > sum(phase["seconds"] for phase in report["phases"]) > 0
    assert list(report["tokens_per_second"]) == ["rollouts", "scoring", "update"]
    assert min(report["tokens_per_second"].values()) > 0
    assert report["faults_caught"] == ["a weight that is not sent"]
    assert report["logprob_gap"] < 1e-3
    assert "prompts of 10 tokens, responses of 12; 2 steps of 8 rollouts, 8 of them trained" in report["lengths"]
    assert list(tmp_path.iterdir()) == []
    assert run(["train", "--dry-run", "--json", "--quiet", *SMALL]) == 0
    dry = json.loads(capsys.readouterr().out)["plan"]["memory"]
    assert report["planned_for_run"] == {"rollouts": dry["rollout_peak"], "update": dry["update_peak"]}


def test_what_is_wrong_is_in_the_verdict(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A generator that takes no weights and says nothing, and updates that are skipped."""
    monkeypatch.setattr(HFGenerator, "sync", lambda self, weights, version, score=None: list(weights))
    assert run(["train", "--check", "--quiet", *SMALL, "--set", "optim.skip_norm=1e-9"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert "canary     stopped the run for: nothing" in lines
    assert "problem    the canary let a fault pass: a weight that is not sent" in lines
    assert sum("was skipped: gradient norm above 1e-09" in line for line in lines) == 4
    assert lines[-1] == "verdict    5 problems, see above"
    # Memory of a CPU is shown, not judged.
    assert not [line for line in lines if "is as planned" in line]
    assert len([line for line in lines if line.startswith("time ")]) == 1


def phase(name: str, step: int, seconds: float) -> Phase:
    return Phase(name=name, step=step, seconds=seconds, peak_bytes=0)


REPORT = CheckReport(
    backbone="tiny", engines="hf and torch", device="1 x H200", versions={}, lengths="",
    memory=(Memory(part="update", planned=10 * 2**30, measured=9 * 2**30, judged=True),),
    planned_for_run={"rollouts": 2**34, "update": 2**35}, tokens_per_second={"update": 1234.5},
    phases=(phase("rollouts", 1, 300), phase("update", 1, 50), phase("rollouts", 2, 200), phase("update", 2, 50)),
    seconds=601, faults_caught=(), logprob_gap=None, problems=(),
)  # fmt: skip


def test_the_report_says_what_it_planned_and_how_long_it_took() -> None:
    """A tenth and half a gibibyte above 10 GiB are 11.5."""
    lines = REPORT.lines()
    assert "memory     update: 9.0 GiB; planned 10.0 GiB, up to 11.5 GiB is as planned" in lines
    assert (
        "note       planned are this check's rows and no validation; the run is planned at 16.0 GiB during rollouts "
        "and 32.0 GiB during the update (--dry-run)"
    ) in lines
    assert "speed      tokens a second: update 1,234" in lines
    assert "time       601.0 s: rollouts 500.0 s, update 100.0 s, loading and all else 1.0 s" in lines


@pytest.mark.parametrize(("ranks", "told"), [(1, True), (2, False)])
def test_what_stops_a_run_is_told_and_ends_several_ranks(ranks: int, told: bool) -> None:
    problems: list[str] = []
    failed = pytest.raises(RunError, match=OUT) if not told else nullcontext()
    with failed, noting(problems, Meter(torch.device("cpu")), Ranks(world_size=ranks)):
        raise torch.OutOfMemoryError("tried to allocate 2.00 GiB\nand more")
    assert problems == ([OUT] if told else [])


def test_what_cannot_be_checked_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["train", "--check", "--backbone", "no-one/no-model", "--device", "cpu"]) == 2
    assert "the shape of backbone 'no-one/no-model' is not known here" in capsys.readouterr().err
    assert run(["train", "--check", "--dry-run", *SMALL]) == 2
    assert "--check measures two steps, --dry-run starts nothing: leave one of them out." in capsys.readouterr().err


@pytest.mark.parametrize("mode", ["--check", "--dry-run"])
def test_what_the_run_would_refuse_is_refused_before_anything_is_measured(
    mode: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["train", mode, "--data", "nope.jsonl", *SMALL, "--set", "rollout.require_eos=false"]) == 2
    said = capsys.readouterr()
    assert "data.train: nope.jsonl does not exist" in said.err
    assert said.out == "" and "random weights" not in said.err


def test_memory_of_a_gpu_that_others_had_before_is_not_the_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 80 GiB 50 are free at the start, 44 and 47 after the two phases: 6 and 3 are the run's."""
    free = iter([50, 44, 47])
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (next(free) * 2**30, 80 * 2**30))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    meter = Meter(torch.device("cuda", 0))
    for name in ("rollouts", "update"):
        with meter.phase(name):
            pass
    assert [meter.peak(name) for name in ("rollouts", "update")] == [6 * 2**30, 3 * 2**30]


def test_memory_clearly_above_the_plan_is_a_problem() -> None:
    """A tenth and half a gibibyte above it are not, and on a CPU nothing is."""
    at = [(2**29, True), (2**30, True), (2**30, False)]
    found = [Memory(part="rollouts", planned=2**30, measured=2**30 + more, judged=judged) for more, judged in at]
    assert [each.problem for each in found] == ["", "rollouts took 2.0 GiB, 1.0 GiB were planned", ""]


def check(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "exgrpo_cli", *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)


@pytest.mark.engines
@pytest.mark.timeout(600)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_with_vllm_a_norm_of_the_next_number_is_caught_too(dtype: str) -> None:
    settings = ["--rollout", "vllm", "--set", f"backbone.dtype={dtype}"]
    done = check("train", "--check", "--json", *SMALL, *settings)
    assert done.returncode == 0, done.stderr + done.stdout
    report = json.loads(done.stdout)
    assert report["faults_caught"] == ["a weight that is not sent", "a norm by the next number"]


@pytest.mark.engines
@pytest.mark.timeout(600)
def test_two_ranks_under_deepspeed_are_checked_together() -> None:
    settings = ["--nproc", "2", "--engine", "deepspeed", "--device", "cpu"]
    done = check("train", "--check", "--json", *SMALL, *settings)
    assert done.returncode == 0, done.stderr + done.stdout
    assert json.loads(done.stdout)["device"] == "2 x CPU"


@pytest.mark.engines
@pytest.mark.timeout(600)
def test_doctor_smoke_ends_with_a_verdict() -> None:
    done = check("doctor", "--smoke")
    assert done.returncode == 0, done.stderr + done.stdout
    assert done.stdout.splitlines()[-1] == "verdict    all is well"
    assert "exgrpo train with its defaults works here." in done.stdout

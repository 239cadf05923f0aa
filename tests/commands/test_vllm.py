"""The commands with vLLM: training with its rollouts, on one rank and on two with DeepSpeed, and evaluation."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from processes import python
from run_leaves import kill_when_saved, metrics

pytestmark = pytest.mark.engines

RUN_SETTINGS = (
    "arithmetic.levels=[2]", "arithmetic.num_train=60", "arithmetic.num_heldout=10", "rollout.questions_per_step=8",
    "rollout.logprobs=engine", "replay.start_threshold=0", "optim.learning_rate=3e-4", "optim.warmup_steps=0",
    "run.save_every=2", "run.threads=1", "run.plots=false", "validation.samples=2",
)  # fmt: skip


def command(*arguments: str, ahead: bool = False) -> list[str]:
    """The command line, by vLLM's scheduler of a GPU where it is to run `ahead`."""
    first = "import pytest, vllm_pair; vllm_pair.schedule_asynchronously(pytest.MonkeyPatch()); " if ahead else ""
    return [sys.executable, "-c", f"{first}from exgrpo_cli.main import main; main()", *arguments]


def train_command(folder: Path, run: Path, *, steps: int, ahead: bool = False) -> list[str]:
    settings = [part for text in RUN_SETTINGS for part in ("--set", text)]
    options = f"--rollout vllm --backbone {folder} --steps {steps} --output {run} --log tensorboard --quiet"
    return command("train", *options.split(), *settings, ahead=ahead)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("steps", "settings", "ahead"),
    [(12, (), False), (5, ("lora.rank=8", "lora.sync=adapter"), False), (5, ("rollout.carry_over=0.5",), True)],
)
def test_a_run_from_the_command_line_killed_and_resumed(
    vllm_backbone: Path, tmp_path: Path, steps, settings, ahead: bool
) -> None:
    """Training with vllm rollouts: fresh weights at every step, the ledger holds the engine's log-probs."""
    from exgrpo_cli.ledger.reader import LedgerReader

    run = tmp_path / "run"
    options = [part for text in settings for part in ("--set", text)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[1] / "helpers")}
    started = train_command(vllm_backbone, run, steps=steps, ahead=ahead)
    process = subprocess.Popen([*started, *options], env=environment)
    kill_when_saved(run, process)
    assert 0 < int((run / "checkpoints" / "latest").read_text().strip().removeprefix("step-")) < steps
    resumed = command("train", "--resume", "--output", str(run), "--quiet", ahead=ahead)
    subprocess.run(resumed, check=True, timeout=300, env=environment)
    lines = metrics(run)
    assert [line["step"] for line in lines] == list(range(1, steps + 1))
    assert all(line["policy/logprob_gap_max"] < 1e-4 for line in lines)
    assert all(0.999 < line["policy/tis_weight"] < 1.001 for line in lines)
    assert sum(line["replay/used"] for line in lines) > 0
    assert sum(line["optim/updates_applied"] for line in lines) == 2 * steps
    assert not ahead or max(line["rollout/versions_max"] for line in lines) > 1
    assert {row["logprob_source"] for row in LedgerReader(run / "replay").trajectories().to_pylist()} == {"engine"}
    assert list((run / "tensorboard").iterdir())


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("exgrpo", ("optim.zero_stage=3",)),
        ("exgrpo", ("rollout.carry_over=0.5", "optim.zero_stage=2")),
        ("exgrpo", ("rollout.tensor_parallel=2", "optim.zero_stage=2")),
        ("exgrpo", ("rollout.tensor_parallel=2", "optim.zero_stage=2", "lora.rank=6", "lora.sync=adapter")),
        ("headroom-drift", ("replay.max_drift=0.5",)),
        ("repo", ("replay.min_stored=4", "arithmetic.num_train=16")),
    ],
)
def test_two_ranks_with_an_engine_each_or_between_them(
    vllm_backbone: Path, tmp_path: Path, method: str, settings: tuple[str, ...]
) -> None:
    """DeepSpeed's trainer of each rank agrees with its engine on every token, through updates with replay, whatever is
    scored, gated or joined."""
    from exgrpo_cli.ledger.reader import LedgerReader

    run = tmp_path / "run"
    options = ["--method", method, "--nproc", "2", "--engine", "deepspeed"]
    options += [part for setting in settings for part in ("--set", setting)]
    command = [*train_command(vllm_backbone, run, steps=4), *options]
    done = subprocess.run(command, check=False, timeout=360, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr[-1500:]) == (0, "")
    lines = metrics(run)
    assert [line["optim/updates_applied"] for line in lines] == [2, 2, 2, 2] or method != "exgrpo"
    assert sum(line["replay/used"] > 0 for line in lines) >= (1 if method == "exgrpo" else 2)
    assert all(line["policy/logprob_gap_max"] < 1e-4 for line in lines)
    assert "rollout.carry_over=0.5" not in settings or max(line["rollout/versions_max"] for line in lines) > 1
    assert json.loads((run / "summary.json").read_text())["heldout"]["after"]["questions"] == 10
    ledger = LedgerReader(run / "replay")
    assert len(ledger.replays() if method == "headroom-drift" else ledger.scores()) and len(ledger.visits()) == 4 * 8


@pytest.mark.timeout(300)
def test_evaluation_with_vllm(vllm_backbone: Path, tmp_path: Path) -> None:
    data = tmp_path / "sums.jsonl"
    data.write_text("".join(json.dumps({"question": f"{n}+1=?", "answer": n + 1}) + "\n" for n in range(6)))
    options = f"--data {data} --model {vllm_backbone} --samples 3 --max-tokens 24"
    options += f" --output {tmp_path / 'out'} --json --quiet"
    done = python("-m", "exgrpo_cli", "evaluate", *options.split(), "--engine", "vllm", check=True, timeout=240)
    result = json.loads(done.stdout)["benchmark"]
    assert (result["questions"], result["k"]) == (6, 3)
    stamp = json.loads(next((tmp_path / "out").rglob("protocol.json")).read_text())
    assert stamp["engine"]["name"] == "vllm" and stamp["engine"]["version"].startswith("vllm")

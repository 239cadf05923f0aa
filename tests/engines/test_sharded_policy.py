"""The DeepSpeed policy on two processes against the torch policy on one."""

import base64
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from run_leaves import metrics, wait_for_step
from small_policy import build_model, build_policy, minibatch, sequences
from two_ranks import TORCHRUN, agents, free_port, two_ranks

from exgrpo_cli.base.errors import InputError
from exgrpo_cli.config.sections.run import LoraSettings, OptimSettings
from exgrpo_cli.config.settings import to_toml

ALL_WEIGHTS = LoraSettings()


def deepspeed_launcher() -> tuple[str, ...]:
    """What `deepspeed --num_gpus 2 --no_local_rank` runs on each host."""
    two_here = base64.urlsafe_b64encode(json.dumps({"localhost": [0, 1]}).encode()).decode()
    return ("deepspeed.launcher.launch", f"--world_info={two_here}", f"--master_port={free_port()}", "--no_local_rank")


@pytest.mark.engines
@pytest.mark.parametrize(("stage", "rank"), [(2, -1), (3, -1), (2, 3)])
def test_two_sharded_processes_train_as_one_plain_one(stage: int, rank: int, tmp_path: Path) -> None:
    """The change of the parameters after 5 updates agrees within 1e-3; after 4 of them it would not.

    Stage 2 is started by torchrun, stage 3 by DeepSpeed's own launcher; stage 2 trains an adapter as well.
    """
    job = f"{'lora' if rank > 0 else 'zero'}{stage}-float32"
    done = two_ranks(job, tmp_path, TORCHRUN if stage == 2 else deepspeed_launcher())
    assert done.returncode == 0, done.stderr
    results = torch.load(tmp_path / "results.pt", weights_only=False)
    scores = build_policy(build_model(torch.float32)).score(sequences())
    for ours, theirs in zip(scores, results["scores"], strict=True):
        np.testing.assert_allclose(theirs.logprobs, ours.logprobs, atol=1e-5)
    gaps, _ = gaps_to_the_plain_policy(results, torch.float32, LoraSettings(rank=rank, learning_rate_factor=1.0))
    assert gaps[-1] < 1e-3 and gaps[-2] > 1e-2
    saved_loaded_refused_and_skipped(results)


@pytest.mark.engines
def test_stage_1_of_a_bfloat16_model(tmp_path: Path) -> None:
    """For it DeepSpeed has an optimizer of its own, which prints.

    Roundings part the two, on every processor otherwise: each update leads towards the plain policy's end, and the
    first gradient, before any of them, is the same. Float32 above is exact.
    """
    done = two_ranks("zero1-bfloat16", tmp_path)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    results = torch.load(tmp_path / "results.pt", weights_only=False)
    gaps, norms = gaps_to_the_plain_policy(results, torch.bfloat16)
    assert results["norms"][0] == pytest.approx(norms[0], rel=0.1)
    assert gaps == sorted(gaps, reverse=True) and gaps[-1] < 0.5
    saved_loaded_refused_and_skipped(results)


def gaps_to_the_plain_policy(
    results: dict[str, Any], dtype: torch.dtype, lora: LoraSettings = ALL_WEIGHTS
) -> tuple[list[float], list[float]]:
    """How far from the plain policy's weights after 5 updates each update's were, relative to the change of those; and
    the plain policy's gradient norms."""
    model = build_model(dtype)
    before = {name: weight.clone().float() for name, weight in model.state_dict().items()}
    policy = build_policy(model, optim=OptimSettings(learning_rate=1e-3), lora=lora)
    norms = [policy.update(minibatch()).grad_norm for _ in range(5)]
    after = {name: weight.float() for name, weight in policy.named_weights()}

    def distance(weights: dict[str, torch.Tensor]) -> float:
        assert weights.keys() == after.keys()
        return sum(float((weights[name].float() - after[name]).norm() ** 2) for name in after) ** 0.5

    return [distance(weights) / distance(before) for weights in results["history"]], norms


def saved_loaded_refused_and_skipped(results: dict[str, Any]) -> None:
    assert results["resumed"] == (True, True, True)
    assert "was written with 3 ranks, this run has 2: ZeRO shards fit the same number alone" in results["refused"]
    assert results["skipped"] == (False, "gradient norm above 0.001", 1, True)


@pytest.mark.engines
def test_gradients_of_ranks_are_summed_in_float32(tmp_path: Path) -> None:
    """256 and 1 are 256 in bfloat16."""
    done = two_ranks("sum2-bfloat16", tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "sum.json").read_text()) == pytest.approx(257, rel=1e-6)


OFFLOADED = ("optim.zero_stage=1", "optim.offload=true")
ALL_AT_ONCE = (
    "optim.zero_stage=3", "backbone.dtype=bfloat16", "backbone.gradient_checkpointing=true",
    "objective.kl_coefficient=0.01",
)  # fmt: skip


ADAPTED = (
    "optim.zero_stage=2", "backbone.dtype=bfloat16", "backbone.gradient_checkpointing=true",
    "objective.kl_coefficient=0.01", "lora.rank=4",
)  # fmt: skip


def train(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "exgrpo_cli", "train", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.engines
@pytest.mark.parametrize(
    ("settings", "stopped_by"), [(OFFLOADED, signal.SIGKILL), (ALL_AT_ONCE, signal.SIGINT), (ADAPTED, signal.SIGINT)]
)
def test_a_run_of_two_ranks_stopped_and_resumed(small_config, tmp_path, settings, stopped_by) -> None:
    """After a Ctrl-C the command says how to go on; when it is killed its ranks save and stop all the same."""
    file, run = tmp_path / "settings.toml", tmp_path / "run"
    config = small_config("run.steps=24", "run.save_every=100", "run.nproc=2", "optim.engine=deepspeed", *settings)
    file.write_text(to_toml(config))
    started = train("--config", str(file), "--output", str(run))
    wait_for_step(run, 3, started)
    os.kill(started.pid, stopped_by)
    # The ranks hold the pipes, which end with the last of them.
    _, talk = started.communicate(timeout=60)
    assert started.returncode == (130 if stopped_by == signal.SIGINT else -signal.SIGKILL)
    assert f"state saved; go on with: exgrpo train --resume --output {run}" in talk and "Warning" not in talk
    saved = len(metrics(run))
    assert (run / "checkpoints" / "latest").read_text() == f"step-{saved:06d}\n"
    resumed = train("--resume", "--output", str(run), "--json", "--set", "run.rank_timeout=10")
    out, talk = resumed.communicate(timeout=200)
    assert resumed.returncode == 0, talk
    lines = metrics(run)
    assert [line["step"] for line in lines] == list(range(1, 25))
    assert sum(line["optim/updates_applied"] for line in lines) == 48
    assert json.loads(out)["replay"]["used"] == sum(line["replay/used"] for line in lines) > 0
    assert "policy/kl" in lines[-1] or settings == OFFLOADED


@pytest.mark.engines
def test_a_rank_killed_on_one_host_ends_the_other_host(small_config, tmp_path: Path) -> None:
    """Both agents end, and the rank that is left says what happened."""
    file, run = tmp_path / "settings.toml", tmp_path / "run"
    file.write_text(to_toml(small_config("run.steps=500", "optim.engine=deepspeed", "optim.zero_stage=3")))
    hosts = agents(["--config", str(file), "--output", str(run)], [tmp_path, tmp_path])
    wait_for_step(run, 2, hosts[0])
    (rank,) = psutil.Process(hosts[1].pid).children()
    rank.kill()
    left, _ = [process.communicate(timeout=60)[1] for process in hosts]
    assert all(process.returncode for process in hosts)
    assert "one of them has ended or hangs" in left and "go on with --resume" in left


@pytest.mark.engines
def test_the_extension_that_is_never_built_has_its_name() -> None:
    from deepspeed import ops

    from exgrpo_cli.engines.policy.deepspeed import SHARED_MEMORY_EXTENSION

    assert SHARED_MEMORY_EXTENSION in ops.__compatible_ops__


def test_what_deepspeed_prints_at_its_import_spoils_no_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from exgrpo_cli.engines.policy.deepspeed import require_deepspeed

    # Without a CUDA toolkit the builders of its kernels say so.
    (tmp_path / "deepspeed.py").write_text(
        "import logging, types\nprint('[WARNING] no nvcc')\nops = types.SimpleNamespace(__compatible_ops__={})\n"
        "utils = types.SimpleNamespace(logger=logging.getLogger('stub'))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "deepspeed", raising=False)
    try:
        require_deepspeed(torch.device("cpu"))
    finally:
        sys.modules.pop("deepspeed", None)
    assert capsys.readouterr().out == ""


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from exgrpo_cli.engines.policy.deepspeed import require_deepspeed

    # As where it is not installed: importing it fails.
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    with pytest.raises(InputError, match=r"pip install .*\[deepspeed\]'"):
        require_deepspeed(torch.device("cpu"))

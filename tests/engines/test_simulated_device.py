"""A device that is not the CPU, simulated: whole runs through the command line, and how often the host waits for it."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from run_leaves import kill_when_saved, metrics

from exgrpo_cli.config.settings import to_toml

pytestmark = pytest.mark.engines

HELPERS = Path(__file__).parents[1] / "helpers"
SETTINGS = ("run.steps=3", "run.save_every=2", "replay.start_threshold=0")
AT_SIZE = (
    "-1.5b 1 48", "-7b 4 80", "-1.5b 2 80 optim.zero_stage=1", "-1.5b 1 24 lora.rank=32", "-7b 1 48 lora.rank=32",
)  # fmt: skip
ON_TWO_DEVICES = """
import sys
import simulated_device, torch
from exgrpo_cli.engines.policy import policy as policies
pack = policies.packing.pack
policies.packing.pack = lambda sequences, device, **layout: pack(sequences, torch.device("cpu"), **layout)
sys.exit(simulated_device.main(sys.argv[1:]))
"""


def on_device(*arguments: str, **options: Any) -> "subprocess.Popen[str]":
    environment = os.environ | {"PYTHONPATH": str(HELPERS), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([sys.executable, *arguments], env=environment, text=True, **options)


def train(config: Path, run: Path) -> "subprocess.Popen[str]":
    return on_device("-m", "simulated_device", "train", "--quiet", "--config", str(config), "--output", str(run))


def journal(run: Path) -> list[dict[str, Any]]:
    """Without what no two runs share."""
    apart = ("time/", "perf/", "memory/")
    return [{key: value for key, value in line.items() if not key.startswith(apart)} for line in metrics(run)]


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("exgrpo", ("objective.kl_coefficient=0.1", "backbone.gradient_checkpointing=true")),
        ("headroom-drift", ("optim.offload_during_rollouts=true", "replay.max_drift=10")),
        ("exgrpo", ("lora.rank=4", "objective.kl_coefficient=0.1", "optim.offload_during_rollouts=true")),
    ],
)
def test_a_run_replays_and_resumes_after_a_kill(method, settings, small_config, tmp_path) -> None:
    config = tmp_path / "config.toml"
    config.write_text(to_toml(small_config(*SETTINGS, *settings, method=method)))
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert train(config, whole).wait(timeout=250) == 0
    lines = journal(whole)
    assert [line["step"] for line in lines] == [1, 2, 3] and sum(line["replay/used"] for line in lines) > 0
    assert all(line["policy/logprob_gap_max"] < 1e-3 for line in lines)
    kill_when_saved(cut, train(config, cut))
    again = on_device("-m", "simulated_device", "train", "--resume", "--output", str(cut), "--quiet")
    assert again.wait(timeout=250) == 0
    assert journal(cut) == lines
    (weights,) = (whole / "model").glob("*.safetensors")
    for name in (weights.name, "config.json"):
        assert (cut / "model" / name).read_bytes() == (whole / "model" / name).read_bytes()


def test_two_devices_in_one_operation_end_the_run(small_config, tmp_path) -> None:
    """The policy's inputs stay behind on the CPU."""
    (tmp_path / "config.toml").write_text(to_toml(small_config(*SETTINGS)))
    arguments = ("train", "--quiet", "--config", str(tmp_path / "config.toml"), "--output", str(tmp_path / "run"))
    process = on_device("-c", ON_TWO_DEVICES, *arguments, stderr=subprocess.PIPE)
    _, talk = process.communicate(timeout=250)
    assert process.returncode == 1 and "tensors on sim:0 and on cpu" in talk


@pytest.fixture(scope="module")
def figures() -> dict[str, Any]:
    """What `measured_on_device` prints."""
    printed, _ = on_device("-m", "measured_on_device", stdout=subprocess.PIPE).communicate(timeout=250)
    return dict(json.loads(printed))


@pytest.mark.parametrize("checkpointing", ["false", "true"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rank", [-1, 8])
def test_memory_is_planned_within_a_tenth_of_what_is_alive(dtype, checkpointing, rank, figures) -> None:
    phases = figures[f"memory-{dtype}-{checkpointing}-{rank}"]
    assert set(phases) == {"drawing", "sync", "rollouts", "asleep", "scoring", "update"}
    # An adapter is merged one weight at a time on its way to the sampler: much of so small a model, and in no plan.
    for phase in phases.keys() - {"sync"}:
        planned, alive = phases[phase]
        assert 0.9 <= planned / alive <= 1.1, (phase, planned, alive)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("asked", AT_SIZE)
def test_a_mixed_step_of_a_published_backbone_is_planned_at_its_size(asked: str) -> None:
    """By torch on one card and DeepSpeed on several; the engine takes the rest of the card while it is awake."""
    started = on_device("-m", "planned_at_size", *f"qwen-math{asked}".split(), stdout=subprocess.PIPE)
    room, phases = json.loads(started.communicate(timeout=550)[0])
    # That one begins with the engine awake.
    for phase in phases.keys() - {"asleep"}:
        planned, alive = phases[phase]
        # Of the smaller ones the plan may count more: a layer that is scored as one that is trained.
        assert 0.9 <= planned / alive <= (1.1 if phase in ("update", "rollouts") else 1.25), (phase, planned, alive)
        assert alive <= room


def test_the_host_seldom_waits_and_results_are_those_of_the_cpu(figures: dict[str, Any]) -> None:
    assert figures["counted"] == 3, "a list as index, a tensor made there, a copy that blocks; not one that does not"
    for name in ("rollouts-20", "rollouts-6"):
        # Rows that ended are looked for every eight tokens: a wait, one more where there are any, one to let others in.
        figure = figures[name]
        assert figure["equal"] and figure["waits"] <= figure["step"] / 2
    assert figures["rollouts-6"]["admit"] > 6, "rows are replaced"
    for name in ("policy-False", "policy-True"):
        figure = figures[name]
        # One a micro-batch of scoring. None in one of an update: loss, norm of the gradient and diagnostics at the end.
        assert figure["scoring"] == figure["micro_batches"] == 3 and figure["updating"] == 4
        assert figure["applied"] == [True, True]
        assert figure["logprob_gap"] < 1e-9 and figure["weight_gap"] < 1e-9

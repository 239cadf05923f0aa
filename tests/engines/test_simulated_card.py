"""LoRA on one card as `docs/engines.md` has it: the two presets in small on the simulated device, against the plan."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HELPERS = Path(__file__).parents[1] / "helpers"
MEASURE = """
import json
import measured_on_device, simulated_device
from measured_on_device import LARGE, memory, plain_copy
from exgrpo_cli.presets import load_preset

def of_vllm(model):
    # What vLLM samples with lies in the part of the card that it takes while it is awake.
    copy = plain_copy(model)
    for weight in copy.model.layers.parameters():
        weight.data = weight.data.cpu()
    return copy

measured_on_device.plain_copy = of_vllm
device = simulated_device.install()
for name in ("qwen-math-1.5b", "qwen-math-7b"):
    preset = load_preset("backbones", name)
    assert preset["rollout"]["engine"] == "vllm" and preset["backbone"]["gradient_checkpointing"]
    shape = preset["about"]["shape"]
    vocab, ffn, rank = (max(1, size * 128 // shape["hidden_size"]) for size in (
        shape["vocab_size"], shape["intermediate_size"], 32))
    asked = "rollout.engine=vllm", f"lora.rank={rank}", "optim.microbatch_tokens=1024", *LARGE
    print(json.dumps(memory(device, *asked, vocab=vocab, ffn=ffn, lends=True)))
"""


@pytest.mark.engines
def test_the_settings_for_one_card_take_what_the_plan_says() -> None:
    environment = os.environ | {"PYTHONPATH": str(HELPERS), "OMP_NUM_THREADS": "1"}
    printed = subprocess.check_output([sys.executable, "-c", MEASURE], env=environment, text=True)
    for phases in map(json.loads, printed.splitlines()):
        for phase, (planned, alive) in phases.items():
            assert 0.9 <= planned / alive <= 1.1, (phase, planned, alive)

"""First contact with a GPU: what only one can show, by the run's own parts, with a table at the end.

    pytest -n 0 -m gpu tests/gpu        (EXGRPO_GPU_BACKBONE=qwen-math-7b takes another backbone than qwen-math-1.5b)

EXGRPO_GPU_TESTS_ON=cpu runs the same with tiny shapes where there is none.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from run_leaves import metrics, wait_for_step

from exgrpo_cli.algo.cpu import wide_matmul
from exgrpo_cli.base.types import RolloutRequest, SamplingParams, TokenSequence
from exgrpo_cli.config.sections.run import TinySettings
from exgrpo_cli.engines.causal_lm import split_causal_lm
from exgrpo_cli.engines.hf.generator import HFGenerator
from exgrpo_cli.engines.policy.packing import pack, response_hidden, takes_segments
from exgrpo_cli.machine.memory import size
from exgrpo_cli.models.tiny import make_model, make_tokenizer

ON_CPU = os.environ.get("EXGRPO_GPU_TESTS_ON") == "cpu"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not (ON_CPU or torch.cuda.is_available()), reason="no CUDA GPU is visible"),
]
DEVICE = torch.device("cpu" if ON_CPU else "cuda")
BACKBONE = os.environ.get("EXGRPO_GPU_BACKBONE", "tiny" if ON_CPU else "qwen-math-1.5b")
LIMITS = ("rollout.max_response_tokens=12", "data.max_prompt_tokens=10") if ON_CPU else ("rollout.max_rows=128",)
ENGINES = [("hf", "torch"), *([("hf", "deepspeed")] if find_spec("deepspeed") else []),
           *([("vllm", "torch")] if find_spec("vllm") and not ON_CPU else [])]  # fmt: skip
PEAK_FLOPS = {"H100": 989e12, "H200": 989e12, "A100": 312e12, "L40S": 362e12, "RTX 4090": 165e12}
"""Dense products in bfloat16 a second, by the makers' data sheets."""


@pytest.fixture(scope="module")
def table(pytestconfig: pytest.Config) -> Iterator[list[str]]:
    """Lines of the table that is printed once all has run."""
    rows = ["| engines | phase | tokens/s | MFU | GiB | planned |", "|---|---|---|---|---|---|"]
    yield rows
    name = torch.cuda.get_device_name() if DEVICE.type == "cuda" else "CPU"
    text = "\n".join([f"torch {torch.__version__} on {name}, {BACKBONE}", "", *rows])
    with pytestconfig.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        print(f"\n{text}")


def model(dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    made = make_model(TinySettings(hidden_size=128, num_heads=2, num_kv_heads=1), make_tokenizer(max_tokens=512))
    return made.to(dtype=dtype, device=DEVICE).eval()


def rows_of(lengths: tuple[int, ...]) -> list[TokenSequence]:
    ids = np.random.default_rng(0).integers(5, 200, 600).astype(np.int32)
    return [TokenSequence(prompt_ids=ids[:9], response_ids=ids[9 : 9 + length]) for length in lengths]


def test_products_of_bfloat16_factors_keep_float32_sums() -> None:
    """Of 4,096 factors: 2^-9 of rounding where the sum is rounded, 1e-6 where it is not."""
    left, right = (torch.randn(64, 4096, device=DEVICE).bfloat16() for _ in range(2))
    exact = left.double() @ right.double().T
    found = wide_matmul(left, right, torch.float32).double()
    assert float((found - exact).norm() / exact.norm()) < (1e-2 if ON_CPU else 1e-5)


def test_attention_by_segments_is_attention_by_blocks() -> None:
    """Both in bfloat16 against blocks in float32; a CPU has no kernel for segments, but takes slices."""
    rows = rows_of((5, 300, 1, 64))
    hidden = {}
    for dtype, way in (
        (torch.float32, "blocks"),
        (torch.bfloat16, "blocks"),
        (torch.bfloat16, "slices" if ON_CPU else "segments"),
    ):
        parts = split_causal_lm(model(dtype))
        assert ON_CPU or dtype != torch.bfloat16 or takes_segments(parts), "this GPU and torch take no segments"
        with torch.no_grad():
            batch = pack(rows, DEVICE, way=way)
            hidden[dtype, way] = response_hidden(parts.body, batch).float()
    exact = hidden[torch.float32, "blocks"]
    for key, found in hidden.items():
        assert float((found - exact).norm() / exact.norm()) < 3e-2, key


def test_sampler_and_trainer_agree() -> None:
    """In float32 by rounding alone, and in bfloat16 within the bound that stops a run."""
    from exgrpo_cli.config.sections.objective import ObjectiveSettings
    from exgrpo_cli.config.sections.run import OptimSettings
    from exgrpo_cli.engines.policy.adamw import torch_policy

    prompt = rows_of((1,))[0].prompt_ids
    asked = [RolloutRequest(question_id="q", prompt_ids=prompt, seeds=tuple(range(8)))]
    for dtype, bound in ((torch.float32, 1e-3), (torch.bfloat16, 0.05)):
        own = model(dtype)
        params = SamplingParams(temperature=1.0, top_p=1.0, max_new_tokens=48)
        (group,) = HFGenerator(own, max_rows=8, eos_ids=(-1,)).generate(asked, params)
        policy = torch_policy(own, temperature=1.0, objective=ObjectiveSettings(), optim=OptimSettings())
        scores = policy.score([TokenSequence(prompt_ids=prompt, response_ids=each.token_ids) for each in group])
        gaps = [abs(each.engine_logprobs - own.logprobs) for each, own in zip(group, scores, strict=True)]
        assert np.concatenate(gaps).mean() < bound, dtype


@pytest.mark.parametrize(("rollout", "training"), ENGINES)
def test_two_steps_stay_within_the_plan(rollout: str, training: str, table: list[str], tmp_path: Path) -> None:
    """`train --check` on one rank: every phase's memory against the plan, an injected fault caught, speed."""
    command = ["train", "--check", "--json", "--quiet", "--backbone", BACKBONE, "--device", DEVICE.type]
    command += ["--rollout", rollout, "--engine", training, "--nproc", "1"]
    for setting in LIMITS:
        command += ["--set", setting]
    report = json.loads(exgrpo(command, tmp_path).communicate(timeout=1800)[0])
    assert report["well"], report["problems"]
    name = torch.cuda.get_device_name() if DEVICE.type == "cuda" else ""
    peak = next((flops for card, flops in PEAK_FLOPS.items() if card in name), 0.0)
    for phase in report["phases"]:
        speed, memory = report["tokens_per_second"].get(phase), report["memory"].get(phase)
        # 2 a weight and token forward, twice that backward; attention is left out.
        passes = {"scoring": 2, "update": 6, "rollouts": 2}.get(phase, 0)
        used = f"{passes * report['parameters'] * speed / peak:.0%}" if peak and speed else ""
        told = [size(memory[key]) for key in ("measured", "planned")] if memory else ["", ""]
        table.append(f"| {rollout}, {training} | {phase} | {speed:,.0f} | {used} | {told[0]} | {told[1]} |" if speed
                     else f"| {rollout}, {training} | {phase} | | | {told[0]} | {told[1]} |")  # fmt: skip


def test_a_run_is_saved_at_sigterm_and_goes_on(small_config: Any, tmp_path: Path) -> None:
    """The whole loop on the device; kernels of a GPU add in any order, so the bits of an unbroken run are not asked."""
    from exgrpo_cli.config.settings import to_toml

    kept = small_config("run.steps=20", "run.save_every=50", "replay.start_threshold=0", f"run.device={DEVICE.type}")
    (tmp_path / "small.toml").write_text(to_toml(kept))
    first = exgrpo(["train", "--quiet", "--config", "small.toml", "--output", "run"], tmp_path)
    wait_for_step(tmp_path / "run", 3, first)
    first.send_signal(signal.SIGTERM)
    first.communicate(timeout=300)
    assert first.returncode == 130 and 3 <= len(metrics(tmp_path / "run")) < 20
    last = exgrpo(["train", "--quiet", "--resume", "--output", "run"], tmp_path)
    last.communicate(timeout=600)
    assert last.returncode == 0
    assert [line["step"] for line in metrics(tmp_path / "run")] == list(range(1, 21))


def exgrpo(arguments: list[str], folder: Path) -> "subprocess.Popen[str]":
    command = [sys.executable, "-P", "-m", "exgrpo_cli", *arguments]
    return subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True)

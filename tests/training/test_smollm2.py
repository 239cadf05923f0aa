"""A real language model through the real command line: SmolLM2-135M-Instruct, whose weights a package brings.

Rewards are given by the length of a response, which any model makes both ways: what is tested is the machinery on a
real vocabulary and chat template, not how good the model is.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from run_leaves import kill_when_saved, metrics

from exgrpo_cli.commands import run
from exgrpo_cli.config.layers import build_config
from exgrpo_cli.ledger.reader import LedgerReader
from exgrpo_cli.questions.made.word_problems import make_word_problems
from exgrpo_cli.questions.prompts import encode
from exgrpo_cli.training.setup import choose_run_template

pytestmark = [pytest.mark.engines, pytest.mark.timeout(1200)]

GRADER = """
def is_even_length(gold: str, answer: str) -> bool:
    return len(answer) % 2 == 0
"""
COMMAND = "from exgrpo_cli.main import main; main()"
SETTINGS = (
    "data.require_box=never", "word_problems.num_train=30", "word_problems.num_heldout=4", "word_problems.examples=0",
    "rollout.questions_per_step=4", "rollout.group_size=4", "rollout.max_response_tokens=16",
    "rollout.require_eos=false", "grading.grader=python:even_length:is_even_length", "replay.start_threshold=0",
    "optim.warmup_steps=0", "optim.learning_rate=1e-4", "run.save_every=2", "run.keep_checkpoints=1", "run.threads=1",
    "run.plots=false", "validation.every=0",
)  # fmt: skip


@pytest.fixture(scope="module")
def grader(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("grader")
    (folder / "even_length.py").write_text(GRADER)
    return folder


def train(model: Path, grader: Path, run: Path, *options: str, steps: int = 3) -> "subprocess.Popen[bytes]":
    settings = [part for text in (f"backbone.source={model}", *SETTINGS) for part in ("--set", text)]
    arguments = ["train", "--backbone", "smollm2-135m", "--steps", str(steps), "--output", str(run), "--quiet"]
    return start(grader, *arguments, *settings, *options)


def start(grader: Path, *arguments: str) -> "subprocess.Popen[bytes]":
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(grader)}
    return subprocess.Popen([sys.executable, "-c", COMMAND, *arguments], env=environment)


@pytest.fixture(scope="module")
def trained(smollm2: Path, grader: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Three steps that nothing disturbed; gigabytes, gone with the last test that reads them."""
    run = tmp_path_factory.mktemp("smollm2") / "run"
    assert train(smollm2, grader, run).wait(timeout=900) == 0
    shutil.rmtree(run / "checkpoints")
    yield run
    shutil.rmtree(run)


def test_it_replays_and_its_buffer_is_shown(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = metrics(trained)
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert all(line["policy/logprob_gap_max"] < 1e-3 for line in lines)
    assert run(["replay-stats", str(trained), "--json", "--no-plots"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["stored"] == LedgerReader(trained / "replay").trajectories().num_rows > 0
    assert shown["used"] == sum(line["replay/used"] for line in lines) > 0


@pytest.mark.parametrize("examples", [0, 3])
def test_prompts_are_those_of_its_chat_template(smollm2: Path, examples: int) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    sized = [f"word_problems.{name}=2" for name in ("num_train", "num_heldout")]
    config = build_config(backbone="smollm2-135m", assignments=[*sized, f"word_problems.examples={examples}"])
    (question, _) = make_word_problems(config.word_problems).train
    turns = [{"role": message.role, "content": message.content} for message in question.prompt]
    expected = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)
    assert encode(choose_run_template(config, tokenizer), question, tokenizer).tolist() == list(expected)


def test_deepspeed_goes_on_with_the_experience_of_another_run(trained, smollm2, grader, tmp_path) -> None:
    run = tmp_path / "run"
    options = ["--engine", "deepspeed", "--replay-from", str(trained), "--set", "run.save_every=50"]
    assert train(smollm2, grader, run, *options, steps=2).wait(timeout=900) == 0
    lines = metrics(run)
    assert lines[0]["replay/used"] > 0, "the first step replays what the other run stored"
    assert all(line["policy/logprob_gap_max"] < 1e-3 for line in lines)
    assert sum(line["optim/updates_applied"] for line in lines) > 0
    assert LedgerReader(run / "replay").trajectories().num_rows > 0


def test_with_vllm_a_killed_run_goes_on_and_every_sync_arrives(smollm2: Path, grader: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    kill_when_saved(run, train(smollm2, grader, run, "--rollout", "vllm", "--set", "backbone.dtype=float32"))
    assert start(grader, "train", "--resume", "--output", str(run), "--quiet", "--allow-code").wait(timeout=900) == 0
    lines = metrics(run)
    # The run itself stops above a mean gap of 1e-3; the canary has compared weights and log-probs at each sync.
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert all(np.isfinite(line["policy/logprob_gap_mean"]) for line in lines)
    assert sum(line["optim/updates_applied"] for line in lines) > 0
    assert sum(line["replay/used"] for line in lines) > 0
    shutil.rmtree(run)

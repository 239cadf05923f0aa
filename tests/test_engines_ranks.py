"""Two real processes against one: shares, gradients, errors, and a run started by `--nproc 2`."""

import os
import pickle
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from test_engines_torch import build_model, build_policy, minibatch, sequences, weights

from exgrpo_cli.algo.batching import rank_shares

WORKER = Path(__file__).parent / "rank_worker.py"


def torchrun(job: str, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    paths = [str(Path(__file__).parents[1]), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    return subprocess.run(
        [*command, str(WORKER), job, str(folder)],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
    )


def test_shares_keep_prompts_together_and_have_as_many_tokens() -> None:
    """97 tokens with prompts: two shares of 45 to 52, which differ by no more than the longest row, 17."""
    shares = rank_shares(sequences(), 2)
    assert sorted(index for share in shares for index in share) == list(range(12))
    tokens = [sum(len(sequences()[i].prompt_ids) + len(sequences()[i].response_ids) for i in share) for share in shares]
    assert abs(tokens[0] - tokens[1]) <= 17
    prompts = [{sequences()[i].prompt_ids.tobytes() for i in share} for share in shares]
    assert len(prompts[0] & prompts[1]) <= 1


def test_two_processes_have_the_scores_and_the_gradient_of_one(tmp_path: Path) -> None:
    done = torchrun("torch", tmp_path)
    assert done.returncode == 0, done.stderr
    model = build_model()
    before = weights(model)
    alone = build_policy(model)
    scores = alone.score(sequences())
    report = alone.update(minibatch())
    change = weights(model) - before
    results = [pickle.loads((tmp_path / f"rank-{rank}.pkl").read_bytes()) for rank in range(2)]
    assert torch.equal(results[0][2], results[1][2])
    for their_scores, their_report, their_change in results:
        for ours, theirs in zip(scores, their_scores, strict=True):
            np.testing.assert_allclose(theirs.logprobs, ours.logprobs, rtol=1e-6)
            np.testing.assert_allclose(theirs.entropies, ours.entropies, rtol=1e-6)
        assert float((their_change - change).norm() / change.norm()) < 1e-5
        assert their_report.grad_norm == pytest.approx(report.grad_norm, rel=1e-5)
        assert their_report.loss == pytest.approx(report.loss, rel=1e-5)
        assert their_report.metrics == pytest.approx(report.metrics, rel=1e-5)
        assert their_report.num_tokens == report.num_tokens


def test_a_rank_that_ends_ends_the_other_and_speaks_alone(tmp_path: Path) -> None:
    started = time.monotonic()
    done = torchrun("refuse", tmp_path)
    assert done.returncode != 0
    assert done.stderr.count("InputError: rank 1 refuses") == 1
    assert time.monotonic() - started < 60


@pytest.mark.slow
def test_a_run_of_two_processes_asks_the_same_questions_as_one(small_config, tmp_path: Path) -> None:
    """Before any weight has moved by a rounding (step 1) everything sampled and chosen is equal."""
    import json

    from exgrpo_cli.config import to_toml

    settings = tmp_path / "settings.toml"
    settings.write_text(to_toml(small_config("run.steps=3", "optim.learning_rate=1e-7", "optim.warmup_steps=0")))
    lines = []
    for ranks in (1, 2):
        run = tmp_path / f"run-{ranks}"
        command = [sys.executable, "-m", "exgrpo_cli.commands", "train", "--config", str(settings), "--quiet"]
        done = subprocess.run(
            [*command, "--nproc", str(ranks), "--output", str(run)], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        lines.append([json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()])
    for ours, theirs in zip(*lines, strict=True):
        for key in ("phase", "reward/mean", "tokens/generated", "replay/questions", "replay/retired", "replay/used"):
            assert ours.get(key) == theirs.get(key), key
        assert theirs["optim/grad_norm"] == pytest.approx(ours["optim/grad_norm"], rel=1e-4)

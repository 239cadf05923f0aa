"""The DeepSpeed policy on two processes against the torch policy on one."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch
from test_engines_ranks import torchrun
from test_engines_torch import build_model, build_policy, minibatch, sequences

from exgrpo_cli.engines.optimizer import OptimizerSettings
from exgrpo_cli.errors import InputError

HAS_DEEPSPEED = importlib.util.find_spec("deepspeed") is not None


@pytest.mark.engines
@pytest.mark.skipif(not HAS_DEEPSPEED, reason="needs the deepspeed extra")
@pytest.mark.parametrize("stage", [2, 3])
def test_two_sharded_processes_train_as_one_plain_one(stage: int, tmp_path: Path) -> None:
    """The change of the parameters after 5 updates agrees within 1e-3; after 4 of them it would not."""
    done = torchrun(f"zero{stage}", tmp_path)
    assert done.returncode == 0, done.stderr
    results = torch.load(tmp_path / "results.pt", weights_only=False)
    model = build_model(torch.float32)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    policy = build_policy(model, optimizer=OptimizerSettings(learning_rate=1e-3))
    for ours, theirs in zip(policy.score(sequences()), results["scores"], strict=True):
        np.testing.assert_allclose(theirs.logprobs, ours.logprobs, atol=1e-5)
    for _ in range(5):
        policy.update(minibatch())
    after = model.state_dict()
    change = sum(float((after[name] - before[name]).norm() ** 2) for name in before) ** 0.5

    def gap(weights: dict[str, torch.Tensor]) -> float:
        assert weights.keys() == after.keys()
        return sum(float((weights[name] - after[name]).norm() ** 2) for name in after) ** 0.5 / change

    assert gap(results["history"][-1]) < 1e-3
    assert gap(results["history"][-2]) > 1e-2
    assert results["resumed"] == (True, True, True)
    assert results["skipped"] == (False, "gradient norm above 0.001", 1, True)


@pytest.mark.skipif(HAS_DEEPSPEED, reason="the deepspeed extra is installed")
def test_a_missing_extra_is_named() -> None:
    from exgrpo_cli.engines.deepspeed_policy import require_deepspeed

    with pytest.raises(InputError, match=r"pip install 'exgrpo\[deepspeed\]'"):
        require_deepspeed(torch.device("cpu"))

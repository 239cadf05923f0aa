"""vLLM on the CPU beside an adapted policy: merged on the way, proved as any other sync."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from vllm_pair import MARKS, gaps, opened

from exgrpo_cli.base.errors import RunError
from exgrpo_cli.base.types import RolloutRequest, SamplingParams
from exgrpo_cli.engines.policy.policy import Policy

pytestmark = MARKS
PROMPT = np.arange(5, 37, dtype=np.int32)


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def pair(request: pytest.FixtureRequest, vllm_backbone: Path) -> Iterator[tuple[Policy, Any]]:
    with opened(vllm_backbone, PROMPT, dtype=request.param, rank=4, max_tokens=100, max_rows=8) as both:
        yield both


def move(policy: Policy) -> None:
    """Change the factors of every layer, by far more than bfloat16 rounds away."""
    generator = torch.Generator().manual_seed(3)
    for name, weight in policy.model.named_parameters():
        if ".lora_B." in name:
            weight.data += 0.05 * torch.randn(weight.shape, generator=generator).to(weight.dtype)


def test_rollouts_are_those_of_the_adapted_policy_after_each_sync(pair: tuple[Policy, Any]) -> None:
    policy, generator = pair
    asked = [RolloutRequest(question_id="q", prompt_ids=PROMPT[:12], seeds=tuple(range(8)))]
    params = SamplingParams(temperature=0.8, top_p=1.0, max_new_tokens=40)
    for version in (1, 2):
        move(policy)
        groups = generator.generate(asked, params)
        before = gaps(policy, asked, groups).mean()
        generator.sync(policy.named_weights(), version, policy.score)
        after = gaps(policy, asked, generator.generate(asked, params)).mean()
        assert after < before / 3 and after < {torch.float32: 1e-4, torch.bfloat16: 0.1}[policy.model.dtype]


def test_a_fault_inside_the_adapter_stops_the_run(pair: tuple[Policy, Any]) -> None:
    """Every weight arrives as it was sent, one layer without its adapter: log-probs show it, here in float32."""
    policy, generator = pair
    move(policy)
    base = policy.model.state_dict()

    def wrong() -> Iterator[tuple[str, Tensor]]:
        for name, weight in policy.named_weights():
            own = base.get(f"{name.removesuffix('.weight')}.base_layer.weight") if ".layers.0.mlp." in name else None
            yield name, weight if own is None else own

    if policy.model.dtype == torch.float32:
        with pytest.raises(RunError, match="log-probs of fixed tokens differ from the trainer's"):
            generator.sync(wrong(), 3, policy.score)
    generator.sync(policy.named_weights(), 3, policy.score)
    lacking = (each for each in policy.named_weights() if "layers.1.mlp.up_proj" not in each[0])
    with pytest.raises(RunError, match=r"weights were not sent to the rollout engine, 'model.layers.1.mlp.up_proj"):
        generator.sync(lacking, 4, policy.score)
    generator.sync(policy.named_weights(), 4, policy.score)

"""Every fault of a sync that we could think of, in both precisions, by both schedulers and at both places: the run must
stop.

A fault is a rule for what becomes of each weight: the new one, the previous one, another one, or none at all. Weights
have moved by a hundredth, as far as no log-prob in bfloat16 shows.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from vllm_pair import MARKS, opened, schedule_asynchronously

from exgrpo_cli.base.errors import RunError
from exgrpo_cli.base.types import RolloutRequest, SamplingParams
from exgrpo_cli.engines.generators import Score
from exgrpo_cli.engines.policy.policy import Policy
from exgrpo_cli.training.step.guards import require_current_weights

pytestmark = MARKS
PROMPT = np.arange(5, 37, dtype=np.int32)

Fault = Callable[[str, Tensor, Tensor], Tensor]
"""Name, new and previous weight to the one that arrives."""


def stale(part: str) -> Fault:
    return lambda name, new, old: old if part in name else new


def other(part: str) -> Fault:
    return lambda name, new, old: nudged(new) if part in name else new


def nudged(weight: Tensor) -> Tensor:
    """Larger by 0.1 %, or by the least there is where that rounds to the same number."""
    larger = weight * 1.001
    return torch.where(larger == weight, torch.nextafter(weight, torch.full_like(weight, 9.0)), larger)


def next_number(weight: Tensor, place: int) -> Tensor:
    changed = weight.clone()
    changed[place] = torch.nextafter(weight[place], torch.full_like(weight[place], 9.0))
    return changed


FAULTS: dict[str, Fault] = {
    "head": stale("lm_head.weight"),
    "layer": stale("model.layers.1."),
    "MLP": stale("model.layers.0.mlp."),
    "keys": stale("model.layers.0.self_attn.k_proj."),
    "norm by 0.1 %": other("model.norm.weight"),
    "norm of a layer by 0.1 %": other("model.layers.1.input_layernorm.weight"),
    "output projection by 0.1 %": other("model.layers.0.self_attn.o_proj.weight"),
    # No log-prob shows it.
    "one bit": lambda name, new, old: next_number(new, 5) if name == "model.norm.weight" else new,
    "previous weights": stale(""),
}


@pytest.fixture(scope="module", params=["float32", "bfloat16", "asynchronous"])
def pair(request: pytest.FixtureRequest, vllm_backbone: Path) -> Iterator[tuple[Policy, Any]]:
    with pytest.MonkeyPatch.context() as patched:
        if is_asynchronous := request.param == "asynchronous":
            schedule_asynchronously(patched)
        dtype = "float32" if is_asynchronous else request.param
        with opened(vllm_backbone, PROMPT, dtype=dtype, max_tokens=100, max_rows=8) as both:
            assert is_asynchronous == both[1].llm.llm_engine.engine_core.engine_core.async_scheduling
            yield both


def move(policy: Policy) -> dict[str, Tensor]:
    """An update of about a hundredth of every weight; returns the weights before."""
    before = {name: weight.clone() for name, weight in policy.named_weights()}
    noise = torch.Generator().manual_seed(len(before))
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.mul_(1 + 0.01 * torch.randn(parameter.shape, generator=noise).to(parameter.dtype))
    return before


@pytest.mark.parametrize("place", ["in transit", "after arrival"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_a_sync_stops_the_run(
    pair: tuple[Policy, Any], monkeypatch: pytest.MonkeyPatch, fault: str, place: str
) -> None:
    policy, generator = pair
    before = move(policy)
    reload = generator.llm.collective_rpc

    def call(method: str, kwargs: dict[str, Any]) -> None:
        sent = list(kwargs["weights_iterator"])
        wrong = [(name, FAULTS[fault](name, weight, before[name])) for name, weight in sent]
        if place == "after arrival":
            reload(method, kwargs={"weights_iterator": iter(sent)})
        reload(method, kwargs={"weights_iterator": iter(wrong)})

    with monkeypatch.context() as patched:
        patched.setattr(generator.llm, "collective_rpc", call)
        with pytest.raises(RunError, match=r"weight '[a-z0-9_.]+' did not reach the rollout engine: what is read back"):
            generator.sync(policy.named_weights(), 1, policy.score)
    generator.sync(policy.named_weights(), 1, policy.score)


def test_a_missed_sync_stops_the_run(pair: tuple[Policy, Any]) -> None:
    """The engine has the weights it had: its rollouts say so."""
    policy, generator = pair
    generator.sync(policy.named_weights(), 4, policy.score)
    move(policy)
    request = RolloutRequest(question_id="q1", prompt_ids=PROMPT, seeds=(1, 2))
    params = SamplingParams(temperature=0.8, top_p=1.0, max_new_tokens=8)
    (rollouts,) = generator.generate([request], params)
    with pytest.raises(RunError, match="sampled with version 4 of the weights, the policy has version 5"):
        require_current_weights(rollouts, 5)
    generator.sync(policy.named_weights(), 5, policy.score)
    (rollouts,) = generator.generate([request], params)
    assert {each.weight_version for each in rollouts} == {5}


def test_the_first_gap_bounds_those_of_all_later_syncs(pair: tuple[Policy, Any]) -> None:
    """In bfloat16 one of half its bound passes, and allows no more: one and a half times the bound stops the run."""
    policy, generator = pair
    first, precision = generator._first_gap, generator._settings.backbone.dtype
    bound = 1e-3 if precision == "float32" else max(0.05, 4 * first)

    def apart(by: float) -> Score:
        return lambda rows: [replace(own, logprobs=own.logprobs + np.float32(by)) for own in policy.score(rows)]

    generator.sync(policy.named_weights(), 6, apart(0.5 * bound))
    with pytest.raises(RunError, match=rf"\({first:.3g} at the first sync\), bound {bound:.3g} in {precision}"):
        generator.sync(policy.named_weights(), 7, apart(1.5 * bound))


def test_logits_are_summed_in_float32_as_the_trainers(pair: tuple[Policy, Any]) -> None:
    """In bfloat16 those of 16 to 32 are exact to 0.125."""
    assert pair[1].llm.apply_model(lambda model: model.logits_processor.head_dtype) == [torch.float32]

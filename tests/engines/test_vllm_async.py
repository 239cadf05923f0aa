"""vLLM's asynchronous scheduler, which a GPU has and its CPU build leaves out: forced on, through sleep and sync."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from vllm_pair import MARKS, gaps, opened, schedule_asynchronously

from exgrpo_cli.base.types import RolloutRequest, SamplingParams
from exgrpo_cli.engines.policy.policy import Policy

pytestmark = MARKS
PROMPT = np.random.default_rng(0).integers(5, 60, 12).astype(np.int32)
ASKED = [RolloutRequest(question_id="q", prompt_ids=PROMPT, seeds=tuple(range(6)))]
PARAMS = SamplingParams(temperature=0.8, top_p=1.0, max_new_tokens=24)


@pytest.fixture(scope="module")
def pair(vllm_backbone: Path) -> Iterator[tuple[Policy, Any]]:
    with pytest.MonkeyPatch.context() as patched:
        schedule_asynchronously(patched)
        with opened(vllm_backbone, PROMPT, max_tokens=64, max_rows=4) as both:
            yield both


def test_rollouts_are_of_the_newest_weights_after_every_sleep(pair: tuple[Policy, Any]) -> None:
    policy, generator = pair
    core = generator.llm.llm_engine.engine_core.engine_core
    assert core.async_scheduling and core.batch_queue is not None
    seen = []
    for version in range(1, 4):
        rollouts = generator.generate(ASKED, PARAMS)
        assert gaps(policy, ASKED, rollouts).max() < 1e-3
        seen.append([rollout.token_ids.tolist() for rollout in rollouts[0]])
        generator.sleep()
        assert not core.batch_queue
        with torch.no_grad():
            for weight in policy.model.parameters():
                weight.mul_(1.03)
        generator.sync(policy.named_weights(), version, policy.score)
    assert seen[0] != seen[2]


def test_a_call_that_is_broken_off_leaves_nothing_in_the_queue(pair: tuple[Policy, Any]) -> None:
    _, generator = pair

    def stop(index: int, rollout: object) -> None:
        raise KeyboardInterrupt

    whole = generator.generate(ASKED, PARAMS)
    with pytest.raises(KeyboardInterrupt):
        generator.generate(ASKED, PARAMS, stop)
    again = generator.generate(ASKED, PARAMS)
    for one, other in zip(whole[0], again[0], strict=True):
        assert one.token_ids.tolist() == other.token_ids.tolist()

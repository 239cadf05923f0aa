"""vLLM in this process, on the CPU: one engine for the whole module, held against the trainer it serves."""

import json
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from vllm_pair import MARKS, gaps, opened

from exgrpo_cli.base.errors import InputError
from exgrpo_cli.base.types import Rollout, RolloutRequest, SamplingParams, StopReason, TokenSequence
from exgrpo_cli.config.sections.run import BackboneSettings
from exgrpo_cli.engines.policy.policy import Policy

pytestmark = MARKS
TEMPERATURE = 0.8
PARAMS = SamplingParams(temperature=TEMPERATURE, top_p=1.0, max_new_tokens=40)


@pytest.fixture(scope="module")
def pair(vllm_backbone: Path) -> Iterator[tuple[Policy, Any]]:
    with opened(vllm_backbone, prompt(0), temperature=TEMPERATURE, max_tokens=400, max_rows=32) as both:
        yield both


@pytest.fixture
def policy(pair: tuple[Policy, Any]) -> Policy:
    return pair[0]


@pytest.fixture
def generator(pair: tuple[Policy, Any]) -> Any:
    return pair[1]


@pytest.fixture
def moved(policy: Policy, request: pytest.FixtureRequest) -> None:
    """The policy a few updates further than the engine."""
    generator = torch.Generator().manual_seed(zlib.crc32(request.node.name.encode()))
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator))


def prompt(number: int, tokens: int = 12) -> np.ndarray:
    return np.random.default_rng(number).integers(5, 60, tokens).astype(np.int32)


def request(number: int, members: int = 4, tokens: int = 12) -> RolloutRequest:
    seeds = tuple(2**62 + 1000 * number + member for member in range(members))
    return RolloutRequest(question_id=f"q{number}", prompt_ids=prompt(number, tokens), seeds=seeds)


def tokens_of(groups: list[list[Rollout]]) -> list[list[list[int]]]:
    return [[rollout.token_ids.tolist() for rollout in group] for group in groups]


def test_log_probs_are_the_trainers(generator: Any, policy: Policy) -> None:
    generator.sync(policy.named_weights(), 1, policy.score)
    requests = [request(number) for number in range(8)]
    groups = generator.generate(requests, PARAMS)
    assert sum(len(rollout.token_ids) for group in groups for rollout in group) > 300
    assert gaps(policy, requests, groups).max() < 1e-4
    assert {rollout.weight_version for group in groups for rollout in group} == {1}
    assert [[rollout.member for rollout in group] for group in groups] == [[0, 1, 2, 3]] * 8


def test_rollouts_end_with_their_eos_or_at_the_limit(generator: Any, policy: Policy) -> None:
    eos = policy.model.config.eos_token_id
    groups = generator.generate([request(number, 8) for number in range(4)], PARAMS)
    rollouts = [rollout for group in groups for rollout in group]
    assert {rollout.stop_reason for rollout in rollouts} >= {StopReason.EOS}
    (cut,) = generator.generate([request(1, 8)], replace(PARAMS, temperature=1.0, max_new_tokens=2))
    for rollout in [*rollouts, *cut]:
        ids = rollout.token_ids.tolist()
        assert (ids.index(eos) == len(ids) - 1) if rollout.stop_reason is StopReason.EOS else eos not in ids
        assert len(rollout.engine_logprobs) == len(ids)
    assert all(len(rollout.token_ids) == 2 for rollout in cut if rollout.stop_reason is StopReason.LENGTH)
    assert StopReason.LENGTH in {rollout.stop_reason for rollout in cut}


def test_a_rollout_depends_on_its_seed_alone(generator: Any) -> None:
    requests = [request(number) for number in range(10)]
    whole = tokens_of(generator.generate(requests, PARAMS))
    assert tokens_of(generator.generate(requests[::-1], PARAMS))[::-1] == whole
    assert tokens_of(generator.generate([requests[7], requests[2]], PARAMS)) == [whole[7], whole[2]]
    last = RolloutRequest(question_id="q3", prompt_ids=requests[3].prompt_ids, seeds=requests[3].seeds[3:])
    assert tokens_of(generator.generate([last], PARAMS)) == [whole[3][3:]]
    differing = [len({tuple(ids) for ids in group}) > 1 for group in whole]
    assert sum(differing) >= 5, "the members of a group draw the same"


def test_rollouts_are_handed_over_while_others_are_under_way(generator: Any) -> None:
    engine = generator.llm.llm_engine
    seen: list[tuple[int, int]] = []
    left: list[int] = []

    def note(index: int, rollout: Rollout) -> None:
        seen.append((index, rollout.member))
        left.append(engine.get_num_unfinished_requests())

    generator.generate([request(number) for number in range(6)], PARAMS, on_finished=note)
    assert sorted(seen) == [(index, member) for index in range(6) for member in range(4)]
    assert left[0] > 0 and left[-1] == 0


def test_an_interrupted_call_leaves_nothing_behind(generator: Any) -> None:
    def stop(index: int, rollout: Rollout) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        generator.generate([request(number) for number in range(6)], PARAMS, on_finished=stop)
    assert generator.llm.llm_engine.get_num_unfinished_requests() == 0
    (group,) = generator.generate([request(0, 2)], PARAMS)
    assert [rollout.member for rollout in group] == [0, 1]


def test_members_share_the_cache_of_their_prompt(generator: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """300 tokens are two whole blocks of 128: the first member computes them, the other three read them."""
    engine, cached = generator.llm.llm_engine, []
    real = engine.step

    def step() -> list[Any]:
        results = real()
        cached.extend(result.num_cached_tokens for result in results if result.finished)
        return results

    monkeypatch.setattr(engine, "step", step)
    generator.llm.reset_prefix_cache()
    generator.generate([request(50, 4, tokens=300)], PARAMS)
    assert sorted(cached) == [0, 256, 256, 256]


@pytest.mark.usefixtures("moved")
def test_cached_prefixes_of_old_weights_are_dropped(
    generator: Any, policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = [request(51, 2, tokens=300)]
    generator.generate(long, PARAMS)
    with monkeypatch.context() as patched:
        patched.setattr(generator.llm, "reset_prefix_cache", lambda: True)
        generator.sync(policy.named_weights(), 2, policy.score)
        assert gaps(policy, long, generator.generate(long, PARAMS)).max() > 1e-3, "the fault does not show"
    generator.sync(policy.named_weights(), 2, policy.score)
    assert gaps(policy, long, generator.generate(long, PARAMS)).max() < 1e-4


@pytest.mark.usefixtures("moved")
def test_the_order_of_calls_around_an_update(generator: Any, policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def spy(name: str, describe: Callable[..., str]) -> None:
        real = getattr(generator.llm, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            calls.append(describe(*args, **kwargs))
            return real(*args, **kwargs)

        monkeypatch.setattr(generator.llm, name, call)

    spy("sleep", lambda level: f"sleep, level {level}")
    spy("wake_up", lambda tags: f"wake {' '.join(tags)}")
    spy("collective_rpc", lambda method, **_: method)
    spy("reset_prefix_cache", lambda: "drop prefixes")
    generator.sleep()
    with pytest.raises(AssertionError):
        generator.generate([request(0)], PARAMS)
    generator.sync(policy.named_weights(), 3, policy.score)
    assert calls == ["sleep, level 2", "wake weights", "reload_weights", "drop prefixes", "wake kv_cache"]
    assert generator.weight_version == 3
    requests = [request(number) for number in range(4)]
    assert gaps(policy, requests, generator.generate(requests, PARAMS)).max() < 1e-4


def test_torch_keeps_its_threads_where_vllm_has_started_for_a_gpu(
    vllm_backbone: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There vLLM's worker leaves one thread, unless the environment names a number: its own function, no engine."""
    from vllm.utils.torch_utils import set_torch_threads_for_runtime

    from exgrpo_cli.engines.vllm import generator as engine

    settings = engine.VLLMSettings(
        folder=vllm_backbone, backbone=BackboneSettings(dtype="float32"), device="cpu", max_tokens=64, max_rows=4
    )
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(engine, "_start", lambda *given: set_torch_threads_for_runtime())
    torch.set_num_threads(3)
    engine.open_llm(settings)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    assert threads == 3


def test_a_prompt_that_leaves_no_room_is_refused(generator: Any) -> None:
    with pytest.raises(InputError, match="q1 has a prompt of 380 tokens, and with 40 new ones it exceeds the 400"):
        generator.generate([request(1, 1, tokens=380)], PARAMS)


def test_what_cannot_be_served_is_refused_before_the_start(vllm_backbone: Path, tmp_path: Path) -> None:
    from exgrpo_cli.engines.vllm.generator import VLLMSettings, open_llm

    settings = {"backbone": BackboneSettings(dtype="float32"), "device": "cpu", "max_tokens": 64, "max_rows": 4}
    with pytest.raises(InputError, match=r"rollout\.tensor_parallel = 2 does not divide the 1 ranks"):
        open_llm(VLLMSettings(folder=vllm_backbone, tensor_parallel=2, **settings))
    config = json.loads((vllm_backbone / "config.json").read_text()) | {"num_attention_heads": 4, "head_dim": 16}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match=r"heads of size 16; vLLM on the CPU has kernels for 32, 64"):
        open_llm(VLLMSettings(folder=tmp_path, **settings))


def test_rollouts_that_are_cut_short_go_on_behind_their_tokens(policy: Policy, generator: Any) -> None:
    """After 3 ends the others come as far as they are; all log-probs are those that the trainer finds of the whole."""
    # The first group has 5 tokens left, so that it is the first to end.
    asked, params = [request(number, tokens=40) for number in range(3)], replace(PARAMS, temperature=TEMPERATURE)
    asked[0] = replace(asked[0], drawn=35)
    cut = generator.generate(asked, params, enough=lambda ended: len(ended) >= 3)
    left = [(own, rollout) for own, group in zip(asked, cut, strict=True) for rollout in group if rollout.is_unfinished]
    left = [each for each in left if not each[0].drawn]
    assert 0 < len(left) <= 8 and all(0 < len(rollout.token_ids) < 40 for _, rollout in left)
    more = generator.generate(
        [
            RolloutRequest(
                question_id=own.question_id,
                prompt_ids=np.concatenate([own.prompt_ids, rollout.token_ids]),
                seeds=(own.seeds[rollout.member],),
                drawn=len(rollout.token_ids),
            )
            for own, rollout in left
        ],
        params,
    )
    for (own, rollout), (rest,) in zip(left, more, strict=True):
        whole = rollout.then(rest)
        assert whole.stop_reason is (StopReason.LENGTH if len(whole.token_ids) == 40 else StopReason.EOS)
        (scores,) = policy.score([TokenSequence(prompt_ids=own.prompt_ids, response_ids=whole.token_ids)])
        np.testing.assert_allclose(whole.engine_logprobs, scores.logprobs, rtol=0, atol=1e-4)

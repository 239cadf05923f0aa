"""The transformers generator against a row-by-row sampler without cache, batch or tricks, in float64."""

import gc
import itertools
from dataclasses import replace

import numpy as np
import pytest
import slow_sampler
import torch
from slow_sampler import EOS, FAMILIES, ONE, PARAMS, build_model, flat, of_config, requests, slowly
from transformers import DynamicCache, PreTrainedModel

from exgrpo_cli.base.errors import InputError, RunError
from exgrpo_cli.base.types import Rollout, RolloutRequest, SamplingParams, StopReason
from exgrpo_cli.engines import causal_lm
from exgrpo_cli.engines.hf import cache as slots
from exgrpo_cli.engines.hf import prompts
from exgrpo_cli.engines.hf.generator import HFGenerator


def sampled(model: PreTrainedModel, params: SamplingParams = PARAMS, max_rows: int = 256) -> list[list[Rollout]]:
    return HFGenerator(model, max_rows=max_rows, eos_ids=EOS).generate(requests(), params)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("top_p", [1.0, 0.7])
def test_rollouts_equal_one_token_at_a_time(family: str, top_p: float) -> None:
    """A rollout depends on its own prompt and seed alone."""
    model, params = build_model(family), replace(PARAMS, top_p=top_p)
    # Six rows at a time: prompts share prefills, rows end and are replaced, caches are moved.
    expected = slowly(model, params)
    slow_sampler.assert_as_one_token_at_a_time(sampled(model, params, max_rows=6), expected)
    # The example must hold early ends, late ones and the limit, and members that differ.
    lengths = {len(tokens) for group in expected for tokens, _ in group}
    assert len(lengths) > 2 and 14 in lengths and len({tuple(tokens) for tokens, _ in expected[0]}) > 1


@pytest.fixture(scope="module")
def one_at_a_time() -> tuple[PreTrainedModel, slow_sampler.Slow]:
    model = build_model()
    return model, slowly(model)


@pytest.mark.parametrize("max_rows", [1, 2, 7, 19, 256])
@pytest.mark.parametrize("prefill_tokens", [1, 12, 4096])
def test_rows_may_enter_at_any_time(one_at_a_time, max_rows, prefill_tokens, monkeypatch) -> None:
    """Rows enter in the middle of a pass over several prompts, at its end, or with a pass each."""
    model, expected = one_at_a_time
    monkeypatch.setattr(prompts, "PREFILL_TOKENS", prefill_tokens)
    slow_sampler.assert_as_one_token_at_a_time(sampled(model, max_rows=max_rows), expected)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.float64, 1e-6)])
def test_log_probs_and_entropies_are_those_of_a_full_forward_pass(dtype: torch.dtype, tolerance: float) -> None:
    """Of every token, the first and those of rows that came later among them; none where they are not asked for."""
    model = build_model(dtype=dtype)
    groups = sampled(model, replace(PARAMS, entropies=True), max_rows=6)
    slow_sampler.assert_as_one_full_pass(groups, model, rtol=1e-5, atol=tolerance)
    assert flat(sampled(model))[0].engine_entropies is None


def test_a_tiny_temperature_is_greedy_as_in_transformers_generate() -> None:
    model = build_model()
    request = requests()[0]
    expected = model.generate(
        torch.from_numpy(request.prompt_ids.astype(np.int64))[None],
        attention_mask=torch.ones(1, len(request.prompt_ids), dtype=torch.long),
        do_sample=False, max_new_tokens=14, pad_token_id=0,
    )[0, len(request.prompt_ids) :]  # fmt: skip
    for rollout in sampled(model, replace(PARAMS, temperature=1e-4))[0]:
        assert rollout.token_ids.tolist() == expected.tolist()


def test_one_new_token_and_no_request() -> None:
    assert all(len(rollout.token_ids) == 1 for rollout in flat(sampled(build_model(), ONE, max_rows=3)))
    assert HFGenerator(build_model(), eos_ids=EOS).generate([], PARAMS) == []


def test_an_eos_at_the_limit_is_an_end_not_a_cut() -> None:
    model = build_model()
    rollout = min(flat(sampled(model)), key=lambda one: len(one.token_ids))
    assert rollout.stop_reason is StopReason.EOS
    again = sampled(model, replace(PARAMS, max_new_tokens=len(rollout.token_ids)))
    same = again[int(rollout.question_id[1:])][rollout.member]
    assert same.stop_reason is StopReason.EOS and same.token_ids.tolist() == rollout.token_ids.tolist()


def test_finished_rollouts_are_handed_over_once_each_as_they_end() -> None:
    heard: list[tuple[int, Rollout]] = []
    generator = HFGenerator(build_model(), max_rows=6, eos_ids=EOS)
    groups = generator.generate(requests(), PARAMS, lambda index, rollout: heard.append((index, rollout)))
    assert len(heard) == 20 and all(groups[index][rollout.member] is rollout for index, rollout in heard)
    assert [id(rollout) for _, rollout in heard] != [id(rollout) for rollout in flat(groups)], "in order of ending"


@pytest.mark.parametrize("every", [1, 8])
def test_what_has_ended_is_handed_over_at_whatever_step_the_others_are_cut_short(every: int, monkeypatch) -> None:
    """A GPU looks for ends every eight tokens, ranks stop together: between two looks too, as at the seventh here."""
    monkeypatch.setattr("exgrpo_cli.engines.hf.generator.check_every", lambda device: every)
    heard, steps, expected = [], itertools.count(), flat(sampled(build_model(), replace(PARAMS, max_new_tokens=7)))
    generator = HFGenerator(build_model(), eos_ids=EOS)
    groups = generator.generate(requests(), PARAMS, lambda _, one: heard.append(one), lambda _: next(steps) == 7)
    ended = [rollout for rollout in flat(groups) if not rollout.is_unfinished]
    assert 0 < len(ended) == sum(rollout.stop_reason is StopReason.EOS for rollout in expected) < 20
    assert {id(rollout) for rollout in heard} == {id(rollout) for rollout in ended} and len(heard) == len(ended)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("max_rows", [3, 256])
def test_rollouts_that_are_cut_short_go_on_as_if_they_were_not(dtype: torch.dtype, max_rows: int) -> None:
    """By the reference and by the native step: after 5 ends the others are asked for again, behind their tokens."""
    model = build_model(dtype=dtype)
    generator, params = HFGenerator(model, max_rows=max_rows, eos_ids=EOS), replace(PARAMS, entropies=True)
    whole = generator.generate(requests(), params)
    cut = generator.generate(requests(), params, enough=lambda ended: len(ended) >= 5)
    left = [rollout for rollout in flat(cut) if rollout.is_unfinished]
    assert 5 <= 20 - len(left) < 20 and any(len(each.token_ids) for each in left)
    assert all(len(each.token_ids) < 14 for each in left) and (
        max_rows == 256 or not all(len(each.token_ids) for each in left)
    )
    asked = [
        RolloutRequest(
            question_id=request.question_id,
            prompt_ids=np.concatenate([request.prompt_ids, rollout.token_ids]),
            seeds=(request.seeds[rollout.member],),
            drawn=len(rollout.token_ids),
        )
        for request, group in zip(requests(), cut, strict=True)
        for rollout in group
        if rollout.is_unfinished
    ]
    generator.weight_version = 1
    more = iter(flat(generator.generate(asked, params)))
    for own, expected in zip(flat(cut), flat(whole), strict=True):
        found = own.then(next(more)) if own.is_unfinished else own
        assert found.token_ids.tolist() == expected.token_ids.tolist() and found.stop_reason is expected.stop_reason
        np.testing.assert_allclose(found.engine_logprobs, expected.engine_logprobs, rtol=0, atol=1e-5)
        np.testing.assert_allclose(found.engine_entropies, expected.engine_entropies, rtol=0, atol=1e-5)
        assert found.earlier == (((0, len(own.token_ids)),) if own.is_unfinished and len(own.token_ids) else ())
        assert (found.member, found.weight_version) == (own.member, int(own.is_unfinished))


def test_keys_and_values_are_given_back_when_the_last_rollout_has_ended() -> None:
    """Not when Python next looks for circles: on a GPU the update needs the room."""
    generator = HFGenerator(build_model(), max_rows=6, eos_ids=EOS)
    gc.collect()
    gc.disable()
    try:
        generator.generate(requests(), PARAMS)
        assert not [each for each in gc.get_objects() if type(each) in (slots.SlotCache, DynamicCache)]
    finally:
        gc.enable()


def test_sampled_shares_are_the_probabilities() -> None:
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()[None].repeat(10_000, 1)
    # Midpoints of 10,000 equal cells hit each token as often as its probability says, within one cell per edge.
    uniforms = (torch.arange(10_000) + 0.5) / 10_000
    tokens, (logprobs,) = prompts.sample_tokens(logits, uniforms, ONE)
    torch.testing.assert_close(tokens.bincount() / 10_000, torch.tensor([0.5, 0.3, 0.15, 0.05]), rtol=0, atol=2e-4)
    torch.testing.assert_close(logprobs[0], torch.tensor(0.5).log())
    # T = 1/2 squares: 25 9 2.25 0.25 over 36.5.
    tokens, _ = prompts.sample_tokens(logits, uniforms, replace(ONE, temperature=0.5))
    expected = torch.tensor([25, 9, 2.25, 0.25]) / 36.5
    torch.testing.assert_close(tokens.bincount(minlength=4) / 10_000, expected, rtol=0, atol=2e-4)
    # The nucleus of 0.7 is the first two tokens, 5/8 and 3/8; the log-probs stay those of the whole distribution.
    tokens, (logprobs,) = prompts.sample_tokens(logits, uniforms, replace(ONE, top_p=0.7))
    torch.testing.assert_close(tokens.bincount() / 10_000, torch.tensor([0.625, 0.375]), rtol=0, atol=2e-4)
    torch.testing.assert_close(logprobs[-1], torch.tensor(0.3).log())


def test_the_largest_uniform_never_draws_a_token_of_probability_zero() -> None:
    logits = torch.randn(1000, 40, generator=torch.Generator().manual_seed(0))
    logits[:, 30:] = -torch.inf
    uniforms = torch.full((1000,), np.nextafter(np.float32(1), np.float32(0)).item())
    tokens, (logprobs,) = prompts.sample_tokens(logits, uniforms, ONE)
    assert tokens.max() < 30 and logprobs.isfinite().all()


def test_sync_brings_new_weights_and_their_version() -> None:
    policy_model, own_model = build_model(), build_model()
    with torch.no_grad():
        for parameter in policy_model.parameters():
            parameter.mul_(1.5)
    generator = HFGenerator(own_model, eos_ids=EOS)
    stale = generator.generate(requests(), PARAMS)
    generator.sync(iter(policy_model.state_dict().items()), 3)
    synced = generator.generate(requests(), PARAMS)
    assert [{each.weight_version for each in flat(groups)} for groups in (stale, synced)] == [{0}, {3}]
    three = [flat(groups) for groups in (stale, synced, sampled(policy_model))]
    before, after, expected = ([one.token_ids.tolist() for one in rollouts] for rollouts in three)
    assert after == expected != before
    # Weights that it shares are there already: nothing is copied.
    own = own_model.state_dict()
    versions = {name: tensor._version for name, tensor in own.items()}
    generator.sync(iter(own.items()), 4)
    assert {name: tensor._version for name, tensor in own.items()} == versions and generator.weight_version == 4


def test_sync_refuses_weights_that_do_not_arrive_whole() -> None:
    generator, weights = HFGenerator(build_model(), eos_ids=EOS), build_model().state_dict()
    without_head = {name: tensor for name, tensor in weights.items() if name != "lm_head.weight"}
    for sent, message in (
        (without_head, r"1 weights were not sent to the generator, 'lm_head.weight' first"),
        (weights | {"other.weight": torch.zeros(1)}, r"'other.weight' is \[1\] in the policy, not there in the"),
        (weights | {"lm_head.weight": torch.zeros(3, 3)}, r"is \[3, 3\] in the policy, \[50, 32\] in"),
    ):
        with pytest.raises(RunError, match=message):
            generator.sync(iter(sent.items()), 1)
    assert generator.weight_version == 0


def test_a_sliding_window_is_refused() -> None:
    with pytest.raises(InputError, match="sliding_attention layers"):
        HFGenerator(of_config("mistral", sliding_window=8), eos_ids=EOS)


def test_a_transformers_that_tells_nothing_of_attention_makes_no_difference(monkeypatch) -> None:
    """The same tokens; afterwards the model has its own attention again."""
    expected, model = flat(sampled(build_model())), build_model()
    monkeypatch.setattr(causal_lm, "SAYS_SO", "_no_such_word")
    monkeypatch.setattr(causal_lm, "OWN_ATTENTION", "_no_such_setting")
    ours = flat(sampled(model))
    assert [each.token_ids.tolist() for each in ours] == [each.token_ids.tolist() for each in expected]
    assert model.config._attn_implementation == "sdpa"


def test_scores_of_a_bfloat16_model_are_not_rounded_to_bfloat16() -> None:
    """Scores of about 80, as large key biases make them: in bfloat16 they are exact to 0.5 alone.

    Against float64 from the same bfloat16 queries, keys and values: 16 columns, softmax by hand.
    """
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, 2, size, 16, generator=generator).bfloat16() for size in (1, 16, 16))
    query, key = query + 8, key + 2
    mask = torch.zeros(2, 2, 1, 16)
    ours, _ = slots.grouped_decoding(torch.nn.Identity(), query, key, value, mask, 0.25)
    scores = 0.25 * query.double() @ key.double().transpose(2, 3)
    assert float(scores.abs().max()) > 60
    expected = (scores.softmax(-1) @ value.double()).transpose(1, 2)
    torch.testing.assert_close(ours.double(), expected, rtol=0, atol=0.02)

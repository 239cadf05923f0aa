"""The transformers generator against a row-by-row sampler without cache, batch or tricks, in float64; and the slots of
decoded rows: who moves where, and which rows attend together."""

import gc
from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.testing import assert_array_equal
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, PreTrainedModel

from exgrpo_cli.base.errors import InputError, RunError
from exgrpo_cli.base.types import Rollout, RolloutRequest, SamplingParams, StopReason
from exgrpo_cli.engines.hf import cache as slots
from exgrpo_cli.engines.hf import generator as decode
from exgrpo_cli.engines.hf.generator import HFGenerator, row_uniforms, sample_tokens

EOS = (1, 7)
VOCAB = 50
PARAMS = SamplingParams(temperature=0.9, top_p=1.0, max_new_tokens=14)
ONE = SamplingParams(temperature=1.0, top_p=1.0, max_new_tokens=1)
SHAPE = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "initializer_range": 0.3, "max_position_embeddings": 64, "eos_token_id": list(EOS),
}  # fmt: skip
FAMILIES = {"qwen2": {"tie_word_embeddings": True}, "qwen3": {"head_dim": 16}, "llama": {}}


Slow = list[list[tuple[list[int], list[float]]]]
"""Tokens and log-probs of each rollout of each question."""


def of_config(family: str, **more: object) -> PreTrainedModel:
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SHAPE, **more))


def build_model(family: str = "qwen2", dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    torch.manual_seed(0)
    return of_config(family, **FAMILIES[family]).to(dtype).eval()


def requests() -> list[RolloutRequest]:
    """Five questions, four rollouts each."""
    rng = np.random.default_rng(0)
    return [
        RolloutRequest(
            question_id=f"q{index}",
            prompt_ids=rng.integers(0, VOCAB, int(rng.integers(1, 9))).astype(np.int32),
            seeds=tuple(int(seed) for seed in rng.integers(0, 2**63 - 1, 4)),
        )
        for index in range(5)
    ]


@torch.no_grad()
def slow_rollout(
    model: PreTrainedModel, prompt: np.ndarray, seed: int, params: SamplingParams = PARAMS
) -> tuple[list[int], list[float]]:
    """One token at a time: a full forward pass, then a walk down the cumulative distribution."""
    ids, tokens, logprobs = prompt.astype(int).tolist(), [], []
    for uniform in row_uniforms(seed, params.max_new_tokens):
        logits = model(input_ids=torch.tensor([ids + tokens])).logits[0, -1]
        probabilities = torch.softmax(logits / params.temperature, -1).tolist()
        order = range(VOCAB) if params.top_p == 1 else np.argsort(-np.array(probabilities), kind="stable").tolist()
        kept, mass = [], 0.0
        for token in order:
            if params.top_p < 1 and mass >= params.top_p:
                break
            kept.append(token)
            mass += probabilities[token]
        walked = 0.0
        for token in kept:
            walked += probabilities[token]
            if walked > float(uniform) * mass:
                break
        tokens.append(token)
        logprobs.append(float(np.log(probabilities[token])))
        if token in EOS:
            break
    return tokens, logprobs


def sampled(model: PreTrainedModel, params: SamplingParams = PARAMS, max_rows: int = 256) -> list[list[Rollout]]:
    return HFGenerator(model, max_rows=max_rows, eos_ids=EOS).generate(requests(), params)


@torch.no_grad()
def full_pass(model: PreTrainedModel, request: RolloutRequest, rollout: Rollout) -> Tensor:
    """Log-probs of every token of the vocabulary at each response position, of one pass over the whole row."""
    ids = torch.from_numpy(np.concatenate([request.prompt_ids, rollout.token_ids]).astype(np.int64))
    logits = model(input_ids=ids[None]).logits[0, len(request.prompt_ids) - 1 : -1]
    return torch.log_softmax(logits / PARAMS.temperature, -1)


def flat(groups: list[list[Rollout]]) -> list[Rollout]:
    return [rollout for group in groups for rollout in group]


def assert_as_one_token_at_a_time(groups: list[list[Rollout]], expected: Slow) -> None:
    for request, group, slow in zip(requests(), groups, expected, strict=True):
        for member, (rollout, (tokens, logprobs)) in enumerate(zip(group, slow, strict=True)):
            assert rollout.token_ids.tolist() == tokens
            np.testing.assert_allclose(rollout.engine_logprobs, logprobs, rtol=1e-5, atol=1e-7)
            assert (rollout.question_id, rollout.member) == (request.question_id, member)
            assert rollout.stop_reason is (StopReason.EOS if tokens[-1] in EOS else StopReason.LENGTH)


def slowly(model: PreTrainedModel, params: SamplingParams = PARAMS) -> Slow:
    return [[slow_rollout(model, each.prompt_ids, seed, params) for seed in each.seeds] for each in requests()]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("top_p", [1.0, 0.7])
def test_rollouts_equal_one_token_at_a_time(family: str, top_p: float) -> None:
    """A rollout depends on its own prompt and seed alone."""
    model, params = build_model(family), replace(PARAMS, top_p=top_p)
    # Six rows at a time: prompts share prefills, rows end and are replaced, caches are moved.
    expected = slowly(model, params)
    assert_as_one_token_at_a_time(sampled(model, params, max_rows=6), expected)
    # The example must hold early ends, late ones and the limit, and members that differ.
    lengths = {len(tokens) for group in expected for tokens, _ in group}
    assert len(lengths) > 2 and 14 in lengths and len({tuple(tokens) for tokens, _ in expected[0]}) > 1


@pytest.fixture(scope="module")
def one_at_a_time() -> tuple[PreTrainedModel, Slow]:
    model = build_model()
    return model, slowly(model)


@pytest.mark.parametrize("max_rows", [1, 2, 7, 19, 256])
@pytest.mark.parametrize("prefill_tokens", [1, 12, 4096])
@pytest.mark.parametrize("by_length", [False, True])
def test_rows_may_enter_at_any_time(one_at_a_time, max_rows, prefill_tokens, by_length, monkeypatch) -> None:
    """Rows enter in the middle of a pass over several prompts, at its end, or with a pass each."""
    model, expected = one_at_a_time
    monkeypatch.setattr(decode, "PREFILL_TOKENS", prefill_tokens)
    if by_length:
        # These rows are short: without it all of them are of one class and attend in one call.
        monkeypatch.setattr(slots, "SHORT", 1)
        monkeypatch.setattr(slots, "CALL_CELLS", 0)
    assert_as_one_token_at_a_time(sampled(model, max_rows=max_rows), expected)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.float64, 1e-6)])
def test_log_probs_and_entropies_are_those_of_a_full_forward_pass(dtype: torch.dtype, tolerance: float) -> None:
    """Of every token, the first and those of rows that came later among them; none where they are not asked for."""
    model = build_model(dtype=dtype)
    groups = sampled(model, replace(PARAMS, entropies=True), max_rows=6)
    for request, group in zip(requests(), groups, strict=True):
        for rollout in group:
            logprobs = full_pass(model, request, rollout)
            drawn = logprobs[torch.arange(len(logprobs)), torch.from_numpy(rollout.token_ids.astype(np.int64))]
            np.testing.assert_allclose(rollout.engine_logprobs, drawn, rtol=1e-5, atol=tolerance)
            entropies = -(logprobs.exp() * logprobs).sum(-1)
            np.testing.assert_allclose(rollout.engine_entropies, entropies, rtol=1e-5, atol=tolerance)
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
    assert len(heard) == 20
    assert all(groups[index][rollout.member] is rollout for index, rollout in heard)
    assert [id(rollout) for _, rollout in heard] != [id(rollout) for rollout in flat(groups)], "in order of ending"


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
    tokens, (logprobs,) = sample_tokens(logits, uniforms, ONE)
    torch.testing.assert_close(tokens.bincount() / 10_000, torch.tensor([0.5, 0.3, 0.15, 0.05]), rtol=0, atol=2e-4)
    torch.testing.assert_close(logprobs[0], torch.tensor(0.5).log())
    # T = 1/2 squares: 25 9 2.25 0.25 over 36.5.
    tokens, _ = sample_tokens(logits, uniforms, replace(ONE, temperature=0.5))
    expected = torch.tensor([25, 9, 2.25, 0.25]) / 36.5
    torch.testing.assert_close(tokens.bincount(minlength=4) / 10_000, expected, rtol=0, atol=2e-4)
    # The nucleus of 0.7 is the first two tokens, 5/8 and 3/8; the log-probs stay those of the whole distribution.
    tokens, (logprobs,) = sample_tokens(logits, uniforms, replace(ONE, top_p=0.7))
    torch.testing.assert_close(tokens.bincount() / 10_000, torch.tensor([0.625, 0.375]), rtol=0, atol=2e-4)
    torch.testing.assert_close(logprobs[-1], torch.tensor(0.3).log())


def test_the_largest_uniform_never_draws_a_token_of_probability_zero() -> None:
    logits = torch.randn(1000, 40, generator=torch.Generator().manual_seed(0))
    logits[:, 30:] = -torch.inf
    uniforms = torch.full((1000,), np.nextafter(np.float32(1), np.float32(0)).item())
    tokens, (logprobs,) = sample_tokens(logits, uniforms, ONE)
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


def test_scores_of_a_bfloat16_model_are_not_rounded_to_bfloat16() -> None:
    """Scores of about 80, as large key biases make them: in bfloat16 they are exact to 0.5 alone.

    Against float64 from the same bfloat16 queries, keys and values: 16 columns, softmax by hand.
    """
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, 2, size, 16, generator=generator).bfloat16() for size in (1, 16, 16))
    query, key = query + 8, key + 2
    mask = torch.zeros(2, 2, 1, 16)
    ours, _ = slots.grouped_decoding(
        torch.nn.Identity(), query, key, value, mask, 0.25, calls=[slots.AttentionCall(0, 2, 16)]
    )
    scores = 0.25 * query.double() @ key.double().transpose(2, 3)
    assert float(scores.abs().max()) > 60
    expected = (scores.softmax(-1) @ value.double()).transpose(1, 2)
    torch.testing.assert_close(ours.double(), expected, rtol=0, atol=0.02)


def test_length_classes_are_powers_of_two_from_64_on_halved_among_many_rows() -> None:
    lengths = np.array([1, 2, 8, 63, 64, 90, 91, 127, 128, 255, 256])
    classes = slots.length_class(lengths)
    assert_array_equal(classes - classes[0], [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 3])
    # 64 * sqrt(2) is 90.5, 128 * sqrt(2) 181.
    classes = slots.length_class(np.concatenate([lengths, np.full(128, 181), [182]]))
    assert_array_equal(classes[:11] - classes[0], [0, 0, 0, 0, 1, 1, 2, 2, 3, 4, 5])
    assert_array_equal(classes[-2:] - classes[0], [3, 4])


def test_only_rows_in_the_wrong_run_move() -> None:
    # Classes 8 8 7 7 6 6; the second row leaves: one row of class 7 and one of class 6 shift up by one run.
    lengths = np.array([200, 190, 80, 100, 20, 40])
    alive = np.array([True, False, True, True, True, True])
    order, run_starts = slots.regroup(lengths, alive)
    # One of class 7 into slot 1, and one of class 6 into the slot it left.
    assert (order[:5] != np.arange(5)).sum() == 2
    assert_array_equal(run_starts, [0, 1, 3])


@pytest.mark.parametrize("seed", range(20))
def test_regrouped_rows_are_the_living_ones_in_order_of_class(seed: int) -> None:
    rng = np.random.default_rng(seed)
    lengths, alive = rng.integers(1, 500, 30), rng.random(30) < rng.choice([0.0, 0.3, 0.9, 1.0])
    order, run_starts = slots.regroup(lengths, alive)
    kept = order[: alive.sum()]
    assert sorted(order.tolist()) == list(range(30))
    assert sorted(kept.tolist()) == np.flatnonzero(alive).tolist(), "every living row once, no dead one"
    classes = slots.length_class(lengths[kept])
    assert (np.diff(classes) <= 0).all()
    assert_array_equal(run_starts, [i for i in range(len(kept)) if i == 0 or classes[i] != classes[i - 1]])


def test_calls_merge_where_one_more_costs_more_than_the_columns() -> None:
    # 100 rows of 200 columns and 100 of 20: together 40,000 cells, apart 22,000.
    lengths = np.repeat([199, 19], 100)
    assert slots.attention_calls(lengths, np.array([0, 100])) == [
        slots.AttentionCall(0, 100, 200),
        slots.AttentionCall(100, 200, 20),
    ]
    # Two rows of each: 800 cells against 440, not worth a call of 500.
    assert slots.attention_calls(np.repeat([199, 19], 2), np.array([0, 2])) == [slots.AttentionCall(0, 4, 200)]
    # On a GPU a call has to save 32,768 cells: 100 rows of each save 18,000, 200 of each 36,000.
    assert slots.attention_calls(lengths, np.array([0, 100]), "cuda") == [slots.AttentionCall(0, 200, 200)]
    assert len(slots.attention_calls(np.repeat([199, 19], 200), np.array([0, 200]), "cuda")) == 2

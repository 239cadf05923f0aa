"""The torch policy against straightforward autograd over full logits, row by row, in float64.

transformers computes norms and rotary angles in float32 whatever the model's dtype, so results that are equal on paper
differ by roundings of 1e-8.
"""

import copy
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from small_policy import (
    LINEAR,
    VOCAB,
    build_model,
    build_policy,
    full_logits_scores,
    masked_one_by_one,
    minibatch,
    sequences,
    slow_loss,
    weights,
)
from torch import Tensor
from transformers import Gemma2Config, Gemma2ForCausalLM, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM, Qwen2Model

from exgrpo_cli.algo import batching, cpu
from exgrpo_cli.base.errors import InputError, RunError
from exgrpo_cli.base.types import TokenSequence
from exgrpo_cli.config.sections.objective import ObjectiveSettings
from exgrpo_cli.config.sections.run import OptimSettings
from exgrpo_cli.engines.causal_lm import split_causal_lm
from exgrpo_cli.engines.policy.packing import pack, prove_packing
from exgrpo_cli.engines.policy.policy import Policy, learning_rate_at


def change_by_update(batch: batching.MiniBatch, **settings: object) -> Tensor:
    model = build_model()
    before = weights(model)
    assert build_policy(model, **settings).update(batch).applied
    return weights(model) - before


def test_scores_equal_full_logits_row_by_row() -> None:
    model = build_model()
    for sequence, scores in zip(sequences(), build_policy(model).score(sequences()), strict=True):
        logprobs, entropies = full_logits_scores(model, sequence)
        np.testing.assert_allclose(scores.logprobs, logprobs.detach(), rtol=1e-6)
        np.testing.assert_allclose(scores.entropies, entropies.detach(), rtol=1e-6)
    assert build_policy(model).score([]) == []


@pytest.mark.parametrize("clip", [True, False])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("entropy_coefficient", [0.0, 0.3])
def test_gradient_equals_autograd_over_full_logits(clip: bool, tied: bool, entropy_coefficient: float) -> None:
    batch = minibatch(clip=clip)
    model = build_model(tied=tied)
    reference = copy.deepcopy(model)
    loss = slow_loss(reference, batch, entropy_coefficient)
    loss.backward()
    gradient = torch.cat([parameter.grad.flatten() for parameter in reference.parameters()])
    before = weights(model)
    report = build_policy(model, objective=ObjectiveSettings(entropy_coefficient=entropy_coefficient)).update(batch)
    assert report.loss == pytest.approx(loss.item(), rel=1e-7)
    assert report.grad_norm == pytest.approx(gradient.norm().item(), rel=1e-7)
    # First AdamW step: m / (sqrt(v) + eps) = g / (|g| + eps).
    torch.testing.assert_close(weights(model) - before, -gradient / (gradient.abs() + 1e3), rtol=1e-6, atol=1e-10)


def test_micro_batches_order_and_checkpointing_do_not_move_the_update() -> None:
    objective = ObjectiveSettings(entropy_coefficient=0.3, kl_coefficient=0.1)
    batch = minibatch()
    whole = change_by_update(batch, objective=objective, microbatch_tokens=10_000)
    assert whole.abs().mean() > 1e-6
    shuffled = replace(batch, rows=tuple(batch.rows[index] for index in np.random.default_rng(2).permutation(12)))
    for rows, tokens, checkpointing in ((batch, 1, False), (shuffled, 40, False), (batch, 40, True)):
        change = change_by_update(
            rows, objective=objective, microbatch_tokens=tokens, gradient_checkpointing=checkpointing
        )
        torch.testing.assert_close(change, whole, rtol=1e-6, atol=1e-10)


def test_m2po_masks_over_the_whole_minibatch_however_it_is_cut() -> None:
    """As the raw ratio does without the advantages of the tokens that the paper's loop masks, by full logits."""
    weighted = {0: {"advantage": 0.0}, 3: {"importance_weights": np.full(5, 0.5, np.float32)}}
    rows = tuple(replace(row, **weighted.get(index, {})) for index, row in enumerate(minibatch().rows))
    batch, model = minibatch(rows=rows), build_model()
    replayed = [row for row in batch.rows if row.replayed]
    logprobs = [full_logits_scores(model, row.sequence)[0].detach().numpy() for row in replayed]
    log_ratio = np.concatenate([own - row.behaviour_logprobs for own, row in zip(logprobs, replayed, strict=True)])
    kept = masked_one_by_one(log_ratio, np.concatenate([row.token_advantages for row in replayed]), 0.04)
    assert 2 <= (~kept).sum() < len(kept) - 2
    masks = iter(np.split(kept.astype(np.float32), np.cumsum([row.num_tokens for row in replayed])[:-1]))
    left = [replace(row, importance_weights=next(masks) * (0.5 if row is batch.rows[3] else 1)) for row in replayed]
    fresh = [row for row in batch.rows if not row.replayed]
    expected = change_by_update(
        replace(batch, rows=(*left, *fresh)), objective=ObjectiveSettings(replay_surrogate="raw")
    )
    m2po = ObjectiveSettings(replay_surrogate="m2po")
    shuffled = replace(batch, rows=tuple(batch.rows[index] for index in np.random.default_rng(2).permutation(12)))
    for each, tokens in ((batch, 10_000), (batch, 1), (shuffled, 40)):
        change = change_by_update(each, objective=m2po, microbatch_tokens=tokens)
        torch.testing.assert_close(change, expected, rtol=1e-6, atol=1e-10)
    # The three tokens of the row without an advantage are not trained on.
    found = build_policy(model, objective=m2po).update(batch).metrics["policy/clip_fraction_replay"]
    assert found == pytest.approx((~kept).sum() / (len(kept) - 3), rel=1e-12)
    alone = minibatch(rows=tuple(fresh))
    torch.testing.assert_close(change_by_update(alone, objective=m2po), change_by_update(alone), rtol=0, atol=0)


def test_packing_adds_few_pad_tokens_and_cells(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups of long-tailed lengths on two ranks: layers see a prompt once and the pads of products alone."""
    monkeypatch.setattr(cpu, "onednn_pays", lambda: True)
    monkeypatch.setattr(cpu, "missing_rows", lambda count: 7)
    rng = np.random.default_rng(0)
    rows = []
    for group in range(12):
        prompt = np.full(100 + group, group, dtype=np.int32)
        for length in rng.lognormal(6, 0.7, 8).astype(int):
            rows.append(TokenSequence(prompt_ids=prompt, response_ids=np.zeros(length, dtype=np.int32)))
    for share in batching.rank_shares(rows, 2):
        own = [rows[index] for index in share]
        for batch in batching.packed_batches(own, 8192):
            chosen = [own[index] for index in batch]
            packed = pack(chosen, torch.device("cpu"))
            inputs = sum({len(row.prompt_ids) for row in chosen}) + sum(len(row.response_ids) - 1 for row in chosen)
            assert packed.input_ids.numel() == inputs + 7
            cells = packed.layout.cells.numel()
            used = sum(len(row.prompt_ids) + len(row.response_ids) - 1 for row in chosen)
            assert used <= cells < used / 0.85


def test_zero_advantage_rows_count_in_n_only() -> None:
    batch = minibatch()
    zeroed = tuple(replace(row, advantage=0.0) if index < 6 else row for index, row in enumerate(batch.rows))
    with_zeros, without = replace(batch, rows=zeroed), replace(batch, rows=batch.rows[6:])
    torch.testing.assert_close(change_by_update(with_zeros), change_by_update(without), rtol=1e-6, atol=1e-10)
    fewer = replace(without, num_rollouts=6)
    torch.testing.assert_close(change_by_update(fewer), 2 * change_by_update(without), rtol=1e-3, atol=1e-9)
    # Where an entropy bonus reads every row, none is left out.
    objective = ObjectiveSettings(entropy_coefficient=0.3)
    assert build_policy(build_model(), objective=objective).update(with_zeros).num_tokens == with_zeros.num_tokens
    assert build_policy(build_model()).update(with_zeros).num_tokens == without.num_tokens


def test_a_minibatch_of_zero_advantages_is_an_update_of_zero_gradient() -> None:
    model = build_model()
    policy = build_policy(model, optim=replace(LINEAR, epsilon=1e-8, learning_rate=1e-3))
    policy.update(minibatch())
    before = weights(model)
    report = policy.update(minibatch(rows=tuple(replace(row, advantage=0.0) for row in minibatch().rows)))
    assert (report.applied, report.grad_norm, report.num_tokens) == (True, 0.0, 0)
    assert not torch.equal(weights(model), before), "Adam's momentum moves on"


def test_kl_penalty_pulls_back_to_the_initial_weights() -> None:
    policy = build_policy(build_model(), objective=ObjectiveSettings(kl_coefficient=1.0))
    batch = minibatch()
    first = policy.update(batch).metrics["policy/kl"]
    second = policy.update(batch).metrics["policy/kl"]
    assert first == pytest.approx(0.0, abs=1e-12) and second > 1e-9


def test_saved_and_loaded_policy_goes_on_bit_for_bit(tmp_path: Path) -> None:
    batch = minibatch()
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        optimizer = OptimSettings(
            learning_rate=1e-3, schedule="linear", warmup_steps=1, horizon=4, minibatches=1, skip_norm=1e9
        )
        straight = build_policy(build_model(dtype), optim=optimizer)
        straight.update(batch)
        straight.save(tmp_path / str(dtype))
        resumed_model = build_model(dtype)
        torch.nn.init.zeros_(resumed_model.model.norm.weight)
        resumed = build_policy(resumed_model, optim=optimizer)
        resumed.load(tmp_path / str(dtype))
        reports = [policy.update(batch) for policy in (straight, resumed)]
        assert reports[0] == reports[1] and reports[0].metrics["optim/learning_rate"] == 1e-3
        assert torch.equal(weights(straight.model), weights(resumed.model)) and resumed.weight_version == 2


def test_loading_another_backbone_is_refused(tmp_path: Path) -> None:
    build_policy(build_model(torch.float32)).save(tmp_path)
    with pytest.raises(RunError, match=r"'lm_head.weight' is missing there and float32.* and 0 other weights"):
        build_policy(build_model(torch.float32, tied=False)).load(tmp_path)
    with pytest.raises(RunError, match=r"is float32\[50, 32\] there and float64\[50, 32\] here"):
        build_policy(build_model()).load(tmp_path)


def test_an_update_of_bad_gradient_is_skipped_and_counted() -> None:
    model = build_model()
    policy = build_policy(model, optim=replace(LINEAR, skip_norm=1e-6))
    before = weights(model)
    broken = minibatch(rows=(replace(minibatch().rows[0], advantage=math.nan),))
    reports = [policy.update(minibatch()), policy.update(broken)]
    assert [report.applied for report in reports] == [False, False]
    assert [report.skip_reason for report in reports] == ["gradient norm above 1e-06", "non-finite gradient"]
    assert torch.equal(weights(model), before)
    assert (policy.weight_version, policy.consecutive_skips, policy.num_updates) == (0, 2, 2)
    healthy = build_policy(model)
    healthy.consecutive_skips = 2
    assert healthy.update(minibatch()).applied and healthy.consecutive_skips == 0 and healthy.weight_version == 1


def test_clipping_scales_the_gradient_to_the_bound() -> None:
    plain = change_by_update(minibatch())
    norm = build_policy(build_model()).update(minibatch()).grad_norm
    clipped = change_by_update(minibatch(), optim=replace(LINEAR, grad_clip=norm / 2))
    torch.testing.assert_close(clipped, plain / 2, rtol=1e-3, atol=1e-9)


def test_bfloat16_weights_keep_float32_masters() -> None:
    # A step of 1e-6 is lost in most bfloat16 weights of 0.2 (1e-3 apart); 31 steps move many more of them.
    model = build_model(torch.bfloat16)
    policy = build_policy(model, optim=OptimSettings(learning_rate=1e-6, weight_decay=0.0, skip_norm=1e9))
    batch = minibatch()
    before = weights(model).float()
    policy.update(batch)
    after_one = (weights(model).float() != before).float().mean()
    for _ in range(30):
        policy.update(batch)
    after_many = (weights(model).float() != before).float().mean()
    assert all(parameter.dtype == torch.bfloat16 for parameter in model.parameters())
    assert after_one < 0.02 < 2 * after_one + 0.02 < after_many


def test_rounded_matmuls_move_the_update_by_their_rounding_alone() -> None:
    """The head is not rounded; weights stay float32, and a model that is not is refused."""
    plain, rounded = (build_model(torch.float32) for _ in range(2))
    for model, dtype in ((plain, "float32"), (rounded, "bfloat16")):
        build_policy(model, optim=replace(LINEAR, matmul_dtype=dtype)).update(minibatch())
    assert not cpu.has_rounded_matmuls(rounded.lm_head) and cpu.has_rounded_matmuls(rounded)
    moved = [weights(model) - weights(build_model(torch.float32)) for model in (plain, rounded)]
    assert weights(rounded).dtype == torch.float32 and not torch.equal(*moved)
    assert torch.nn.functional.cosine_similarity(*moved, dim=0) > 0.99
    with pytest.raises(InputError, match=r"optim\.matmul_dtype = bfloat16 is for float32 weights on a CPU"):
        build_policy(build_model(torch.float64), optim=replace(LINEAR, matmul_dtype="bfloat16"))


def test_bfloat16_gradients_of_micro_batches_add_up() -> None:
    norms = [
        build_policy(build_model(torch.bfloat16), microbatch_tokens=tokens).update(minibatch()).grad_norm
        for tokens in (1, 10_000)
    ]
    assert norms[0] == pytest.approx(norms[1], rel=0.02)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_that_rests_between_updates_changes_nothing(dtype: torch.dtype, tmp_path: Path) -> None:
    """Bit for bit the weights and the checkpoint of a policy whose state never moves, in the middle of it and after."""
    resting, plain = (
        build_policy(build_model(dtype), optim=replace(LINEAR, offload_during_rollouts=offload))
        for offload in (True, False)
    )
    for _ in range(2):
        resting.offload()
        resting.offload()
        assert resting.update(minibatch()) == plain.update(minibatch())
    resting.offload()
    state = {tensor.data_ptr() for tensor in resting._stepper._update_state()}
    assert state == {host.data_ptr() for host in resting._stepper._hosts}
    assert len(state) == len(plain._stepper._masters) * (2 + (dtype is torch.bfloat16))
    for name, policy in (("resting", resting), ("plain", plain)):
        policy.save(tmp_path / name)
    resting.load(tmp_path / "plain")
    again = build_policy(build_model(dtype), optim=replace(LINEAR, offload_during_rollouts=True))
    again.load(tmp_path / "resting")
    plain.update(minibatch())
    for policy in (resting, again):
        policy.update(minibatch())
        assert torch.equal(weights(policy.model), weights(plain.model))


def test_first_update_has_ratio_one_exactly() -> None:
    # float32: scoring and training must run the very same sums.
    policy = build_policy(build_model(torch.float32))
    batch = minibatch()
    scores = policy.score([row.sequence for row in batch.rows])
    rows = tuple(
        replace(row, behaviour_logprobs=score.logprobs, replayed=False)
        for row, score in zip(batch.rows, scores, strict=True)
    )
    metrics = policy.update(replace(batch, rows=rows)).metrics
    assert metrics["policy/ratio_fresh"] == metrics["policy/ratio_fresh_max"] == 1.0


def test_named_weights_hold_tied_tensors_under_each_name() -> None:
    model = build_model()
    named = dict(build_policy(model).named_weights())
    assert named.keys() == model.state_dict().keys()
    assert named["lm_head.weight"].data_ptr() == named["model.embed_tokens.weight"].data_ptr()


def test_schedules_by_hand() -> None:
    linear = OptimSettings(
        learning_rate=1.0, schedule="linear", warmup_steps=1, horizon=3, minibatches=2, final_fraction=0.2
    )
    # Warm-up 1/2, 1; then from 1 at update 2 down to 0.2 at update 6, in steps of 0.2.
    expected = [0.5, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2]
    assert [learning_rate_at(linear, update) for update in range(8)] == pytest.approx(expected)
    constant = OptimSettings(learning_rate=2.0, warmup_steps=4, minibatches=1)
    assert [learning_rate_at(constant, update) for update in range(6)] == [0.5, 1.0, 1.5, 2.0, 2.0, 2.0]
    with pytest.raises(InputError, match=r"optim.horizon = 4 is out of range: use more than optim.warmup_steps = 4"):
        OptimSettings(schedule="linear", horizon=4, warmup_steps=4)


def unsuitable(kind: str) -> PreTrainedModel:
    shape = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
             "num_attention_heads": 2, "num_key_value_heads": 1}  # fmt: skip
    if kind == "biased":
        model = build_model()
        model.lm_head = torch.nn.Linear(32, VOCAB, dtype=torch.float64)
        return model
    if kind == "dropout":
        return Qwen2ForCausalLM(Qwen2Config(**shape, attention_dropout=0.1))
    cap = 0.5 if kind == "logits" else None
    full = ["full_attention"]
    return Gemma2ForCausalLM(Gemma2Config(**shape, head_dim=16, final_logit_softcapping=cap, layer_types=full))


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("logits", "does something to its logits after the head"), ("attention", "asks its attention for 'softcap'"),
        ("dropout", r"has dropout 0\.1"), ("biased", "head with a bias"),
    ],
)  # fmt: skip
def test_models_whose_log_probs_would_be_wrong_are_refused(kind: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        build_policy(unsuitable(kind))
    with pytest.raises(InputError, match="no separate body and linear head"):
        build_policy(build_model().model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_that_ignores_position_ids_is_refused(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in bfloat16, whose roundings are larger than what its positions change; random numbers stay as they were."""
    parts = split_causal_lm(build_model(dtype))
    state = torch.get_rng_state()
    prove_packing(parts)
    assert torch.equal(torch.get_rng_state(), state)
    forward = Qwen2Model.forward
    monkeypatch.setattr(Qwen2Model, "forward", lambda self, *args, position_ids=None, **kw: forward(self, *args, **kw))
    with pytest.raises(InputError, match="must take its positions from position_ids"):
        prove_packing(parts)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e308])
def test_damaged_weights_are_called_so(value: float) -> None:
    """Not blamed on what a sound model does to its logits, which may be large."""
    model = build_model()
    with torch.no_grad():
        model.lm_head.weight *= 1e30
    build_policy(model)
    with torch.no_grad():
        model.model.layers[0].self_attn.v_proj.weight[:] = value
        model.lm_head.weight[0, 0] = value
    with pytest.raises(InputError, match=r"gives logits that are NaN or infinite: its weights are damaged"):
        build_policy(model)


@pytest.mark.engines
def test_moments_of_8_bits_are_small_rest_in_main_memory_and_are_restored_to_the_bit(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCAB, hidden_size=128, intermediate_size=256, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=True, max_position_embeddings=64,
    )  # fmt: skip
    start = Qwen2ForCausalLM(config)

    def policy(moments: str, **settings: bool) -> Policy:
        optim = replace(LINEAR, moments=moments, epsilon=1e-8, learning_rate=1e-3, **settings)
        return build_policy(copy.deepcopy(start), optim=optim)

    exact, narrow, resumed, resting = (
        policy("float32"), policy("8bit"), policy("8bit"), policy("8bit", offload_during_rollouts=True),
    )  # fmt: skip
    for each in (exact, narrow, resting):
        for _ in range(2):
            assert each.update(minibatch()).applied
            each.offload()
    for name, each in (("exact", exact), ("saved", narrow), ("rested", resting)):
        each.save(tmp_path / name)
    resumed.load(tmp_path / "rested")
    for each in (exact, narrow, resumed, resting):
        each.update(minibatch())
    weights = [dict(each.named_weights()) for each in (exact, narrow, resumed, resting)]
    for others in weights[2:]:
        assert all(torch.equal(weights[1][name], own) for name, own in others.items())
    moved = [torch.cat([(own[name] - start.state_dict()[name]).flatten() for name in own]) for own in weights]
    # The same direction as with exact moments, though not the same step; as far as the schedule's rate says.
    assert 0.9 < torch.cosine_similarity(moved[0], moved[1], dim=0) < 1
    assert moved[1].norm() == pytest.approx(moved[0].norm().item(), rel=0.1)
    sizes = [(tmp_path / name / "optimizer.pt").stat().st_size for name in ("saved", "exact")]
    assert sizes[0] < sizes[1] / 3

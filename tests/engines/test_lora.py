"""An adapted policy against the plain model with merged weights, in float64; its files; what is refused."""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from small_policy import LINEAR, build_model, build_policy, minibatch, sequences, slow_loss
from transformers import PreTrainedModel

from exgrpo_cli.base.errors import InputError, RunError
from exgrpo_cli.config.sections.objective import ObjectiveSettings
from exgrpo_cli.config.sections.run import LoraSettings
from exgrpo_cli.engines.hf.generator import HFGenerator
from exgrpo_cli.engines.lora import IN_FILES, adapter_weights, merged_weights, plain_copy
from exgrpo_cli.engines.policy.policy import Policy

LORA = LoraSettings(rank=3, alpha=6, learning_rate_factor=1.0)
SCALING = 2.0


def adapted(dtype: torch.dtype = torch.float64, *, tied: bool = True, **settings: object) -> Policy:
    """A policy whose B is not zero, as after some updates."""
    policy = build_policy(build_model(dtype, tied=tied), **{"lora": LORA, **settings})
    generator = torch.Generator().manual_seed(1)
    for name, weight in policy.model.named_parameters():
        if ".lora_B." in name:
            weight.data = 0.1 * torch.randn(weight.shape, generator=generator).to(dtype)
    return policy


def merged_model(policy: Policy, *, tied: bool = True) -> PreTrainedModel:
    model = build_model(policy.model.dtype, tied=tied)
    model.load_state_dict(dict(merged_weights(policy.model)))
    return model


@pytest.mark.parametrize(("tied", "checkpointing"), [(True, False), (False, True)])
def test_the_gradient_is_that_of_the_merged_weights_projected_onto_the_factors(tied: bool, checkpointing: bool) -> None:
    """W = W0 + s B A: with G that of W, B has s G A^T and A has s B^T G."""
    batch = minibatch()
    policy = adapted(tied=tied, gradient_checkpointing=checkpointing)
    reference = merged_model(policy, tied=tied)
    loss = slow_loss(reference, batch)
    loss.backward()
    before = {name: weight.clone() for name, weight in policy.model.named_parameters()}
    assert policy.update(batch).loss == pytest.approx(loss.item(), rel=1e-7)
    changed = {name for name, weight in policy.model.named_parameters() if not torch.equal(weight, before[name])}
    assert changed == {name for name in before if ".lora_" in name} and len(changed) == 2 * 2 * 7
    after = dict(policy.model.named_parameters())
    for name in changed:
        path, _, factor = name.removesuffix(".default.weight").rpartition(".")
        down, up = (before[f"{path}.lora_{each}.default.weight"] for each in "AB")
        gradient = reference.get_parameter(f"{path}.weight").grad
        assert gradient is not None
        projected = SCALING * (gradient @ down.T if factor == "lora_B" else up.T @ gradient)
        # As of any first AdamW step of the helper: g / (|g| + eps).
        torch.testing.assert_close(
            after[name] - before[name], -projected / (projected.abs() + 1e3), rtol=1e-6, atol=1e-10
        )


def test_merged_logits_are_those_with_the_adapter_on_and_scores_too() -> None:
    policy = adapted()
    ids = torch.arange(12)[None]
    plain = merged_model(policy)
    torch.testing.assert_close(plain(input_ids=ids).logits, policy.model(input_ids=ids).logits, rtol=1e-7, atol=1e-8)
    for ours, theirs in zip(policy.score(sequences()), build_policy(plain).score(sequences()), strict=True):
        np.testing.assert_allclose(ours.logprobs, theirs.logprobs, rtol=1e-6)


def test_the_reference_of_a_kl_penalty_is_the_model_without_the_adapter() -> None:
    """As the plain policy's, which has a frozen copy; the second update moves what the first has left."""
    objective, batch = ObjectiveSettings(kl_coefficient=0.5), minibatch()
    policy, plain = adapted(objective=objective), build_policy(build_model(), objective=objective)
    plain.model.load_state_dict(dict(merged_weights(policy.model)))
    ours, theirs = policy.update(batch), plain.update(batch)
    assert ours.loss == pytest.approx(theirs.loss, rel=1e-6) and ours.metrics["policy/kl"] > 1e-3
    assert ours.metrics["policy/kl"] == pytest.approx(theirs.metrics["policy/kl"], rel=1e-6)
    assert policy.update(batch).grad_norm > 0


def test_a_sampler_has_the_merged_weights_and_shares_what_stays() -> None:
    model = build_model()
    sampled = plain_copy(model)
    generator = HFGenerator(sampled, eos_ids=(0,))
    policy = build_policy(model, lora=LORA)
    policy.update(minibatch())
    generator.sync(policy.named_weights(), 1)
    for name, weight in merged_weights(policy.model):
        assert torch.equal(sampled.state_dict()[name], weight), name
    assert sampled.get_input_embeddings().weight is model.get_input_embeddings().weight
    with pytest.raises(RunError, match=r"1 weights were not sent .*'model.layers.0.mlp.up_proj.weight' first"):
        generator.sync((each for each in policy.named_weights() if "layers.0.mlp.up" not in each[0]), 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_saved_is_the_adapter_and_goes_on_bit_for_bit(dtype: torch.dtype, tmp_path: Path) -> None:
    optim = replace(LINEAR, learning_rate=1e-3, epsilon=1e-8)
    first, second = (adapted(dtype, optim=optim) for _ in range(2))
    first.update(minibatch())
    first.save(tmp_path)
    saved = load_file(tmp_path / "weights.safetensors")
    assert len(saved) == 28 and all(".lora_" in name for name in saved)
    assert {each.dtype for each in saved.values()} == {torch.float32}, "masters"
    second.load(tmp_path)
    for policy in (first, second):
        policy.update(minibatch())
    ours, theirs = (adapter_weights(policy.model) for policy in (first, second))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours) and len(ours) == 28
    other = build_model(dtype)
    other.model.norm.weight.data += 0.1
    for policy, said in (
        (build_policy(other, lora=LORA), "belongs to an adapter of another model"),
        (build_policy(build_model(dtype)), "belongs to an adapter of another model"),
        (
            adapted(dtype, lora=replace(LORA, rank=2)),
            r"lora_A.default.weight' is float32\[3, 48\] there and float32\[2, 48\] here",
        ),
    ):
        with pytest.raises(RunError, match=said):
            policy.load(tmp_path)


def test_the_seed_draws_the_adapter_and_nothing_else_notices() -> None:
    models = [build_model() for _ in range(3)]
    state = torch.get_rng_state()
    drawn = [
        adapter_weights(build_policy(model, lora=LORA, seed=seed).model)
        for model, seed in zip(models, (1, 1, 2), strict=True)
    ]
    assert torch.equal(torch.get_rng_state(), state)
    name = f"{IN_FILES}model.layers.0.self_attn.q_proj.lora_A.weight"
    assert torch.equal(drawn[0][name], drawn[1][name]) and not torch.equal(drawn[0][name], drawn[2][name])


@pytest.mark.parametrize(
    ("targets", "said"),
    [
        ("qproj", "lora.targets names 'qproj', which Qwen2ForCausalLM has not below its head: use all-linear, or some"),
        ("q_proj, lm_head", r"names 'lm_head', .* some of down_proj, gate_proj, k_proj, o_proj, .*v_proj\."),
        ("", "lora.targets names ''"),
    ],
)
def test_targets_that_the_model_has_not_are_refused(targets: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        build_policy(build_model(), lora=replace(LORA, targets=targets))
    assert len(adapter_weights(build_policy(build_model(), lora=replace(LORA, targets="q_proj, v_proj")).model)) == 8


def test_transformers_that_ask_for_a_newer_peft_train_an_adapter_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.integrations.peft.MIN_PEFT_VERSION", "99")
    policy = build_policy(build_model(), lora=LORA, objective=ObjectiveSettings(kl_coefficient=0.5))
    assert policy.update(minibatch()).applied


def test_without_peft_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(InputError, match=r"lora.rank = 3 needs peft .*: pip install .*\[lora\]'"):
        build_policy(build_model(), lora=LORA)

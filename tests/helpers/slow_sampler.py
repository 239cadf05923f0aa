"""A small model of each family, and its rollouts one token at a time: a full pass for each, no cache, no batch."""

import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from exgrpo_cli.base.types import Rollout, RolloutRequest, SamplingParams, StopReason
from exgrpo_cli.engines.hf.prompts import row_uniforms

EOS = (1, 7)
VOCAB = 50
PARAMS = SamplingParams(temperature=0.9, top_p=1.0, max_new_tokens=14)
ONE = SamplingParams(temperature=1.0, top_p=1.0, max_new_tokens=1)
SHAPE = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "initializer_range": 0.3, "max_position_embeddings": 64, "eos_token_id": list(EOS),
}  # fmt: skip
FAMILIES = {
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 16},
    "llama": {},
    "mistral": {
        "sliding_window": None,
        "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4},
    },
}


Slow = list[list[tuple[list[int], list[float]]]]
"""Tokens and log-probs of each rollout of each question."""


def of_config(family: str, **more: object) -> PreTrainedModel:
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SHAPE | more))


def build_model(family: str = "qwen2", dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    """Biases and norms are drawn too: as they are made, biases are 0 and norms 1, and would not be seen."""
    torch.manual_seed(0)
    model = of_config(family, **FAMILIES[family])
    for vector in (each for each in model.parameters() if each.ndim == 1):
        vector.detach().add_(0.3 * torch.randn_like(vector))
    return model.to(dtype).eval()


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
        order = (
            range(len(probabilities))
            if params.top_p == 1
            else np.argsort(-np.array(probabilities), kind="stable").tolist()
        )
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


@torch.no_grad()
def full_pass(model: PreTrainedModel, request: RolloutRequest, rollout: Rollout) -> Tensor:
    """Log-probs of every token of the vocabulary at each response position, of one pass over the whole row."""
    ids = torch.from_numpy(np.concatenate([request.prompt_ids, rollout.token_ids]).astype(np.int64))
    logits = model(input_ids=ids[None]).logits[0, len(request.prompt_ids) - 1 : -1]
    return torch.log_softmax(logits / PARAMS.temperature, -1)


def flat(groups: list[list[Rollout]]) -> list[Rollout]:
    return [rollout for group in groups for rollout in group]


def assert_as_one_token_at_a_time(
    groups: list[list[Rollout]], expected: Slow, rtol: float = 1e-5, atol: float = 1e-7
) -> None:
    for request, group, slow in zip(requests(), groups, expected, strict=True):
        for member, (rollout, (tokens, logprobs)) in enumerate(zip(group, slow, strict=True)):
            assert rollout.token_ids.tolist() == tokens
            np.testing.assert_allclose(rollout.engine_logprobs, logprobs, rtol=rtol, atol=atol)
            assert (rollout.question_id, rollout.member) == (request.question_id, member)
            assert rollout.stop_reason is (StopReason.EOS if tokens[-1] in EOS else StopReason.LENGTH)


def assert_as_one_full_pass(groups: list[list[Rollout]], model: PreTrainedModel, rtol: float, atol: float) -> None:
    """Log-probs and entropies of every token."""
    for request, group in zip(requests(), groups, strict=True):
        for rollout in group:
            logprobs = full_pass(model, request, rollout)
            drawn = logprobs[torch.arange(len(logprobs)), torch.from_numpy(rollout.token_ids.astype(np.int64))]
            np.testing.assert_allclose(rollout.engine_logprobs, drawn, rtol=rtol, atol=atol)
            entropies = -(logprobs.exp() * logprobs).sum(-1)
            np.testing.assert_allclose(rollout.engine_entropies, entropies, rtol=rtol, atol=atol)


def slowly(model: PreTrainedModel, params: SamplingParams = PARAMS) -> Slow:
    return [[slow_rollout(model, each.prompt_ids, seed, params) for seed in each.seeds] for each in requests()]

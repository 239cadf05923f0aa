"""A small policy, twelve rows and a mini-batch of them, for the tests of engines and ranks."""

import math
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from exgrpo_cli.algo.batching import MiniBatch, TrainingRow
from exgrpo_cli.base.types import TokenSequence
from exgrpo_cli.config.sections import objective, run
from exgrpo_cli.engines.policy import adamw, policy

TEMPERATURE = 0.8
VOCAB = 50
# With epsilon far above the gradients AdamW's first step is -lr * gradient / epsilon: the change of the weights shows
# the gradient itself, where its usual sign-like step would hide its size. The clip and skip bounds are out of reach.
LINEAR = run.OptimSettings(learning_rate=1.0, epsilon=1e3, weight_decay=0.0, grad_clip=1e9, skip_norm=1e9)


def build_model(dtype: torch.dtype = torch.float64, *, tied: bool = True) -> PreTrainedModel:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=tied, initializer_range=0.2, max_position_embeddings=64,
    )  # fmt: skip
    return Qwen2ForCausalLM(config).to(dtype)


def build_policy(
    model: PreTrainedModel, *, optim: run.OptimSettings = LINEAR, microbatch_tokens: int = 64, **settings: object
) -> policy.Policy:
    chosen = {"objective": objective.ObjectiveSettings(), **settings}
    optim = replace(optim, microbatch_tokens=microbatch_tokens)
    return adamw.torch_policy(model, temperature=TEMPERATURE, optim=optim, **chosen)  # type: ignore[arg-type]


def sequences() -> list[TokenSequence]:
    """Four questions with three responses each, lengths 1 to 12, prompts of 1 to 7 tokens."""
    rng = np.random.default_rng(0)

    def tokens(count: int) -> np.ndarray:
        return rng.integers(0, VOCAB, count).astype(np.int32)

    prompts = [tokens(size) for size in (5, 1, 7, 3)]
    lengths = enumerate((3, 12, 1, 5, 5, 8, 2, 9, 4, 6, 11, 7))
    return [TokenSequence(prompt_ids=prompts[index // 3], response_ids=tokens(length)) for index, length in lengths]


def minibatch(**settings: object) -> MiniBatch:
    rng = np.random.default_rng(1)
    rows = tuple(
        TrainingRow(
            sequence=sequence,
            advantage=float(rng.normal()),
            behaviour_logprobs=rng.normal(-math.log(VOCAB), 0.5, len(sequence.response_ids)).astype(np.float32),
            replayed=index % 3 == 0,
        )
        for index, sequence in enumerate(sequences())
    )
    chosen = {"rows": rows, "num_rollouts": len(rows), "max_response_tokens": 20, "clip": True, **settings}
    return MiniBatch(**chosen)  # type: ignore[arg-type]


def weights(model: PreTrainedModel) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def full_logits_scores(model: PreTrainedModel, sequence: TokenSequence) -> tuple[Tensor, Tensor]:
    ids = torch.from_numpy(np.concatenate([sequence.prompt_ids, sequence.response_ids]).astype(np.int64))
    logits = model(input_ids=ids[None]).logits[0, len(sequence.prompt_ids) - 1 : -1]
    logprobs = torch.log_softmax(logits / TEMPERATURE, -1)
    targets = ids[len(sequence.prompt_ids) :]
    return logprobs[torch.arange(len(targets)), targets], -(logprobs.exp() * logprobs).sum(-1)


def masked_one_by_one(log_ratio: np.ndarray, advantages: np.ndarray, most: float) -> np.ndarray:
    """Algorithm 1 of M2PO (arXiv 2510.01161) as it stands there: True for tokens that are kept."""
    left = [i for i, (x, a) in enumerate(zip(log_ratio, advantages, strict=True)) if (a > 0 < x) or (a < 0 and x < 0)]
    kept = np.ones(len(log_ratio), dtype=bool)
    while left and np.mean(np.square(log_ratio[left])) > most:
        left.remove(largest := max(left, key=lambda index: float(log_ratio[index] ** 2)))
        kept[largest] = False
    return kept


def slow_loss(model: PreTrainedModel, batch: MiniBatch, entropy_coefficient: float = 0.0) -> Tensor:
    """The objective written out once more, row by row."""
    policy, entropy, num_tokens = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64), 0
    for row in batch.rows:
        logprobs, entropies = full_logits_scores(model, row.sequence)
        ratio = (logprobs - torch.from_numpy(row.behaviour_logprobs)).exp()
        if row.replayed:
            gain = row.advantage * ratio / (ratio + 0.1)
        elif batch.clip:
            gain = torch.minimum(row.advantage * ratio, row.advantage * ratio.clamp(0.8, 1.2))
        else:
            gain = row.advantage * ratio
        policy = policy - gain.sum() / (batch.num_rollouts * batch.max_response_tokens)
        entropy, num_tokens = entropy + entropies.sum(), num_tokens + len(entropies)
    return policy - entropy_coefficient * entropy / num_tokens

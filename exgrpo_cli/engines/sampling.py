"""Rollouts by request and seed; tokens drawn by inverting the cumulative distribution at one uniform number each.

The uniforms of a row come from a counter-based generator keyed by the row's seed alone, so a rollout does not depend on
what else is in the batch, beyond rounding of the logits.

Axes: rows = rollouts being decoded, vocab = vocabulary, tokens = response positions.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from jaxtyping import Float, Float32, Int
from torch import Tensor

from exgrpo_cli.base.types import Rollout, RolloutRequest, SamplingParams

LEAST_LOGPROB = -1e4
"""Log-prob of a token that is never drawn, as an entropy counts it."""


Place = tuple[int, int]
"""A rollout: the index of its request and that of its seed."""


def places_of(requests: Sequence[RolloutRequest]) -> list[Place]:
    """Every rollout that is asked for, in order."""
    return [(index, member) for index, request in enumerate(requests) for member in range(len(request.seeds))]


def in_order(requests: Sequence[RolloutRequest], rollouts: Mapping[Place, Rollout]) -> list[list[Rollout]]:
    """The rollouts of each request, in the order of its seeds."""
    return [[rollouts[index, member] for member in range(len(each.seeds))] for index, each in enumerate(requests)]


def row_uniforms(seed: int, num_tokens: int) -> Float32[np.ndarray, " tokens"]:
    """The uniforms in [0, 1) of one rollout: Philox with the seed as its key, one per response position."""
    return np.random.Generator(np.random.Philox(key=seed)).random(num_tokens, dtype=np.float32)


def sample_tokens(
    logits: Float[Tensor, "rows vocab"], uniforms: Float[Tensor, " rows"], params: SamplingParams
) -> tuple[Int[Tensor, " rows"], Float[Tensor, "kinds rows"]]:
    """Token ids; and their log-probs under softmax(logits / temperature) and, where asked for, its entropies, in nats.

    top_p < 1 draws from the smallest set of most likely tokens whose probability reaches it, renormalised; the
    log-probs are still those of the whole distribution.
    """
    logprobs = torch.log_softmax(logits.float() / params.temperature, dim=-1)
    probabilities = logprobs.exp()
    if params.top_p < 1:
        tokens = _invert_nucleus(probabilities, uniforms, params.top_p)
    else:
        tokens = _invert(probabilities, uniforms)
    numbers = [logprobs.gather(1, tokens[:, None])[:, 0]]
    if params.entropies:
        # An entry of probability 0 adds nothing, and 0 times -inf would be NaN.
        numbers.append(-logprobs.clamp(min=LEAST_LOGPROB).mul_(probabilities).sum(dim=-1))
    return tokens, torch.stack(numbers)


def _invert(weights: Float[Tensor, "rows vocab"], uniforms: Float[Tensor, " rows"]) -> Int[Tensor, " rows"]:
    """The first index whose cumulative weight exceeds u * total: never one of weight 0."""
    cumulative = weights.cumsum(dim=1)
    # At most (1 - 2^-24) * total, which in float32 never rounds up to the total itself: an index is always found.
    threshold = uniforms * cumulative[:, -1]
    return torch.searchsorted(cumulative, threshold[:, None], right=True)[:, 0]


def _invert_nucleus(
    probabilities: Float[Tensor, "rows vocab"], uniforms: Float[Tensor, " rows"], top_p: float
) -> Int[Tensor, " rows"]:
    ordered, token_ids = probabilities.sort(dim=1, descending=True, stable=True)
    # Mass before each token: the most likely one has none and is always kept.
    outside = ordered.cumsum(dim=1) - ordered >= top_p
    chosen = _invert(ordered.masked_fill(outside, 0.0), uniforms)
    return token_ids.gather(1, chosen[:, None])[:, 0]

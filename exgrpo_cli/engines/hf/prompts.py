"""Beginnings of rollouts: passes over prompts, and the draw of a token.

Tokens are drawn by inverting the cumulative distribution at one uniform number each. The uniforms of a row come from a
counter-based generator keyed by the row's seed alone, so a rollout does not depend on what else is in the batch, beyond
rounding of the logits.

Axes: prompts = prompts of one pass, rows = rollouts being decoded, or let in together, hidden = model width, vocab =
vocabulary, tokens = response positions, kinds = log-probs and, where asked for, entropies.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Float32, Int
from torch import Tensor
from transformers import DynamicCache

from exgrpo_cli.algo.batching import shared_prefix
from exgrpo_cli.base import errors, types
from exgrpo_cli.engines.causal_lm import CausalLM, reading, to_device, use_attention
from exgrpo_cli.engines.generators import Place, places_of

PREFILL_TOKENS = 4096
"""Token budget of one pass, padding included, enough to fill a GPU; a longer prompt has a pass of its own."""
DIVERGED = "the policy's logits are NaN: its weights have diverged; lower optim.learning_rate."
LEAST_LOGPROB = -1e4
"""Log-prob of a token that is never drawn, as an entropy counts it."""
Drawn = tuple[Int[Tensor, " rows"], Float[Tensor, "kinds rows"]]
"""Token ids, and their log-probs and, where asked for, entropies, in nats."""


def row_uniforms(seed: int, num_tokens: int) -> Float32[np.ndarray, " tokens"]:
    """The uniforms in [0, 1) of one rollout: Philox with the seed as its key, one per response position."""
    return np.random.Generator(np.random.Philox(key=seed)).random(num_tokens, dtype=np.float32)


def sample_tokens(
    logits: Float[Tensor, "rows vocab"], uniforms: Float[Tensor, " rows"], params: types.SamplingParams
) -> Drawn:
    """Token ids; and their log-probs under softmax(logits / temperature) and, where asked for, its entropies, in nats.

    top_p < 1 draws from the smallest set of most likely tokens whose probability reaches it, renormalised; the
    log-probs are still those of the whole distribution. Raises RunError where logits are NaN, on a CPU.
    """
    logprobs = torch.log_softmax(logits.float() / params.temperature, dim=-1)
    probabilities = logprobs.exp()
    if params.top_p < 1:
        ordered, token_ids = probabilities.sort(dim=1, descending=True, stable=True)
        # Mass before each token: the most likely one has none and is always kept.
        outside = ordered.cumsum(dim=1) - ordered >= params.top_p
        tokens = token_ids.gather(1, _invert(ordered.masked_fill(outside, 0.0), uniforms)[:, None])[:, 0]
    else:
        tokens = _invert(probabilities, uniforms)
    # NaN exceeds nothing. A GPU's host would have to wait to know.
    if tokens.device.type == "cpu" and int(tokens.max()) >= logits.shape[1]:
        raise errors.RunError(DIVERGED)
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


class Prefilled(NamedTuple):
    """Consecutive requests, from number `first` on, after one pass over their prompts."""

    first: int
    lengths: list[int]
    prefix: int
    """Tokens that all of them begin with."""
    cache: DynamicCache
    last_hidden: Float[Tensor, "prompts hidden"]
    """States that predict the first response tokens."""


class StartingRows(NamedTuple):
    """Rows whose prompts lie in one `Prefilled`, with their first tokens drawn."""

    prefilled: Prefilled
    places: Sequence[Place]
    sources: Int[np.ndarray, " rows"]
    """Numbers of their prompts in `prefilled`."""
    limits: Int[np.ndarray, " rows"]
    """Most tokens of each."""
    uniforms: Float32[np.ndarray, "rows tokens"]
    tokens: Int[Tensor, " rows"]
    numbers: Float[Tensor, "kinds rows"]
    """Their log-probs, and entropies where asked for."""


def starting_rows(
    parts: CausalLM, requests: Sequence[types.RolloutRequest], params: types.SamplingParams, attention: str, most: int
) -> Iterator[StartingRows]:
    """All rows, in the order of their requests: prefilled in `attention`, and begun, many at a time.

    At most `most` rows are begun at once, which bounds the logits.
    """
    places, begun = places_of(requests), 0
    prefilled: Prefilled | None = None
    while begun < len(places):
        request, _ = places[begun]
        if prefilled is None or request >= prefilled.first + len(prefilled.lengths):
            # Given up before the next pass: two at a time would double what prompts hold.
            prefilled = None
            prefilled = prefill(parts, requests, request, attention)
        end = prefilled.first + len(prefilled.lengths)
        chosen = [place for place in places[begun : begun + most] if place[0] < end]
        begun += len(chosen)
        sources = np.array([request - prefilled.first for request, _ in chosen])
        seeds = [requests[request].seeds[member] for request, member in chosen]
        drawn = np.array([requests[request].drawn for request, _ in chosen])
        # Those of tokens that are there already come last, where no row gets to.
        every = [row_uniforms(seed, params.max_new_tokens) for seed in seeds]
        uniforms = np.stack([np.roll(own, -num) for own, num in zip(every, drawn, strict=True)])
        logits = parts.head(prefilled.last_hidden[to_device(sources, parts.device)])
        tokens, numbers = sample_tokens(logits, to_device(uniforms[:, 0], parts.device), params)
        del logits
        yield StartingRows(prefilled, chosen, sources, params.max_new_tokens - drawn, uniforms, tokens, numbers)


def prefill(parts: CausalLM, requests: Sequence[types.RolloutRequest], first: int, attention: str) -> Prefilled:
    """A pass over as many prompts, from request `first` on, as have room padded; over one at least."""
    longest = np.maximum.accumulate([len(request.prompt_ids) for request in requests[first:]])
    count = max(1, int(np.searchsorted(longest * np.arange(1, len(longest) + 1), PREFILL_TOKENS, side="right")))
    prompts = [request.prompt_ids for request in requests[first : first + count]]
    lengths = np.array([len(prompt) for prompt in prompts])
    padded = np.zeros((len(prompts), lengths.max()), dtype=np.int64)
    for row, prompt in enumerate(prompts):
        padded[row, : len(prompt)] = prompt
    input_ids = to_device(padded, parts.device)
    cache = DynamicCache(config=parts.model.config)
    # The last token is left: its hidden state is asked for.
    prefix = min(shared_prefix(prompts), int(lengths.min()) - 1)
    with use_attention(parts.body, attention):
        if prefix:
            parts.body(input_ids=input_ids[:1, :prefix], **reading(parts.body, cache))
            cache.batch_repeat_interleave(len(prompts))
        hidden = parts.body(input_ids=input_ids[:, prefix:], **reading(parts.body, cache)).last_hidden_state
    last = hidden[torch.arange(len(prompts), device=parts.device), to_device(lengths - 1 - prefix, parts.device)]
    return Prefilled(first, lengths.tolist(), prefix, cache, last)

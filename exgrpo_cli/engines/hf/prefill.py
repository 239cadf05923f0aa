"""Prompts prefilled ahead of the rows that will need them.

A prefill is a forward pass of its own, and rows of a batch end one by one: prompts are prefilled many at a time, so
that a free row can be filled at once without a pass. What the prompts of a pass begin with is computed once.

Axes: prompts = prompts of one pass, rows = rollouts that start from them, hidden = model width.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Float32, Int
from torch import Tensor
from transformers import DynamicCache

from exgrpo_cli.algo.batching import shared_prefix
from exgrpo_cli.base.types import RolloutRequest, SamplingParams
from exgrpo_cli.engines.causal_lm import PLAIN_CAUSAL, CausalLM, repeats_keys, to_device, use_attention
from exgrpo_cli.engines.hf.cache import PromptStates, prompt_states
from exgrpo_cli.engines.sampling import row_uniforms, sample_tokens

PREFILL_TOKENS = 4096
"""Token budget of one pass, padding included, enough to fill a GPU; a longer prompt has a pass of its own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WaitingRow:
    """One rollout asked for: an index of the requests and one of its seeds."""

    request: int
    member: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Prefilled:
    """Consecutive requests after one pass over their prompts."""

    first: int
    lengths: list[int]
    states: PromptStates
    last_hidden: Float[Tensor, "prompts hidden"]
    """States that predict the first response tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StartingRows:
    """Rows whose prompts lie in one `Prefilled`, with their first tokens drawn."""

    rows: Sequence[WaitingRow]
    prefilled: Prefilled
    sources: Int[np.ndarray, " rows"]
    """Places of their prompts in it."""
    uniforms: Float32[np.ndarray, "rows tokens"]
    tokens: Int[Tensor, " rows"]
    logprobs: Float[Tensor, " rows"]
    entropies: Float[Tensor, " rows"] | None

    def __getitem__(self, part: slice) -> "StartingRows":
        return StartingRows(
            rows=self.rows[part],
            prefilled=self.prefilled,
            sources=self.sources[part],
            uniforms=self.uniforms[part],
            tokens=self.tokens[part],
            logprobs=self.logprobs[part],
            entropies=None if self.entropies is None else self.entropies[part],
        )


class WaitingRows:
    """The rows that wait for a slot, in the order of their requests: prefilled, and begun, many at a time."""

    def __init__(
        self, parts: CausalLM, requests: Sequence[RolloutRequest], params: SamplingParams, *, max_started: int
    ) -> None:
        """At most `max_started` rows are begun at once, which bounds the logits."""
        self._parts = parts
        # Prefilling runs in the model's own attention, whatever decoding uses, where that has a kernel.
        own = parts.body.config._attn_implementation
        self._attention = PLAIN_CAUSAL if repeats_keys(parts.device, parts.head.weight.dtype) else own
        self._requests = requests
        self._params = params
        self._max_started = max_started
        self._rows = [
            WaitingRow(request=index, member=member)
            for index, request in enumerate(requests)
            for member in range(len(request.seeds))
        ]
        self._begun = 0
        self._newest: Prefilled | None = None
        self._started: StartingRows | None = None

    def __len__(self) -> int:
        return len(self._rows) - self._begun + (len(self._started.rows) if self._started else 0)

    def take(self, count: int) -> StartingRows:
        """The next rows, from 1 to `count` of them."""
        if self._started is None:
            self._started = self._begin()
        taken, left = self._started[:count], self._started[count:]
        self._started = left if left.rows else None
        return taken

    def _begin(self) -> StartingRows:
        prefilled = self._with(self._rows[self._begun].request)
        last = prefilled.first + len(prefilled.lengths)
        rows = [row for row in self._rows[self._begun : self._begun + self._max_started] if row.request < last]
        self._begun += len(rows)
        sources = np.array([row.request - prefilled.first for row in rows])
        seeds = [self._requests[row.request].seeds[row.member] for row in rows]
        uniforms = np.stack([row_uniforms(seed, self._params.max_new_tokens) for seed in seeds])
        device = self._parts.device
        tokens, logprobs, entropies = sample_tokens(
            self._parts.head(prefilled.last_hidden[to_device(sources, device)]),
            to_device(uniforms[:, 0], device),
            temperature=self._params.temperature,
            top_p=self._params.top_p,
            entropies=self._params.entropies,
        )
        return StartingRows(
            rows=rows,
            prefilled=prefilled,
            sources=sources,
            uniforms=uniforms,
            tokens=tokens,
            logprobs=logprobs,
            entropies=entropies,
        )

    def _with(self, request: int) -> Prefilled:
        newest = self._newest
        if newest is None or not newest.first <= request < newest.first + len(newest.lengths):
            # Given up before the next pass: two at a time would double what prompts hold.
            self._newest = None
            self._newest = newest = self._prefill(request)
        return newest

    def _prefill(self, first: int) -> Prefilled:
        prompts = self._affordable(first)
        lengths = np.array([len(prompt) for prompt in prompts])
        padded = np.zeros((len(prompts), lengths.max()), dtype=np.int64)
        for row, prompt in enumerate(prompts):
            padded[row, : len(prompt)] = prompt
        device = self._parts.device
        input_ids = to_device(padded, device)
        cache = DynamicCache(config=self._parts.model.config)
        # Plain causal attention reads no cache. The last token is left: its hidden state is asked for.
        prefix = 0 if self._attention == PLAIN_CAUSAL else min(shared_prefix(prompts), int(lengths.min()) - 1)
        with use_attention(self._parts.body, self._attention):
            if prefix:
                self._parts.body(input_ids=input_ids[:1, :prefix], past_key_values=cache, use_cache=True)
                cache.batch_repeat_interleave(len(prompts))
            hidden = self._parts.body(
                input_ids=input_ids[:, prefix:], past_key_values=cache, use_cache=True
            ).last_hidden_state
        last = hidden[torch.arange(len(prompts), device=device), to_device(lengths - 1 - prefix, device)]
        return Prefilled(first=first, lengths=lengths.tolist(), states=prompt_states(cache), last_hidden=last)

    def _affordable(self, first: int) -> list[Int[np.ndarray, " prompt_tokens"]]:
        """Prompts from request `first` on whose padded batch stays within the token budget; at least one."""
        prompts: list[Int[np.ndarray, " prompt_tokens"]] = []
        longest = 0
        for request in self._requests[first:]:
            longest = max(longest, len(request.prompt_ids))
            if prompts and (len(prompts) + 1) * longest > PREFILL_TOKENS:
                break
            prompts.append(request.prompt_ids)
        return prompts

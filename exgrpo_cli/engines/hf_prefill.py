"""Prompts prefilled ahead of the rows that will need them.

A prefill is a forward pass of its own, and rows of a batch end one by one: prompts are prefilled many at a time, so
that a free row can be filled at once without a pass.

Axes: prompts = prompts of one pass, rows = rollouts that start from them, hidden = model width.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import DynamicCache

from exgrpo_cli.engines.attention import use_attention
from exgrpo_cli.engines.causal_lm import CausalLM
from exgrpo_cli.types import RolloutRequest

PREFILL_TOKENS = 4096
"""Token budget of one pass, padding included; a longer prompt has a pass of its own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WaitingRow:
    """One rollout asked for: an index of the requests and one of its seeds."""

    request: int
    member: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Prefilled:
    """Consecutive requests after one pass over their prompts."""

    first: int
    lengths: Int[np.ndarray, " prompts"]
    cache: DynamicCache
    last_hidden: Float[Tensor, "prompts hidden"]
    """States that predict the first response tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StartingRows:
    """Rows whose prompts lie in one `Prefilled`: `sources` are their places in it."""

    rows: Sequence[WaitingRow]
    prefilled: Prefilled
    sources: Int[np.ndarray, " rows"]


class PromptAhead:
    """Prefills prompts of `requests` in their order, keeping those of the newest pass."""

    def __init__(self, parts: CausalLM, requests: Sequence[RolloutRequest]) -> None:
        self._parts = parts
        # Prefilling runs in the model's own attention, whatever decoding uses.
        self._attention = parts.body.config._attn_implementation
        self._requests = requests
        self._newest: Prefilled | None = None

    def starting(self, rows: Sequence[WaitingRow]) -> Iterator[StartingRows]:
        """`rows`, which come in the order of their requests, cut by the pass that has their prompts."""
        done = 0
        while done < len(rows):
            prefilled = self._with(rows[done].request)
            last = prefilled.first + len(prefilled.lengths)
            stop = done + sum(row.request < last for row in rows[done:])
            part = rows[done:stop]
            yield StartingRows(
                rows=part, prefilled=prefilled, sources=np.array([row.request - prefilled.first for row in part])
            )
            done = stop

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
        cache = DynamicCache(config=self._parts.model.config)
        with use_attention(self._parts, self._attention):
            hidden = self._parts.body(
                input_ids=torch.from_numpy(padded).to(device), past_key_values=cache, use_cache=True
            ).last_hidden_state
        last = hidden[torch.arange(len(prompts), device=device), torch.from_numpy(lengths - 1).to(device)]
        return Prefilled(first=first, lengths=lengths, cache=cache, last_hidden=last)

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

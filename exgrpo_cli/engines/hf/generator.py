"""The reference generator: sampling with a transformers model, rows replaced as they end.

A prefill is a forward pass of its own, and rows of a batch end one by one: prompts are prefilled many at a time, each
once for all its rollouts, so that a free row can be filled at once without a pass. What the prompts of a pass begin
with is computed once. Rows that end leave the batch at once, and waiting ones take their place.

Tokens are drawn by inverting the cumulative distribution at one uniform number each. The uniforms of a row come from a
counter-based generator keyed by the row's seed alone, so a rollout does not depend on what else is in the batch, beyond
rounding of the logits.

Axes: prompts = prompts of one pass, rows = rollouts being decoded, or let in together, slots = rows there is room for,
hidden = model width, vocab = vocabulary, tokens = response positions.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Float32, Int
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from exgrpo_cli.algo.batching import shared_prefix
from exgrpo_cli.algo.cpu import use_fast_matmuls
from exgrpo_cli.base.errors import RunError
from exgrpo_cli.base.types import Rollout, RolloutRequest, SamplingParams, StopReason
from exgrpo_cli.engines.causal_lm import CausalLM, split_causal_lm, to_device, use_attention
from exgrpo_cli.engines.generators import Place, Score, in_order, places_of
from exgrpo_cli.engines.hf.cache import GROUPED_DECODING, AttentionCall, SlotCache, attention_calls, regroup

PREFILL_TOKENS = 4096
"""Token budget of one pass, padding included, enough to fill a GPU; a longer prompt has a pass of its own."""
EOS_CHECK_EVERY = 8
"""Tokens, on a GPU, where each check for rows that ended makes the host wait for what it has queued.

Rows that ended decode until the next check; the extra tokens are dropped."""
LEAST_LOGPROB = -1e4
"""Log-prob of a token that is never drawn, as an entropy counts it."""


class HFGenerator:
    """A `Generator` with any causal language model of transformers with full attention.

    May share its module with the policy, which makes `sync` free: the weights are the same memory.
    """

    def __init__(self, model: PreTrainedModel, *, max_rows: int = 256, eos_ids: Sequence[int]) -> None:
        self.weight_version = 0
        use_fast_matmuls(model)
        self._parts = split_causal_lm(model)
        self._max_rows = max_rows
        self._eos_ids = np.array(eos_ids, dtype=np.int64)

    @torch.inference_mode()
    def generate(
        self,
        requests: Sequence[RolloutRequest],
        params: SamplingParams,
        on_finished: Callable[[int, Rollout], None] | None = None,
    ) -> list[list[Rollout]]:
        """See `Generator.generate`; rollouts come in the order in which they end."""
        self._parts.model.eval()
        finished: dict[Place, Rollout] = {}
        max_rows = min(self._max_rows, max(1, sum(len(request.seeds) for request in requests)))
        eos_ids = to_device(self._eos_ids, self._parts.device)
        batch = DecodeBatch(self._parts, requests, params, max_rows, eos_ids, self.weight_version)
        # Set once, not once a step: transformers checks its config at every change.
        with use_attention(self._parts.body, GROUPED_DECODING):
            while batch.waiting or batch.num_rows:
                ended = batch.admit() if batch.waiting and batch.num_rows < max_rows else batch.step()
                finished |= ended
                if on_finished is not None:
                    for (request, _), rollout in ended:
                        on_finished(request, rollout)
        return in_order(requests, finished)

    def sleep(self) -> None:
        """Nothing to give back: the module is the policy's, buffers live for one call of `generate`."""

    @torch.no_grad()
    def sync(self, weights: Iterator[tuple[str, Tensor]], weight_version: int, score: Score | None = None) -> None:
        """Copy every weight that is not the model's own memory already.

        Raises RunError when a name is unknown or missing, or a shape differs.
        """
        own = self._parts.model.state_dict()
        missing = dict.fromkeys(own)
        for name, sent in weights:
            target = own.get(name)
            if target is None or target.shape != sent.shape:
                here = "not there" if target is None else list(target.shape)
                raise RunError(
                    f"weight {name!r} is {list(sent.shape)} in the policy, {here} in the generator; use one backbone."
                )
            missing.pop(name, None)
            if target.data_ptr() != sent.data_ptr():
                target.copy_(sent)
        if missing:
            raise RunError(
                f"{len(missing)} weights were not sent to the generator, {next(iter(missing))!r} first; "
                f"send the whole state dict, tied weights under each of their names."
            )
        self.weight_version = weight_version

    def close(self) -> None:
        """Nothing to release: buffers live for one call of `generate`."""


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
        ordered, token_ids = probabilities.sort(dim=1, descending=True, stable=True)
        # Mass before each token: the most likely one has none and is always kept.
        outside = ordered.cumsum(dim=1) - ordered >= params.top_p
        tokens = token_ids.gather(1, _invert(ordered.masked_fill(outside, 0.0), uniforms)[:, None])[:, 0]
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


class Prefilled(NamedTuple):
    """Consecutive requests, from number `first` on, after one pass over their prompts."""

    first: int
    lengths: list[int]
    cache: DynamicCache
    last_hidden: Float[Tensor, "prompts hidden"]
    """States that predict the first response tokens."""


class StartingRows(NamedTuple):
    """Rows whose prompts lie in one `Prefilled`, with their first tokens drawn."""

    prefilled: Prefilled
    places: Sequence[Place]
    sources: Int[np.ndarray, " rows"]
    """Numbers of their prompts in `prefilled`."""
    uniforms: Float32[np.ndarray, "rows tokens"]
    tokens: Int[Tensor, " rows"]
    numbers: Float[Tensor, "kinds rows"]
    """Their log-probs, and entropies where asked for."""


def starting_rows(
    parts: CausalLM, requests: Sequence[RolloutRequest], params: SamplingParams, attention: str, most: int
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
            prefilled = _prefill(parts, requests, request, attention)
        end = prefilled.first + len(prefilled.lengths)
        chosen = [place for place in places[begun : begun + most] if place[0] < end]
        begun += len(chosen)
        sources = np.array([request - prefilled.first for request, _ in chosen])
        seeds = [requests[request].seeds[member] for request, member in chosen]
        uniforms = np.stack([row_uniforms(seed, params.max_new_tokens) for seed in seeds])
        logits = parts.head(prefilled.last_hidden[to_device(sources, parts.device)])
        tokens, numbers = sample_tokens(logits, to_device(uniforms[:, 0], parts.device), params)
        del logits
        yield StartingRows(prefilled, chosen, sources, uniforms, tokens, numbers)


def _prefill(parts: CausalLM, requests: Sequence[RolloutRequest], first: int, attention: str) -> Prefilled:
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
            parts.body(input_ids=input_ids[:1, :prefix], past_key_values=cache, use_cache=True)
            cache.batch_repeat_interleave(len(prompts))
        hidden = parts.body(input_ids=input_ids[:, prefix:], past_key_values=cache, use_cache=True).last_hidden_state
    last = hidden[torch.arange(len(prompts), device=parts.device), to_device(lengths - 1 - prefix, parts.device)]
    return Prefilled(first, lengths.tolist(), cache, last)


class DecodeBatch:
    """Up to `max_rows` rollouts under way. Rows 0 .. num_rows - 1 are in use."""

    def __init__(
        self,
        parts: CausalLM,
        requests: Sequence[RolloutRequest],
        params: SamplingParams,
        max_rows: int,
        eos_ids: Int[Tensor, " eos"],
        weight_version: int,
    ) -> None:
        self._parts = parts
        self._requests = requests
        self._params = params
        self._max_rows = max_rows
        self._eos_ids = eos_ids
        self._weight_version = weight_version
        # Prefilling runs in the model's own attention, whatever decoding uses.
        self._starting = starting_rows(parts, requests, params, parts.body.config._attn_implementation, max_rows)
        self._part: StartingRows | None = None
        self._left: Int[np.ndarray, " left"] = np.arange(0)
        """Rows of `_part` that have no slot yet."""
        self.waiting = sum(len(request.seeds) for request in requests)
        """Rows that have no slot yet."""
        self.num_rows = 0
        device = parts.device
        self._check_every = 1 if device.type == "cpu" else EOS_CHECK_EVERY
        self._unchecked = 0
        """Tokens since the last check for rows that ended."""
        longest = max((len(request.prompt_ids) for request in requests), default=1)
        most_tokens = params.max_new_tokens + self._check_every - 1
        self._cache = SlotCache(max_rows=max_rows, max_columns=longest + most_tokens)
        self._places: list[Place] = []
        self._cached = np.zeros(max_rows, dtype=np.int64)
        """Cached tokens; on the host, where attention is planned."""
        self._run_starts = np.zeros(0, dtype=np.int64)
        """First rows of runs of like length."""
        self._calls: list[AttentionCall] = []
        """Attention calls of the latest step; none after rows came, left or moved."""
        self._state = torch.zeros(5, max_rows, dtype=torch.long, device=device)
        # Of each slot: cached tokens; response tokens, one more, the newest being the next input; that one; where its
        # row records its tokens, which stay when rows move; of rows that ended twice their tokens, plus 1 at an EOS.
        self._lengths, self._counts, self._newest, self._records, self._ends = self._state
        self._records.copy_(torch.arange(max_rows))
        self._tokens = torch.zeros(max_rows, most_tokens, dtype=torch.int32, device=device)
        self._numbers = torch.zeros(1 + params.entropies, *self._tokens.shape, device=device)
        self._uniforms = torch.zeros_like(self._numbers[0])

    def admit(self) -> list[tuple[Place, Rollout]]:
        """Let waiting rows into free slots; returns those that ended with their first token, which take none."""
        if self._part is None or not len(self._left):
            # Given up first, with the prompts it holds.
            self._part = None
            self._part = next(self._starting)
            self._left = np.arange(len(self._part.places))
        part = self._part
        taken, self._left = np.split(self._left, [self._max_rows - self.num_rows])
        self.waiting -= len(taken)
        stopped = torch.isin(part.tokens, self._eos_ids).cpu().numpy()
        ended = stopped[taken] | (self._params.max_new_tokens == 1)
        self._start(part, taken[~ended])
        if not ended.any():
            return []
        gone = taken[ended]
        tokens, numbers = part.tokens.to(torch.int32).cpu().numpy(), part.numbers.cpu().numpy()
        columns = [tokens[gone, None], *numbers[:, gone, None]]
        return self._rollouts([part.places[i] for i in gone], np.ones_like(gone), stopped[gone], columns)

    def step(self) -> list[tuple[Place, Rollout]]:
        """Extend every row by one token and return the rows that ended; runs under GROUPED_DECODING attention."""
        used = slice(0, self.num_rows)
        # Every row grows by a token, so the calls of a step are those of the one before, a column wider.
        self._calls = [call._replace(span=call.span + 1) for call in self._calls] or attention_calls(
            self._cached[used], self._run_starts, self._parts.device.type
        )
        lengths = self._lengths[used]
        output = self._parts.body(
            input_ids=self._newest[used, None],
            position_ids=lengths[:, None],
            attention_mask=self._cache.begin_step(lengths, span=max(call.span for call in self._calls)),
            past_key_values=self._cache,
            use_cache=True,
            calls=self._calls,
        )
        self._cached[used] += 1
        lengths += 1
        self._extend(self._parts.head(output.last_hidden_state[:, 0]))
        self._unchecked += 1
        if self._unchecked < self._check_every:
            return []
        self._unchecked = 0
        ends = self._ends[used].cpu().numpy()
        return self._take_out(ends) if ends.any() else []

    def _start(self, part: StartingRows, alive: Int[np.ndarray, " alive"]) -> None:
        """Fill the next slots with rows `alive` of `part`: their prompts' keys and values, and their first tokens."""
        if not len(alive):
            return
        first, prefilled = self.num_rows, part.prefilled
        self.num_rows += len(alive)
        used = slice(first, self.num_rows)
        sources, chosen = part.sources[alive].tolist(), self._on_device(alive)
        self._cache.fill(prefilled.cache, prefilled.lengths, sources, first)
        self._cached[used] = [prefilled.lengths[source] for source in sources]
        self._lengths[used] = self._on_device(self._cached[used])
        self._places.extend(part.places[i] for i in alive)
        self._run_starts, self._calls = np.append(self._run_starts, first), []
        records = self._records[used]
        self._uniforms[records, : self._params.max_new_tokens] = self._on_device(part.uniforms[alive])
        self._newest[used] = part.tokens[chosen]
        self._tokens[records, 0] = part.tokens[chosen].to(torch.int32)
        self._numbers[:, records, 0] = part.numbers[:, chosen]
        self._counts[used] = 1
        self._ends[used] = 0

    def _extend(self, logits: Float[Tensor, "rows vocab"]) -> None:
        """Sample the next token of every row, record it, and note the rows that end with it."""
        used = slice(0, self.num_rows)
        counts = self._counts[used]
        at = self._records[used], counts
        tokens, numbers = sample_tokens(logits, self._uniforms[at], self._params)
        self._tokens[at] = tokens.to(torch.int32)
        self._numbers[:, at[0], at[1]] = numbers
        self._newest[used] = tokens
        counts += 1
        stopped = torch.isin(tokens, self._eos_ids)
        ended = (stopped | (counts == self._params.max_new_tokens)) & (self._ends[used] == 0)
        self._ends[used] += ended * (2 * counts + stopped)

    def _take_out(self, ends: Int[np.ndarray, " rows"]) -> list[tuple[Place, Rollout]]:
        gone = np.flatnonzero(ends)
        records = self._records[self._on_device(gone)]
        # Bits of all in one copy: each copy to the host waits.
        numbers = self._numbers[:, records].view(torch.int32)
        bits = torch.cat([self._tokens[records][None], numbers]).cpu().numpy()
        counts, by_eos = np.divmod(ends[gone], 2)
        columns = [bits[0], *bits[1:].view(np.float32)]
        finished = self._rollouts([self._places[row] for row in gone], counts, by_eos == 1, columns)
        self._regroup(ends == 0)
        return finished

    def _rollouts(
        self,
        places: Sequence[Place],
        counts: Int[np.ndarray, " rows"],
        by_eos: Bool[np.ndarray, " rows"],
        columns: Sequence[np.ndarray],
    ) -> list[tuple[Place, Rollout]]:
        """Results of the rows at `places`: tokens, log-probs and, where asked for, entropies, `counts` of each."""
        finished = []
        for place, count, eos, *row in zip(places, counts.tolist(), by_eos.tolist(), *columns, strict=True):
            tokens, logprobs, *entropies = (column[:count].copy() for column in row)
            rollout = Rollout(
                question_id=self._requests[place[0]].question_id,
                member=place[1],
                token_ids=tokens,
                engine_logprobs=logprobs,
                stop_reason=StopReason.EOS if eos else StopReason.LENGTH,
                weight_version=self._weight_version,
                engine_entropies=entropies[0] if entropies else None,
            )
            finished.append((place, rollout))
        return finished

    def _regroup(self, alive: Bool[np.ndarray, " rows"]) -> None:
        """Fill the slots of rows that left, keeping rows of like length together."""
        used, self.num_rows = slice(0, self.num_rows), int(alive.sum())
        order, self._run_starts = regroup(self._cached[used], alive)
        self._calls = []
        self._cached[used] = self._cached[order]
        moved = np.flatnonzero(order[: self.num_rows] != np.arange(self.num_rows))
        if len(moved):
            span = int(self._cached[moved].max())
            self._cache.move(self._on_device(order[moved]), self._on_device(moved), span)
        self._state[:, used] = self._state[:, self._on_device(order)]
        self._places = [self._places[row] for row in order[: self.num_rows]]

    def _on_device(self, array: np.ndarray) -> Tensor:
        return to_device(array, self._parts.device)

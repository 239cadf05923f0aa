"""The rows being decoded: admit waiting ones, extend all by a token, hand over those that ended.

Axes: rows = rows in use, slots = rows there is room for, hidden = model width, vocab = vocabulary, tokens = response
positions.
"""

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from exgrpo_cli.base.types import Rollout, RolloutRequest, SamplingParams, StopReason
from exgrpo_cli.engines.causal_lm import CausalLM, to_device
from exgrpo_cli.engines.hf.cache import AttentionChunk, SlotCache, attention_chunks, regroup, widened
from exgrpo_cli.engines.hf.prefill import StartingRows, WaitingRow, WaitingRows
from exgrpo_cli.engines.hf.step import decoding_calls
from exgrpo_cli.engines.sampling import sample_tokens


class DecodeBatch:
    """Up to `max_rows` rollouts under way. Rows 0 .. num_rows - 1 are in use."""

    def __init__(
        self,
        parts: CausalLM,
        requests: Sequence[RolloutRequest],
        params: SamplingParams,
        *,
        max_rows: int,
        eos_ids: Int[Tensor, " eos"],
        weight_version: int,
        look_every: int = 1,
    ) -> None:
        """`look_every`: tokens between two looks for rows that ended, each of which waits for the device.

        Rows that ended since the last one are decoded on meanwhile, to no effect.
        """
        self.max_rows = max_rows
        self.num_rows = 0
        self._parts = parts
        self._requests = requests
        self._waiting = WaitingRows(parts, requests, params, max_started=max_rows)
        self._params = params
        self._eos_ids = eos_ids
        self._weight_version = weight_version
        longest = max((len(request.prompt_ids) for request in requests), default=1)
        self._cache = SlotCache(
            num_layers=parts.model.config.get_text_config().num_hidden_layers,
            max_rows=max_rows,
            max_columns=longest + params.max_new_tokens + look_every - 1,
        )
        device = parts.device
        self._rows: list[WaitingRow] = []
        self._lengths = np.zeros(max_rows, dtype=np.int64)
        """Cached tokens; on the host, where attention is planned."""
        self._run_starts = np.zeros(0, dtype=np.int64)
        """First rows of runs of like length."""
        self._chunks: tuple[AttentionChunk, ...] = ()
        """Attention calls of the latest step; none after rows came, left or moved."""
        self._counts = torch.zeros(max_rows, dtype=torch.long, device=device)
        """Response tokens so far: one more than are cached, the newest being the next input."""
        self._newest = torch.zeros(max_rows, dtype=torch.long, device=device)
        self._lengths_there = torch.zeros(max_rows, dtype=torch.long, device=device)
        """`_lengths` on the device, where each token is placed by them."""
        self._records = np.arange(max_rows)
        """Where each row writes its tokens: rows move to other slots, what they wrote stays."""
        self._records_there = torch.arange(max_rows, device=device)
        """`_records` on the device."""
        self._ends = torch.zeros(max_rows, dtype=torch.long, device=device)
        """Of rows that ended: twice their response tokens, plus 1 where the last one is an end of sequence."""
        self._look_every = look_every
        self._not_looked = 0
        """Tokens since the last look."""
        shape = (max_rows, params.max_new_tokens + look_every - 1)
        self._tokens = torch.zeros(shape, dtype=torch.int32, device=device)
        self._logprobs = torch.zeros(shape, dtype=torch.float32, device=device)
        self._entropies = torch.zeros_like(self._logprobs) if params.entropies else None
        self._uniforms = torch.zeros(shape, dtype=torch.float32, device=device)

    @property
    def num_waiting(self) -> int:
        """Rows whose prompt is computed and that have no slot yet."""
        return len(self._waiting)

    def admit(self) -> list[tuple[WaitingRow, Rollout]]:
        """Let waiting rows into free slots; returns those that ended with their first token, which take none."""
        part = self._waiting.take(self.max_rows - self.num_rows)
        stopped = torch.isin(part.tokens, self._eos_ids).cpu().numpy()
        ended = stopped | (self._params.max_new_tokens == 1)
        self._start(part, np.flatnonzero(~ended))
        if not ended.any():
            return []
        tokens, logprobs = part.tokens.to(torch.int32).cpu().numpy(), part.logprobs.cpu().numpy()
        entropies = None if part.entropies is None else part.entropies.cpu().numpy()
        finished = []
        for i in np.flatnonzero(ended):
            own = slice(i, i + 1)
            entropy = None if entropies is None else entropies[own]
            rollout = self._rollout(part.rows[i], tokens[own], logprobs[own], entropy, bool(stopped[i]))
            finished.append((part.rows[i], rollout))
        return finished

    def step(self) -> list[tuple[WaitingRow, Rollout]]:
        """Extend every row by one token and return the rows that ended; runs under GROUPED_DECODING attention."""
        used = slice(0, self.num_rows)
        # Every row grows by a token, so the calls of a step are those of the one before, a column wider.
        self._chunks = widened(self._chunks) or attention_chunks(
            self._lengths[used], self._run_starts, self._newest.device.type
        )
        lengths = self._lengths_there[used]
        mask = self._cache.begin_step(lengths, span=max(chunk.span for chunk in self._chunks))
        hidden = self._hidden(self._newest[used], lengths, mask)
        self._lengths[used] += 1
        lengths += 1
        return self._extend(self._parts.head(hidden))

    def _hidden(
        self,
        tokens: Int[Tensor, " rows"],
        lengths: Int[Tensor, " rows"],
        mask: Float[Tensor, "rows kv_heads 1 span"],
    ) -> Float[Tensor, "rows hidden"]:
        output = self._parts.body(
            input_ids=tokens[:, None],
            position_ids=lengths[:, None],
            attention_mask=mask,
            past_key_values=self._cache,
            use_cache=True,
            calls=decoding_calls(self._chunks, mask),
        )
        return output.last_hidden_state[:, 0]

    def _start(self, part: StartingRows, alive: Int[np.ndarray, " alive"]) -> None:
        """Fill the next slots with rows `alive` of `part`: their prompts' keys and values, and their first tokens."""
        if not len(alive):
            return
        first = self.num_rows
        self.num_rows += len(alive)
        used = slice(first, self.num_rows)
        lengths, sources, chosen = part.prefilled.lengths, part.sources[alive].tolist(), self._on_device(alive)
        self._cache.fill(part.prefilled.states, lengths, sources, first)
        self._lengths[used] = [lengths[source] for source in sources]
        self._lengths_there[used] = self._on_device(self._lengths[used])
        self._rows.extend(part.rows[i] for i in alive)
        self._run_starts, self._chunks = np.append(self._run_starts, first), ()
        records = self._records_there[used]
        self._uniforms[records, : self._params.max_new_tokens] = self._on_device(part.uniforms[alive])
        self._newest[used] = part.tokens[chosen]
        self._tokens[records, 0] = part.tokens[chosen].to(torch.int32)
        self._logprobs[records, 0] = part.logprobs[chosen]
        if self._entropies is not None and part.entropies is not None:
            self._entropies[records, 0] = part.entropies[chosen]
        self._counts[used] = 1
        self._ends[used] = 0

    def _extend(self, logits: Float[Tensor, "rows vocab"]) -> list[tuple[WaitingRow, Rollout]]:
        """Sample the next token of every row, record it, and take out the rows that ended."""
        used = slice(0, self.num_rows)
        counts = self._counts[used]
        at = self._records_there[used], counts
        tokens, logprobs, entropies = sample_tokens(
            logits,
            self._uniforms[at],
            temperature=self._params.temperature,
            top_p=self._params.top_p,
            entropies=self._params.entropies,
        )
        self._tokens[at] = tokens.to(torch.int32)
        self._logprobs[at] = logprobs
        if self._entropies is not None and entropies is not None:
            self._entropies[at] = entropies
        self._newest[used] = tokens
        counts += 1
        stopped = torch.isin(tokens, self._eos_ids)
        ended = (stopped | (counts == self._params.max_new_tokens)) & (self._ends[used] == 0)
        self._ends[used] += ended * (2 * counts + stopped)
        self._not_looked += 1
        if self._not_looked < self._look_every:
            return []
        self._not_looked = 0
        ends = self._ends[used].cpu().numpy()
        return self._take_out(np.flatnonzero(ends), ends) if ends.any() else []

    def _take_out(
        self, gone: Int[np.ndarray, " gone"], ends: Int[np.ndarray, " rows"]
    ) -> list[tuple[WaitingRow, Rollout]]:
        records = self._on_device(self._records[gone])
        # Bits of all in one copy: each copy to the host waits.
        kept = [each for each in (self._logprobs, self._entropies) if each is not None]
        bits = [self._tokens[records], *(each[records].view(torch.int32) for each in kept)]
        tokens, *numbers = np.split(torch.cat(bits, dim=1).cpu().numpy(), len(bits), axis=1)
        finished = []
        for i, row in enumerate(gone):
            count, by_eos = divmod(int(ends[row]), 2)
            logprobs, *entropies = (each[i, :count].view(np.float32) for each in numbers)
            entropy = entropies[0] if entropies else None
            rollout = self._rollout(self._rows[row], tokens[i, :count], logprobs, entropy, bool(by_eos))
            finished.append((self._rows[row], rollout))
        self._regroup(gone.tolist())
        return finished

    def _rollout(
        self, row: WaitingRow, tokens: np.ndarray, logprobs: np.ndarray, entropies: np.ndarray | None, by_eos: bool
    ) -> Rollout:
        return Rollout(
            question_id=self._requests[row.request].question_id,
            member=row.member,
            token_ids=tokens.copy(),
            engine_logprobs=logprobs.copy(),
            stop_reason=StopReason.EOS if by_eos else StopReason.LENGTH,
            weight_version=self._weight_version,
            engine_entropies=None if entropies is None else entropies.copy(),
        )

    def _regroup(self, gone: list[int]) -> None:
        """Fill the slots of rows that left, keeping rows of like length together."""
        alive = np.ones(self.num_rows, dtype=bool)
        alive[gone] = False
        moves = regroup(self._lengths[: self.num_rows], alive)
        free_records = self._records[gone]
        self._run_starts, self._chunks = moves.run_starts, ()
        if len(moves.sources):
            self._move(moves.sources, moves.targets)
        self._records[self.num_rows - len(gone) : self.num_rows] = free_records
        self._records_there.copy_(self._on_device(self._records))
        self.num_rows -= len(gone)
        del self._rows[self.num_rows :]

    def _move(self, sources: np.ndarray, targets: np.ndarray) -> None:
        self._lengths[targets] = self._lengths[sources]
        self._records[targets] = self._records[sources]
        moved = [self._rows[source] for source in sources]
        for target, row in zip(targets, moved, strict=True):
            self._rows[target] = row
        self._cache.move(sources, targets, int(self._lengths[targets].max()))
        from_slots, to_slots = self._on_device(sources), self._on_device(targets)
        for state in (self._lengths_there, self._counts, self._newest, self._ends):
            state[to_slots] = state[from_slots]

    def _on_device(self, array: np.ndarray) -> Tensor:
        return to_device(array, self._newest.device)

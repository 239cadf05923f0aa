"""The reference generator: sampling with a transformers model, rows replaced as they end.

A prefill is a forward pass of its own, and rows of a batch end one by one: prompts are prefilled many at a time, each
once for all its rollouts, so that a free row can be filled at once without a pass. What the prompts of a pass begin
with is computed once. Rows that end leave the batch at once, and waiting ones take their place.

A step is one native call where this machine has a C++ compiler and the model a shape that is known to it (`native.py`),
a pass of transformers over a cache of slots elsewhere.

Axes: rows = rollouts being decoded, or let in together, slots = rows there is room for, tokens = response positions.
"""

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor
from transformers import PreTrainedModel

from exgrpo_cli.algo.cpu import use_fast_matmuls
from exgrpo_cli.base.errors import RunError, ToolkitWarning
from exgrpo_cli.base.types import Rollout, RolloutRequest, SamplingParams, StopReason
from exgrpo_cli.engines.causal_lm import CausalLM, own_attention, split_causal_lm, to_device, use_attention
from exgrpo_cli.engines.generators import Enough, OnFinished, Place, Requests, Score, in_order, places_of
from exgrpo_cli.engines.hf import native, prompts
from exgrpo_cli.engines.hf.cache import GROUPED_DECODING, SlotDecoder

EOS_CHECK_EVERY = 8
"""Tokens, on a GPU, where each check for rows that ended makes the host wait for what it has queued.

Rows that ended decode until the next check; the extra tokens are dropped."""


class HFGenerator:
    """A `Generator` with any causal language model of transformers with full attention.

    May share its module with the policy, which makes `sync` free: the weights are the same memory.
    """

    def __init__(self, model: PreTrainedModel, *, max_rows: int = 256, eos_ids: Sequence[int]) -> None:
        self.weight_version = 0
        use_fast_matmuls(model)
        self._parts = split_causal_lm(model)
        self._library = native.usable_library(self._parts)
        if isinstance(self._library, str):
            slower = f"sampling takes about twice as long, for want of a native decoding step: {self._library}."
            warnings.warn(slower, ToolkitWarning, stacklevel=2)
        self._max_rows = max_rows
        self._eos_ids = np.array(eos_ids, dtype=np.int64)

    @torch.inference_mode()
    def generate(
        self, requests: Requests, params: SamplingParams, on_finished: OnFinished = None, enough: Enough = None
    ) -> list[list[Rollout]]:
        """See `Generator.generate`; rollouts come in the order in which they end."""
        self._parts.model.eval()
        finished: dict[Place, Rollout] = {}
        max_rows = min(self._max_rows, max(1, sum(len(request.seeds) for request in requests)))
        eos_ids = to_device(self._eos_ids, self._parts.device)
        decoder = self._decoder(requests, params, max_rows)
        batch = DecodeBatch(self._parts, decoder, requests, params, max_rows, eos_ids, self.weight_version)
        # Set once, not once a step: transformers checks its config at every change.
        with use_attention(self._parts.body, GROUPED_DECODING):
            going = True
            while going:
                going = bool(batch.waiting or batch.num_rows) and not (enough and enough(finished.keys()))
                go_on = batch.admit if batch.waiting and batch.num_rows < max_rows else batch.step
                # Rows that ended since the last look for them come with those that are cut short.
                ended = go_on() if going else batch.cut_short()
                finished |= ended
                for (request, _), rollout in ended:
                    if on_finished is not None and not rollout.is_unfinished:
                        on_finished(request, rollout)
        return in_order(requests, finished)

    def _decoder(self, requests: Requests, params: SamplingParams, max_rows: int) -> SlotDecoder | native.NativeDecoder:
        longest = max((len(request.prompt_ids) - request.drawn for request in requests), default=1)
        max_tokens = params.max_new_tokens + check_every(self._parts.device) - 1
        if self._library is None or isinstance(self._library, str):
            return SlotDecoder(self._parts, params, max_rows=max_rows, max_columns=longest + max_tokens)
        model = native.NativeModel(self._parts, self._library, longest + max_tokens)
        return native.NativeDecoder(model, params, max_rows, max_tokens)

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


def check_every(device: torch.device) -> int:
    """Tokens from one check for rows that ended to the next."""
    return 1 if device.type == "cpu" else EOS_CHECK_EVERY


@dataclass(eq=False)
class DecodeBatch:
    """Up to `max_rows` rollouts under way. Rows 0 .. num_rows - 1 are in use."""

    parts: CausalLM
    decoder: SlotDecoder | native.NativeDecoder
    requests: Sequence[RolloutRequest]
    params: SamplingParams
    max_rows: int
    eos_ids: Int[Tensor, " eos"]
    weight_version: int

    def __post_init__(self) -> None:
        parts, requests, params, max_rows = self.parts, self.requests, self.params, self.max_rows
        # Prefilling runs in the model's own attention, whatever decoding uses.
        self._starting = prompts.starting_rows(parts, requests, params, own_attention(parts.body), max_rows)
        self._part: prompts.StartingRows | None = None
        self._left: Int[np.ndarray, " left"] = np.arange(0)
        """Rows of `_part` that have no slot yet."""
        self.waiting = sum(len(request.seeds) for request in requests)
        """Rows that have no slot yet."""
        self.num_rows = 0
        self._device = parts.device
        self._unchecked = 0
        """Tokens since the last check for rows that ended."""
        self._places: list[Place] = []
        self._state = torch.zeros(5, max_rows, dtype=torch.long, device=parts.device)
        # Of each slot: response tokens; the newest of them, the next input; where its row records its tokens, which
        # stay when rows move; of rows that ended twice their tokens, plus 1 at an EOS; most tokens that it may have.
        self._counts, self._newest, self._records, self._ends, self._limits = self._state
        self._records.copy_(torch.arange(max_rows))
        most_tokens = params.max_new_tokens + check_every(parts.device) - 1
        self._tokens = torch.zeros(max_rows, most_tokens, dtype=torch.int32, device=parts.device)
        self._numbers = torch.zeros(1 + params.entropies, *self._tokens.shape, device=parts.device)
        self._uniforms = torch.zeros_like(self._numbers[0])

    def admit(self) -> list[tuple[Place, Rollout]]:
        """Let waiting rows into free slots; returns those that ended with their first token, which take none."""
        if self._part is None or not len(self._left):
            # Given up first, with the prompts it holds.
            self._part = None
            self._part = next(self._starting)
            self._left = np.arange(len(self._part.places))
        part = self._part
        taken, self._left = np.split(self._left, [self.max_rows - self.num_rows])
        self.waiting -= len(taken)
        stopped = torch.isin(part.tokens, self.eos_ids).cpu().numpy()
        ended = stopped[taken] | (part.limits[taken] == 1)
        self._start(part, taken[~ended])
        if not ended.any():
            return []
        gone = taken[ended]
        tokens, numbers = part.tokens.to(torch.int32).cpu().numpy(), part.numbers.cpu().numpy()
        columns = [tokens[gone, None], *numbers[:, gone, None]]
        return self._rollouts([part.places[i] for i in gone], np.ones_like(gone), stopped[gone], columns)

    def step(self) -> list[tuple[Place, Rollout]]:
        """Extend every row by one token and return the rows that ended."""
        used = slice(0, self.num_rows)
        counts = self._counts[used]
        at = self._records[used], counts
        tokens, numbers = self.decoder.step(self._newest[used], self._uniforms[at])
        self._tokens[at] = tokens.to(torch.int32)
        self._numbers[:, at[0], at[1]] = numbers
        self._newest[used] = tokens
        counts += 1
        stopped = torch.isin(tokens, self.eos_ids)
        ended = (stopped | (counts == self._limits[used])) & (self._ends[used] == 0)
        self._ends[used] += ended * (2 * counts + stopped)
        self._unchecked += 1
        if self._unchecked < check_every(self._device):
            return []
        self._unchecked = 0
        ends = self._ends[used].cpu().numpy()
        return self._take_out(ends) if ends.any() else []

    def _start(self, part: prompts.StartingRows, alive: Int[np.ndarray, " alive"]) -> None:
        """Fill the next slots with rows `alive` of `part`: their prompts' keys and values, and their first tokens."""
        if not len(alive):
            return
        first = self.num_rows
        self.num_rows += len(alive)
        used = slice(first, self.num_rows)
        self.decoder.fill(part.prefilled, part.sources[alive].tolist(), first)
        self._places.extend(part.places[i] for i in alive)
        chosen = self._on_device(alive)
        records = self._records[used]
        self._uniforms[records, : self.params.max_new_tokens] = self._on_device(part.uniforms[alive])
        self._newest[used] = part.tokens[chosen]
        self._tokens[records, 0] = part.tokens[chosen].to(torch.int32)
        self._numbers[:, records, 0] = part.numbers[:, chosen]
        self._counts[used] = 1
        self._ends[used] = 0
        self._limits[used] = self._on_device(part.limits[alive])

    def cut_short(self) -> list[tuple[Place, Rollout]]:
        """Take out every row as far as it is, and those without a slot, that have no token."""
        counts, ends = self._counts[: self.num_rows], self._ends[: self.num_rows]
        under_way = self._take_out(torch.where(ends == 0, 2 * counts, ends).cpu().numpy())
        places = places_of(self.requests)
        places, none = places[len(places) - self.waiting :], np.zeros(self.waiting, dtype=np.int64)
        columns = [np.zeros((self.waiting, 0), np.int32), *np.zeros((len(self._numbers), self.waiting, 0), np.float32)]
        return under_way + self._rollouts(places, none, none > 0, columns)

    def _take_out(self, ends: Int[np.ndarray, " rows"]) -> list[tuple[Place, Rollout]]:
        gone = np.flatnonzero(ends)
        records = self._records[self._on_device(gone)]
        # Bits of all in one copy: each copy to the host waits.
        numbers = self._numbers[:, records].view(torch.int32)
        bits = torch.cat([self._tokens[records][None], numbers]).cpu().numpy()
        counts, by_eos = np.divmod(ends[gone], 2)
        columns = [bits[0], *bits[1:].view(np.float32)]
        finished = self._rollouts([self._places[row] for row in gone], counts, by_eos == 1, columns)
        self._close_up(ends == 0)
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
            at_limit = count == self.params.max_new_tokens - self.requests[place[0]].drawn
            rollout = Rollout(
                question_id=self.requests[place[0]].question_id, member=place[1], weight_version=self.weight_version,
                stop_reason=StopReason.EOS if eos else StopReason.LENGTH if at_limit else StopReason.UNFINISHED,
                token_ids=tokens, engine_logprobs=logprobs, engine_entropies=entropies[0] if entropies else None,
            )  # fmt: skip
            finished.append((place, rollout))
        return finished

    def _close_up(self, alive: Bool[np.ndarray, " rows"]) -> None:
        """Let the last rows take the places of those that ended."""
        used, self.num_rows = slice(0, self.num_rows), int(alive.sum())
        gone = ~alive
        order = np.arange(len(alive))
        order[: self.num_rows][gone[: self.num_rows]] = self.num_rows + alive[self.num_rows :].nonzero()[0]
        order[self.num_rows :] = gone.nonzero()[0]
        self.decoder.reorder(order, self.num_rows)
        self._state[:, used] = self._state[:, self._on_device(order)]
        self._places = [self._places[row] for row in order[: self.num_rows]]

    def _on_device(self, array: np.ndarray) -> Tensor:
        return to_device(array, self._device)

"""From graded groups to mini-batches of whole groups, and from rows to micro-batches with few or no pad tokens."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from jaxtyping import Float32, Float64, Int

from exgrpo_cli.base.types import TokenSequence

MAX_PADDING = 0.05
"""Largest share of pad tokens in a micro-batch."""
SMALL_MICRO_BATCH = 512
"""Tokens below which a micro-batch costs its fixed overhead: it takes rows of other lengths rather than end early."""
SHORTEST_PREFIX = 32
"""Tokens that all prompts must begin with, as a system message or worked examples, to be stored once."""
MOST_REPEATED = 2
"""Cells of whole rows for each packed input, above which attention tells prompts apart from responses."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingRow:
    """One rollout to train on."""

    sequence: TokenSequence
    advantage: float
    """Fixed for the step; relative to the whole group of K."""
    behaviour_logprobs: Float32[np.ndarray, " tokens"]
    """Denominator of the importance ratio: pi_old for a fresh row, pi_past for a replayed one."""
    replayed: bool
    importance_weights: Float32[np.ndarray, " tokens"] | None = None
    """Fixed factors of the advantage, token by token: where the sampler's distribution was not pi_old; None is 1."""

    @property
    def token_advantages(self) -> Float64[np.ndarray, " tokens"]:
        """The advantage of each response token."""
        if self.importance_weights is None:
            return np.full(self.num_tokens, self.advantage)
        return self.advantage * self.importance_weights.astype(np.float64)

    @property
    def num_tokens(self) -> int:
        """Response tokens."""
        return len(self.sequence.response_ids)


@dataclass(frozen=True, kw_only=True, slots=True)
class MiniBatch:
    """The rows of one optimizer update, over all ranks."""

    rows: tuple[TrainingRow, ...]
    num_rollouts: int
    """N of the loss: all rows, replayed ones and those of zero advantage included."""
    max_response_tokens: int
    """Response limit, the other factor of the constant denominator."""
    clip: bool
    """Whether fresh tokens take the PPO-clipped surrogate (on-policy phase) or -A w (mixed phase)."""
    progress: float | None = None
    """Share of the run's budget that was spent before this step, where the learning rate follows that; None where it
    follows the number of updates."""

    @property
    def num_replayed(self) -> int:
        """N of the replayed kind."""
        return sum(row.replayed for row in self.rows)

    @property
    def num_tokens(self) -> int:
        """Response tokens of all rows."""
        return sum(row.num_tokens for row in self.rows)


def split_minibatches(
    groups: Sequence[Sequence[TrainingRow]],
    units: Sequence[Sequence[TrainingRow]] = (),
    *,
    num_minibatches: int,
    max_response_tokens: int,
    clip: bool,
    rng: np.random.Generator,
    order: Literal["mixed", "first", "last"] = "mixed",
) -> list[MiniBatch]:
    """Deal whole groups, and replayed units beside them, into mini-batches.

    Mini-batches have the same share of experiential groups (those with a replayed row) and of units: the number of
    groups, and that of experiential ones, differ by at most one. With fewer groups than `num_minibatches` there are as
    many mini-batches as groups. With another `order` than "mixed" the units go before or after the groups, in
    mini-batches of their own, as many as hold no more rows than the largest of groups.
    """

    def batches(dealt: Sequence[Sequence[TrainingRow]], num: int) -> list[MiniBatch]:
        return _dealt(dealt, num, max_response_tokens=max_response_tokens, clip=clip, rng=rng)

    if order == "mixed" or not units or not groups:
        return batches([*groups, *units], num_minibatches)
    fresh = batches(groups, num_minibatches)
    largest = max(len(batch.rows) for batch in fresh)
    replayed = batches(units, math.ceil(sum(map(len, units)) / largest))
    return [*replayed, *fresh] if order == "first" else [*fresh, *replayed]


def _dealt(
    groups: Sequence[Sequence[TrainingRow]],
    num_minibatches: int,
    *,
    max_response_tokens: int,
    clip: bool,
    rng: np.random.Generator,
) -> list[MiniBatch]:
    experiential = [index for index, group in enumerate(groups) if any(row.replayed for row in group)]
    fresh = [index for index, group in enumerate(groups) if not any(row.replayed for row in group)]
    # Dealt one after the other, fresh groups go on where the experiential ones ended: both counts stay within one.
    dealt = [*rng.permutation(experiential).astype(int).tolist(), *rng.permutation(fresh).astype(int).tolist()]
    num_batches = min(num_minibatches, len(groups))
    batches = [
        _minibatch([groups[index] for index in dealt[first::num_batches]], max_response_tokens, clip)
        for first in range(num_batches)
    ]
    # The first batches hold the odd groups: which update gets them is drawn too.
    return [batches[index] for index in rng.permutation(num_batches)]


def rank_shares(sequences: Sequence[TokenSequence], num_ranks: int) -> list[list[int]]:
    """Row indices of each rank: rows of one prompt side by side, cut where every rank has as many tokens.

    A row goes to the rank in whose part of the tokens its middle lies, so shares differ by at most the longest row.
    """
    if num_ranks == 1:
        return [list(range(len(sequences)))]
    by_prompt: dict[bytes, list[int]] = {}
    for index, sequence in enumerate(sequences):
        by_prompt.setdefault(sequence.prompt_ids.tobytes(), []).append(index)
    order = [index for rows in by_prompt.values() for index in rows]
    tokens = np.array([len(sequences[row].prompt_ids) + len(sequences[row].response_ids) for row in order], dtype=int)
    shares: list[list[int]] = [[] for _ in range(num_ranks)]
    for row, middle in zip(order, (2 * tokens.cumsum() - tokens).tolist(), strict=True):
        shares[middle * num_ranks // (2 * int(tokens.sum()))].append(row)
    return shares


def shared_prefix(prompts: Iterable[Int[np.ndarray, " _"]]) -> int:
    """Tokens that all prompts begin with; 0 below `SHORTEST_PREFIX`, or where there are no two unlike prompts."""
    unlike = list({prompt.tobytes(): prompt for prompt in prompts}.values())
    if len(unlike) < 2:
        return 0
    shortest = min(map(len, unlike))
    same = np.ones(shortest, dtype=bool)
    for prompt in unlike[1:]:
        same &= prompt[:shortest] == unlike[0][:shortest]
    common = shortest if same.all() else int(same.argmin())
    return common if common >= SHORTEST_PREFIX else 0


def packed_batches(sequences: Sequence[TokenSequence], token_budget: int) -> list[list[int]]:
    """Cut rows into micro-batches of at most `token_budget` inputs when packed end to end, each prompt stored once.

    Rows of one prompt stand together, in the order of the prompts' first appearance. An input is a prompt token or a
    response token but the last; the `shared_prefix` of all prompts counts once. A row longer than the budget is a
    micro-batch of its own. Returns row indices.
    """
    by_prompt: dict[bytes, list[int]] = {}
    for index, sequence in enumerate(sequences):
        by_prompt.setdefault(sequence.prompt_ids.tobytes(), []).append(index)
    prefix = shared_prefix(sequence.prompt_ids for sequence in sequences)
    batches: list[list[int]] = []
    filled = token_budget
    for rows in by_prompt.values():
        prompt_stored = False
        for row in rows:
            prompt, response = len(sequences[row].prompt_ids) - prefix, len(sequences[row].response_ids) - 1
            if filled + response + (0 if prompt_stored else prompt) > token_budget:
                batches.append([])
                filled, prompt_stored = prefix, False
            batches[-1].append(row)
            filled += response + (0 if prompt_stored else prompt)
            prompt_stored = True
    return [batch for batch in batches if batch]


def micro_batches(
    lengths: Sequence[int], token_budget: int, *, max_padding: float = MAX_PADDING, small: int = SMALL_MICRO_BATCH
) -> list[list[int]]:
    """Cut rows, longest first, into micro-batches of at most `token_budget` tokens, padding included.

    A micro-batch ends before pad tokens exceed the share `max_padding` of it, unless it is still smaller than `small`
    tokens; a row longer than the budget is a micro-batch of its own. Returns row indices.
    """
    order = sorted(range(len(lengths)), key=lambda row: -lengths[row])
    batches: list[list[int]] = []
    filled = 0
    for row in order:
        if batches:
            padded = lengths[batches[-1][0]] * (len(batches[-1]) + 1)
            too_ragged = padded - filled - lengths[row] > max_padding * padded and filled >= small
            if padded <= token_budget and not too_ragged:
                batches[-1].append(row)
                filled += lengths[row]
                continue
        batches.append([row])
        filled = lengths[row]
    return batches


def _minibatch(groups: Sequence[Sequence[TrainingRow]], max_response_tokens: int, clip: bool) -> MiniBatch:
    rows = tuple(row for group in groups for row in group)
    return MiniBatch(rows=rows, num_rollouts=len(rows), max_response_tokens=max_response_tokens, clip=clip)

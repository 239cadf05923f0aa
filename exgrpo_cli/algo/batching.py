"""From graded groups to mini-batches of whole groups, and from rows to micro-batches with few or no pad tokens."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float32, Float64, Int

from exgrpo_cli.base.types import Rollout, TokenSequence

SMALL_MICRO_BATCH = 512
"""Tokens below which a micro-batch costs its fixed overhead: it takes rows of other lengths rather than end early."""
SHORTEST_PREFIX = 32
"""Tokens that all prompts must begin with, as a system message or worked examples, to be stored once."""
MOST_REPEATED = 2
"""Cells of whole rows for each packed input, above which attention tells prompts apart from responses."""
SLICED_WIDTH = 256
"""Query heads times their width, from which it does on a CPU in any case: faster then (`benchmarks/attention.py`)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingRow:
    """One rollout to train on."""

    sequence: TokenSequence
    advantage: float
    """Fixed for the step; relative to the whole group of K, or as the place of a replayed row says."""
    behaviour_logprobs: Float32[np.ndarray, " tokens"]
    """Denominator of the importance ratio: pi_old for a fresh row, pi_past for a replayed one unless
    `objective.importance` says otherwise."""
    replayed: bool
    importance_weights: Float32[np.ndarray, " tokens"] | None = None
    """Fixed factors of the advantage, token by token: where the sampler's distribution was not pi_old, and 0 where M2PO
    masks; None is 1."""
    rollout: Rollout | None = None
    """The generator's rollout behind a fresh row, with its own log-probs and entropies."""
    left_out: bool = False
    """Dealt into a mini-batch like the others, so that they stay where they are, and then dropped."""

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
    with_scores: bool = False
    """Ask for the scores of fresh rows too, which the gradient computes anyhow."""

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
    order: str = "mixed",
) -> list[MiniBatch]:
    """Deal whole groups, and replayed units beside them, into mini-batches.

    Mini-batches have the same share of experiential groups (those with a replayed row) and of units: the number of
    groups, and that of experiential ones, differ by at most one. With fewer groups than `num_minibatches` there are as
    many mini-batches as groups. With another `order` than "mixed" the units go before or after the groups, in
    mini-batches of their own, as many as hold no more rows than the largest of groups. One whose rows are all left out
    is none.
    """

    def dealt(groups: Sequence[Sequence[TrainingRow]], most: int) -> list[MiniBatch]:
        is_fresh = [not any(row.replayed for row in group) for group in groups]
        # Dealt one after the other, fresh groups go on where the experiential ones ended: both counts stay within one.
        turns = [rng.permutation([i for i, fresh in enumerate(is_fresh) if fresh == kind]) for kind in (False, True)]
        indices = np.concatenate(turns).astype(int).tolist()
        num_batches = min(most, len(groups))
        # The first batches hold the odd groups: which update gets them is drawn too.
        parts = (indices[first::num_batches] for first in rng.permutation(num_batches))
        batches = [minibatch([row for index in part for row in groups[index] if not row.left_out]) for part in parts]
        return [batch for batch in batches if batch.rows]

    def minibatch(rows: Sequence[TrainingRow]) -> MiniBatch:
        return MiniBatch(rows=tuple(rows), num_rollouts=len(rows), max_response_tokens=max_response_tokens, clip=clip)

    if order == "mixed" or not units or not groups:
        return dealt([*groups, *units], num_minibatches)
    fresh = dealt(groups, num_minibatches)
    replayed = dealt(units, math.ceil(sum(map(len, units)) / max(len(batch.rows) for batch in fresh)))
    return [*replayed, *fresh] if order == "first" else [*fresh, *replayed]


def by_prompt(sequences: Sequence[TokenSequence]) -> list[list[int]]:
    """Row indices of each prompt, in the order of the prompts' first appearance."""
    rows: dict[bytes, list[int]] = {}
    for index, sequence in enumerate(sequences):
        rows.setdefault(sequence.prompt_ids.tobytes(), []).append(index)
    return list(rows.values())


def rank_shares(sequences: Sequence[TokenSequence], num_ranks: int) -> list[list[int]]:
    """Row indices of each rank: rows of one prompt side by side, cut where every rank has as many tokens.

    A row goes to the rank in whose part of the tokens its middle lies, so shares differ by at most the longest row.
    """
    if num_ranks == 1:
        return [list(range(len(sequences)))]
    order = [index for rows in by_prompt(sequences) for index in rows]
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
    prefix = shared_prefix(sequence.prompt_ids for sequence in sequences)
    batches: list[list[int]] = []
    filled = 0
    for rows in by_prompt(sequences):
        prompt_stored = False
        for row in rows:
            prompt, response = len(sequences[row].prompt_ids) - prefix, len(sequences[row].response_ids) - 1
            if not batches or filled + response + prompt * (not prompt_stored) > token_budget:
                batches.append([])
                filled, prompt_stored = prefix, False
            batches[-1].append(row)
            filled += response + prompt * (not prompt_stored)
            prompt_stored = True
    return batches


def micro_batches(lengths: Sequence[int], token_budget: int, *, max_padding: float) -> list[list[int]]:
    """Cut rows, longest first, into micro-batches of at most `token_budget` tokens, padding included.

    A micro-batch ends before pad tokens exceed the share `max_padding` of it, unless it is still smaller than
    `SMALL_MICRO_BATCH`; a row longer than the budget is a micro-batch of its own. Returns row indices.
    """
    order = sorted(range(len(lengths)), key=lambda row: -lengths[row])
    batches: list[list[int]] = []
    filled = 0
    for row in order:
        if batches:
            padded = lengths[batches[-1][0]] * (len(batches[-1]) + 1)
            too_ragged = padded - filled - lengths[row] > max_padding * padded and filled >= SMALL_MICRO_BATCH
            if padded <= token_budget and not too_ragged:
                batches[-1].append(row)
                filled += lengths[row]
                continue
        batches.append([row])
        filled = lengths[row]
    return batches

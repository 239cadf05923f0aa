"""Generators: prompts in, rollouts out; and one for several ranks, of which each samples a share and all get the whole.

`hf` is the reference that every other engine is tested against. Under several ranks every rank makes the same calls
with the same arguments and gets the same whole result: an engine shards and gathers inside, so the loop never sees a
rank. What a rollout costs is its length, which nobody knows before: a request says what to expect. Rollouts of one
question are alike in length, known or not, so a group is spread over the ranks.
"""

import heapq
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Protocol, runtime_checkable

import numpy as np
from torch import Tensor

from exgrpo_cli.base.types import Rollout, RolloutRequest, SamplingParams, TokenScores, TokenSequence
from exgrpo_cli.ranks import Ranks

Score = Callable[[Sequence[TokenSequence]], list[TokenScores]]
"""Log-probs and entropies of response tokens under a policy's current weights."""

OnFinished = Callable[[int, Rollout], None]
"""Called with the index of its request and each rollout as it ends."""
Place = tuple[int, int]
"""A rollout: the index of its request and that of its seed."""


def places_of(requests: Sequence[RolloutRequest]) -> list[Place]:
    """Every rollout that is asked for, in order."""
    return [(index, member) for index, request in enumerate(requests) for member in range(len(request.seeds))]


def in_order(requests: Sequence[RolloutRequest], rollouts: Mapping[Place, Rollout]) -> list[list[Rollout]]:
    """The rollouts of each request, in the order of its seeds."""
    return [[rollouts[index, member] for member in range(len(each.seeds))] for index, each in enumerate(requests)]


@runtime_checkable
class Generator(Protocol):
    """Prompts in, rollouts out."""

    @property
    def weight_version(self) -> int:
        """Version of the weights the next rollout will be sampled with."""

    def generate(
        self, requests: Sequence[RolloutRequest], params: SamplingParams, on_finished: OnFinished | None = None
    ) -> list[list[Rollout]]:
        """Sample len(request.seeds) rollouts for each request, in the order of requests and seeds.

        `on_finished` is called as each one ends, so that grading can overlap.
        """

    def sleep(self) -> None:
        """Give back the device memory that only sampling needs, until the next `sync`; nothing where none is held."""

    def sync(self, weights: Iterator[tuple[str, Tensor]], weight_version: int, score: Score | None = None) -> None:
        """Take over new weights and prove that they arrived; raises RunError where they did not.

        `score` is the sender's own `Policy.score`: an engine that computes by kernels of its own compares log-probs
        with it, beside checksums.
        """

    def close(self) -> None:
        """Free what the engine holds; nothing may be asked of it afterwards."""


class RankedGenerator:
    """A `Generator` with one generator on each rank, or on each `tensor_parallel` neighbours.

    A rollout depends on weights, prompt and seed alone, so it is the same on whichever rank it is sampled. Ranks that
    hold one generator together sample the same share.
    """

    def __init__(self, local: Generator, ranks: Ranks, *, tensor_parallel: int = 1) -> None:
        self.local = local
        """This rank's own, or its part of one."""
        self._ranks = ranks
        self._tensor_parallel = tensor_parallel
        self._idle_seconds = 0.0

    @property
    def weight_version(self) -> int:
        """Version of the weights that this rank's engine samples from."""
        return self.local.weight_version

    def generate(
        self, requests: Sequence[RolloutRequest], params: SamplingParams, on_finished: OnFinished | None = None
    ) -> list[list[Rollout]]:
        """As the protocol says; `on_finished` is called once all ranks are done, in the order of requests."""
        wanted = places_of(requests)
        expected = [requests[index].expected_tokens for index, _ in wanted]
        shares = deal(expected, self._ranks.world_size // self._tensor_parallel)
        # Asked for in the order in which their questions first come.
        members: dict[int, list[int]] = {}
        for place in shares[self._ranks.rank // self._tensor_parallel]:
            index, member = wanted[place]
            members.setdefault(index, []).append(member)
        asked = [
            replace(requests[index], seeds=tuple(requests[index].seeds[member] for member in chosen))
            for index, chosen in members.items()
        ]
        started = time.perf_counter()
        sampled = {
            (index, member): replace(rollout, member=member)
            for (index, chosen), group in zip(members.items(), self.local.generate(asked, params), strict=True)
            for member, rollout in zip(chosen, group, strict=True)
        }
        seconds, parts = zip(*self._ranks.gather((time.perf_counter() - started, sampled)), strict=True)
        self._idle_seconds += max(seconds) - float(np.mean(seconds))
        groups = in_order(requests, {place: rollout for part in parts for place, rollout in part.items()})
        if on_finished is not None:
            for index, group in enumerate(groups):
                for rollout in group:
                    on_finished(index, rollout)
        return groups

    def take_idle_seconds(self) -> float:
        """Seconds for which ranks have waited for the slowest one, on average, since this was last asked."""
        seconds, self._idle_seconds = self._idle_seconds, 0.0
        return seconds

    def sleep(self) -> None:
        """See `Generator.sleep`."""
        self.local.sleep()

    def sync(self, weights: Iterator[tuple[str, Tensor]], weight_version: int, score: Score | None = None) -> None:
        """See `Generator.sync`."""
        self.local.sync(weights, weight_version, score)

    def close(self) -> None:
        """See `Generator.close`."""
        self.local.close()


def local_generator(generator: Generator) -> Generator:
    """Generator that samples on this rank alone."""
    return generator.local if isinstance(generator, RankedGenerator) else generator


def deal(expected: Sequence[float], num_shares: int) -> list[list[int]]:
    """Indices of each share: longest first, each to the share with the least so far, the first one of several.

    No share is more than a third longer than it must be (Graham 1969, longest processing time first).
    """
    shares: list[list[int]] = [[] for _ in range(num_shares)]
    loads = [(0.0, share) for share in range(num_shares)]
    for index in np.argsort(-np.asarray(expected), kind="stable").tolist():
        load, share = loads[0]
        shares[share].append(index)
        heapq.heapreplace(loads, (load + expected[index], share))
    return shares

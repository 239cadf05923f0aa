"""Generators: prompts in, rollouts out; and one for several ranks, of which each samples a share and all get the whole.

`hf` is the reference that every other engine is tested against. Under several ranks every rank makes the same calls
with the same arguments and gets the same whole result: an engine shards and gathers inside, so the loop never sees a
rank. What a rollout costs is its length, which nobody knows before: a request says what to expect. Rollouts of one
question are alike in length, known or not, so a group is spread over the ranks.
"""

import heapq
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from typing import Protocol, runtime_checkable

import numpy as np
from torch import Tensor

from exgrpo_cli.base.types import Rollout, RolloutRequest, SamplingParams, TokenScores, TokenSequence
from exgrpo_cli.ranks import Ranks

Score = Callable[[Sequence[TokenSequence]], list[TokenScores]]
"""Log-probs and entropies of response tokens under a policy's current weights."""

Requests = Sequence[RolloutRequest]
OnFinished = Callable[[int, Rollout], None] | None
"""Called with the index of its request and each rollout as it ends."""
ASLEEP = -1
"""Weight version of a generator that has given its weights back."""
Place = tuple[int, int]
"""A rollout: the index of its request and that of its seed."""
Enough = Callable[[Set[Place]], bool] | None
"""Whether sampling may stop, by the rollouts that have ended: asked before every decoding step. None waits for all."""


def places_of(requests: Requests) -> list[Place]:
    """Every rollout that is asked for, in order."""
    return [(index, member) for index, request in enumerate(requests) for member in range(len(request.seeds))]


def in_order(requests: Requests, rollouts: Mapping[Place, Rollout]) -> list[list[Rollout]]:
    """The rollouts of each request, in the order of its seeds."""
    return [[rollouts[index, member] for member in range(len(each.seeds))] for index, each in enumerate(requests)]


@runtime_checkable
class Generator(Protocol):
    """Prompts in, rollouts out."""

    @property
    def weight_version(self) -> int:
        """Version of the weights the next rollout will be sampled with; ASLEEP where a sync has to come first."""

    def generate(
        self, requests: Requests, params: SamplingParams, on_finished: OnFinished = None, enough: Enough = None
    ) -> list[list[Rollout]]:
        """Sample len(request.seeds) rollouts for each request, in the order of requests and seeds.

        `on_finished` is called as each one ends, so that grading can overlap; on the rank that has sampled it alone.
        Where there is `enough`, the others come as far as they are, with no token where they have not begun, and their
        stop reason says so.
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


MEET_EVERY = 16
"""Decoding steps from one meeting of the ranks to the next, at which they stop together or go on."""


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
        self, requests: Requests, params: SamplingParams, on_finished: OnFinished = None, enough: Enough = None
    ) -> list[list[Rollout]]:
        """As the protocol says; ranks that hold one generator call `on_finished` for its rollouts in turn.

        Ranks ask together whether there is `enough`, after as many steps each, so that a run can be repeated.
        """
        wanted, dealt = places_of(requests), self._ranks.world_size // self._tensor_parallel
        shares = deal([requests[index].expected_tokens for index, _ in wanted], dealt)
        # Asked for in the order in which their questions first come, what is begun first.
        members: dict[int, list[int]] = {}
        own = [wanted[place] for place in shares[self._ranks.rank // self._tensor_parallel]]
        for index, member in sorted(own, key=lambda place: not requests[place[0]].drawn):
            members.setdefault(index, []).append(member)
        asked = [
            replace(requests[index], seeds=tuple(requests[index].seeds[member] for member in chosen))
            for index, chosen in members.items()
        ]

        def heard(at: int, rollout: Rollout) -> None:
            index = list(members)[at]
            # Ranks that sample the same share take turns.
            if on_finished is not None and (at + rollout.member - self._ranks.rank) % self._tensor_parallel == 0:
                on_finished(index, replace(rollout, member=members[index][rollout.member]))

        places = [(index, member) for index, chosen in members.items() for member in chosen]
        started = time.perf_counter()
        meeting = enough and _Meeting(self._ranks, dict(zip(places_of(asked), places, strict=True)), enough)
        groups = self.local.generate(asked, params, heard, meeting)
        worked = time.perf_counter() - started - (meeting.waited if meeting else 0.0)
        # Others may still be at work.
        while meeting and not meeting(set(places_of(asked))):
            pass
        rollouts = zip(places, itertools.chain(*groups), strict=True)
        sampled = {place: replace(rollout, member=place[1]) for place, rollout in rollouts}
        seconds, busy, parts = zip(*self._ranks.gather((time.perf_counter() - started, worked, sampled)), strict=True)
        self._idle_seconds += max(seconds) - float(np.mean(busy))
        return in_order(requests, {place: rollout for part in parts for place, rollout in part.items()})

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


class _Meeting:
    """`Enough` of one rank, that of all of them: they meet after every `MEET_EVERY` times that each was asked."""

    def __init__(self, ranks: Ranks, places: Mapping[Place, Place], enough: Callable[[Set[Place]], bool]) -> None:
        self._ranks, self._places, self._enough = ranks, places, enough
        self._asked, self._stopped = 0, False
        self.waited = 0.0
        """Seconds in meetings, which the slowest rank ends."""

    def __call__(self, ended: Set[Place]) -> bool:
        """Whether all ranks stop now, of which this one has `ended` these."""
        self._asked += 1
        if not self._stopped and self._asked % MEET_EVERY == 0:
            started = time.perf_counter()
            everywhere = self._ranks.gather({self._places[place] for place in ended})
            self.waited += time.perf_counter() - started
            self._stopped = self._enough(set().union(*everywhere))
        return self._stopped


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

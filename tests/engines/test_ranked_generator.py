"""Rollouts dealt to ranks: balanced by expected length, every one sampled once, the same as on one rank."""

import json
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest

from exgrpo_cli.base.types import Rollout, RolloutRequest, SamplingParams, StopReason
from exgrpo_cli.engines.generators import RankedGenerator, deal
from exgrpo_cli.ranks import Ranks
from exgrpo_cli.training.state import RunState

PARAMS = SamplingParams(temperature=1.0, top_p=1.0, max_new_tokens=1000)


def test_rollouts_are_dealt_longest_first_to_the_share_with_the_least() -> None:
    """9 | 7, then 6 to the 7 (13), 5 to the 9 (14), 4 to the 13 (17), 3 to the 14 (17)."""
    assert deal([3, 9, 4, 7, 5, 6], 2) == [[1, 4, 0], [3, 5, 2]]
    assert deal([1.0] * 7, 3) == [[0, 3, 6], [1, 4], [2, 5]] and deal([], 2) == [[], []]
    lengths = np.random.default_rng(0).lognormal(6.8, 0.9, 1024).tolist()
    shares = deal(lengths, 16)
    assert sorted(index for share in shares for index in share) == list(range(1024))
    # Every 16th question, as questions come, is what it improves on.
    assert max(sum(lengths[index] for index in share) for share in shares) < 1.01 * sum(lengths) / 16
    assert max(sum(lengths[rank::16]) for rank in range(16)) > 1.1 * sum(lengths) / 16


class Counting:
    """A generator whose rollouts have 10 tokens times the number of their question, and a few by their seed."""

    weight_version = 3

    def __init__(self, pause: float = 0.0) -> None:
        self.asked: list[tuple[str, tuple[int, ...]]] = []
        self._pause = pause

    def generate(
        self, requests: Sequence[RolloutRequest], params: SamplingParams, on_finished: Any = None, enough: Any = None
    ) -> list[list[Rollout]]:
        time.sleep(self._pause)
        self.asked = [(request.question_id, request.seeds) for request in requests]
        groups = [
            [rollout(request.question_id, member, seed) for member, seed in enumerate(request.seeds)]
            for request in requests
        ]
        for index, group in enumerate(groups if on_finished else ()):
            for each in reversed(group):
                on_finished(index, each)
        return groups


def rollout(question_id: str, member: int, seed: int) -> Rollout:
    tokens = np.full(int(question_id) * 10 + seed % 7, seed, dtype=np.int32)
    return Rollout(
        question_id=question_id,
        member=member,
        token_ids=tokens,
        engine_logprobs=np.zeros(len(tokens), dtype=np.float32),
        stop_reason=StopReason.EOS,
        weight_version=3,
    )


class ThreadRanks(Ranks):
    """Ranks that are threads of this process."""

    def __init__(self, rank: int, boxes: list[Any], barrier: threading.Barrier) -> None:
        super().__init__(rank=rank, world_size=len(boxes))
        self._boxes, self._meet = boxes, barrier

    def gather(self, value: Any) -> list[Any]:
        self._boxes[self.rank] = value
        self._meet.wait(120)
        values = list(self._boxes)
        self._meet.wait(120)
        return values


def on_ranks(num_ranks: int, work: Callable[[Ranks], Any]) -> list[Any]:
    """What `work` returns on each of `num_ranks` ranks."""
    boxes: list[Any] = [None] * num_ranks
    barrier = threading.Barrier(num_ranks)
    with ThreadPoolExecutor(num_ranks) as pool:
        return list(pool.map(lambda rank: work(ThreadRanks(rank, boxes, barrier)), range(num_ranks)))


def requests() -> list[RolloutRequest]:
    """Questions 1 to 6 with 4 rollouts each, but of question 2 one less."""
    return [
        RolloutRequest(
            question_id=str(number),
            prompt_ids=np.array([number], dtype=np.int32),
            seeds=tuple(range(number * 100, number * 100 + (3 if number == 2 else 4))),
            expected_tokens=10.0 * number,
        )
        for number in range(1, 7)
    ]


@pytest.mark.parametrize(("num_ranks", "together"), [(2, 1), (3, 1), (4, 2)])
def test_all_ranks_get_the_rollouts_of_one(num_ranks: int, together: int) -> None:
    alone = Counting().generate(requests(), PARAMS)

    def work(ranks: Ranks) -> Any:
        generator, told = RankedGenerator(Counting(), ranks, tensor_parallel=together), []
        groups = generator.generate(requests(), PARAMS, lambda *each: told.append(each))
        return groups, generator.local.asked, generator.take_idle_seconds(), told

    results = on_ranks(num_ranks, work)
    # Each rollout is told as it ends, at its place, on one of the ranks that sampled it.
    everything = [each for _, _, _, told in results for each in told]
    assert len(everything) == 23 and all(told for _, _, _, told in results)
    for index, own in everything:
        assert own.token_ids.tolist() == alone[index][own.member].token_ids.tolist()
    for groups, asked, idle, _ in results:
        assert [[(r.question_id, r.member, r.token_ids.tolist()) for r in group] for group in groups] == [
            [(r.question_id, r.member, r.token_ids.tolist()) for r in group] for group in alone
        ]
        assert idle == results[0][2] >= 0
        # The longest are asked for first.
        assert asked[0][0] == "6"
    seeds = [seed for _, asked, *_ in results[::together] for _, own in asked for seed in own]
    assert sorted(seeds) == sorted(seed for request in requests() for seed in request.seeds)
    assert all(results[rank][1] == results[rank - rank % together][1] for rank in range(num_ranks))


def test_what_has_begun_is_asked_for_first() -> None:
    """The two shortest questions have, on either rank."""
    asked = [replace(each, drawn=5) if each.question_id in "12" else each for each in requests()]

    def work(ranks: Ranks) -> list[bool]:
        generator = RankedGenerator(Counting(), ranks)
        generator.generate(asked, PARAMS)
        return [question_id in "12" for question_id, _ in generator.local.asked]

    assert on_ranks(2, work) == [[True] * 2 + [False] * 4] * 2


def test_expected_lengths_outlive_a_checkpoint() -> None:
    """A resumed run deals as the uninterrupted one: another batch could round another way."""
    state = RunState()
    state.remember_lengths([[rollout("3", 0, 0), rollout("3", 1, 4)], [], [rollout("7", 0, 2)]])
    again = msgspec.convert(json.loads(json.dumps(msgspec.to_builtins(state))), RunState)
    # Of 30 and 34 tokens, and of 72.
    assert again.lengths == state.lengths == {"3": 32, "7": 72} and again.usual_length == (30 + 34 + 72) / 3


class Stepping(Counting):
    """Decodes a token of each row a step, until all are whole or there are enough."""

    def generate(
        self, requests: Sequence[RolloutRequest], params: SamplingParams, on_finished: Any = None, enough: Any = None
    ) -> Any:
        groups, step, ended = super().generate(requests, params), 0, set[tuple[int, int]]()
        places = [(at, row.member, len(row.token_ids)) for at, group in enumerate(groups) for row in group]
        while len(ended) < len(places) and not enough(ended):
            step += 1
            ended = {(at, member) for at, member, tokens in places if tokens <= step}
        return [[cut(row, step) for row in group] for group in groups]


def cut(row: Rollout, step: int) -> Rollout:
    reason = StopReason.EOS if len(row.token_ids) <= step else StopReason.UNFINISHED
    return replace(row, token_ids=row.token_ids[:step], engine_logprobs=row.engine_logprobs[:step], stop_reason=reason)


@pytest.mark.parametrize(("kind", "enough"), [(Counting, None), (Stepping, lambda ended: len(ended) >= 9)])
def test_ranks_that_wait_are_counted(kind: type[Counting], enough: Any) -> None:
    """Of two ranks the second samples for 1 s: each has waited 0.5 s on average, in a meeting too, told once."""

    def work(ranks: Ranks) -> tuple[float, float]:
        generator = RankedGenerator(kind(1.0 * ranks.rank), ranks)
        generator.generate(requests(), PARAMS, enough=enough)
        return generator.take_idle_seconds(), generator.take_idle_seconds()

    for told, again in on_ranks(2, work):
        assert (again, told > 0.05) == (0.0, True)


@pytest.mark.parametrize(("num_ranks", "together"), [(1, 1), (3, 1), (4, 2)])
def test_ranks_stop_after_as_many_steps_each(num_ranks: int, together: int) -> None:
    """Nine rows have ended after 31 steps, at the second meeting, and not after 15."""

    def work(ranks: Ranks) -> Any:
        generator = RankedGenerator(Stepping(), ranks, tensor_parallel=together)
        return generator.generate(requests(), PARAMS, enough=lambda ended: len(ended) >= 9)

    results = on_ranks(num_ranks, work)
    ends = [[(row.member, len(row.token_ids), row.is_unfinished) for row in group] for group in results[0]]
    whole = [[len(row.token_ids) for row in group] for group in Counting().generate(requests(), PARAMS)]
    assert ends == [[(m, min(31, n), n > 31) for m, n in enumerate(group)] for group in whole]
    assert sum(n <= 15 for group in whole for n in group) < 9 <= sum(n <= 31 for group in whole for n in group)
    for groups in results[1:]:
        assert [[(row.member, len(row.token_ids), row.is_unfinished) for row in group] for group in groups] == ends

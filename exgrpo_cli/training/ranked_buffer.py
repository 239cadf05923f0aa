"""The experience buffer under several ranks: rank 0 has it, and all make the same calls.

Rank 0 alone opens the ledger, draws and writes; what a call returns goes to the others. What the loop reads often (the
retired questions, the counts) every rank keeps for itself, brought up to date by `flush`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import numpy as np
from jaxtyping import Bool

from exgrpo_cli.ranks.ranks import Ranks
from exgrpo_cli.replay.buffer import ExperienceBuffer, Visit
from exgrpo_cli.replay.sampling import Draw
from exgrpo_cli.replay.selection import Candidates
from exgrpo_cli.replay.warm_start import WarmStartReport
from exgrpo_cli.types import Trajectory

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Occupancy:
    """The counts of a buffer at the end of a step."""

    num_questions: int
    num_trajectories: int
    num_retired: int
    buckets: dict[int, int]
    newly_retired: tuple[str, ...] = field(default=())
    """Questions retired since the last occupancy."""


class RankedBuffer:
    """The calls of ExperienceBuffer that a run makes, each made by all ranks in the same order.

    The generators passed in advance on rank 0 alone, whose state is the one that checkpoints hold.
    """

    def __init__(self, buffer: ExperienceBuffer | None, ranks: Ranks) -> None:
        """`buffer` is rank 0's, None on the others."""
        self._buffer = buffer
        self._ranks = ranks
        self._newly_retired: list[str] = []
        self.needs_scores: bool = self._asked(lambda own: own.needs_scores)
        """Whether selection looks at entropies or likelihoods, which take a forward pass."""
        self._max_staleness: int = self._asked(lambda own: own.rules.max_staleness)
        self.retired: set[str] = set()
        self._renew()

    def _renew(self) -> None:
        self.retired = self._asked(lambda own: set(own.retired))
        self._occupancy = self._asked(self._count)

    @property
    def num_questions(self) -> int:
        return self._occupancy.num_questions

    @property
    def num_trajectories(self) -> int:
        return self._occupancy.num_trajectories

    @property
    def num_retired(self) -> int:
        return self._occupancy.num_retired

    def bucket_counts(self) -> dict[int, int]:
        return dict(self._occupancy.buckets)

    def warm_start(self, source: Path, *, max_response_tokens: int, with_retired: bool) -> WarmStartReport:
        report = self._asked(
            lambda own: own.warm_start(source, max_response_tokens=max_response_tokens, with_retired=with_retired)
        )
        self._renew()
        return report

    def readmit(self, step: int, rng: np.random.Generator) -> list[str]:
        returning = self._asked(lambda own: own.readmit(step, rng))
        self.retired.difference_update(returning)
        return returning

    def available(self, step: int) -> int:
        return self._asked(lambda own: own.available(step))

    def draw(self, num: int, step: int, rng: np.random.Generator) -> Draw:
        return self._asked(lambda own: own.draw(num, step, rng))

    def candidates(self, question_id: str) -> Candidates:
        return self._asked(lambda own: own.candidates(question_id))

    def stale(self, candidates: Candidates, weight_version: int) -> Bool[np.ndarray, " candidates"]:
        return candidates.stale(weight_version, self._max_staleness)

    def choose(self, candidates: Candidates, rng: np.random.Generator) -> int:
        return self._asked(lambda own: own.choose(candidates, rng))

    def load(self, trajectory_ids: Sequence[int]) -> list[Trajectory]:
        return self._asked(lambda own: own.load(trajectory_ids))

    def record_scores(self, step: int, candidates: Candidates, chosen: int | None) -> None:
        self._told(lambda own: own.record_scores(step, candidates, chosen))

    def record_selected(self, step: int, trajectory_ids: Sequence[int]) -> None:
        self._told(lambda own: own.record_selected(step, trajectory_ids))

    def record_visit(self, visit: Visit, *, collecting: bool = True) -> None:
        def record(own: ExperienceBuffer) -> None:
            if own.record_visit(visit, collecting=collecting).retired:
                self._newly_retired.append(visit.question_id)

        self._told(record)

    def flush(self, step: int) -> None:
        """Make the step durable, and tell all ranks what the buffer holds after it."""

        def flush(own: ExperienceBuffer) -> Occupancy:
            own.flush(step)
            return self._count(own)

        self._occupancy = self._asked(flush)
        self.retired.update(self._occupancy.newly_retired)

    def compact(self, kept_checkpoints: Sequence[int]) -> None:
        self._told(lambda own: own.compact(kept_checkpoints))

    def _count(self, own: ExperienceBuffer) -> Occupancy:
        newly_retired, self._newly_retired = tuple(self._newly_retired), []
        return Occupancy(
            num_questions=own.num_questions,
            num_trajectories=own.num_trajectories,
            num_retired=own.num_retired,
            buckets=own.bucket_counts(),
            newly_retired=newly_retired,
        )

    def _asked(self, call: Callable[[ExperienceBuffer], T]) -> T:
        """What `call` returns on rank 0, on every rank."""

        def ask() -> T:
            assert self._buffer is not None
            return call(self._buffer)

        return self._ranks.from_main(ask)

    def _told(self, call: Callable[[ExperienceBuffer], None]) -> None:
        """A call that returns nothing: the other ranks need not wait for it, and an error of it ends them all."""
        if self._buffer is not None:
            call(self._buffer)


AnyBuffer = ExperienceBuffer | RankedBuffer

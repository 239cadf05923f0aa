"""Everything a step works with, and a run under way: its parts, its folder, its guards and clocks, who shows it."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
from jaxtyping import Int32

from exgrpo_cli.base.output import Stopper
from exgrpo_cli.base.reporter import Reporter
from exgrpo_cli.base.types import AnswerFormat, Question, TokenScores, TokenSequence, Trajectory
from exgrpo_cli.config.settings import Config
from exgrpo_cli.engines.protocols import Generator, Policy
from exgrpo_cli.grading import GradingPool
from exgrpo_cli.models.load import Backbone
from exgrpo_cli.questions.stream import QuestionStream
from exgrpo_cli.ranks import ALONE, Ranks
from exgrpo_cli.replay.place import Asked
from exgrpo_cli.replay.store import Store
from exgrpo_cli.runs.folder import RunFolder
from exgrpo_cli.runs.watchdog import TimeLimit, Watchdog
from exgrpo_cli.training.state import RunState
from exgrpo_cli.training.step.guards import Guards
from exgrpo_cli.training.trackers import Tracker

T = TypeVar("T")
Score = Callable[[Sequence[Trajectory]], Sequence[TokenScores]]
Prompts = Mapping[str, Int32[np.ndarray, " prompt_tokens"]]
"""Token ids of each question's prompt."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    """Everything a step works with."""

    config: Config
    questions: Mapping[str, Question]
    prompts: Prompts
    answer_format: AnswerFormat
    backbone: Backbone
    generator: Generator
    policy: Policy
    pool: GradingPool
    """This rank's own."""
    stream: QuestionStream
    """Moved on rank 0 alone, whose state checkpoints hold, as that of the generators for draws."""
    store: Store | None = None
    """Rank 0's; None on the others, and before it is opened."""
    rngs: Mapping[str, np.random.Generator]
    ranks: Ranks = ALONE

    @property
    def main_store(self) -> Store:
        """The store, on rank 0."""
        assert self.store is not None
        return self.store

    def ask_place(self, ask: Callable[[Asked], T], step: int) -> T:
        """The answer of a place on rank 0, on all ranks. Raises what `ask` raises of errors a user can act on."""

        def asked(score: Score) -> T:
            return ask(
                Asked(
                    store=self.main_store,
                    step=step,
                    weight_version=self.policy.weight_version,
                    questions_per_step=self.config.rollout.questions_per_step,
                    from_old=self.config.objective.importance == "old",
                    rngs=self.rngs,
                    score=score,
                )
            )

        return ask_main(self.ranks, asked, self._score)

    def _score(self, rows: Sequence[Trajectory]) -> Sequence[TokenScores]:
        """Scores of stored rows under the current policy; all ranks take part."""
        prompts = self.prompts
        return self.policy.score(
            [TokenSequence(prompt_ids=prompts[row.question_id], response_ids=row.token_ids) for row in rows]
        )


def ask_main(ranks: Ranks, ask: Callable[[Score], T], score: Score) -> T:
    """The answer of rank 0 to `ask`, on all ranks: one exchange, and one for rows that it wants scored, by all."""

    def together(rows: Sequence[Trajectory]) -> Sequence[TokenScores]:
        return score(ranks.from_main(lambda: (None, rows))[1])

    while True:
        answer, rows = ranks.from_main(lambda: (ask(together), None))
        if rows is None:
            return answer
        score(rows)


@dataclass(kw_only=True, slots=True)
class ActiveRun:
    """A run under way."""

    folder: RunFolder
    parts: Parts
    state: RunState
    heldout: tuple[Question, ...]
    trackers: Sequence[Tracker]
    """Those of rank 0, none on the others."""
    reporter: Reporter
    stopper: Stopper
    since: float
    """Moment up to which wall time has been counted into the state."""
    watchdog: Watchdog
    guards: Guards
    time_limit: TimeLimit
    validated: dict[int, dict[str, Any]] = field(default_factory=dict)
    """Scores on the held-out questions by step, as far as this process measured them between the steps."""

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Work outside the steps, counted as a phase of its own."""
        started = time.perf_counter()
        try:
            with self.watchdog.phase(name):
                yield
        finally:
            self.state.add_seconds(name, time.perf_counter() - started)

    def count_wall_time(self) -> None:
        """Add the seconds since the last call to the run's total."""
        now = time.perf_counter()
        self.state.add_seconds("total", now - self.since)
        self.since = now

"""Everything a step works with."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from jaxtyping import Int32

from exgrpo_cli.base.types import AnswerFormat, Question, TokenScores, TokenSequence, Trajectory
from exgrpo_cli.config.settings import Config
from exgrpo_cli.engines.protocols import Generator, Policy
from exgrpo_cli.grading import GradingPool
from exgrpo_cli.models.load import Backbone
from exgrpo_cli.questions.stream import QuestionStream
from exgrpo_cli.ranks import ALONE, Ranks
from exgrpo_cli.replay.place import Asked
from exgrpo_cli.replay.store import Store

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

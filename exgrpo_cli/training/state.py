"""A run under way: what changes from step to step, what a step works with, and its folder, guards and clocks."""

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from jaxtyping import Int32

from exgrpo_cli.algo.advantages import SuccessHistory
from exgrpo_cli.base.output import Stopper
from exgrpo_cli.base.reporter import PHASE_WORDS, Reporter
from exgrpo_cli.base.types import AnswerFormat, Question, Rollout, TokenScores, TokenSequence, Trajectory
from exgrpo_cli.config.sections.objective import ObjectiveSettings
from exgrpo_cli.config.sections.run import RunSettings
from exgrpo_cli.config.settings import Config
from exgrpo_cli.engines.generators import Generator
from exgrpo_cli.engines.policy.policy import Policy
from exgrpo_cli.grading import GradingPool
from exgrpo_cli.models.load import Backbone
from exgrpo_cli.questions.stream import QuestionStream
from exgrpo_cli.ranks import ALONE, Ranks
from exgrpo_cli.replay.place import Asked
from exgrpo_cli.replay.store import Store
from exgrpo_cli.runs.folder import PHASES, RunFolder
from exgrpo_cli.runs.result import Ending
from exgrpo_cli.runs.watchdog import TimeLimit, Watchdog
from exgrpo_cli.training.step.groups import Group, UnderWay
from exgrpo_cli.training.trackers import Tracker

T = TypeVar("T")
Score = Callable[[Sequence[Trajectory]], Sequence[TokenScores]]
Prompts = Mapping[str, Int32[np.ndarray, " prompt_tokens"]]
"""Token ids of each question's prompt."""
RNG_NAMES = ("stream", "draw", "choice", "minibatch", "readmit")
"""One generator per use, so that what one use draws never moves another."""


def make_generators(seed: int) -> dict[str, np.random.Generator]:
    """Independent generators, one per use, all derived from the run's seed."""
    children = np.random.SeedSequence(seed).spawn(len(RNG_NAMES))
    return {name: np.random.default_rng(child) for name, child in zip(RNG_NAMES, children, strict=True)}


@dataclass(kw_only=True, slots=True)
class RunState:
    """Progress of the loop, apart from weights and buffer; saved in every checkpoint as JSON."""

    step: int = 0
    """Steps completed."""
    start_exceeded_at: int = -1
    """Step whose batch pass@1 first exceeded the start threshold; -1 before that. Later steps are mixed."""
    finished: Ending = Ending.UNDER_WAY
    """Why training ended."""
    visits: dict[str, int] = field(default_factory=dict)
    """Visits of each question: part of its rollouts' seeds."""
    history: dict[str, SuccessHistory] = field(default_factory=dict)
    """Discounted successes and failures by question, where they are the baseline of rewards."""
    lengths: dict[str, float] = field(default_factory=dict)
    """Mean response length of each question's latest rollouts, where several ranks share them."""
    usual_length: float = 1.0
    """Mean response length of the latest rollouts, what a new question is expected to take."""
    first_gaps: list[tuple[float, float]] = field(default_factory=list)
    """Gap between log-probs of rollout engine and trainer, and the entropy, of the first steps; nats a token."""
    gap_told: float = 0.0
    """The largest such gap that the user has heard of."""
    carried: list[UnderWay] = field(default_factory=list)
    """Groups that go on in the next step, first in line."""
    tokens_generated: int = 0
    tokens_trained: int = 0
    replayed: int = 0
    """Trajectories replayed."""
    updates_applied: int = 0
    updates_skipped: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    """Wall time per phase, interruptions not counted."""
    heldout_before: dict[str, Any] = field(default_factory=dict)
    """Score on the held-out questions before training, as `validation.score_json` returns it."""
    best_score: float = -1.0
    """Highest held-out pass@1 of the validations between steps; -1 before the first."""
    best_step: int = -1
    """Step after which it was measured."""

    def count_successes(self, groups: Sequence[Group], goal: ObjectiveSettings) -> None:
        """Take a step's visits into the questions' histories: their rewards for the baseline, for a gate all successes
        alike. A failure of the verifier changes nothing."""
        gated = goal.gate != "none"
        for group in groups:
            if not group.verifier_failed:
                before = self.history.get(group.question.id, SuccessHistory())
                won, discount = (group.num_fresh_correct, 1.0) if gated else (sum(group.rewards), goal.history_discount)
                self.history[group.question.id] = before.after(won, len(group.fresh), discount)

    def remember_lengths(self, rollouts: Sequence[Sequence[Rollout]]) -> None:
        """Take over the response lengths of each question's rollouts."""
        lengths = {group[0].question_id: [len(rollout.token_ids) for rollout in group] for group in rollouts if group}
        self.lengths |= {question: float(np.mean(own)) for question, own in lengths.items()}
        if lengths:
            self.usual_length = float(np.mean([length for own in lengths.values() for length in own]))

    def spent(self, budget: str) -> float:
        """Tokens generated, tokens trained, or this rank's seconds in the phases of steps; steps for `steps`."""
        if budget == "seconds":
            return sum(self.seconds.get(phase, 0.0) for phase in PHASES)
        return {"generated": self.tokens_generated, "trained": self.tokens_trained, "steps": self.step}[budget]

    def spent_share(self, settings: RunSettings, ranks: Ranks) -> float | None:
        """Share of the run's budget that has been spent, the same on every rank; None where steps are counted."""
        if settings.budget == "steps":
            return None
        return ranks.from_main(lambda: self.spent(settings.budget)) / settings.budget_amount

    def count_step(self, groups: Sequence[Group], line: Mapping[str, Any], seconds: Mapping[str, float]) -> None:
        """Count a finished step, by its journal line and the seconds of its phases."""
        self.step = line["step"]
        for group in groups:
            self.visits[group.question.id] = self.visits.get(group.question.id, 0) + 1
        self.replayed += line.get("replay/used", 0)
        self.tokens_generated += line["tokens/generated"]
        self.tokens_trained += line["tokens/trained"]
        self.updates_applied += line["optim/updates_applied"]
        self.updates_skipped += line["optim/updates_skipped"]
        for name, taken in seconds.items():
            self.add_seconds(name, taken)

    def add_seconds(self, phase: str, seconds: float) -> None:
        """Count wall time of a phase."""
        self.seconds[phase] = self.seconds.get(phase, 0.0) + seconds

    def is_mixed(self, step: int, threshold: float, warmup_steps: int = 0) -> bool:
        """Whether `step` replays: always with threshold 0, else every step after the one that exceeded it; never while
        the run warms up."""
        return step > warmup_steps and (threshold == 0 or (0 <= self.start_exceeded_at < step))


@dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    """Everything a step works with."""

    config: Config
    questions: Mapping[str, Question]
    """By id: those that are trained on, then the held-out ones."""
    heldout: tuple[Question, ...]
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
    instead: Mapping[int, int | None] = field(default_factory=dict)
    """Stored trajectories that train in the place of those drawn, None for nothing (`training/fork.py`)."""

    @property
    def main_store(self) -> Store:
        """The store, on rank 0."""
        assert self.store is not None
        return self.store

    def prompt_of(self, group: UnderWay) -> Int32[np.ndarray, " tokens"]:
        """Tokens that the rollouts of a group go on from: its question's prompt, and its beginning behind that."""
        prompt = self.prompts[group.question_id]
        return np.concatenate([prompt, group.beginning.token_ids]) if group.beginning else prompt

    def score(self, rows: Sequence[Trajectory]) -> Sequence[TokenScores]:
        """Log-probs and entropies of stored responses under the current weights."""
        prompts = [self.prompts[row.question_id] for row in rows]
        return self.policy.score(
            [TokenSequence(prompt_ids=own, response_ids=row.token_ids) for own, row in zip(prompts, rows, strict=True)]
        )

    def sync(self) -> None:
        """Hand the policy's weights to the generator, which proves that it has them."""
        self.generator.sync(self.policy.sampled_weights(), self.policy.weight_version, self.policy.score)

    def wake(self) -> None:
        """Make the generator ready to sample: a sync, where it has other weights than the policy, or sleeps."""
        if self.generator.weight_version != self.policy.weight_version:
            self.sync()

    def ask_place(self, ask: Callable[[Asked], T], step: int, under_way: Sequence[UnderWay] = ()) -> T:
        """The answer of a place on rank 0, on all ranks. Raises what `ask` raises of errors a user can act on."""

        def asked(score: Score) -> T:
            return ask(
                Asked(
                    store=self.main_store,
                    step=step,
                    weight_version=self.policy.weight_version,
                    questions_per_step=self.config.rollout.questions_per_step,
                    under_way=frozenset(group.question_id for group in under_way),
                    from_old=self.config.objective.importance == "old",
                    rngs=self.rngs,
                    score=score,
                    instead=self.instead,
                )
            )

        return ask_main(self.ranks, asked, self.score)


def ask_main(ranks: Ranks, ask: Callable[[Score], T], score: Score) -> T:
    """The answer of rank 0 to `ask`, on all ranks.

    Where `ask` wants rows scored, rank 0 first hands them to the others, which score their share with it and wait on.
    """

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
    trackers: Sequence[Tracker]
    """Those of rank 0, none on the others."""
    reporter: Reporter
    stopper: Stopper
    since: float
    """Moment up to which wall time has been counted into the state."""
    watchdog: Watchdog
    time_limit: TimeLimit
    starts: Path | None = None
    """A folder for what runs of a study that begin with the same weights have in common."""
    validated: dict[int, dict[str, Any]] = field(default_factory=dict)
    """Scores on the held-out questions by step, as far as this process measured them between the steps."""

    @contextmanager
    def phase(self, name: str) -> Iterator[Callable[[int], None]]:
        """Work that is watched, and named on the terminal while it lasts; yields a function that is to be called
        as each of its parts ends, with the number of all of them."""
        what, done = PHASE_WORDS.get(name, ""), itertools.count(1)
        self.reporter.phase(what)
        try:
            with self.watchdog.phase(name):
                yield lambda total: self.reporter.phase(what, next(done), total)
        finally:
            self.reporter.phase("")

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Work outside the steps, counted as a phase of its own."""
        started = time.perf_counter()
        try:
            with self.phase(name):
                yield
        finally:
            self.state.add_seconds(name, time.perf_counter() - started)

    def count_wall_time(self) -> None:
        """Add the seconds since the last call to the run's total."""
        now = time.perf_counter()
        self.state.add_seconds("total", now - self.since)
        self.since = now

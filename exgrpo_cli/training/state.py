"""State of a run from step to step, apart from weights and buffer; saved in every checkpoint as JSON."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from exgrpo_cli.algo.advantages import SuccessHistory
from exgrpo_cli.base.types import Rollout
from exgrpo_cli.config.sections.run import RunSettings
from exgrpo_cli.ranks import Ranks
from exgrpo_cli.runs.folder import PHASES
from exgrpo_cli.runs.result import Ending
from exgrpo_cli.training.step.groups import Group

RNG_NAMES = ("stream", "draw", "choice", "minibatch", "readmit")
"""One generator per use, so that what one use draws never moves another."""


def make_generators(seed: int) -> dict[str, np.random.Generator]:
    """Independent generators, one per use, all derived from the run's seed."""
    children = np.random.SeedSequence(seed).spawn(len(RNG_NAMES))
    return {name: np.random.default_rng(child) for name, child in zip(RNG_NAMES, children, strict=True)}


@dataclass(kw_only=True, slots=True)
class RunState:
    """Progress of the loop."""

    step: int = 0
    """Steps completed."""
    start_exceeded_at: int = -1
    """Step whose batch pass@1 first exceeded the start threshold; -1 before that. Later steps are mixed."""
    finished: Ending = Ending.UNDER_WAY
    """Why training ended."""
    visits: Counter[str] = field(default_factory=Counter)
    """Visits of each question: part of its rollouts' seeds."""
    history: dict[str, SuccessHistory] = field(default_factory=dict)
    """Discounted successes and failures by question, where they are the baseline of rewards."""
    lengths: dict[str, float] = field(default_factory=dict)
    """Mean response length of each question's latest rollouts, where several ranks share them."""
    usual_length: float = 1.0
    """Mean response length of the latest rollouts, what a new question is expected to take."""
    tokens_generated: int = 0
    tokens_trained: int = 0
    replayed: int = 0
    """Trajectories replayed."""
    updates_applied: int = 0
    updates_skipped: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    """Wall time per phase, interruptions not counted."""
    heldout_before: dict[str, Any] = field(default_factory=dict)
    best_score: float = -1.0
    best_step: int = -1

    def count_successes(self, groups: Sequence[Group], discount: float) -> None:
        """Take a step's visits into the questions' histories; a failure of the verifier changes nothing."""
        for group in groups:
            if not group.verifier_failed:
                before = self.history.get(group.question.id, SuccessHistory())
                self.history[group.question.id] = before.after(group.num_fresh_correct, len(group.fresh), discount)

    def remember_lengths(self, rollouts: Sequence[Sequence[Rollout]]) -> None:
        """Take over the response lengths of each question's rollouts."""
        lengths = {group[0].question_id: [len(rollout.token_ids) for rollout in group] for group in rollouts if group}
        self.lengths |= {question: float(np.mean(own)) for question, own in lengths.items()}
        if lengths:
            self.usual_length = float(np.mean([length for own in lengths.values() for length in own]))

    def spent(self, budget: str) -> float:
        """Tokens generated, tokens trained, or this rank's seconds in the phases of steps; steps for `steps`."""
        match budget:
            case "generated":
                return self.tokens_generated
            case "trained":
                return self.tokens_trained
            case "seconds":
                return sum(self.seconds.get(phase, 0.0) for phase in PHASES)
        return self.step

    def spent_share(self, settings: RunSettings, ranks: Ranks) -> float | None:
        """Share of the run's budget that has been spent, the same on every rank; None where steps are counted."""
        if settings.budget == "steps":
            return None
        return ranks.from_main(lambda: self.spent(settings.budget)) / settings.budget_amount

    def count_step(self, groups: Sequence[Group], line: Mapping[str, Any], seconds: Mapping[str, float]) -> None:
        """Count a finished step, by its journal line and the seconds of its phases."""
        self.step = line["step"]
        self.visits.update(group.question.id for group in groups)
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

    def first_mixed_step(self, threshold: float, warmup_steps: int = 0) -> int | None:
        """The first step that was mixed; None while none has been."""
        if threshold > 0 and self.start_exceeded_at < 0:
            return None
        first = max(warmup_steps, 0 if threshold == 0 else self.start_exceeded_at) + 1
        return first if first <= self.step else None

    def to_json(self) -> dict[str, Any]:
        """The state as a checkpoint keeps it."""
        return {setting.name: getattr(self, setting.name) for setting in fields(self)}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "RunState":
        """The state from a checkpoint; raises TypeError, KeyError or ValueError where it is not one."""
        history = {question: SuccessHistory(*counts) for question, counts in values.get("history", {}).items()}
        restored = {"visits": Counter(values["visits"]), "finished": Ending(values["finished"]), "history": history}
        return cls(**values | restored)

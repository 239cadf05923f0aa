"""A run under way: its parts, its folder, and who is told of it."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from exgrpo_cli.base.console.reporter import Reporter
from exgrpo_cli.base.console.signals import Stopper
from exgrpo_cli.base.types import Question
from exgrpo_cli.endpoints.heldout import new_fall, read_validations
from exgrpo_cli.evaluation.results.records import Evaluation
from exgrpo_cli.runs.checksums import note_checksums
from exgrpo_cli.runs.folder import HELDOUT, TRAINED, RunFolder
from exgrpo_cli.runs.summary import remarks
from exgrpo_cli.runs.watchdog import Watchdog
from exgrpo_cli.training.parts import Parts
from exgrpo_cli.training.resuming.checkpoint import save_checkpoint
from exgrpo_cli.training.resuming.state import RunState
from exgrpo_cli.training.step.guards import Guards
from exgrpo_cli.training.time_limit import TimeLimit
from exgrpo_cli.training.trackers import Tracker
from exgrpo_cli.training.validation import beside, score_json, valid_counts, validate


@dataclass(kw_only=True, slots=True)
class ActiveRun:
    """A run under way."""

    folder: RunFolder
    parts: Parts
    state: RunState
    heldout: tuple[Question, ...]
    trackers: Sequence[Tracker]
    """Of rank 0 alone."""
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

    def save(self) -> None:
        """Write a checkpoint of the current step; raises RunError where the disk is full."""
        started = time.perf_counter()
        with self.timed("checkpoint"):
            self.count_wall_time()
            save_checkpoint(
                self.folder.checkpoints, self.parts, self.state, keep=self.parts.config.run.keep_checkpoints
            )
            if self.parts.ranks.is_main:
                note_checksums(self.folder.path)
        self.time_limit.count_save(time.perf_counter() - started)


def ask_heldout(run: ActiveRun, when: str) -> dict[str, Any]:
    """Score the current weights on the held-out questions, tell it and keep the counts; returns the score."""
    parts = run.parts
    evaluation = ask(run, run.heldout, f"held-out, {when}", HELDOUT)
    with run.timed("validation"):
        seconds = {}
        if parts.ranks.is_main:  # One rank is enough for what is only told.
            seconds = beside(evaluation, parts.config.grading.grader, parts.answer_format, parts.pool)
    score = score_json(evaluation, seconds)
    run.reporter.note(
        f"held-out pass@1 ({parts.config.data.heldout_name}) {when}: "
        f"{score['pass_at_1']:.3f} [{score['low']:.3f}, {score['high']:.3f}] "
        f"over {score['questions']} questions{remarks(score)}"
    )
    if parts.ranks.is_main and (fall := new_fall(read_validations(run.folder.path))):
        run.reporter.note(fall)
    return score


def ask(run: ActiveRun, questions: Sequence[Question], what: str, asked: str) -> Evaluation:
    """Ask the current weights, and keep how often each question was answered correctly."""
    with run.timed("validation"):
        evaluation = validate(run.parts, questions, run.reporter.progress, what)
        if run.parts.ranks.is_main:
            valid = valid_counts(evaluation)
            run.folder.append_validation(
                {
                    "step": run.state.step,
                    "asked": asked,
                    "generated": run.state.tokens_generated,
                    "trained": run.state.tokens_trained,
                    "samples": evaluation.samples,
                    "correct": " ".join(map(str, evaluation.correct)),
                    **({} if valid is None else {"valid": " ".join(map(str, valid))}),
                    "ids": [question.id for question in questions] if asked == TRAINED else [],
                }
            )
    return evaluation


def ask_trained(run: ActiveRun, when: str) -> None:
    """Ask some training questions, the same ones at every call, where the settings want it."""
    settings = run.parts.config.validation
    if settings.train_questions == 0:
        return
    heldout = {question.id for question in run.heldout}
    ids = [each for each in run.parts.questions if each not in heldout]
    chosen = np.random.default_rng(settings.seed).permutation(len(ids))[: settings.train_questions]
    ask(run, [run.parts.questions[ids[index]] for index in sorted(chosen)], f"training questions, {when}", TRAINED)


def validation_metrics(run: ActiveRun) -> dict[str, float | int]:
    """`val/<benchmark>` of the current weights; remembers the best step."""
    state = run.state
    name = run.parts.config.data.heldout_name
    score = ask_heldout(run, f"after step {state.step}")
    run.validated[state.step] = score
    if score["pass_at_1"] > state.best_score:
        state.best_score, state.best_step = score["pass_at_1"], state.step
    coverage = {
        f"val/{name}/pass_at_{k}{end}": found[part]
        for k, found in score["pass_at_k"].items()
        if k != "1"
        for end, part in (("", "value"), ("/low", "low"), ("/high", "high"))
    }
    if "valid_pass_at_1" in score:
        coverage[f"val/{name}/valid"] = score["valid_pass_at_1"]
    coverage |= {f"val/{name}/{grader}": found["pass_at_1"] for grader, found in score["second_graders"].items()}
    ends = {f"val/{name}/low": score["low"], f"val/{name}/high": score["high"]}
    return {f"val/{name}": score["pass_at_1"], **ends, **coverage}

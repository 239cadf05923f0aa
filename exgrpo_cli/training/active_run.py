"""A run under way: its parts, its folder, and who is told of it."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from exgrpo_cli.console.reporter import Reporter
from exgrpo_cli.console.signals import Stopper
from exgrpo_cli.runs.folder import RunFolder
from exgrpo_cli.runs.watchdog import Watchdog
from exgrpo_cli.training.parts import Parts
from exgrpo_cli.training.resuming.checkpoint import save_checkpoint
from exgrpo_cli.training.resuming.state import RunState
from exgrpo_cli.training.step.guards import Guards
from exgrpo_cli.training.time_limit import TimeLimit
from exgrpo_cli.training.trackers import Tracker
from exgrpo_cli.training.validation import validate
from exgrpo_cli.types import Question


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
        self.time_limit.count_save(time.perf_counter() - started)


def note_score(run: ActiveRun, score: dict[str, Any], when: str) -> None:
    """Tell the reporter a held-out score, with the name of its question set and its interval."""
    run.reporter.note(
        f"held-out pass@1 ({run.parts.config.data.heldout_name}) {when}: "
        f"{score['pass_at_1']:.3f} [{score['low']:.3f}, {score['high']:.3f}] "
        f"over {score['questions']} questions"
    )


def validation_metrics(run: ActiveRun) -> dict[str, float | int]:
    """`val/<benchmark>` of the current weights; remembers the best step."""
    state = run.state
    name = run.parts.config.data.heldout_name
    with run.timed("validation"):
        score = validate(run.parts, run.heldout, run.reporter.progress, f"held-out, step {state.step}")
    note_score(run, score, f"after step {state.step}")
    run.validated[state.step] = score
    if score["pass_at_1"] > state.best_score:
        state.best_score, state.best_step = score["pass_at_1"], state.step
    coverage = {
        f"val/{name}/pass_at_{k}{end}": found[part]
        for k, found in score["pass_at_k"].items()
        if k != "1"
        for end, part in (("", "value"), ("/low", "low"), ("/high", "high"))
    }
    ends = {f"val/{name}/low": score["low"], f"val/{name}/high": score["high"]}
    return {f"val/{name}": score["pass_at_1"], **ends, **coverage}

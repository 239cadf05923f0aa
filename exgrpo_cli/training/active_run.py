"""A run under way: its parts, its folder, its guards and clocks, and who shows it."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from exgrpo_cli.base.console.output import Stopper
from exgrpo_cli.base.console.reporter import Reporter
from exgrpo_cli.base.types import Question
from exgrpo_cli.runs.folder import RunFolder
from exgrpo_cli.runs.manifest import note_checksums
from exgrpo_cli.runs.watchdog import TimeLimit, Watchdog
from exgrpo_cli.training.parts import Parts
from exgrpo_cli.training.resuming.checkpoint import save_checkpoint
from exgrpo_cli.training.resuming.state import RunState
from exgrpo_cli.training.step.guards import Guards
from exgrpo_cli.training.trackers import Tracker


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

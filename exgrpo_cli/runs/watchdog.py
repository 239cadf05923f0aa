"""The watchdog of a run: a phase that lasts longer than its deadline ends the process, with the stacks of all ranks.

A rank that hangs (in a collective whose partner is gone, on a device that does not answer, on a disk) says nothing by
itself. A thread looks at how long the current phases have lasted; past the deadline it writes the stacks of
all threads to `stacks/rank-<n>.txt` in the run folder, asks the other ranks of the run to do the same, says which
phase it was on which rank, and ends the process with exit code 1. The last checkpoint is untouched.
"""

import faulthandler
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from exgrpo_cli.errors import RunError

POLL_SECONDS = 1.0
_WANTED = "wanted"


class Watchdog:
    """Named phases of one rank, watched while the `with` block of the watchdog lasts."""

    def __init__(self, run: Path, *, rank: int, seconds: float) -> None:
        """`seconds` a phase may last; 0 watches nothing. Stacks go to `run`/stacks, which all ranks must see."""
        self._stacks = run / "stacks"
        self._run, self._rank, self._seconds = run, rank, seconds
        self._phases: list[tuple[str, float]] = []
        self._over = threading.Event()

    def __enter__(self) -> "Watchdog":
        if self._seconds > 0:
            (self._stacks / _WANTED).unlink(missing_ok=True)
            threading.Thread(target=self._watch, name="watchdog", daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Work with a name and a deadline; phases may contain one another."""
        entry = (name, time.monotonic())
        self._phases.append(entry)
        try:
            yield
        finally:
            self._phases.remove(entry)

    def _watch(self) -> None:
        interval = min(POLL_SECONDS, self._seconds / 4)
        while not self._over.wait(interval):
            late = [(name, since) for name, since in list(self._phases) if time.monotonic() - since > self._seconds]
            if late:
                # The innermost one says most about where the time goes.
                self._give_up(*late[-1])
            if (self._stacks / _WANTED).exists():
                self._write_stacks("another rank has given up")
                return

    def _give_up(self, phase: str, since: float) -> None:
        seconds = time.monotonic() - since
        what = f"rank {self._rank} has been in phase {phase!r} for {seconds:.0f} s, more than {self._seconds:.0f} s"
        self._write_stacks(what)
        (self._stacks / _WANTED).touch()
        # The other ranks look once in POLL_SECONDS; a launcher ends them as soon as this one is gone.
        time.sleep(2 * min(POLL_SECONDS, self._seconds / 4))
        error = RunError(
            f"{what} (run.phase_timeout). Where every rank was is in {self._stacks}; go on from the last checkpoint "
            f"with: exgrpo train --resume --output {self._run}"
        )
        sys.stderr.write(f"exgrpo: {error}\n")
        sys.stderr.flush()
        # The main thread hangs: nothing but the end of the process ends it.
        os._exit(error.exit_code)

    def _write_stacks(self, what: str) -> None:
        self._stacks.mkdir(exist_ok=True)
        with (self._stacks / f"rank-{self._rank}.txt").open("w", encoding="utf-8") as file:
            file.write(f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC: {what}\n\n")
            file.flush()
            faulthandler.dump_traceback(file, all_threads=True)

"""Clocks of a run: a limit on the time of its process, before which it saves and stops, and a watchdog over its phases.

A rank that hangs (in a collective whose partner is gone, on a device that does not answer, on a disk) says nothing by
itself. A thread counts how long the current phases have lasted; past the deadline it reports which phase it was on
which rank, writes the stacks of all threads to `stacks/rank-<n>.txt` in the run folder, leaves other ranks that
hang the time to do the same, and ends the process with exit code 1. The last checkpoint is untouched. Time for which
Ctrl-Z has stopped the process does not count, since the thread stands still as well.
"""

import faulthandler
import math
import os
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from exgrpo_cli.base import errors, output

POLL_SECONDS = 1.0
_PATIENCE = 3
"""Looks for which a rank that gives up waits for others in the same phase to write their stacks."""
_STDERR = 2

JOB_END = "SLURM_JOB_END_TIME"
"""Variable of Slurm's: when the job will be ended, in seconds since 1970."""

_DURATION = re.compile(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?")


@dataclass(kw_only=True, slots=True)
class TimeLimit:
    """Time that this process may work, counted from when the limit was made; a resumed run counts anew."""

    seconds: float
    """Infinite where there is no limit."""
    started: float = field(default_factory=time.perf_counter)
    _longest_step: float = 0.0
    _longest_save: float = 0.0

    @classmethod
    def parse(cls, text: str) -> "TimeLimit":
        """The limit written as days, hours, minutes and seconds: "3h50m", "45m", "1d12h", "90s".

        Raises InputError for anything else, and for no time at all.
        """
        parts = _DURATION.fullmatch(text.strip())
        days, hours, minutes, seconds = (int(part or 0) for part in parts.groups()) if parts else (0, 0, 0, 0)
        seconds += 86400 * days + 3600 * hours + 60 * minutes
        if seconds == 0:
            raise errors.InputError(f"--time-limit {text!r} is no length of time: write it like 3h50m, 45m or 90s.")
        return cls(seconds=seconds)

    @classmethod
    def of_job(cls) -> "TimeLimit":
        """The rest of this Slurm job, where Slurm says when that ends (old releases do not); else no limit."""
        end = os.environ.get(JOB_END, "")
        return cls(seconds=float(end) - time.time() if end.isdecimal() else math.inf)

    def count_step(self, seconds: float) -> None:
        """A step took so long; the next one may take as long as the longest."""
        self._longest_step = max(self._longest_step, seconds)

    def count_save(self, seconds: float) -> None:
        """A checkpoint took so long."""
        self._longest_save = max(self._longest_save, seconds)

    @property
    def is_near(self) -> bool:
        """Whether another step and a checkpoint might not fit any more."""
        spent = time.perf_counter() - self.started
        return spent + self._longest_step + 2 * self._longest_save >= self.seconds


class Watchdog:
    """Named phases of one rank, watched while the `with` block of the watchdog lasts."""

    def __init__(self, run: Path, *, rank: int, seconds: float) -> None:
        """`seconds` a phase may last; 0 watches nothing. Stacks go to `run`/stacks; without a `run`, to stderr."""
        self._run, self._stacks, self._rank, self._seconds = run, run / "stacks", rank, seconds
        self._interval = min(POLL_SECONDS, seconds / 4)
        self._counted = 0.0
        """Seconds of its looks."""
        self._phases: list[tuple[str, float]] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> "Watchdog":
        if self._seconds > 0:
            self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._seconds > 0:
            self._over.set()
            self._thread.join()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Work with a name and a deadline; phases may contain one another."""
        entry = (name, self._counted)
        self._phases.append(entry)
        try:
            yield
        finally:
            self._phases.remove(entry)

    def _watch(self) -> None:
        while not self._over.wait(self._interval):
            self._counted += self._interval
            # The innermost one says most about where the time goes.
            for name, since in reversed(list(self._phases)):
                if self._counted - since > self._seconds:
                    self._give_up(name, self._counted - since)

    def _give_up(self, phase: str, seconds: float) -> None:
        what = f"rank {self._rank} has been in phase {phase!r} for {seconds:.0f} s, more than {self._seconds:.0f} s"
        error = errors.RunError(
            f"{what} (run.phase_timeout, which --set may raise). Where every rank was is in {self._stacks}; go on from "
            f"the last checkpoint with: exgrpo train --resume --output {self._run}"
        )
        output.say(f"exgrpo: {error}")
        # What follows writes to a disk, which may be what hangs.
        faulthandler.dump_traceback_later(10 * _PATIENCE * self._interval, exit=True, file=_STDERR)
        self._write_stacks(what)
        # A launcher ends the other ranks as soon as this one is gone: those that hang too get the time to write theirs.
        time.sleep(_PATIENCE * self._interval)
        # The main thread hangs: nothing but the end of the process ends it.
        os._exit(error.exit_code)

    def _write_stacks(self, what: str) -> None:
        descriptor = _STDERR
        # On a host of its own a rank may not see the run folder.
        with suppress(OSError):
            self._stacks.mkdir(exist_ok=True)
            path = self._stacks / f"rank-{self._rank}.txt"
            # A link of this name may lead anywhere.
            path.unlink(missing_ok=True)
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        with suppress(OSError):
            os.write(descriptor, f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC: {what}\n\n".encode())
        faulthandler.dump_traceback(descriptor, all_threads=True)

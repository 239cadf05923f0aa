"""Clocks of a run: a limit on the time of its process, before which it saves and stops, and a watchdog over its phases.

A rank that hangs (in a collective whose partner is gone, on a device that does not answer, on a disk) says nothing by
itself. A thread looks at how long the current phases have lasted; past the deadline it writes the stacks of all threads
to `stacks/rank-<n>.txt` in the run folder, makes the other ranks of the run do the same, reports which phase it was on
which rank, and ends the process with exit code 1. The last checkpoint is untouched.

Where a call holds the interpreter that thread stands still as well. Then a timer that does not need the interpreter
writes the stacks below the phase that the file names already, and ends the process with exit code 1. faulthandler has
one such timer a process: whoever needs it says by when, and the earliest moment counts.
"""

import faulthandler
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import FrameType

from exgrpo_cli.base.errors import InputError, RunError

POLL_SECONDS = 1.0
_PATIENCE = 10
"""Looks that the timer waits beyond the deadline, and that a rank which gives up waits for the others' stacks."""
_WANTED = "wanted"
_STDERR = 2
_HEAD_BYTES = 160
"""Length of the first line of a file of stacks, which is written anew with every phase."""

_DURATION = re.compile(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?")
_lock = threading.Lock()
_ends: dict[object, tuple[float, int]] = {}
"""By owner: the moment (monotonic), and the file descriptor that the stacks go to."""


def end_process_in(seconds: float, descriptor: int, owner: object) -> None:
    """Let the process end in `seconds`, its stacks in an open file, unless `owner` sets another time or cancels it."""
    with _lock:
        _ends[owner] = (time.monotonic() + seconds, descriptor)
        _set_timer()


def cancel_end(owner: object) -> None:
    """Cancel what `owner` has set; it may have set nothing."""
    with _lock:
        _ends.pop(owner, None)
        _set_timer()


def _set_timer() -> None:
    if not _ends:
        faulthandler.cancel_dump_traceback_later()
        return
    moment, descriptor = min(_ends.values())
    faulthandler.dump_traceback_later(max(0.01, round(moment - time.monotonic(), 2)), exit=True, file=descriptor)


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
            raise InputError(f"--time-limit {text!r} is no length of time: write it like 3h50m, 45m or 90s.")
        return cls(seconds=seconds)

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
        self._stacks = run / "stacks"
        self._file = self._stacks / f"rank-{rank}.txt"
        self._run, self._rank, self._seconds = run, rank, seconds
        # On a host of its own a rank may not; its stacks go to stderr then.
        self._sees_folder = run.is_dir()
        self._interval = min(POLL_SECONDS, seconds / 4)
        self._phases: list[tuple[str, float]] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._descriptor = -1
        """Closed: a phase that begins when the watch is over writes nowhere."""
        self._has_written = False
        self._suspended, self._is_suspended = 0.0, False

    def __enter__(self) -> "Watchdog":
        """Raises RunError where the run folder cannot be written."""
        if self._seconds > 0:
            self._descriptor = self._open()
            self._thread.start()
            if signal.getsignal(signal.SIGTSTP) == signal.SIG_DFL:
                # Outside the main thread signals cannot be caught.
                with suppress(ValueError):
                    signal.signal(signal.SIGTSTP, self._suspend)
        return self

    def __exit__(self, *error: object) -> None:
        if self._seconds == 0:
            return
        if signal.getsignal(signal.SIGTSTP) == self._suspend:
            signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        self._over.set()
        self._thread.join()
        cancel_end(self)
        os.close(self._descriptor)
        self._descriptor = -1
        if not self._has_written:
            with suppress(OSError):
                self._file.unlink()
                self._stacks.rmdir()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Work with a name and a deadline; phases may contain one another."""
        entry = (name, self._now())
        self._phases.append(entry)
        self._write_head()
        try:
            yield
        finally:
            self._phases.remove(entry)
            self._write_head()

    def _open(self) -> int:
        if not self._sees_folder:
            return os.dup(_STDERR)
        try:
            self._stacks.mkdir(exist_ok=True)
            (self._stacks / _WANTED).unlink(missing_ok=True)
            descriptor = os.open(self._file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        except OSError as error:
            raise RunError(f"{self._file} cannot be written ({error.strerror}): make room, or allow it.") from error
        os.lseek(descriptor, _HEAD_BYTES, os.SEEK_SET)
        return descriptor

    def _now(self) -> float:
        """Seconds of a clock that stands still while Ctrl-Z has stopped the process."""
        return time.monotonic() - self._suspended

    def _watch(self) -> None:
        while True:
            if not self._is_suspended:
                phases = list(self._phases)
                late = [(name, since) for name, since in phases if self._now() - since > self._seconds]
                if late:
                    # The innermost one says most about where the time goes.
                    self._give_up(*late[-1])
                since = min((since for _, since in phases), default=self._now())
                end_process_in(since + self._seconds - self._now() + _PATIENCE * self._interval, self._descriptor, self)
            if (self._stacks / _WANTED).exists():
                self._write_stacks("another rank has given up")
                return
            if self._over.wait(self._interval):
                return

    def _write_head(self) -> None:
        """Name the innermost phase in the first line of the file; what the disk refuses costs no more than the name."""
        if self._sees_folder and self._seconds > 0 and not self._has_written:
            name, since = self._phases[-1] if self._phases else ("between phases", self._now())
            began = datetime.now(UTC) - timedelta(seconds=self._now() - since)
            head = f"rank {self._rank}, in phase {name!r} since {began:%Y-%m-%d %H:%M:%S} UTC"
            with suppress(OSError):
                os.pwrite(self._descriptor, head.ljust(_HEAD_BYTES - 1).encode()[: _HEAD_BYTES - 1] + b"\n", 0)

    def _suspend(self, number: int, frame: FrameType | None) -> None:
        """Stop as Ctrl-Z does, and count none of the time until the process goes on."""
        self._is_suspended = True
        cancel_end(self)
        stopped = time.monotonic()
        os.kill(os.getpid(), signal.SIGSTOP)
        self._suspended += time.monotonic() - stopped
        self._is_suspended = False

    def _give_up(self, phase: str, since: float) -> None:
        seconds = self._now() - since
        what = f"rank {self._rank} has been in phase {phase!r} for {seconds:.0f} s, more than {self._seconds:.0f} s"
        # What follows writes to a disk, which may be what hangs.
        end_process_in(2 * _PATIENCE * self._interval, self._descriptor, self)
        self._write_stacks(what)
        with suppress(OSError):
            (self._stacks / _WANTED).touch()
        # A launcher ends the other ranks as soon as this one is gone: each gets the time to write its stacks.
        for _ in range(_PATIENCE):
            if all(file.stat().st_size > _HEAD_BYTES for file in self._stacks.glob("rank-*.txt")):
                break
            time.sleep(self._interval)
        error = RunError(
            f"{what} (run.phase_timeout). Where every rank was is in {self._stacks}; go on from the last checkpoint "
            f"with: exgrpo train --resume --output {self._run}"
        )
        sys.stderr.write(f"exgrpo: {error}\n")
        sys.stderr.flush()
        # The main thread hangs: nothing but the end of the process ends it.
        os._exit(error.exit_code)

    def _write_stacks(self, what: str) -> None:
        self._has_written = True
        with suppress(OSError):
            os.write(self._descriptor, f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC: {what}\n\n".encode())
        faulthandler.dump_traceback(self._descriptor, all_threads=True)

"""Bounds on what strangers give: bytes and rows are counted while it is read, before it fills the memory.

Whoever trusts what is refused raises the bound by its environment variable. Code of a stranger (a chat template, a
tokenizer) runs under `time_limit` and `memory_limit`.
"""

import ctypes
import faulthandler
import math
import os
import resource
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import AnyStr, NamedTuple

from exgrpo_cli.base.errors import InputError

HANG_SECONDS = 60.0
"""Time for which a single call into C code may hold the process beyond a limit."""
_STDERR = 2
_MOST = 1e9


class Bound(NamedTuple):
    """Bound on one thing that foreign data may take, and the environment variable that sets another one."""

    variable: str
    default: float
    unit: str

    @property
    def value(self) -> float:
        """The bound in its unit. Raises InputError where the variable is no such number."""
        text = os.environ.get(self.variable, "")
        try:
            value = float(text or self.default)
        except ValueError:
            value = math.nan
        if not 0 < value <= _MOST:
            bound = f"a number of {self.unit} above 0, up to {_MOST:g}"
            raise InputError(f"{self.variable}={text!r} is no bound: use {bound}.")
        return value

    def require(self, what: str, amount: float) -> None:
        """Raise InputError naming `what`, the bound and its variable where `amount`, in the unit, is over it."""
        if amount > (most := self.value):
            trusted = f"set {self.variable} to a higher one if you trust where it comes from"
            raise InputError(f"{what} is over the bound of {most:,.10g} {self.unit}: leave it out, or {trusted}.")


MEGABYTES = Bound("EXGRPO_MAX_MB", 64, "MB")
"""Bytes, in 2**20, of one line or row of a file."""
ROWS = Bound("EXGRPO_MAX_ROWS", 20_000_000, "rows")
"""Lines or rows of one file."""
GROWTH = Bound("EXGRPO_MAX_GROWTH", 1000, "times its size on disk")
"""Bytes that a file may be unpacked to for each byte of it, counted from 256 MB on."""
_FREE_BYTES = 1 << 28
MB = 1 << 20


class Meter:
    """Count of the bytes and rows that have been read of one file."""

    def __init__(self, file: Path) -> None:
        self._file, self.rows, self._bytes = file, 0, 0
        self._most_rows = ROWS.value
        self._most_bytes = max(_FREE_BYTES, GROWTH.value * file.stat().st_size)

    def take(self, num_bytes: int, rows: int = 1) -> None:
        """Count bytes and rows; raises InputError naming the file where it has too many."""
        self.rows += rows
        self._bytes += num_bytes
        if self.rows > self._most_rows:
            ROWS.require(f"{self._file}", self.rows)
        if self._bytes > self._most_bytes:
            GROWTH.require(f"{self._file}: what is packed in it", self._bytes / max(1, self._file.stat().st_size))


def bounded_lines(readline: Callable[[int], AnyStr], file: Path) -> Iterator[AnyStr]:
    """Lines of an open file, unpacked or not, each of `EXGRPO_MAX_MB` at most.

    Raises InputError naming the file, and the line where it is too long: no more of it is in memory than the bound.
    """
    meter, longest = Meter(file), int(MEGABYTES.value * MB)
    while line := readline(longest + 1):
        if len(line) > longest:
            MEGABYTES.require(f"{file}: line {meter.rows + 1}", len(line) / MB)
        meter.take(len(line))
        yield line


class Expired(BaseException):
    """Time is over. Not an Exception, so that no handler of the limited code takes it for an error of its own."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise Expired in this thread once `seconds` are over; a single call into C code is let finish first.

    Unlike an alarm signal it works in any thread. A call that does not come back, such as the power of a power, lets
    nothing be raised: after HANG_SECONDS more the process ends with exit code 1 and its stacks on stderr.
    """
    thread, lock, is_over = threading.get_ident(), threading.Lock(), False

    def expire() -> None:
        with lock:
            if not is_over:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(Expired))

    timer = threading.Timer(seconds, expire)
    timer.daemon = True
    # A process has one such timer, which does not need the interpreter.
    faulthandler.dump_traceback_later(seconds + HANG_SECONDS, exit=True, file=_STDERR)
    timer.start()
    try:
        yield
    finally:
        with lock:
            is_over = True
        timer.cancel()
        faulthandler.cancel_dump_traceback_later()


@contextmanager
def memory_limit(num_bytes: int) -> Iterator[None]:
    """Let the process reserve `num_bytes` more than it has, and not more: then MemoryError.

    The limit is the system's, on the address space of the whole process: other threads feel it too. Without /proc, as
    on a Mac, there is none.
    """
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
    except OSError:
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = pages * resource.getpagesize() + num_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit if soft == resource.RLIM_INFINITY else min(limit, soft), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))

"""Limits on the time and memory of Python code that somebody else wrote, such as a chat template."""

import ctypes
import faulthandler
import resource
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

HANG_SECONDS = 60.0
"""Time for which a single call into C code may hold the process beyond a limit."""
_STDERR = 2


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

    The limit is the system's, on the address space of the whole process: other threads feel it too.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + num_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit if soft == resource.RLIM_INFINITY else min(limit, soft), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))

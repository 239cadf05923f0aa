"""A limit on the time of Python code that somebody else wrote, such as a chat template: it is ended from outside."""

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Expired(BaseException):
    """Time is over. Not an Exception, so that no handler of the limited code takes it for an error of its own."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise Expired in this thread once `seconds` are over; a single call into C code is let finish first.

    Unlike an alarm signal it works in any thread.
    """
    thread, lock, is_over = threading.get_ident(), threading.Lock(), False

    def expire() -> None:
        with lock:
            if not is_over:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(Expired))

    timer = threading.Timer(seconds, expire)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        with lock:
            is_over = True
        timer.cancel()

"""The process's last resort against a call that never lets go of the interpreter: a timer that does not need it.

faulthandler has one such timer for the whole process. It writes the stacks of all threads and ends the process with
exit code 1; whoever needs it says by when, and the earliest moment counts.
"""

import faulthandler
import threading
import time

_lock = threading.Lock()
_ends: dict[object, tuple[float, int]] = {}
"""Of each who asked: the moment (monotonic), and the file descriptor that the stacks go to."""


def end_process_in(seconds: float, descriptor: int, owner: object) -> None:
    """Let the process end in `seconds`, its stacks in an open file, unless `owner` asks for another time or none."""
    with _lock:
        _ends[owner] = (time.monotonic() + seconds, descriptor)
        _set_timer()


def spare_process(owner: object) -> None:
    """Forget what `owner` asked for; it may have asked for nothing."""
    with _lock:
        _ends.pop(owner, None)
        _set_timer()


def _set_timer() -> None:
    if not _ends:
        faulthandler.cancel_dump_traceback_later()
        return
    moment, descriptor = min(_ends.values())
    faulthandler.dump_traceback_later(max(0.01, round(moment - time.monotonic(), 2)), exit=True, file=descriptor)

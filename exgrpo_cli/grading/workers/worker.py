"""One worker process: grades the answers it is sent, one at a time, until its pipe closes or it is killed.

Workers are forked by the supervisor, after the graders are imported, so that replacing one costs milliseconds.
"""

import ctypes
import os
import resource
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

from exgrpo_cli.base.types import Verdict
from exgrpo_cli.grading.workers.messages import Task

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)


def serve(
    connection: Connection, run_task: Callable[[Task], Verdict], *, supervisor_pid: int, memory_bytes: int
) -> None:
    """Answer every task on `connection` with its verdict. What a grader raises ends the process: see `supervisor`."""
    _end_with_supervisor(supervisor_pid)
    _limit_memory(memory_bytes)
    while True:
        try:
            task = connection.recv()
        except EOFError:
            return
        connection.send(run_task(task).value)


def _end_with_supervisor(supervisor_pid: int) -> None:
    """Have the kernel kill this process when the supervisor, which is single-threaded, is gone, however it died."""
    if hasattr(_LIBC, "prctl"):
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    # It may have died before the line above.
    if os.getppid() != supervisor_pid:
        os._exit(1)


def _limit_memory(memory_bytes: int) -> None:
    """A second fence behind the supervisor's watch, for what grows faster than it looks.

    It lies further out on purpose: behind it an allocation fails with MemoryError, which math-verify swallows and takes
    for a wrong answer, whereas the supervisor's kill is counted as a crash.
    """
    address_space = address_space_bytes()
    if address_space is not None:
        limit = address_space + 2 * memory_bytes
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def address_space_bytes() -> int | None:
    """Size of this process's address space; None where the system has no /proc."""
    return _statm_bytes("self", 0)


def resident_bytes(pid: int) -> int | None:
    """Memory that a process holds; None where it is gone or the system has no /proc."""
    return _statm_bytes(str(pid), 1)


def cpu_seconds(pid: int) -> float | None:
    """Processor time that a process has used; None where it is gone or the system has no /proc."""
    try:
        # The name in brackets may hold spaces; utime and stime are the 12th and 13th fields after it.
        fields = Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    except (OSError, IndexError, ValueError):
        return None


def _statm_bytes(process: str, field: int) -> int | None:
    try:
        return int(Path("/proc", process, "statm").read_text().split()[field]) * resource.getpagesize()
    except (OSError, IndexError, ValueError):
        return None

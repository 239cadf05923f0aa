"""The supervisor process: forks workers, sends them answers, kills the one that overruns its deadline or its memory.

It stands between the pool and the workers so that deadlines hold whatever the parent's threads do, and so that it can
fork: it has one thread, no torch, and everything the graders need already imported, so that replacing a worker costs
milliseconds. It ends, and its workers with it, as soon as the parent does: the connection closes, and it looks at its
parent's pid every second in case something else still holds the other end.
"""

import ctypes
import gc
import math
import os
import resource
import signal
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any, NamedTuple

from exgrpo_cli.base import errors, types
from exgrpo_cli.config.sections.run import GradingSettings
from exgrpo_cli.grading.routes import Task, task_runner

READY = "ready\n"
"""Supervisor to parent, once: everything is imported; what the grader does without follows. Any other greeting is the
reason why grading cannot start."""
STOP = None
"""Parent to supervisor, in place of a numbered task: kill the workers and end."""

_WATCH_SECONDS = 0.02
"""Interval at which a busy worker's memory and CPU time are read; Python integers, the usual culprits, grow by far less
than a cap in it."""
_IDLE_SECONDS = 1.0
_MOST_WALL_PER_DEADLINE = 4
"""A deadline is of the worker's CPU time, so that a busy machine is charged to no answer; one that waits instead of
working ends after this many deadlines of wall time."""
_LEAST_MEMORY_FOR_ANSWERS = 64
"""In MiB."""
_TASKS_PER_WORKER = 20_000
"""A worker is then replaced, before what sympy caches for good is charged to an innocent answer."""
_SUSPECT_DIVISOR = 32
_LEAST_SUSPECT_SECONDS = 0.1
_MAX_SUSPECTS = 4096
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)

Job = tuple[int, Task]
"""A task behind the number under which the parent waits for it."""


class Use(NamedTuple):
    """Resources of a process, in seconds and bytes."""

    cpu_seconds: float
    address_space: int
    resident: int


def use_of(pid: int) -> Use | None:
    """Resources that a process has used and holds; None where it is gone or the system has no /proc."""
    try:
        # The name in brackets may hold spaces; the fields are numbered from the one after it.
        fields = Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()
        ticks, address_space, pages = int(fields[11]) + int(fields[12]), int(fields[20]), int(fields[21])
    except (OSError, IndexError, ValueError):
        return None
    return Use(ticks / os.sysconf("SC_CLK_TCK"), address_space, pages * resource.getpagesize())


@dataclass(kw_only=True, slots=True)
class Worker:
    """A worker process as the supervisor sees it."""

    pid: int
    connection: Connection
    job: Job | None = None
    deadline: float = 0.0
    """Moment, on the monotonic clock, at which it is killed if still busy, however little it has worked."""
    cpu_limit: float = math.inf
    """CPU time of its own, in seconds, at which it is killed if still busy."""
    num_tasks: int = 0

    def kill(self) -> None:
        """End the process, whatever it does."""
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        self.connection.close()


class Supervisor:
    """Serves one parent until its connection closes.

    Jobs go out in order of arrival. Suspects, answers that reached a deadline or died, get a fraction of a deadline: a
    power tower sampled for twenty questions would otherwise cost twenty deadlines. The fraction is of CPU time, so that
    an answer whose worker only had to wait, on a machine that is too busy, is not charged again.
    """

    def __init__(self, parent: Connection, run_task: Callable[[Task], types.Grade], settings: GradingSettings) -> None:
        self._parent = parent
        self._parent_pid = os.getppid()
        self._run_task = run_task
        self._deadline_seconds = settings.deadline_seconds
        self._memory_bytes = settings.memory_mb << 20
        self._queue: deque[Job] = deque()
        self._suspects: dict[str, None] = {}
        self._stopped = False
        self._next_watch = 0.0
        self._workers: list[Worker] = []
        for _ in range(settings.workers):
            self._workers.append(self._fork_worker())

    def run(self) -> None:
        """Send out jobs and collect verdicts until the parent is gone; then kill the workers."""
        try:
            while os.getppid() == self._parent_pid and not self._stopped:
                self._send_out()
                seconds = _WATCH_SECONDS if any(worker.job for worker in self._workers) else _IDLE_SECONDS
                ready = wait([self._parent, *(worker.connection for worker in self._workers)], seconds)
                while self._parent in ready and not self._stopped and self._parent.poll():
                    job = self._parent.recv()
                    self._stopped = job is STOP
                    self._queue.append(job)
                for worker in list(self._workers):
                    if worker.connection in ready:
                        self._receive_grade(worker)
                self._enforce_limits()
        except (EOFError, ConnectionError):
            # The parent closed the pool or died.
            pass
        finally:
            for worker in self._workers:
                worker.kill()

    def _send_out(self) -> None:
        for worker in list(self._workers):
            if worker.job is not None:
                continue
            if not self._queue:
                return
            job = self._queue.popleft()
            if worker.num_tasks >= _TASKS_PER_WORKER:
                worker = self._replace(worker)
            worker.job = job
            self._limit_time(worker, job[1])
            worker.num_tasks += 1
            try:
                worker.connection.send(job[1])
            except ConnectionError:
                # It died while idle, before it held this answer; the answer goes to its replacement.
                self._queue.append(job)
                self._replace(worker)

    def _limit_time(self, worker: Worker, task: Task) -> None:
        """Deadlines of a task from now on: a suspect's is shorter, unless it is tried again with patience."""
        deadline = self._deadline_seconds * task.patience
        use = use_of(worker.pid)
        worker.deadline = time.monotonic() + deadline * (1 if use is None else _MOST_WALL_PER_DEADLINE)
        if task.patience == 1 and task.judged in self._suspects:
            deadline = min(deadline, max(deadline / _SUSPECT_DIVISOR, _LEAST_SUSPECT_SECONDS))
        worker.cpu_limit = (use.cpu_seconds if use else 0.0) + deadline

    def _receive_grade(self, worker: Worker) -> None:
        try:
            grade = worker.connection.recv()
        except (EOFError, ConnectionError):
            self._give_up_on(worker, types.Verdict.CRASHED)
            return
        if worker.job is not None:
            self._parent.send((worker.job[0], grade))
            worker.job = None

    def _enforce_limits(self) -> None:
        now = time.monotonic()
        if now < self._next_watch:
            return
        self._next_watch = now + _WATCH_SECONDS
        for worker in list(self._workers):
            if worker.job is None or worker.connection.poll():
                continue
            use = use_of(worker.pid)
            if now >= worker.deadline or (use and use.cpu_seconds >= worker.cpu_limit):
                self._give_up_on(worker, types.Verdict.TIMEOUT)
            elif use and use.resident > self._memory_bytes:
                self._give_up_on(worker, types.Verdict.CRASHED)

    def _give_up_on(self, worker: Worker, verdict: types.Verdict) -> None:
        """Kill and replace a worker; the answer it held, and no other, gets `verdict`."""
        self._replace(worker)
        if worker.job is None:
            return
        number, task = worker.job
        self._suspects[task.judged] = None
        if len(self._suspects) > _MAX_SUSPECTS:
            del self._suspects[next(iter(self._suspects))]
        self._parent.send((number, types.Grade.of(verdict)))

    def _replace(self, worker: Worker) -> Worker:
        index = self._workers.index(worker)
        worker.kill()
        self._workers[index] = self._fork_worker()
        return self._workers[index]

    def _fork_worker(self) -> Worker:
        ours, theirs = Pipe()
        supervisor_pid = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._become_worker(theirs, ours, supervisor_pid)
        theirs.close()
        return Worker(pid=pid, connection=ours)

    def _become_worker(self, connection: Connection, supervisors_end: Connection, supervisor_pid: int) -> None:
        """Never returns: whatever happens, a forked copy of the supervisor must not run on."""
        try:
            for inherited in (supervisors_end, self._parent, *(sibling.connection for sibling in self._workers)):
                inherited.close()
            # The kernel kills this process when the supervisor, which is single-threaded, is gone, however it died.
            if hasattr(_LIBC, "prctl"):
                _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            # It may have died before the line above.
            if os.getppid() != supervisor_pid:
                return
            # A second fence behind the supervisor's watch, for what grows faster than it looks. It lies further out on
            # purpose: behind it an allocation fails with MemoryError, which math-verify swallows and takes for a wrong
            # answer, whereas the supervisor's kill is counted as a crash.
            if use := use_of(os.getpid()):
                resource.setrlimit(resource.RLIMIT_AS, (use.address_space + 2 * self._memory_bytes,) * 2)
            while True:
                try:
                    task = connection.recv()
                except EOFError:
                    return
                try:
                    outcome: types.Grade | errors.InputError = self._run_task(task)
                except errors.InputError as error:
                    outcome = errors.InputError(str(error))
                connection.send(outcome)
        except BaseException:  # noqa: BLE001 - the top of a process
            # What a grader raises ends the process. stderr leads to the user for a grader of their own, and nowhere for
            # math-verify.
            sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        finally:
            os._exit(0)


def main(connection_fd: int, settings: dict[str, Any]) -> None:
    """Entry of the process that `remote` starts; `connection_fd` is its end of the pair."""
    # Ctrl-C on a terminal reaches the whole process group; stopping is for the parent to decide.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = Connection(connection_fd)
    grading = GradingSettings(**settings)
    try:
        run_task, lost = task_runner(grading.grader, grading.success_at)
        use = use_of(os.getpid())
        held = use.resident >> 20 if use else 0
        # A worker starts with all that the supervisor holds: a cap below that would crash every answer.
        if grading.memory_mb < held + _LEAST_MEMORY_FOR_ANSWERS:
            raise errors.InputError(
                f"grading.memory_mb is {grading.memory_mb}, but the grader itself holds {held} MiB before any answer: "
                f"set it to {held + 2 * _LEAST_MEMORY_FOR_ANSWERS} or more."
            )
    except errors.InputError as error:
        parent.send(str(error))
        return
    # Keeps the garbage collector from touching, and so copying, the pages that workers share.
    gc.collect()
    gc.freeze()
    supervisor = Supervisor(parent, run_task, grading)
    parent.send(READY + lost)
    supervisor.run()

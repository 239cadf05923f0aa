"""The supervisor process: forks workers, sends them answers, kills the one that overruns its deadline or its memory.

It stands between the pool and the workers so that deadlines hold whatever the parent's threads do, and so that it can
fork: it has one thread, no torch, and everything the graders need already imported. It ends, and its workers with it,
as soon as the parent does: the connection closes, and it looks at its parent's pid every second in case something else
still holds the other end.
"""

import gc
import math
import os
import selectors
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from typing import Any

from exgrpo_cli.base.errors import InputError
from exgrpo_cli.base.types import Verdict
from exgrpo_cli.config.names import PREFIX
from exgrpo_cli.config.sections.run import GradingSettings
from exgrpo_cli.grading.graders import custom
from exgrpo_cli.grading.workers.jobs import Job, JobQueue, Suspects
from exgrpo_cli.grading.workers.messages import READY, STOP, Task, TaskKind
from exgrpo_cli.grading.workers.worker import cpu_seconds, resident_bytes, serve

_WATCH_SECONDS = 0.02
"""How often a busy worker's memory and processor time are read; Python integers, the usual culprits, grow by far less
than a cap in it."""
_IDLE_SECONDS = 1.0
_MOST_WALL_PER_DEADLINE = 4
"""A deadline is of the worker's processor time, so that a busy machine is charged to no answer; one that waits instead
of working ends after this many deadlines on the clock."""
_LEAST_MEMORY_FOR_ANSWERS = 64
"""In MiB."""
_TASKS_PER_WORKER = 20_000
"""A worker is then replaced, before what sympy caches for good is charged to an innocent answer."""


@dataclass(kw_only=True, slots=True)
class Worker:
    """A worker process as the supervisor sees it."""

    pid: int
    connection: Connection
    job: Job | None = None
    deadline: float = 0.0
    """Moment, on the monotonic clock, at which it is killed if still busy, however little it has worked."""
    cpu_limit: float = math.inf
    """Processor time of its own, in seconds, at which it is killed if still busy."""
    num_tasks: int = 0


class Supervisor:
    """Serves one parent until its connection closes."""

    def __init__(
        self,
        parent: Connection,
        run_task: Callable[[Task], Verdict],
        settings: GradingSettings,
    ) -> None:
        self._parent = parent
        self._parent_pid = os.getppid()
        self._run_task = run_task
        self._deadline_seconds = settings.deadline_seconds
        self._memory_bytes = settings.memory_mb << 20
        self._queue = JobQueue()
        self._suspects = Suspects()
        self._stopped = False
        self._next_watch = 0.0
        # A worker's connection carries the worker as its data, the parent's carries None.
        self._selector = selectors.DefaultSelector()
        self._selector.register(parent, selectors.EVENT_READ)
        self._workers: list[Worker] = []
        for _ in range(settings.workers):
            self._workers.append(self._fork_worker())

    def run(self) -> None:
        """Send out jobs and collect verdicts until the parent is gone; then kill the workers."""
        try:
            while os.getppid() == self._parent_pid and not self._stopped:
                self._send_out()
                for key, _ in self._selector.select(self._seconds_to_wait()):
                    if key.data is None:
                        self._receive_jobs()
                    else:
                        self._receive_verdict(key.data)
                self._enforce_limits()
        except (EOFError, ConnectionError):
            # The parent closed the pool or died.
            pass
        finally:
            for worker in self._workers:
                _kill(worker)

    def _seconds_to_wait(self) -> float:
        busy = [worker.deadline for worker in self._workers if worker.job is not None]
        if not busy:
            return _IDLE_SECONDS
        return min(_WATCH_SECONDS, max(0.0, min(busy) - time.monotonic()))

    def _receive_jobs(self) -> None:
        while self._parent.poll():
            message = self._parent.recv()
            if message is STOP:
                self._stopped = True
                return
            number, task = message
            self._queue.push(Job(number=number, task=task), is_suspect=task.judged in self._suspects)

    def _send_out(self) -> None:
        for index, worker in enumerate(self._workers):
            if worker.job is not None:
                continue
            elsewhere = {other.job.task.judged for other in self._workers if other.job is not None}
            job = self._queue.pop(judged_elsewhere=elsewhere)
            if job is None:
                return
            if worker.num_tasks >= _TASKS_PER_WORKER:
                worker = self._replace(index)
            worker.job = job
            self._limit_time(worker, job)
            worker.num_tasks += 1
            try:
                worker.connection.send(job.task)
            except ConnectionError:
                # It died while idle, before it held this answer; the answer goes to its replacement.
                worker.job = None
                self._queue.push(job)
                self._replace(index)

    def _limit_time(self, worker: Worker, job: Job) -> None:
        """Deadlines of a job from now on: a suspect's is shorter, unless it is tried again with patience."""
        deadline = self._deadline_seconds * job.task.patience
        used = cpu_seconds(worker.pid)
        worker.deadline = time.monotonic() + deadline * (1 if used is None else _MOST_WALL_PER_DEADLINE)
        if job.task.patience == 1:
            deadline = min(deadline, self._suspects.cpu_seconds(job.task.judged, deadline))
        worker.cpu_limit = (used or 0.0) + deadline

    def _receive_verdict(self, worker: Worker) -> None:
        try:
            verdict = Verdict(worker.connection.recv())
        except (EOFError, ConnectionError):
            self._give_up_on(worker, Verdict.CRASHED)
            return
        if worker.job is not None:
            self._suspects.completed(worker.job.task.judged)
            self._report(worker.job, verdict)
            worker.job = None

    def _enforce_limits(self) -> None:
        now = time.monotonic()
        watches = now >= self._next_watch
        if watches:
            self._next_watch = now + _WATCH_SECONDS
        for worker in list(self._workers):
            if worker.job is None or worker.connection.poll():
                continue
            if now >= worker.deadline or (watches and _is_over_cpu_limit(worker)):
                self._give_up_on(worker, Verdict.TIMEOUT)
            elif watches and (resident_bytes(worker.pid) or 0) > self._memory_bytes:
                self._give_up_on(worker, Verdict.CRASHED)

    def _give_up_on(self, worker: Worker, verdict: Verdict) -> None:
        """Kill and replace a worker; the answer it held, and no other, gets `verdict`."""
        job = worker.job
        self._replace(self._workers.index(worker))
        if job is not None:
            self._suspects.failed(job.task.judged)
            self._queue.put_last(job.task.judged)
            for other in self._workers:
                if other.job is not None and other.job.task.judged == job.task.judged:
                    self._limit_time(other, other.job)
            self._report(job, verdict)

    def _report(self, job: Job, verdict: Verdict) -> None:
        self._parent.send((job.number, verdict.value))

    def _replace(self, index: int) -> Worker:
        self._selector.unregister(self._workers[index].connection)
        _kill(self._workers[index])
        self._workers[index] = self._fork_worker()
        return self._workers[index]

    def _fork_worker(self) -> Worker:
        ours, theirs = Pipe()
        supervisor_pid = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._become_worker(theirs, ours, supervisor_pid)
        theirs.close()
        worker = Worker(pid=pid, connection=ours)
        self._selector.register(ours, selectors.EVENT_READ, worker)
        return worker

    def _become_worker(self, connection: Connection, supervisors_end: Connection, supervisor_pid: int) -> None:
        """Never returns: whatever happens, a forked copy of the supervisor must not run on."""
        status = 1
        try:
            self._selector.close()
            supervisors_end.close()
            self._parent.close()
            for sibling in self._workers:
                sibling.connection.close()
            serve(connection, self._run_task, supervisor_pid=supervisor_pid, memory_bytes=self._memory_bytes)
            status = 0
        except BaseException:  # noqa: BLE001 - the top of a process
            # stderr leads to the user for a grader of their own, and nowhere for math-verify.
            sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        finally:
            os._exit(status)


def _is_over_cpu_limit(worker: Worker) -> bool:
    return (cpu_seconds(worker.pid) or 0.0) >= worker.cpu_limit


def _kill(worker: Worker) -> None:
    os.kill(worker.pid, signal.SIGKILL)
    os.waitpid(worker.pid, 0)
    worker.connection.close()


def task_runner(grader: str) -> Callable[[Task], Verdict]:
    """The function workers run, with everything it needs imported."""
    from exgrpo_cli.grading.routes import route_packed

    run_found = _found_answer_runner(grader)

    def run(task: Task) -> Verdict:
        decided = route_packed(task) if task.is_packed else task
        return decided if isinstance(decided, Verdict) else run_found(decided)

    return run


def _found_answer_runner(grader: str) -> Callable[[Task], Verdict]:
    """For tasks whose answer is found. A user's grader audits a gold as its own answer."""
    if not grader.startswith(PREFIX):
        from exgrpo_cli.grading.graders import found, gym, mathematics, oat

        mathematics.prepare()
        runners: dict[TaskKind, Callable[[Task], Verdict]] = {
            "grade": lambda task: found.grade_box(task.gold, task.answer),
            "grade a text": lambda task: found.grade_text(task.gold, task.answer),
            "grade like Oat": lambda task: oat.grade(task.gold, task.answer),
            "compare texts": lambda task: found.compare_answers(task.gold, task.answer),
            "audit": lambda task: found.audit(task.gold),
            "audit for parts": lambda task: found.reads_in_part(task.gold),
            "gym": lambda task: gym.grade(task.metadata, task.answer),
        }
        return lambda task: runners[task.kind](task)
    grade = custom.load(grader)
    return lambda task: grade(task.gold, task.judged, task.metadata)


def _check_memory(memory_mb: int) -> None:
    """A worker starts with all that the supervisor holds: a cap below that would crash every answer."""
    held = (resident_bytes(os.getpid()) or 0) >> 20
    if memory_mb < held + _LEAST_MEMORY_FOR_ANSWERS:
        raise InputError(
            f"grading.memory_mb is {memory_mb}, but the grader itself holds {held} MiB before any answer: set it to "
            f"{held + 2 * _LEAST_MEMORY_FOR_ANSWERS} or more."
        )


def main(connection_fd: int, settings: dict[str, Any]) -> None:
    """Entry of the process that `pool` starts; `connection_fd` is its end of the pair."""
    # Ctrl-C on a terminal reaches the whole process group; stopping is for the parent to decide.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = Connection(connection_fd)
    grading = GradingSettings(**settings)
    try:
        run_task = task_runner(grading.grader)
        _check_memory(grading.memory_mb)
    except InputError as error:
        parent.send(str(error))
        return
    # Keeps the garbage collector from touching, and so copying, the pages that workers share.
    gc.collect()
    gc.freeze()
    supervisor = Supervisor(parent, run_task, grading)
    parent.send(READY)
    supervisor.run()

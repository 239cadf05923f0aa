"""The supervisor process: forks workers, hands them answers, kills the one that overruns its deadline or its memory.

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
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe

from exgrpo_cli.errors import InputError
from exgrpo_cli.grading import custom
from exgrpo_cli.grading.messages import READY, STOP, Task
from exgrpo_cli.grading.worker import cpu_seconds, resident_bytes, serve
from exgrpo_cli.types import Verdict

_WATCH_SECONDS = 0.02
"""How often a busy worker's memory and processor time are read; Python integers, the usual culprits, grow by far less
than a cap in it."""
_IDLE_SECONDS = 1.0
_LEAST_MEMORY_FOR_ANSWERS = 64 << 20
_TASKS_PER_WORKER = 20_000
"""A worker is then replaced, before what sympy caches for good is charged to an innocent answer."""
_SUSPECT_DIVISOR = 32
_LEAST_SUSPECT_SECONDS = 0.1
_COMPLETIONS_TO_CLEAR = 3
_LONG_ANSWER_CHARS = 300
_MANY_POWERS = 3
_MAX_SUSPECTS = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """A task with the number under which the parent waits for it."""

    number: int
    task: Task


@dataclass(kw_only=True, slots=True)
class Worker:
    """A worker process as the supervisor sees it."""

    pid: int
    connection: Connection
    job: Job | None = None
    deadline: float = 0.0
    """Moment, on the monotonic clock, at which it is killed if still busy."""
    cpu_limit: float = math.inf
    """Processor time of its own, in seconds, at which it is killed if still busy."""
    num_tasks: int = 0
    gold: str | None = None
    """Gold of its latest job: it has that one parsed."""


class JobQueue:
    """Jobs in order of arrival, with two exceptions that only save time.

    What looks slow goes first: an answer that takes its whole deadline should run beside the others, not after them.
    And a worker goes on with the gold it has parsed.
    """

    def __init__(self) -> None:
        self._slow: deque[Job] = deque()
        self._by_gold: OrderedDict[str, deque[Job]] = OrderedDict()

    def push(self, job: Job) -> None:
        if _looks_slow(job.task.answer):
            self._slow.append(job)
        else:
            self._by_gold.setdefault(job.task.gold, deque()).append(job)

    def pop(self, *, parsed_gold: str | None, golds_elsewhere: set[str | None]) -> Job | None:
        """The next job for a worker: of the gold it has, else of one nobody has, else the oldest; None when empty."""
        if self._slow:
            return self._slow.popleft()
        if not self._by_gold:
            return None
        if parsed_gold is not None and parsed_gold in self._by_gold:
            gold = parsed_gold
        else:
            oldest = next(iter(self._by_gold))
            gold = next((gold for gold in self._by_gold if gold not in golds_elsewhere), oldest)
        jobs = self._by_gold[gold]
        job = jobs.popleft()
        if not jobs:
            del self._by_gold[gold]
        return job


def _looks_slow(answer: str) -> bool:
    """A guess: long, or with powers enough for a tower."""
    return len(answer) > _LONG_ANSWER_CHARS or answer.count("^") >= _MANY_POWERS


class Suspects:
    """Answers that reached a deadline or died: against the next gold they get a fraction of it, in processor time.

    A power tower sampled for twenty questions would otherwise cost twenty deadlines. The fraction is of processor time,
    so that an answer whose worker only had to wait, on a machine that is too busy, is not charged again. Completing
    clears an answer, but only after a few times: against a word or a set even a power tower is compared in no time.
    """

    def __init__(self) -> None:
        self._completions_to_clear: OrderedDict[str, int] = OrderedDict()

    def cpu_seconds(self, answer: str, deadline_seconds: float) -> float:
        """Processor time that an answer gets; infinite for one that nothing is held against."""
        if answer not in self._completions_to_clear:
            return math.inf
        return max(deadline_seconds / _SUSPECT_DIVISOR, _LEAST_SUSPECT_SECONDS)

    def failed(self, answer: str) -> None:
        self._completions_to_clear.pop(answer, None)
        self._completions_to_clear[answer] = _COMPLETIONS_TO_CLEAR
        if len(self._completions_to_clear) > _MAX_SUSPECTS:
            self._completions_to_clear.popitem(last=False)

    def completed(self, answer: str) -> None:
        left = self._completions_to_clear.get(answer)
        if left == 1:
            del self._completions_to_clear[answer]
        elif left is not None:
            self._completions_to_clear[answer] = left - 1


class Supervisor:
    """Serves one parent until its connection closes."""

    def __init__(
        self,
        parent: Connection,
        run_task: Callable[[Task], Verdict],
        *,
        workers: int,
        deadline_seconds: float,
        memory_bytes: int,
    ) -> None:
        self._parent = parent
        self._parent_pid = os.getppid()
        self._run_task = run_task
        self._deadline_seconds = deadline_seconds
        self._memory_bytes = memory_bytes
        self._queue = JobQueue()
        self._suspects = Suspects()
        self._stopped = False
        self._next_watch = 0.0
        # A worker's connection carries the worker as its data, the parent's carries None.
        self._selector = selectors.DefaultSelector()
        self._selector.register(parent, selectors.EVENT_READ)
        self._workers: list[Worker] = []
        for _ in range(workers):
            self._workers.append(self._fork_worker())

    def run(self) -> None:
        """Hand out jobs and collect verdicts until the parent is gone; then kill the workers."""
        try:
            while os.getppid() == self._parent_pid and not self._stopped:
                self._hand_out()
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
            self._queue.push(Job(number=number, task=task))

    def _hand_out(self) -> None:
        for index, worker in enumerate(self._workers):
            if worker.job is not None:
                continue
            golds_elsewhere = {other.gold for other in self._workers if other is not worker and other.job is not None}
            job = self._queue.pop(parsed_gold=worker.gold, golds_elsewhere=golds_elsewhere)
            if job is None:
                return
            if worker.num_tasks >= _TASKS_PER_WORKER:
                worker = self._replace(index)
            worker.job, worker.gold = job, job.task.gold
            worker.deadline = time.monotonic() + self._deadline_seconds
            seconds = self._suspects.cpu_seconds(job.task.answer, self._deadline_seconds)
            worker.cpu_limit = seconds if seconds == math.inf else (cpu_seconds(worker.pid) or 0.0) + seconds
            worker.num_tasks += 1
            try:
                worker.connection.send(job.task)
            except ConnectionError:
                # It died while idle, before it held this answer; the answer goes to its replacement.
                worker.job = None
                self._queue.push(job)
                self._replace(index)

    def _receive_verdict(self, worker: Worker) -> None:
        try:
            verdict = Verdict(worker.connection.recv())
        except (EOFError, ConnectionError):
            self._give_up_on(worker, Verdict.CRASHED)
            return
        if worker.job is not None:
            self._suspects.completed(worker.job.task.answer)
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
            self._suspects.failed(job.task.answer)
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
    return worker.cpu_limit < math.inf and (cpu_seconds(worker.pid) or 0.0) > worker.cpu_limit


def _kill(worker: Worker) -> None:
    os.kill(worker.pid, signal.SIGKILL)
    os.waitpid(worker.pid, 0)
    worker.connection.close()


def task_runner(grader: str) -> Callable[[Task], Verdict]:
    """The function workers run, with everything it needs imported. A user's grader audits a gold as its own answer."""
    if grader == "math":
        from exgrpo_cli.grading import mathematics

        mathematics.prepare()

        def run_math(task: Task) -> Verdict:
            return mathematics.audit(task.gold) if task.audits_gold else mathematics.grade(task.gold, task.answer)

        return run_math

    grade = custom.load(grader)

    def run_custom(task: Task) -> Verdict:
        return grade(task.gold, task.gold if task.audits_gold else task.answer)

    return run_custom


def _check_memory(memory_bytes: int) -> None:
    """A worker starts with all that the supervisor holds: a cap below that would crash every answer."""
    held = resident_bytes(os.getpid()) or 0
    if memory_bytes < held + _LEAST_MEMORY_FOR_ANSWERS:
        raise InputError(
            f"grading.memory_mb is {memory_bytes >> 20}, but the grader itself holds {held >> 20} MiB before any "
            f"answer: set it to {(held + 2 * _LEAST_MEMORY_FOR_ANSWERS) >> 20} or more."
        )


def main(connection_fd: int, grader: str, workers: int, deadline_seconds: float, memory_bytes: int) -> None:
    """Entry of the process that `pool` starts; `connection_fd` is its end of the pair."""
    # Ctrl-C on a terminal reaches the whole process group; stopping is for the parent to decide.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = Connection(connection_fd)
    try:
        run_task = task_runner(grader)
        _check_memory(memory_bytes)
    except InputError as error:
        parent.send(str(error))
        return
    # Keeps the garbage collector from touching, and so copying, the pages that workers share.
    gc.collect()
    gc.freeze()
    supervisor = Supervisor(
        parent, run_task, workers=workers, deadline_seconds=deadline_seconds, memory_bytes=memory_bytes
    )
    parent.send(READY)
    supervisor.run()

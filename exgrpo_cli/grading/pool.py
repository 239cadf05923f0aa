"""A pool of killable graders: responses in, grades out, from any thread, each pair of gold and answer once.

The work is done by the workers of one supervisor process, started on first need, restarted should it die, left behind
by a fork. One thread reads grades and completes their futures; any thread may send. The reader never waits for a
sender, or both processes could end up waiting for each other with full pipes.
"""

import json
import os
import subprocess
import sys
import threading
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, replace
from multiprocessing.connection import Connection, Pipe
from typing import NamedTuple

from exgrpo_cli.base.errors import ExgrpoError, InputError, RunError, ToolkitWarning
from exgrpo_cli.base.types import Grade, Verdict
from exgrpo_cli.base.versions import usable_cores
from exgrpo_cli.config.names import GRADERS, PREFIX, label_of
from exgrpo_cli.config.sections.run import MOST_WORKERS, GradingSettings
from exgrpo_cli.grading import plain, supervisor
from exgrpo_cli.grading.routes import GradingItem, Route, Task, route_item

_MAX_CACHED_GRADES = 65_536
_PATIENCE = 4
_MOST_FAILURES = 32
_MAX_DEATHS_IN_A_ROW = 3
_STOP_SECONDS = 5.0
# -c with -P: -m and a plain -c would search the working directory ahead of the path that this process has.
_BOOT = (
    "import json, sys; arguments = json.loads(sys.argv[1]); sys.path[:] = arguments.pop('path'); "
    "from exgrpo_cli.grading.supervisor import main; main(**arguments)"
)
_ENVIRONMENT = plain.tables()["environment"]


class _Line(NamedTuple):
    """One supervisor process and the parent's end of its connection."""

    process: "subprocess.Popen[bytes]"
    connection: Connection
    ready: "Future[None]"
    """Done once everything is imported; holds the reason why grading cannot start."""


class GradingPool(AbstractContextManager["GradingPool"]):
    """Grades responses with one grader, in worker processes where an answer could hang or crash it.

    A worker that overruns `deadline_seconds` or `memory_mb` is killed and replaced, and the answer it held is
    charged: TIMEOUT or CRASHED. Processes start with the first answer that needs one, and end with the pool or with
    this process, however it ends. Every method may be called from any thread; in a forked child the pool starts
    processes of its own.

    Use it as a context manager, or call `close`.
    """

    def __init__(self, settings: GradingSettings) -> None:
        """Import a `python:` grader in its process at once, so that a wrong name is found now.

        Raises:
            InputError: a function that cannot be imported.
        """
        settings = settings if settings.workers else replace(settings, workers=min(MOST_WORKERS, usable_cores()))
        # A user's function alone, or all of the built-in graders.
        names = (settings.grader,) if settings.grader.startswith(PREFIX) else GRADERS
        self._routes = {name: Route(grader=name, max_answer_chars=settings.max_answer_chars) for name in names}
        self._route = self._routes[settings.grader]
        self._grades: OrderedDict[Task, Grade] = OrderedDict()
        self._settings, self._closed = settings, False
        self._begin()
        others = (name for name in settings.rewards if name != settings.grader)
        self._others = {name: GradingPool(replace(settings, grader=name, rewards={})) for name in others}
        _POOLS.add(self)
        if settings.grader.startswith(PREFIX):
            with self._lock:
                ready = self._connected().ready
            ready.result()

    def _begin(self) -> None:
        """In a forked child once more: the parent's locks may be held by threads that do not exist there."""
        self._lock = threading.Lock()
        self._send_lock = threading.Lock()
        self._line: _Line | None = None
        self._reader: threading.Thread | None = None
        self._in_flight: dict[Task, Future[Grade]] = {}
        self._sent: dict[int, Task] = {}
        self._next_number = 0
        self._num_deaths_in_a_row = 0

    def submit(self, item: GradingItem) -> Future[Grade]:
        """Start grading one response. The future is done at once where no worker is needed; it cannot be cancelled.

        Raises:
            RunError: the pool is closed. The future raises it where the workers cannot be kept alive, and InputError
                where a grader returns what is no grade.
        """
        return self._future(route_item(self._route, item))

    def grade(self, items: Sequence[GradingItem], *, grader: str = "") -> list[Verdict]:
        """Verdicts on responses, in their order, of the pool's grader or of another that it `has`.

        Raises RunError as `submit` and its futures do.
        """
        return self._verdicts_of([route_item(self._routes[grader or self._settings.grader], item) for item in items])

    def judge(self, item: GradingItem) -> Callable[[], Grade]:
        """Start grading a response for training; what is returned waits for its grade, with `grading.rewards` the
        weighted sum of all graders'.

        The verdict is the own grader's. Where another one overruns its deadline or crashes it gives nothing, and the
        part `<name>.failed` is 1. Both raise as `submit` and its futures do.
        """
        own, weights = self._settings.grader, self._settings.rewards
        asked = {name: pool.submit(item) for name, pool in {own: self, **self._others}.items()}

        def grade() -> Grade:
            grades = {name: future.result() for name, future in asked.items()}
            return combined(own, grades, weights) if weights else grades[own]

        return grade

    def has(self, grader: str) -> bool:
        """Whether this pool can grade by `grader` too: every built-in one, unless its own is a user's function."""
        return grader in self._routes

    def try_again(self, items: Sequence[GradingItem], *, grader: str = "") -> list[Verdict]:
        """Verdicts on responses that timed out, one after the other, each with four times the deadline.

        For the end of an evaluation, when nothing else is graded. An answer that fails again is not tried against
        further golds, and after 32 failures nothing is: what never ends costs a bounded time.
        """
        route = self._routes[grader or self._settings.grader]
        failed: set[str] = set()
        verdicts: list[Verdict] = []
        for routed in (route_item(route, item) for item in items):
            verdict = routed if isinstance(routed, Verdict) else Verdict.TIMEOUT
            if isinstance(routed, Task) and routed.judged not in failed and len(failed) < _MOST_FAILURES:
                verdict = self._future(routed._replace(patience=_PATIENCE)).result().verdict
                failed |= {routed.judged} if verdict.is_verifier_failure else set()
            verdicts.append(verdict)
        return verdicts

    def verify_gold(self, golds: Sequence[str], metadata: Sequence[str | None] | None = None) -> list[Verdict]:
        """Whether each gold can serve: CORRECT, UNPARSABLE_GOLD, or WRONG where it does not verify against itself.

        `metadata` are those of the golds' questions, where they have any.
        """
        known = [None] * len(golds) if metadata is None else metadata
        return self._verdicts_of([self._route.audit(gold, own) for gold, own in zip(golds, known, strict=True)])

    def close(self) -> None:
        """End supervisor and workers, and wait for them; what is still pending raises RunError."""
        for other in self._others.values():
            other.close()
        with self._lock:
            self._closed = True
            line, reader, self._line = self._line, self._reader, None
            abandoned = self._abandon()
        if line is not None and reader is not None:
            self._send(line, supervisor.STOP)
            try:
                line.process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                line.process.kill()
            reader.join()
        _fail(abandoned, RunError("the grading pool was closed before this answer was graded."))

    def __exit__(self, *_: object) -> None:
        self.close()

    def _verdicts_of(self, routed: list[Verdict | Task]) -> list[Verdict]:
        return [future.result().verdict for future in [self._future(each) for each in routed]]

    def _future(self, decided: Verdict | Task) -> Future[Grade]:
        with self._lock:
            if self._closed:
                raise RunError("the grading pool is closed and grades no more answers; open another one.")
            grade = Grade.of(decided) if isinstance(decided, Verdict) else self._grades.get(decided)
            if grade is not None:
                known: Future[Grade] = Future()
                known.set_result(grade)
                return known
            task: Task = decided  # type: ignore[assignment]
            if task in self._in_flight:
                return self._in_flight[task]
            future = self._in_flight[task] = Future()
            # Others may wait for the same pair, so nobody may cancel it.
            future.set_running_or_notify_cancel()
            line = self._connected()
            number = self._next_number
            self._next_number += 1
            self._sent[number] = task
        self._send(line, (number, task))
        return future

    def _connected(self) -> _Line:
        """The line to a running supervisor, started where there is none. Needs the lock."""
        if self._line is None:
            ours, theirs = Pipe()
            arguments = {"settings": asdict(self._settings), "connection_fd": theirs.fileno(), "path": sys.path}
            process = subprocess.Popen(
                [sys.executable, "-P", "-c", _BOOT, json.dumps(arguments)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                # A user's own grader may print why it failed; math-verify's complaints about answers help nobody.
                stderr=None if self._settings.grader.startswith(PREFIX) else subprocess.DEVNULL,
                env={**os.environ, **_ENVIRONMENT},
                pass_fds=[theirs.fileno()],
                # Ctrl-C and Ctrl-Z on the terminal are for the parent alone.
                start_new_session=True,
            )
            theirs.close()
            self._line = _Line(process, ours, Future())
            self._reader = threading.Thread(target=self._read, args=(self._line,), name="grading-reader", daemon=True)
            self._reader.start()
        return self._line

    def _send(self, line: _Line, message: object) -> None:
        # Should the supervisor be gone, the reader notices too, and sends what is pending to the next one.
        with self._send_lock, suppress(OSError):
            line.connection.send(message)

    def _read(self, line: _Line) -> None:
        """Complete futures until the supervisor is gone."""
        refusal: InputError | None = None
        try:
            greeting = line.connection.recv()
            if greeting.startswith(supervisor.READY):
                if lost := greeting.removeprefix(supervisor.READY):
                    warnings.warn(f"{lost}.", ToolkitWarning, stacklevel=2)
                line.ready.set_result(None)
                while True:
                    self._complete(*line.connection.recv())
            refusal = InputError(greeting)
        except (EOFError, ConnectionError):
            pass
        exit_code = line.process.wait()
        with self._send_lock:
            line.connection.close()
        death = refusal or RunError(
            f"the grading supervisor died with exit code {exit_code}. Is the machine out of memory? "
            "Lower grading.workers or grading.memory_mb."
        )
        if not line.ready.done():
            line.ready.set_exception(death)
        self._after_death(line, death)

    def _complete(self, number: int, outcome: Grade | InputError) -> None:
        with self._lock:
            self._num_deaths_in_a_row = 0
            task = self._sent.pop(number, None)
            if task is None:
                return
            future = self._in_flight.pop(task)
            if isinstance(outcome, InputError):
                future.set_exception(outcome)
                return
            # A failure may be the machine's: the same pair gets another chance when it comes again. Whole responses are
            # too long to be kept.
            size = len(task.answer) + len(task.response)
            if not outcome.verdict.is_verifier_failure and size <= self._settings.max_answer_chars:
                self._grades[task] = outcome
                if len(self._grades) > _MAX_CACHED_GRADES:
                    self._grades.popitem(last=False)
        future.set_result(outcome)

    def _after_death(self, line: _Line, death: ExgrpoError) -> None:
        """Send what is pending to a new supervisor, unless the pool is closed or this one was the last to be tried."""
        with self._lock:
            if self._line is not line:
                return
            self._line = None
            self._num_deaths_in_a_row += 1
            gives_up = isinstance(death, InputError) or self._num_deaths_in_a_row >= _MAX_DEATHS_IN_A_ROW
            abandoned = self._abandon() if gives_up else []
            unanswered = list(self._sent.items())
            successor = self._connected() if unanswered else line
        _fail(abandoned, death)
        for job in unanswered:
            self._send(successor, job)

    def _abandon(self) -> "list[Future[Grade]]":
        """The futures of all that is pending, which is forgotten. Needs the lock."""
        futures = list(self._in_flight.values())
        self._in_flight.clear()
        self._sent.clear()
        return futures

    def _after_fork(self) -> None:
        """In a child: leave supervisor and pending tasks to the parent; the child starts its own when needed."""
        if self._line is not None:
            # The parent's death must close the last copy of this end.
            self._line.connection.close()
            # Not this process's child: nothing to wait for, nothing to warn about.
            self._line.process.returncode = 0
        self._begin()


def combined(own: str, grades: Mapping[str, Grade], weights: Mapping[str, float]) -> Grade:
    """One grade of several graders': the verdict of `own`, and r = sum_g w_g r_g, w 1 where `own` has no weight."""
    parts: dict[str, float] = {}
    for name, grade in grades.items():
        label = label_of(name)
        parts |= {label: grade.reward} | {f"{label}.{part}": value for part, value in grade.parts.items()}
        parts |= {f"{label}.failed": 1.0} if grade.verdict.is_verifier_failure else {}
    reward = sum(weights.get(name, 1.0) * grade.reward for name, grade in grades.items())
    return Grade(grades[own].verdict, reward, parts)


def _fail(futures: "list[Future[Grade]]", error: ExgrpoError) -> None:
    for future in futures:
        future.set_exception(error)


_POOLS: "weakref.WeakSet[GradingPool]" = weakref.WeakSet()


def _forget_parents_processes() -> None:
    for pool in list(_POOLS):
        pool._after_fork()


os.register_at_fork(after_in_child=_forget_parents_processes)

"""The parent's line to its supervisor process: started on first need, restarted should it die, left behind by a fork.

One thread reads verdicts and completes their futures; any thread may send. The reader never waits for a sender, or both
processes could end up waiting for each other with full pipes.
"""

import json
import os
import subprocess
import sys
import threading
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict
from multiprocessing.connection import Connection, Pipe
from typing import NamedTuple

from exgrpo_cli.base.errors import ExgrpoError, InputError, RunError
from exgrpo_cli.base.types import Verdict
from exgrpo_cli.config.names import PREFIX
from exgrpo_cli.config.sections.run import GradingSettings
from exgrpo_cli.grading.routes import Task
from exgrpo_cli.grading.supervisor import READY, STOP

_MAX_DEATHS_IN_A_ROW = 3
_STOP_SECONDS = 5.0
# -c with -P: -m and a plain -c would search the working directory ahead of the path that this process has.
_BOOT = (
    "import json, sys; arguments = json.loads(sys.argv[1]); sys.path[:] = arguments.pop('path'); "
    "from exgrpo_cli.grading.supervisor import main; main(**arguments)"
)
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    # sympy orders terms by hash in places: the same answer must get the same verdict in every worker.
    "PYTHONHASHSEED": "0",
}


class _Line(NamedTuple):
    """One supervisor process and the parent's end of its connection."""

    process: "subprocess.Popen[bytes]"
    connection: Connection
    ready: "Future[None]"
    """Done once everything is imported; holds the reason why grading cannot start."""


class RemoteGrader:
    """Tasks in, futures of verdicts out; the work is done by the workers of one supervisor process."""

    def __init__(self, settings: GradingSettings) -> None:
        self._settings = settings
        self._begin()

    def _begin(self) -> None:
        self._state_lock = threading.Lock()
        self._send_lock = threading.Lock()
        self._line: _Line | None = None
        self._reader: threading.Thread | None = None
        self._pending: dict[int, tuple[Task, Future[Verdict]]] = {}
        self._next_number = 0
        self._num_deaths_in_a_row = 0
        self._closed = False

    def start(self) -> None:
        """Start the supervisor and wait until what its grader needs is imported.

        Raises:
            InputError: the grader cannot be loaded.
            RunError: the supervisor ended before that.
        """
        with self._state_lock:
            ready = self._connected().ready
        ready.result()

    def submit(self, task: Task, future: Future[Verdict]) -> None:
        """Queue a task; `future` gets its verdict, or RunError where the supervisor cannot be kept alive.

        Raises:
            RunError: the pool is closed.
        """
        with self._state_lock:
            if self._closed:
                raise RunError("the grading pool is closed and grades no more answers; open another one.")
            line = self._connected()
            number = self._next_number
            self._next_number += 1
            self._pending[number] = (task, future)
        self._send(line, (number, task))

    def close(self) -> None:
        """Stop supervisor and workers, wait for them, and fail what is pending."""
        with self._state_lock:
            self._closed = True
            line, reader, self._line = self._line, self._reader, None
            abandoned, self._pending = self._pending, {}
        if line is not None and reader is not None:
            self._send(line, STOP)
            try:
                line.process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                line.process.kill()
            reader.join()
        _fail(abandoned, RunError("the grading pool was closed before this answer was graded."))

    def forget(self) -> None:
        """In a forked child: leave supervisor and pending tasks to the parent; the child starts its own when needed."""
        if self._line is not None:
            # The parent's death must close the last copy of this end.
            self._line.connection.close()
            # Not this process's child: nothing to wait for, nothing to warn about.
            self._line.process.returncode = 0
        self._begin()

    def _connected(self) -> _Line:
        """The line to a running supervisor, started where there is none. Needs the state lock."""
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
            if greeting == READY:
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

    def _complete(self, number: int, verdict: str) -> None:
        with self._state_lock:
            self._num_deaths_in_a_row = 0
            _, future = self._pending.pop(number, (None, None))
        if future is not None:
            future.set_result(Verdict(verdict))

    def _after_death(self, line: _Line, death: ExgrpoError) -> None:
        """Send what is pending to a new supervisor, unless the pool is closed or this one was the last to be tried."""
        with self._state_lock:
            if self._line is not line:
                return
            self._line = None
            self._num_deaths_in_a_row += 1
            gives_up = isinstance(death, InputError) or self._num_deaths_in_a_row >= _MAX_DEATHS_IN_A_ROW
            unanswered = dict(self._pending)
            if gives_up:
                self._pending.clear()
            successor = self._connected() if unanswered and not gives_up else None
        if successor is None:
            _fail(unanswered, death)
        else:
            for number, (task, _) in unanswered.items():
                self._send(successor, (number, task))


def _fail(pending: dict[int, tuple[Task, "Future[Verdict]"]], error: ExgrpoError) -> None:
    for _, future in pending.values():
        future.set_exception(error)

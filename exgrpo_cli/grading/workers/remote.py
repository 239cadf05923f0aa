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

from exgrpo_cli.base.errors import ExgrpoError, InputError, RunError
from exgrpo_cli.base.types import Verdict
from exgrpo_cli.config.names import PREFIX
from exgrpo_cli.config.sections.run import GradingSettings
from exgrpo_cli.grading.workers.messages import READY, STOP, Task

_MAX_DEATHS_IN_A_ROW = 3
_STOP_SECONDS = 5.0
# -c with -P: -m and a plain -c would search the working directory ahead of the path that this process has.
_BOOT = (
    "import json, sys; arguments = json.loads(sys.argv[1]); sys.path[:] = arguments.pop('path'); "
    "from exgrpo_cli.grading.workers.supervisor import main; main(**arguments)"
)
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    # sympy orders terms by hash in places: the same answer must get the same verdict in every worker.
    "PYTHONHASHSEED": "0",
}


class RemoteGrader:
    """Tasks in, futures of verdicts out; the work is done by the workers of one supervisor process."""

    def __init__(self, settings: GradingSettings) -> None:
        self._settings = settings
        # A grader of the user's own may print why it failed; math-verify's complaints about answers help nobody.
        self._shows_stderr = settings.grader.startswith(PREFIX)
        self._begin()

    def _begin(self) -> None:
        self._state_lock = threading.Lock()
        self._send_lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._reader: threading.Thread | None = None
        self._ready: Future[None] = Future()
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
            self._connect()
            ready = self._ready
        ready.result()

    def submit(self, task: Task, future: Future[Verdict]) -> None:
        """Queue a task; `future` gets its verdict, or RunError where the supervisor cannot be kept alive.

        Raises:
            RunError: the pool is closed.
        """
        with self._state_lock:
            if self._closed:
                raise RunError("the grading pool is closed and grades no more answers; open another one.")
            connection = self._connect()
            number = self._next_number
            self._next_number += 1
            self._pending[number] = (task, future)
        self._send(connection, (number, task))

    def close(self) -> None:
        """Stop supervisor and workers, wait for them, and fail what is pending."""
        with self._state_lock:
            self._closed = True
            connection, process, reader = self._connection, self._process, self._reader
            self._connection = self._process = self._reader = None
            abandoned = self._take_pending()
        if connection is not None and process is not None and reader is not None:
            self._send(connection, STOP)
            try:
                process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
            reader.join()
        _fail(abandoned, RunError("the grading pool was closed before this answer was graded."))

    def forget(self) -> None:
        """In a forked child: leave supervisor and pending tasks to the parent; the child starts its own when needed."""
        if self._connection is not None:
            # The parent's death must close the last copy of this end.
            self._connection.close()
        if self._process is not None:
            # Not this process's child: nothing to wait for, nothing to warn about.
            self._process.returncode = 0
        self._begin()

    def _connect(self) -> Connection:
        """The connection to a running supervisor, starting one where there is none. Needs the state lock."""
        if self._connection is None:
            ours, theirs = Pipe()
            self._process = self._spawn(theirs.fileno())
            theirs.close()
            self._connection = ours
            self._ready = Future()
            self._reader = threading.Thread(
                target=self._read, args=(ours, self._process, self._ready), name="grading-reader", daemon=True
            )
            self._reader.start()
        return self._connection

    def _spawn(self, connection_fd: int) -> "subprocess.Popen[bytes]":
        arguments = {"settings": asdict(self._settings), "connection_fd": connection_fd, "path": sys.path}
        return subprocess.Popen(
            [sys.executable, "-P", "-c", _BOOT, json.dumps(arguments)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=None if self._shows_stderr else subprocess.DEVNULL,
            env={**os.environ, **_ENVIRONMENT},
            pass_fds=[connection_fd],
            # Ctrl-C and Ctrl-Z on the terminal are for the parent alone.
            start_new_session=True,
        )

    def _send(self, connection: Connection, message: object) -> None:
        # Should the supervisor be gone, the reader notices too, and sends what is pending to the next one.
        with self._send_lock, suppress(OSError):
            connection.send(message)

    def _read(self, connection: Connection, process: "subprocess.Popen[bytes]", ready: "Future[None]") -> None:
        """Complete futures until the supervisor is gone."""
        refusal: InputError | None = None
        try:
            greeting = connection.recv()
            if greeting == READY:
                ready.set_result(None)
                while True:
                    self._complete(*connection.recv())
            refusal = InputError(greeting)
        except (EOFError, ConnectionError):
            pass
        exit_code = process.wait()
        with self._send_lock:
            connection.close()
        death = refusal or RunError(
            f"the grading supervisor died with exit code {exit_code}. Is the machine out of memory? "
            "Lower grading.workers or grading.memory_mb."
        )
        if not ready.done():
            ready.set_exception(death)
        self._after_death(connection, death, may_restart=refusal is None)

    def _complete(self, number: int, verdict: str) -> None:
        with self._state_lock:
            self._num_deaths_in_a_row = 0
            _, future = self._pending.pop(number, (None, None))
        if future is not None:
            future.set_result(Verdict(verdict))

    def _after_death(self, connection: Connection, death: ExgrpoError, *, may_restart: bool) -> None:
        """Send what is pending to a new supervisor, unless the pool is closed or this one was the last to be tried."""
        with self._state_lock:
            if self._connection is not connection:
                return
            self._connection = self._process = self._reader = None
            self._num_deaths_in_a_row += 1
            if not may_restart or self._num_deaths_in_a_row >= _MAX_DEATHS_IN_A_ROW:
                abandoned = self._take_pending()
                unanswered = {}
            else:
                abandoned = []
                unanswered = dict(self._pending)
            successor = self._connect() if unanswered else None
        _fail(abandoned, death)
        if successor is not None:
            for number, (task, _) in unanswered.items():
                self._send(successor, (number, task))

    def _take_pending(self) -> list["Future[Verdict]"]:
        abandoned = [future for _, future in self._pending.values()]
        self._pending.clear()
        return abandoned


def _fail(futures: list["Future[Verdict]"], error: ExgrpoError) -> None:
    for future in futures:
        future.set_exception(error)

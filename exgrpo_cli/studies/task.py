"""One run as a task of submitit, which loads this module alone: a worker process, saved when its time is over."""

import os
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from exgrpo_cli.base.errors import EXIT_INTERRUPTED, RunError

POLL_SECONDS = 0.2
SECONDS_TO_REQUEUE = 60.0
FIRST_PORT, NUM_PORTS = 20_000, 20_000


@dataclass(kw_only=True)
class RunTask:
    """One run, called by submitit on the node; the same task goes on with its run when it is called again."""

    command: Sequence[str]
    """The worker, its settings and folder; to come are the process that it must not outlive, and where hosts meet."""
    log: Path
    """Gets the run's output, on whichever host."""
    num_hosts: int = 1
    """Each of which runs this task."""
    _process: "subprocess.Popen[bytes] | None" = field(default=None, repr=False)

    def __call__(self) -> None:
        """Run to the end. Raises RunError with the run's last line where it fails."""
        settings = Path(self.command[-2])
        if not settings.is_file():
            raise RunError(f"{settings} is not there on {socket.gethostname()}: the study's folder is not shared.")
        meeting = meeting_point(self.num_hosts) if self.num_hosts > 1 else []
        with self.log.open("ab") as log:
            # A session of its own: Slurm signals whole process groups, and the run is told what to do from here.
            self._process = subprocess.Popen(
                [*self.command, str(os.getpid()), *meeting],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        signal.signal(signal.SIGTERM, lambda *_: self._stop())
        try:
            while self._process.poll() is None:
                time.sleep(POLL_SECONDS)
        except KeyboardInterrupt:
            self._stop()
            raise
        code = self._process.returncode
        if code == EXIT_INTERRUPTED:
            # Slurm ends a preempted task by SIGTERM first; what requeues it comes after that.
            time.sleep(SECONDS_TO_REQUEUE)
        if code < 0 or code == EXIT_INTERRUPTED:
            # As the task itself: whoever waits takes it for killed, not for failed.
            os.kill(os.getpid(), signal.SIGKILL)
        if code:
            raise RunError(last_line(self.log))

    def checkpoint(self) -> Any:
        """Save and stop the run, since the task's time is over; returns the task that is requeued."""
        from submitit.helpers import DelayedSubmission

        if self._stop():
            assert self._process is not None
            # Not `wait`: this is a signal's handler, and the loop that it interrupted may hold the process's lock.
            os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)
        return DelayedSubmission(RunTask(command=self.command, log=self.log, num_hosts=self.num_hosts))

    def _stop(self) -> bool:
        """Tell the run to save and stop; returns whether there is one."""
        if self._process is None or self._process.returncode is not None:
            return False
        os.kill(self._process.pid, signal.SIGTERM)
        return True


def meeting_point(num_hosts: int) -> list[str]:
    """Arguments of a worker on each of the hosts of a Slurm job: how many, where they meet, the job's id, own name.

    The port follows from the job's number: jobs that share a host have different ones.
    """
    from submitit import JobEnvironment

    job = JobEnvironment()
    number = int("".join(filter(str.isdigit, job.job_id)) or 0)
    endpoint = f"{job.hostnames[0]}:{FIRST_PORT + number % NUM_PORTS}"
    start = f"{job.job_id}-{os.environ.get('SLURM_RESTART_COUNT', '0')}"
    return [str(num_hosts), endpoint, start, job.hostnames[job.node]]


def last_line(log: Path) -> str:
    """The last line of a log, or "no output" where there is none."""
    lines = log.read_text(errors="replace").strip().splitlines() if log.is_file() else []
    return lines[-1] if lines else "no output"

"""A run as a process of its own, and as a task of Slurm, which is such a process on a node.

On a CPU the runs of a study are forked from one server that has imported what they need, which takes half of a short
run; a process that has initialised CUDA must not fork, so on GPUs each imports it anew:
`python -m exgrpo_cli.studies.worker SETTINGS.toml FOLDER PARENT_PID [HOSTS OWN ADDRESS PORT]`. With `run.nproc` above
1, and as one of several hosts, it starts the ranks, each of which is this module again.
"""

import atexit
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing import forkserver, parent_process
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, NoReturn

from exgrpo_cli.base.errors import EXIT_INTERRUPTED, ExgrpoError, RunError
from exgrpo_cli.base.output import PrintableRecord, say, tell_warnings
from exgrpo_cli.config.layers import read_config
from exgrpo_cli.config.settings import Author, Config, Written, resolve
from exgrpo_cli.machine.settle import settle
from exgrpo_cli.machine.survey import survey_machine
from exgrpo_cli.ranks import Hosts, Ranks, run_ranks, started_as_rank

MODULE = "exgrpo_cli.studies.worker"
NEW, RESUME = "new", "resume"
DAMAGE = "damaged: "
"""Beginnings of lines of a run's log that the study's terminal shows too."""
POLL_SECONDS = 0.2
SECONDS_TO_REQUEUE = 60.0
FIRST_PORT, NUM_PORTS = 20_000, 20_000


def main(
    settings: Path, folder: Path, is_alone: Callable[[], bool], *, hosts: Hosts | None = None, resume: bool = False
) -> int:
    """Train, or go on training, and return the exit code; the error is the log's last line.

    The run stops when it `is_alone`, whoever started it gone. `resume` is for a rank, which is told; whoever starts the
    ranks looks.
    """
    try:
        if started_as_rank():
            return train_as_rank(settings, folder, resume=resume)
        threading.Thread(target=stop_when, args=(is_alone,), daemon=True).start()
        resume = (folder / "config.toml").is_file()
        config, _ = settle(asked_config(settings, folder, resume=resume), survey_machine())
        if config.run.nproc > 1 or hosts is not None:
            # Said once: on another host the folder of a new run may be there before its ranks look.
            arguments = ["-m", MODULE, str(settings), str(folder), str(os.getpid()), RESUME if resume else NEW]
            return run_ranks(arguments, config.run.nproc, hosts, on_gpu=config.run.wants_gpus)
        return train_as_rank(settings, folder, resume=resume)
    except ExgrpoError as error:
        say(str(error))
        return error.exit_code


def asked_config(settings: Path, folder: Path, *, resume: bool) -> Config:
    """The settings of the file; a run that goes on keeps the log-probs that it began with, on whatever machine."""
    # Written by whoever started this process, who has asked about code.
    layers = [Written(str(settings), read_config(settings), Author.USER)]
    if resume:
        begun = read_config(folder / "config.toml").get("rollout", {})
        layers.append(Written(str(folder), {"rollout": {"logprobs": begun.get("logprobs", "auto")}}))
    return resolve(layers)


def train_as_rank(settings: Path, folder: Path, *, resume: bool) -> int:
    """Train as the rank that the environment names, or as the only one."""
    from exgrpo_cli.base.reporter import PlainReporter, PrintableConsole
    from exgrpo_cli.training.run import train

    ranks = Ranks.of_environment()
    with ranks.together():
        reporter = PlainReporter(PrintableConsole(stderr=True, width=160))
        config = asked_config(settings, folder, resume=resume)
        starts = folder.parents[1] / "starts"
        train(config, folder, resume=resume, reporter=reporter, ranks=ranks, starts=starts)
    return 0


def stop_when(is_alone: Callable[[], bool]) -> None:
    """Stop, state saved, when the process that started the run is gone: a killed study leaves no run behind."""
    while not is_alone():
        time.sleep(1.0)
    os.kill(os.getpid(), signal.SIGTERM)


def warn_in_log() -> None:
    """Let this process, whose stderr is a log, write each of the toolkit's warnings as one line there."""

    def write(line: str, is_damage: bool) -> None:
        say(f"{DAMAGE if is_damage else ''}{line}")

    logging.setLogRecordFactory(PrintableRecord)
    tell_warnings(write, others=True)


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
    _told: bool = field(default=False, repr=False)
    """Whether the run was told to stop."""

    def __call__(self) -> None:
        """Run to the end. Raises RunError with the run's last line where it fails."""
        settings = Path(self.command[-2])
        if not settings.is_file():
            raise RunError(f"{settings} is not there on {socket.gethostname()}: the study's folder is not shared.")
        meeting = meeting_point(self.num_hosts) if self.num_hosts > 1 else []
        self._process = start_process([*self.command, str(os.getpid()), *meeting], self.log)
        signal.signal(signal.SIGTERM, lambda *_: self._stop())
        try:
            while self._process.poll() is None:
                time.sleep(POLL_SECONDS)
        except KeyboardInterrupt:
            self._stop()
            raise
        code = self._process.returncode
        if code == EXIT_INTERRUPTED and not self._told:
            # It has saved in time by itself: submitit requeues it as if Slurm had said that the time is over.
            signal.raise_signal(signal.SIGUSR2)
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
        self._told = True
        os.kill(self._process.pid, signal.SIGTERM)
        return True


def meeting_point(num_hosts: int) -> list[str]:
    """Arguments of a worker on each of the hosts of a Slurm job: how many, which of them, where they meet.

    The port follows from the job's number: jobs that share a host have different ones.
    """
    from submitit import JobEnvironment

    job = JobEnvironment()
    number = int("".join(filter(str.isdigit, job.job_id)) or 0)
    return [str(num_hosts), str(job.node), job.hostnames[0], str(FIRST_PORT + number % NUM_PORTS)]


def start_process(command: Sequence[str], log: Path) -> "subprocess.Popen[bytes]":
    """Start a worker whose output goes to the end of `log`.

    It has a session of its own: a terminal and Slurm signal whole process groups, and whoever started the run tells it
    what to do.
    """
    with log.open("ab") as file:
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True)


class Fork(ForkServerProcess):
    """A run as a fork of the server, with the names of a Popen that a study uses."""

    def poll(self) -> int | None:
        """Exit code, of one that a signal ended the negative signal; None while it runs."""
        return self.exitcode

    wait = ForkServerProcess.join
    """Wait for its end."""


def fork_process(settings: Path, folder: Path, log: Path) -> Fork:
    """Fork a run whose output goes to the end of `log`, in a session of its own."""
    forkserver.set_forkserver_preload(["exgrpo_cli.studies.warm"])
    before = os.environ.get("PYTHONSAFEPATH")
    # As `python -P`: whatever lies in the working folder is no module of the server's.
    os.environ["PYTHONSAFEPATH"] = "1"
    try:
        forkserver.ensure_running()
    finally:
        os.environ.pop("PYTHONSAFEPATH")
        os.environ |= {} if before is None else {"PYTHONSAFEPATH": before}
    process = Fork(target=run_forked, args=(settings, folder, log))
    process.start()
    return process


def run_forked(settings: Path, folder: Path, log: Path) -> NoReturn:
    """The run itself, in its process."""
    from exgrpo_cli.studies import warm

    os.setsid()
    sys.path[:] = warm.PATH
    written = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    for stream, file in enumerate((os.open(os.devnull, os.O_RDONLY), written, written)):
        os.dup2(file, stream)
    warn_in_log()
    study = parent_process()
    assert study is not None, "a fork of the server has a parent"
    code = main(settings, folder, lambda: not study.is_alive())
    # A fork ends without what trackers have left for the end of a process.
    atexit._run_exitfuncs()
    sys.exit(code)


def last_line(log: Path) -> str:
    """The last line of a log, or "no output" where there is none."""
    lines = log.read_text(errors="replace").strip().splitlines() if log.is_file() else []
    return lines[-1] if lines else "no output"


if __name__ == "__main__":
    warn_in_log()
    settings, folder, parent, *rest = sys.argv[1:]
    hosts = Hosts(number=int(rest[0]), own=int(rest[1]), address=rest[2], port=int(rest[3])) if len(rest) > 1 else None
    code = main(Path(settings), Path(folder), lambda: os.getppid() != int(parent), hosts=hosts, resume=rest == [RESUME])
    sys.exit(code)

"""Starting the ranks of this host by torchrun's agent, and passing stop signals on to them.

The agent runs beside the main thread, which is left to the signals: torchrun itself gives ranks 30 seconds after a
Ctrl-C and then kills them, where a step under way and its checkpoint may take minutes.
"""

import logging
import os
import signal
import sys
import threading
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from exgrpo_cli.base.errors import EXIT_DONE, EXIT_INTERRUPTED, RunError

POLL_SECONDS = 0.2


@dataclass(frozen=True, kw_only=True, slots=True)
class Rendezvous:
    """Where the hosts of one run find each other."""

    num_hosts: int
    endpoint: str
    """HOST:PORT of one of them."""
    run_id: str
    """The same on all of them, and another one at another time."""
    own_name: str
    """By which the others reach this host."""


class RankLauncher:
    """Runs `python ARGUMENTS` once per rank on this host and waits for the end of all.

    With a `rendezvous` the ranks of its hosts are one run, whose first rank is on either of them.
    """

    def __init__(self, arguments: Sequence[str], num_ranks: int, rendezvous: Rendezvous | None = None) -> None:
        self._arguments = list(arguments)
        self._num_ranks = num_ranks
        self._rendezvous = rendezvous or Rendezvous(
            num_hosts=1, endpoint="localhost:0", run_id=f"exgrpo-{os.getpid()}", own_name="localhost"
        )
        self._signals: list[int] = []
        self._was_signalled = False
        self._outcome: BaseException | None = None

    def run(self) -> int:
        """Exit code of the first rank that failed, which has said why, or 0.

        Raises RunError where a rank was killed, or the ranks could not be started.
        """
        handlers = {number: signal.signal(number, self._note) for number in (signal.SIGINT, signal.SIGTERM)}
        agent = threading.Thread(target=self._launch, daemon=True)
        agent.start()
        try:
            while agent.is_alive():
                agent.join(POLL_SECONDS)
                self._pass_on()
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
        return self._exit_code()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._signals.append(number)

    def _pass_on(self) -> None:
        waiting, self._signals = self._signals, []
        for number in waiting:
            for process in child_processes():
                os.kill(process, number)
        if waiting:
            self._was_signalled = True

    def _launch(self) -> None:
        # What a rank has to say it says itself; the agent would add a page on how torchrun ended.
        logging.getLogger("torch.distributed").setLevel(logging.CRITICAL)
        config = LaunchConfig(
            min_nodes=self._rendezvous.num_hosts,
            max_nodes=self._rendezvous.num_hosts,
            nproc_per_node=self._num_ranks,
            rdzv_backend="c10d",
            rdzv_endpoint=self._rendezvous.endpoint,
            run_id=self._rendezvous.run_id,
            local_addr=self._rendezvous.own_name,
            max_restarts=0,
        )
        try:
            elastic_launch(config, sys.executable)(*self._arguments)
        except BaseException as error:  # noqa: BLE001 - carried to the main thread, which raises it
            self._outcome = error

    def _exit_code(self) -> int:
        if self._outcome is None:
            return EXIT_DONE
        if not isinstance(self._outcome, ChildFailedError):
            raise RunError(f"the ranks could not be started or watched: {self._outcome}") from self._outcome
        rank, failure = first_failure(self._outcome)
        if failure.exitcode >= 0:
            return failure.exitcode
        if self._was_signalled:
            return EXIT_INTERRUPTED
        ended = signal.Signals(-failure.exitcode)
        cause = "most often for want of memory (see dmesg)" if ended == signal.SIGKILL else "not by an error it raised"
        raise RunError(
            f"rank {rank} was ended by {ended.name}, {cause}; go on with --resume from the last checkpoint."
        ) from self._outcome


def first_failure(outcome: ChildFailedError) -> tuple[int, ProcessFailure]:
    """The rank that took the others along: one that was killed, before those that ended within the same second.

    The agent looks at all ranks in turn, and stamps whole seconds: a rank that waited for the killed one may have ended
    as well by then, and come first. Its own SIGTERM to those left is no cause, and its SIGKILL comes much later.
    """
    first = outcome.get_first_failure()
    killed = [
        (rank, failure)
        for rank, failure in outcome.failures.items()
        if failure.exitcode < 0 and failure.exitcode != -signal.SIGTERM and failure.timestamp <= first[1].timestamp + 1
    ]
    return killed[0] if killed else first


def quieten_gloo(environment: MutableMapping[str, str]) -> None:
    """Let ranks that are started with `environment` leave out the line that torch's C++ code logs for every gloo error.

    Each is raised as well, and said by the rank that raises it. For ranks on the CPU alone: NCCL logs what none raises.
    """
    environment["TORCH_CPP_LOG_LEVEL"] = "FATAL"


def child_processes(process: int | str = "self") -> list[int]:
    """Ids of the processes that this one, or another, has started and that still run."""
    listed = [file.read_text() for file in Path(f"/proc/{process}/task").glob("*/children")]
    return [int(child) for text in listed for child in text.split()]

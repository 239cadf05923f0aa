"""The processes of one run: which one this is, how they share work, results, sums and errors, how they are started.

Every rank runs the same program with the same seeds and makes the same calls in the same order; what differs between
hosts (files, clocks, the order in which work ends) enters on one rank and is handed to the others. Torchrun and the
DeepSpeed launcher say in environment variables which rank a process is.
"""

import atexit
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from exgrpo_cli.base.console.output import data_stream
from exgrpo_cli.base.errors import EXIT_DONE, EXIT_INTERRUPTED, EXIT_STOPPED, ExgrpoError, RunError, first_line

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

T = TypeVar("T")

RANK_TIMEOUT = timedelta(minutes=60)
"""Longest wait for another rank: rollouts of long responses end minutes apart, a checkpoint takes minutes as well."""
JOIN_TIMEOUT = timedelta(minutes=15)
"""Longest wait for the other ranks to start, as torchrun waits."""
WATCH_SECONDS = 1.0
"""Interval at which a rank looks whether another one has ended with an error."""
GRACE_SECONDS = 10.0
"""Time for a rank to end by itself after another has: a GPU collective never returns once a member is gone."""
POLL_SECONDS = 0.2
"""Interval at which the process that started the ranks looks for signals to pass on."""
ENDED_KEY = "exgrpo/ended"


def started_as_rank() -> bool:
    """Whether a launcher has started this process as one of several, or of one."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


@dataclass(kw_only=True, eq=False)
class Ranks:
    """This process among the ranks of its run; without a launcher the only one, for which everything is immediate."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    """Position among the ranks of this host: the number of its GPU."""
    local_world_size: int = 1
    launched: bool = field(default_factory=started_as_rank)
    """Whether a launcher has started this process."""
    _timeout: timedelta = RANK_TIMEOUT
    _store: Any = None
    _objects: dist.ProcessGroup | None = None

    @classmethod
    def of_environment(cls) -> "Ranks":
        """This process as its launcher started it. Raises RunError when the launcher's store cannot be reached."""
        if not started_as_rank():
            return cls()
        world_size = int(os.environ["WORLD_SIZE"])
        ranks = cls(
            rank=int(os.environ["RANK"]),
            world_size=world_size,
            local_rank=int(os.environ.get("LOCAL_RANK", "0")),
            local_world_size=int(os.environ.get("LOCAL_WORLD_SIZE", world_size)),
        )
        if world_size > 1:
            with _naming_the_cause("meet the other ranks"):
                ranks._store, _, _ = next(iter(dist.rendezvous("env://", timeout=JOIN_TIMEOUT)))
        return ranks

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which alone writes the run folder and speaks to the user."""
        return self.rank == 0

    def connect(self, device: torch.device, timeout: timedelta = RANK_TIMEOUT) -> None:
        """Open the channels between the ranks: gloo for objects, and NCCL besides for tensors on GPUs.

        A rank that lets the others wait longer than `timeout` hangs, which ends the run.
        """
        if self.world_size == 1 or dist.is_initialized():
            return
        assert self._store is not None
        self._timeout = timeout
        on_gpu = device.type == "cuda"
        with _naming_the_cause("connect to the other ranks"):
            dist.init_process_group(
                "nccl" if on_gpu else "gloo",
                store=dist.PrefixStore("exgrpo/groups", self._store),
                rank=self.rank,
                world_size=self.world_size,
                timeout=timeout,
                device_id=device if on_gpu else None,
            )
            self._objects = dist.new_group(backend="gloo", timeout=timeout)

    def scatter(self, items: Sequence[T], *, together: int = 1) -> Sequence[T]:
        """Every world_size-th item, beginning at the rank: like items, which stand together, go to all ranks.

        `together` neighbouring ranks, where they hold one engine between them, get the same share.
        """
        return items[self.rank // together :: self.world_size // together] if self.world_size > 1 else items

    def gather_in_order(self, results: Sequence[T], *, together: int = 1) -> list[T]:
        """The results of all ranks' shares in the order of the items, on every rank."""
        if self.world_size == 1:
            return list(results)
        parts = self.gather(results)[::together]
        merged: list[Any] = [None] * sum(len(part) for part in parts)
        for index, part in enumerate(parts):
            merged[index :: len(parts)] = part
        return merged

    def gather(self, value: T) -> list[T]:
        """`value` of every rank, in the order of ranks, on every rank."""
        if self.world_size == 1:
            return [value]
        self.barrier()
        values: list[Any] = [None] * self.world_size
        with _naming_the_cause("exchange results"):
            dist.all_gather_object(values, value, group=self._objects)
        return values

    def any(self, condition: bool) -> bool:
        """Whether `condition` holds on at least one rank."""
        return any(self.gather(condition))

    def from_main(self, work: Callable[[], T]) -> T:
        """Let rank 0 do `work` and hand its result, or the error a user can act on, to all ranks."""
        if self.world_size == 1:
            return work()
        box: list[Any] = [(None, None)]
        if self.is_main:
            try:
                box = [(work(), None)]
            except ExgrpoError as error:
                box = [(None, error)]
        with _naming_the_cause("hear from rank 0"):
            dist.broadcast_object_list(box, src=0, group=self._objects)
        result, refusal = box[0]
        if refusal is not None:
            raise refusal
        return result

    def sum(self, tensors: Sequence[Tensor]) -> None:
        """Replace every tensor by its sum over the ranks, the same bits on all of them."""
        if self.world_size == 1:
            return
        with _naming_the_cause("sum gradients"):
            for work in [dist.all_reduce(tensor, async_op=True) for tensor in tensors]:
                work.wait()

    def barrier(self) -> None:
        """Wait until every rank is here; raises RunError naming one that does not come."""
        if self.world_size > 1:
            with _naming_the_cause("wait for the other ranks"):
                dist.monitored_barrier(group=self._objects, timeout=self._timeout)

    @contextmanager
    def first_on_host(self) -> Iterator[None]:
        """Let one rank of each host run the body before the others: what it builds or downloads, they find."""
        if self.local_rank > 0:
            self.barrier()
        yield
        if self.local_rank == 0:
            self.barrier()

    @contextmanager
    def together(self) -> Iterator[None]:
        """Run the body as one of the ranks: the first that ends with an error speaks, and ends all others.

        The others leave with SystemExit and the same exit code, by themselves or, where they hang in a collective,
        GRACE_SECONDS later by force. When the launcher is gone the rank is asked to save and stop, as by SIGTERM.
        """
        if self._store is None:
            yield
            return
        leaving = threading.Event()
        watch = threading.Thread(target=_watch, args=(self._store.clone(), os.getppid(), leaving), daemon=True)
        watch.start()
        try:
            yield
        except BaseException as error:
            # The launcher now asks every rank to stop, which this one is doing already: it has a last line to write.
            with suppress(ValueError):  # outside the main thread signals cannot be caught
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
            leaving.set()
            own = first = f"{self.rank}:{_exit_code(error)}"
            # The store may have gone with the rank that kept it: nobody knows who spoke.
            with suppress(RuntimeError):
                first = self._store.compare_set(ENDED_KEY, "", own).decode()
            code = int(first.partition(":")[2])
            # Groups that a dead rank belonged to cannot be taken down in order; the interpreter would abort over them.
            atexit.register(_leave, code)
            if first != own:
                raise SystemExit(code) from error
            raise
        finally:
            leaving.set()
            # A thread that is inside the store's C++ code when the interpreter ends aborts the process.
            watch.join(timeout=GRACE_SECONDS)
        if dist.is_initialized():
            dist.destroy_process_group()


ALONE = Ranks()
"""A run of one process."""


@contextmanager
def _naming_the_cause(work: str) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, ExgrpoError):
            raise
        raise RunError(
            f"rank {os.environ.get('RANK', 0)} could not {work}: one of them has ended or hangs "
            f"({first_line(error)[:200]}). If it left no error of its own it was killed, most often for want of "
            "memory; go on with --resume."
        ) from error


def _leave(code: int) -> None:
    """End the process at once, with what it has said."""
    data_stream().flush()
    sys.stderr.flush()
    os._exit(code)


def _exit_code(error: BaseException) -> int:
    if isinstance(error, ExgrpoError):
        return error.exit_code
    if isinstance(error, KeyboardInterrupt):
        return EXIT_INTERRUPTED
    if isinstance(error, SystemExit) and isinstance(error.code, int):
        return error.code
    return EXIT_STOPPED


def _watch(store: dist.Store, launcher: int, leaving: threading.Event) -> None:
    """End this process with the others, unless it is `leaving` by itself.

    GRACE_SECONDS after another rank has ended with an error it ends at once; when the process that started it is gone
    it is asked to stop, so that a killed launcher leaves no rank behind.
    """
    orphaned = False
    while not leaving.wait(WATCH_SECONDS):
        if not orphaned and os.getppid() != launcher:
            orphaned = True
            os.kill(os.getpid(), signal.SIGTERM)
        ended = False
        # If the rank that kept the store is gone, gloo and the launcher will say so to the main thread.
        with suppress(RuntimeError):
            ended = store.check([ENDED_KEY])
        if ended and not leaving.wait(GRACE_SECONDS):
            os._exit(int(store.get(ENDED_KEY).decode().partition(":")[2]))


@dataclass(frozen=True, kw_only=True, slots=True)
class Rendezvous:
    """Address at which the hosts of one run find each other."""

    num_hosts: int = 1
    endpoint: str = "localhost:0"
    """HOST:PORT of one of them."""
    run_id: str = field(default_factory=lambda: f"exgrpo-{os.getpid()}")
    """The same on all of them, and another one at another time."""
    own_name: str = "localhost"
    """Name by which the others reach this host."""


def run_ranks(arguments: Sequence[str], num_ranks: int, rendezvous: Rendezvous | None = None) -> int:
    """Run `python ARGUMENTS` once per rank on this host; the exit code of the first rank that failed, or 0.

    With a `rendezvous` the ranks of its hosts are one run, whose first rank is on either of them. Torchrun's agent
    starts and watches the ranks, beside the main thread, which passes stop signals on: torchrun itself gives ranks 30
    seconds after a Ctrl-C and then kills them, where a step under way and its checkpoint may take minutes.

    Raises RunError where a rank was killed, or the ranks could not be started.
    """
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # What a rank has to say it says itself; the agent would add a page on how torchrun ended.
    logging.getLogger("torch.distributed").setLevel(logging.CRITICAL)
    hosts = rendezvous or Rendezvous()
    config = LaunchConfig(
        min_nodes=hosts.num_hosts,
        max_nodes=hosts.num_hosts,
        nproc_per_node=num_ranks,
        rdzv_backend="c10d",
        rdzv_endpoint=hosts.endpoint,
        run_id=hosts.run_id,
        local_addr=hosts.own_name,
        max_restarts=0,
    )
    waiting: list[int] = []
    signalled = False
    stops = (signal.SIGINT, signal.SIGTERM)
    handlers = {number: signal.signal(number, lambda number, frame: waiting.append(number)) for number in stops}
    try:
        with ThreadPoolExecutor(max_workers=1) as pool:
            agent = pool.submit(elastic_launch(config, sys.executable), *arguments)
            while not wait([agent], POLL_SECONDS).done:
                while waiting:
                    number, signalled = waiting.pop(0), True
                    for process in child_processes():
                        os.kill(process, number)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    outcome = agent.exception()
    return EXIT_DONE if outcome is None else _exit_code_of(outcome, signalled=signalled)


def _exit_code_of(outcome: BaseException, *, signalled: bool) -> int:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    if not isinstance(outcome, ChildFailedError):
        raise RunError(f"the ranks could not be started or watched: {outcome}") from outcome
    rank, failure = first_failure(outcome)
    if failure.exitcode >= 0:
        return failure.exitcode
    if signalled:
        return EXIT_INTERRUPTED
    ended = signal.Signals(-failure.exitcode)
    cause = "most often for want of memory (see dmesg)" if ended == signal.SIGKILL else "not by an error it raised"
    raise RunError(
        f"rank {rank} was ended by {ended.name}, {cause}; go on with --resume from the last checkpoint."
    ) from outcome


def first_failure(outcome: "ChildFailedError") -> tuple[int, "ProcessFailure"]:
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

"""The processes of one run: which one this is, how they share work, results, sums and errors, how they are started.

Every rank runs the same program with the same seeds and makes the same calls in the same order; what differs between
hosts (files, clocks, the order in which work ends) enters on one rank and is handed to the others. Torchrun and the
DeepSpeed launcher say in environment variables which rank a process is.
"""

import atexit
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar

from exgrpo_cli.base import errors, output

if TYPE_CHECKING:
    # A plan knows ranks, and needs no torch.
    import torch
    import torch.distributed as dist

T = TypeVar("T")

RANK_TIMEOUT = timedelta(minutes=60)
"""Longest wait for another rank: rollouts of long responses end minutes apart, a checkpoint takes minutes as well."""
NCCL_TIMEOUT = timedelta(minutes=10)
"""Longest wait in a collective on GPUs, which ranks reach together: what takes unlike time they await by gloo."""
JOIN_TIMEOUT = timedelta(minutes=15)
"""Longest wait for the other ranks to start, as torchrun waits."""
WATCH_SECONDS = 1.0
"""Interval at which a rank looks whether another one has ended with an error."""
GRACE_SECONDS = 10.0
"""Time for a rank to end by itself after another has: a GPU collective never returns once a member is gone."""
POLL_SECONDS = 0.2
"""Interval at which the process that started the ranks looks whether one of them has ended."""
END_SECONDS = 30.0
"""Time for the ranks of a host to end after one of them has failed; then they are killed."""
TEST_SECONDS, TEST_BYTES = 10.0, (2**20, 2**22, 2**24, 2**26, 2**28)
"""Most time of the network's test, and what it sums over the ranks, growing."""
SLOW_NETWORK = 1.0
"""GB/s below which hosts wait for their gradients: 10 GbE has 1.2."""
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
    _objects: "dist.ProcessGroup | None" = None

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
            import torch.distributed as dist

            with _naming_the_cause("meet the other ranks"):
                ranks._store, _, _ = next(iter(dist.rendezvous("env://", timeout=JOIN_TIMEOUT)))
        return ranks

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which alone writes the run folder and speaks to the user."""
        return self.rank == 0

    def connect(self, device: "torch.device", timeout: timedelta = RANK_TIMEOUT) -> None:
        """Open the channels between the ranks: gloo for objects, and NCCL besides for tensors on GPUs.

        A rank that lets the others wait longer than `timeout` hangs, which ends the run.
        """
        import torch.distributed as dist

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
                timeout=min(timeout, NCCL_TIMEOUT) if on_gpu else timeout,
                device_id=device if on_gpu else None,
            )
            self._objects = dist.new_group(backend="gloo", timeout=timeout)

    def measure_network(self, device: "torch.device") -> str:
        """Interface and speed between hosts, in words, measured by sums over all ranks; empty on one host.

        The speed is the bus bandwidth of nccl-tests: 2 (n - 1) / n x bytes / seconds.
        """
        if self.world_size == self.local_world_size:
            return ""
        import torch

        # Connections are made by the first sum.
        self.sum([torch.zeros(1, device=device)])
        spent = seconds = speed = 0.0
        before = _bytes_by_interface()
        for size in TEST_BYTES:
            # This one takes four times as long.
            if spent + 4 * seconds > TEST_SECONDS:
                break
            numbers = torch.zeros(size // 4, device=device)
            started = time.perf_counter()
            self.sum([numbers])
            # Waits for a GPU too.
            float(numbers[0])
            seconds = max(self.gather(time.perf_counter() - started))
            spent += seconds
            speed = 2 * (self.world_size - 1) / self.world_size * size / seconds / 1e9
        moved = {name: total - before.get(name, 0) for name, total in _bytes_by_interface().items()}
        busiest = max(moved, key=lambda name: moved[name], default="")
        # What InfiniBand moves by itself is not counted there.
        own = busiest if moved.get(busiest, 0) > size else "no interface that the kernel counts"
        names = ", ".join(sorted(set(self.gather(own))))
        text = f"network of {self.world_size // self.local_world_size} hosts: {names}, {speed:.2g} GB/s"
        if speed >= SLOW_NETWORK:
            return text
        kind = "NCCL" if device.type == "cuda" else "GLOO"
        return f"{text}, which is slow: {kind}_SOCKET_IFNAME=NAME takes another interface (`ip -br address` lists them)"

    def scatter(self, items: Sequence[T], *, together: int = 1) -> Sequence[T]:
        """Every world_size-th item, beginning at the rank: like items, which stand together, go to all ranks.

        `together` neighbouring ranks, where they hold one engine between them, get the same share.
        """
        return items[self.rank // together :: self.world_size // together] if self.world_size > 1 else items

    def gather_in_order(self, results: Sequence[T], *, together: int = 1) -> list[T]:
        """The results of all ranks' shares in the order of the items, on every rank."""
        parts = self.gather(results)[::together]
        # The first share is the longest.
        return [part[row] for row in range(len(parts[0])) for part in parts if row < len(part)]

    def gather(self, value: T) -> list[T]:
        """`value` of every rank, in the order of ranks, on every rank."""
        if self.world_size == 1:
            return [value]
        import torch.distributed as dist

        self.barrier()
        values: list[Any] = [None] * self.world_size
        with _naming_the_cause("exchange results"):
            dist.all_gather_object(values, value, group=self._objects)
        return values

    def from_main(self, work: Callable[[], T]) -> T:
        """Let rank 0 do `work` and hand its result, or the error a user can act on, to all ranks."""
        if self.world_size == 1:
            return work()
        import torch.distributed as dist

        box: list[Any] = [(None, None)]
        if self.is_main:
            try:
                box = [(work(), None)]
            except errors.ExgrpoError as error:
                box = [(None, error)]
        with _naming_the_cause("hear from rank 0"):
            dist.broadcast_object_list(box, src=0, group=self._objects)
        result, refusal = box[0]
        if refusal is not None:
            raise refusal
        return result

    def sum(self, tensors: "Sequence[torch.Tensor]") -> None:
        """Replace every tensor by its sum over the ranks, the same bits on all of them."""
        if self.world_size == 1:
            return
        import torch.distributed as dist

        with _naming_the_cause("sum gradients"):
            for work in [dist.all_reduce(tensor, async_op=True) for tensor in tensors]:
                work.wait()

    def barrier(self) -> None:
        """Wait until every rank is here; raises RunError naming one that does not come."""
        if self.world_size > 1:
            import torch.distributed as dist

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
        import torch.distributed as dist

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


def _bytes_by_interface() -> dict[str, int]:
    """Bytes that each network interface of this host has sent; nothing where there is no Linux."""
    table = Path("/proc/net/dev")
    rows = [line.replace(":", " ").split() for line in table.read_text().splitlines()[2:]] if table.exists() else []
    return {name: int(columns[8]) for name, *columns in rows}


ALONE = Ranks()
"""A run of one process."""


@contextmanager
def _naming_the_cause(work: str) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, errors.ExgrpoError):
            raise
        raise errors.RunError(
            f"rank {os.environ.get('RANK', 0)} could not {work}: one of them has ended or hangs "
            f"({errors.first_line(error)[:200]}). If it left no error of its own it was killed, most often for want of "
            "memory; go on with --resume."
        ) from error


def _leave(code: int) -> None:
    """End the process at once, with what it has said."""
    output.data_stream().flush()
    sys.stderr.flush()
    os._exit(code)


def _exit_code(error: BaseException) -> int:
    if isinstance(error, KeyboardInterrupt):
        return errors.EXIT_INTERRUPTED
    code = getattr(error, "exit_code" if isinstance(error, errors.ExgrpoError) else "code", None)
    return code if isinstance(code, int) else errors.EXIT_STOPPED


def _watch(store: "dist.Store", launcher: int, leaving: threading.Event) -> None:
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
class Hosts:
    """The hosts of one run, each of which starts as many ranks."""

    number: int = 1
    own: int = 0
    """Number of this one; the first is where all ranks meet."""
    address: str = "localhost"
    """Name of the first."""
    port: int = 0
    """Free on the first; 0 takes any, which is for a single host."""


def run_ranks(arguments: Sequence[str], num_ranks: int, hosts: Hosts | None = None, *, on_gpu: bool = True) -> int:
    """Run `python ARGUMENTS` once per rank on this host; the exit code of the first rank that failed, or 0.

    With `hosts` the ranks of all of them are one run, whose first rank is on the first. Stop signals are passed on, and
    ranks take as long as they need to save; once one has failed the others get END_SECONDS.

    Raises RunError where a rank was killed.
    """
    import torch.distributed as dist

    hosts = hosts or Hosts()
    # The ranks' store outlives each of them. They are told as torchrun tells its own that it is there.
    store = dist.TCPStore(hosts.address, hosts.port, is_master=True, wait_for_workers=False) if hosts.own == 0 else None
    world = {"WORLD_SIZE": hosts.number * num_ranks, "LOCAL_WORLD_SIZE": num_ranks, "MASTER_ADDR": hosts.address}
    world |= {"MASTER_PORT": store.port if store else hosts.port, "TORCHELASTIC_USE_AGENT_STORE": True}
    if not on_gpu:
        # torch's C++ code logs every gloo error, which the rank raises and says as well; NCCL logs what none raises.
        world["TORCH_CPP_LOG_LEVEL"] = "FATAL"
    ranks: list[subprocess.Popen[bytes]] = []
    passed_on: list[int] = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        passed_on.append(number)
        for rank in ranks:
            rank.send_signal(number)

    first = hosts.own * num_ranks
    handlers = {number: signal.signal(number, pass_on) for number in output.SIGNALS}
    try:
        for local in range(num_ranks):
            own = {name: str(value) for name, value in (world | {"RANK": first + local, "LOCAL_RANK": local}).items()}
            # A session of its own: a terminal's Ctrl-C comes from here, once.
            command = [sys.executable, "-P", *arguments]
            ranks.append(subprocess.Popen(command, env=os.environ | own, start_new_session=True))
        while not any(codes := [rank.poll() for rank in ranks]) and None in codes:
            time.sleep(POLL_SECONDS)
        deadline = time.monotonic() + END_SECONDS
        for rank in ranks:
            rank.terminate()
        while None in [rank.poll() for rank in ranks] and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        for rank in ranks:
            rank.kill()
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    # Of those that have ended since the last look a killed one took the others along.
    code = min((code for code in codes if code), default=errors.EXIT_DONE)
    if code >= 0:
        return code
    if passed_on:
        return errors.EXIT_INTERRUPTED
    ended = signal.Signals(-code)
    cause = "most often for want of memory (see dmesg)" if ended == signal.SIGKILL else "not by an error it raised"
    raise errors.RunError(
        f"rank {first + codes.index(code)} was ended by {ended.name}, {cause}; go on with --resume from the last "
        "checkpoint."
    )

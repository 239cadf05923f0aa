"""A pool of killable graders: responses in, verdicts out, from any thread, each pair of gold and answer once."""

import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial

from exgrpo_cli.base.errors import RunError
from exgrpo_cli.base.types import Verdict
from exgrpo_cli.config.names import PREFIX
from exgrpo_cli.config.sections.run import GradingSettings
from exgrpo_cli.grading.remote import RemoteGrader
from exgrpo_cli.grading.routes import MOST_CHARS_HERE, GradingItem, Task, route_item, routes_of

_MAX_CACHED_VERDICTS = 65_536
_PATIENCE = 4
_MOST_FAILURES = 32


class GradingPool:
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
        self._routes = routes_of(settings.grader, settings.max_answer_chars)
        self._route = self._routes[settings.grader]
        self._remote = RemoteGrader(settings)
        self._lock = threading.Lock()
        self._closed = False
        self._verdicts: OrderedDict[Task, Verdict] = OrderedDict()
        self._in_flight: dict[Task, Future[Verdict]] = {}
        _POOLS.add(self)
        if settings.grader.startswith(PREFIX):
            self._remote.start()

    def submit(self, item: GradingItem) -> Future[Verdict]:
        """Start grading one response. The future is done at once where no worker is needed; it cannot be cancelled.

        Raises:
            RunError: the pool is closed. The future raises it where the workers cannot be kept alive.
        """
        return self._future(self._routed(item))

    def grade(self, items: Sequence[GradingItem], *, grader: str = "") -> list[Verdict]:
        """Verdicts on responses, in their order, of the pool's grader or of another that it `has`.

        Raises RunError as `submit` and its futures do.
        """
        return self._verdicts_of([self._routed(item, grader) for item in items])

    def has(self, grader: str) -> bool:
        """Whether this pool can grade by `grader` too: every built-in one, unless its own is a user's function."""
        return grader in self._routes

    def try_again(self, items: Sequence[GradingItem], *, grader: str = "") -> list[Verdict]:
        """Verdicts on responses that timed out, one after the other, each with four times the deadline.

        For the end of an evaluation, when nothing else is graded. An answer that fails again is not tried against
        further golds, and after 32 failures nothing is: what never ends costs a bounded time.
        """
        failed: set[str] = set()
        verdicts = []
        for item in items:
            decided = self._routed(item, grader)
            if isinstance(decided, Verdict):
                verdict = decided
            elif decided.judged in failed or len(failed) >= _MOST_FAILURES:
                verdict = Verdict.TIMEOUT
            else:
                verdict = self._future(decided._replace(patience=_PATIENCE)).result()
                if verdict.is_verifier_failure:
                    failed.add(decided.judged)
            verdicts.append(verdict)
        return verdicts

    def _routed(self, item: GradingItem, grader: str = "") -> Verdict | Task:
        route = self._routes[grader] if grader else self._route
        if len(item.response) > MOST_CHARS_HERE:
            return Task(item.gold, item.response, kind="unread", find=partial(route_item, route, item))
        return route_item(route, item)

    def same_answer(self, pairs: Sequence[tuple[str, str]], options: tuple[str, ...] | None = None) -> list[bool]:
        """Whether the two graded texts of each pair give the same answer, the first one taken for the gold."""
        verdicts = self._verdicts_of([self._compared(first, second, options) for first, second in pairs])
        return [verdict is Verdict.CORRECT for verdict in verdicts]

    def _compared(self, first: str, second: str, options: tuple[str, ...] | None) -> Verdict | Task:
        if max(len(first), len(second)) > MOST_CHARS_HERE:
            return Task(first, second, kind="unread", find=partial(self._route.same, first, second, options))
        return self._route.same(first, second, options)

    def verify_gold(self, golds: Sequence[str], metadata: Sequence[str | None] | None = None) -> list[Verdict]:
        """Whether each gold can serve: CORRECT, UNPARSABLE_GOLD, or WRONG where it does not verify against itself.

        `metadata` are those of the golds' questions, where they have any.
        """
        known = [None] * len(golds) if metadata is None else metadata
        return self._verdicts_of([self._route.audit(gold, own) for gold, own in zip(golds, known, strict=True)])

    def reads_in_part(self, golds: Sequence[str]) -> list[bool]:
        """Whether each gold, of those that are unparsable, has a part that the grader would take for all of it."""
        verdicts = self._verdicts_of([self._route.in_part(gold) for gold in golds])
        return [verdict is Verdict.CORRECT for verdict in verdicts]

    def close(self) -> None:
        """End the workers; what is still pending raises RunError."""
        self._closed = True
        self._remote.close()

    def __enter__(self) -> "GradingPool":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _verdicts_of(self, routed: list[Verdict | Task]) -> list[Verdict]:
        waited_for = [decided if isinstance(decided, Verdict) else self._future(decided) for decided in routed]
        return [each if isinstance(each, Verdict) else each.result() for each in waited_for]

    def _future(self, decided: Verdict | Task) -> Future[Verdict]:
        if self._closed:
            raise RunError("the grading pool is closed and grades no more answers; open another one.")
        future: Future[Verdict] = Future()
        with self._lock:
            verdict = decided if isinstance(decided, Verdict) else self._verdicts.get(decided)
            if verdict is not None:
                future.set_result(verdict)
                return future
            task: Task = decided  # type: ignore[assignment]
            if task in self._in_flight:
                return self._in_flight[task]
            # Others may wait for the same pair, so nobody may cancel it.
            future.set_running_or_notify_cancel()
            self._in_flight[task] = future
        future.add_done_callback(lambda done: self._remember(task, done))
        self._remote.submit(task, future)
        return future

    def _remember(self, task: Task, done: "Future[Verdict]") -> None:
        with self._lock:
            self._in_flight.pop(task, None)
            # A failure may be the machine's: the same pair gets another chance when it comes again. Whole responses are
            # too long to be kept.
            is_kept = task.find is None and done.exception() is None
            if is_kept and not done.result().is_verifier_failure:
                self._verdicts[task] = done.result()
                if len(self._verdicts) > _MAX_CACHED_VERDICTS:
                    self._verdicts.popitem(last=False)

    def _after_fork(self) -> None:
        """In the child: the parent's locks may be held by threads that do not exist here."""
        self._lock = threading.Lock()
        self._in_flight = {}
        self._remote.forget()


_POOLS: "weakref.WeakSet[GradingPool]" = weakref.WeakSet()


def _forget_parents_processes() -> None:
    for pool in list(_POOLS):
        pool._after_fork()


os.register_at_fork(after_in_child=_forget_parents_processes)

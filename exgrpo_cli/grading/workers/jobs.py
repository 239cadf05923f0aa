"""Which answer is graded next, and how much processor time it gets: the supervisor's queue and its suspects."""

import math
from collections import OrderedDict, deque
from collections.abc import Collection
from dataclasses import dataclass

from exgrpo_cli.grading.workers.messages import Task

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


class JobQueue:
    """Jobs in order of arrival, with exceptions for answers that look slow, which only save time.

    They go first: an answer that takes its whole deadline should run beside the others, not after them. The same one to
    another question waits until the first is back, since a deadline that one of them reached cuts the time of all the
    others; once it was reached they go last.
    """

    def __init__(self) -> None:
        self._slow: OrderedDict[str, deque[Job]] = OrderedDict()
        self._others: deque[Job] = deque()
        self._last: deque[Job] = deque()

    def push(self, job: Job, *, is_suspect: bool = False) -> None:
        """Add a job."""
        if is_suspect:
            self._last.append(job)
        elif _looks_slow(job.task.judged):
            self._slow.setdefault(job.task.judged, deque()).append(job)
        else:
            self._others.append(job)

    def put_last(self, judged: str) -> None:
        """Have what is queued of a slow answer wait for everything else."""
        self._last.extend(self._slow.pop(judged, ()))

    def pop(self, *, judged_elsewhere: Collection[str]) -> Job | None:
        """The next job, None when empty; `judged_elsewhere` are the answers that other workers hold."""
        slow = next((judged for judged in self._slow if judged not in judged_elsewhere), None)
        if slow is not None:
            return _take(self._slow, slow)
        if self._others:
            return self._others.popleft()
        if self._last:
            return self._last.popleft()
        return _take(self._slow, next(iter(self._slow))) if self._slow else None


def _take(jobs: OrderedDict[str, deque[Job]], key: str) -> Job:
    """The first job under a key, which goes with its last one."""
    job = jobs[key].popleft()
    if not jobs[key]:
        del jobs[key]
    return job


def _looks_slow(judged: str) -> bool:
    """A guess: long, or with powers enough for a tower."""
    return len(judged) > _LONG_ANSWER_CHARS or judged.count("^") >= _MANY_POWERS


class Suspects:
    """Answers that reached a deadline or died: against the next gold they get a fraction of it, in processor time.

    A power tower sampled for twenty questions would otherwise cost twenty deadlines. The fraction is of processor time,
    so that an answer whose worker only had to wait, on a machine that is too busy, is not charged again. Completing
    clears an answer, but only after a few times: against a word or a set even a power tower is compared in no time.
    """

    def __init__(self) -> None:
        self._completions_to_clear: OrderedDict[str, int] = OrderedDict()

    def __contains__(self, judged: str) -> bool:
        return judged in self._completions_to_clear

    def cpu_seconds(self, judged: str, deadline_seconds: float) -> float:
        """Processor time that an answer gets; infinite for one that nothing is held against."""
        if judged not in self:
            return math.inf
        return max(deadline_seconds / _SUSPECT_DIVISOR, _LEAST_SUSPECT_SECONDS)

    def failed(self, judged: str) -> None:
        """Hold a deadline that was reached, or a death, against an answer."""
        self._completions_to_clear.pop(judged, None)
        self._completions_to_clear[judged] = _COMPLETIONS_TO_CLEAR
        if len(self._completions_to_clear) > _MAX_SUSPECTS:
            self._completions_to_clear.popitem(last=False)

    def completed(self, judged: str) -> None:
        """Count a completion towards clearing an answer."""
        left = self._completions_to_clear.get(judged)
        if left == 1:
            del self._completions_to_clear[judged]
        elif left is not None:
            self._completions_to_clear[judged] = left - 1

"""Progress of an evaluation: rate, remaining time and the score so far.

Live on a terminal, a plain line now and then elsewhere; always on stderr, since stdout belongs to the command's data.
"""

import time
from collections.abc import Sequence

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from exgrpo_cli.evaluation.records import QuestionRecord

LINE_EVERY_SECONDS = 15.0
RATE_AFTER_SECONDS = 5.0
"""The remaining time is told once questions have been finishing for this long."""


class EvaluationProgress:
    """Progress of one benchmark; a context manager."""

    def __init__(self, name: str, total: int, *, quiet: bool) -> None:
        self._name = name
        self._total = total
        self._console = Console(stderr=True, quiet=quiet)
        self._done = 0
        self._correct = 0.0
        self._new_tokens = 0
        self._found = 0
        self._started = self._last_line = time.monotonic()
        self._first_finished = 0.0
        """When the first new question finished."""
        self._live: Progress | None = None
        if self._console.is_terminal and not quiet:
            columns = (TextColumn("{task.description}"), BarColumn(bar_width=32), MofNCompleteColumn())
            figures = TextColumn("{task.fields[figures]}")
            self._live = Progress(*columns, TimeRemainingColumn(), figures, console=self._console)
            self._task = self._live.add_task(name, total=total, figures="")

    def __enter__(self) -> "EvaluationProgress":
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._live is not None:
            self._live.stop()

    def found(self, records: Sequence[QuestionRecord]) -> None:
        """Finished questions of an earlier, interrupted evaluation."""
        self._found = len(records)
        if records and len(records) < self._total:
            self._console.print(f"{self._name}: going on after {len(records)} of {self._total} questions", markup=False)
        self._count(records)

    def asking(self) -> None:
        """The model is loaded: rates count from here."""
        if self._done == self._found:
            self._started = self._last_line = time.monotonic()

    def finished(self, record: QuestionRecord) -> None:
        """One more question."""
        if self._done == self._found:
            self._first_finished = time.monotonic()
        self._new_tokens += sum(sample.num_tokens for sample in record.samples)
        self._count([record])

    def _count(self, records: Sequence[QuestionRecord]) -> None:
        self._done += len(records)
        self._correct += sum(record.pass_rate for record in records)
        now = time.monotonic()
        if self._live is not None:
            self._live.update(self._task, completed=self._done, figures=self._figures(now))
        elif self._done > self._found and (self._done == self._total or now - self._last_line >= LINE_EVERY_SECONDS):
            self._last_line = now
            self._console.print(f"{self._name}: {self._done}/{self._total}, {self._figures(now)}", markup=False)

    def _figures(self, now: float) -> str:
        new = self._done - self._found
        parts = [f"score {100 * self._correct / self._done:.1f} %"] if self._done else []
        if new:
            parts += [f"{self._new_tokens / max(now - self._started, 1e-9):,.0f} tokens/s"]
            # Others are under way while the first takes a whole response: the pace shows after it.
            since_first = now - self._first_finished
            if self._live is None and self._done < self._total and new > 1 and since_first >= RATE_AFTER_SECONDS:
                parts += [f"{since_first / (new - 1) * (self._total - self._done):.0f} s left"]
        return ", ".join(parts)

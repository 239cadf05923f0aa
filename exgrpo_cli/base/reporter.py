"""Display of a run for people: a live view on a terminal, a plain line now and then elsewhere.

Everything of it goes to stderr; stdout belongs to the command's data, of which tables keep whole numbers at any width.
"""

import math
import textwrap
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from typing import Any

from rich.columns import Columns
from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.live import Live
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    Task,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from exgrpo_cli.base.output import data_stream, printable

_FIGURES = {
    "phase": ("phase", "{}"),
    "pass@1": ("batch/pass_at_1", "{:.3f}"),
    "reward": ("reward/mean", "{:.3f}"),
    "replayed pass@1": ("replay/pass_at_1", "{:.3f}"),
    "entropy": ("policy/entropy", "{:.3f}"),
    "buffered": ("replay/questions", "{}"),
    "trajectories": ("replay/trajectories", "{}"),
    "retired": ("replay/retired", "{}"),
    "length": ("length/mean", "{:.0f}"),
    "s/step": ("time/step", "{:.2f}"),
}
"""Name of a figure of a step, its key in the journal and how it is written."""
_MEANINGS = {
    "phase": "mixed steps replay stored responses, on-policy ones do not",
    "pass@1": "share of fresh responses that are right",
    "buffered": "questions with stored right responses, each in the bucket k of how many were right at its last visit",
    "retired": "questions that every response solved",
}
"""Terms that are said in words before the first step."""
_BRIEF = ("pass@1", "reward", "entropy", "buffered", "retired")
"""Figures of a plain line."""


class PrintableConsole(Console):
    """A console whose terminal obeys nothing in a text, whoever wrote it, but what the console itself sends."""

    def render_str(self, text: str, **look: Any) -> Text:
        """The text as it is shown, before a table measures it."""
        return super().render_str(printable(text), **look)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """All that is shown, as segments of text and of the console's own control codes."""
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else printable(text), style, control)


class Reporter:
    """Hears what happens and decides what is shown; by itself it shows nothing."""

    def note(self, text: str) -> None:
        """Show one line that stays."""

    def progress(self, done: int, total: int, what: str) -> None:
        """Show work outside the training steps: building the backbone, validation."""

    def step(self, line: Mapping[str, Any], total: int) -> None:
        """Show a training step by its journal line; `total` is the run's budget of steps, tokens or seconds."""

    def close(self) -> None:
        """Take what is live off the terminal."""

    @contextmanager
    def showing(self, what: str) -> Iterator[None]:
        """Work whose end alone is known: loading a model, starting an engine."""
        self.progress(0, 1, what)
        yield
        self.progress(1, 1, what)

    explained = False

    def _explain(self, line: Mapping[str, Any]) -> None:
        """Say once, before the first step, what its terms mean."""
        if not self.explained:
            self.note("; ".join(f"{name}: {_MEANINGS[name]}" for name in _figures(line) if name in _MEANINGS))
        self.explained = True


class SilentReporter(Reporter):
    """Shows nothing."""


def make_reporter(*, quiet: bool) -> Reporter:
    """A live view when stderr is a terminal, plain lines otherwise, nothing when quiet."""
    if quiet:
        return SilentReporter()
    console = PrintableConsole(stderr=True)
    return LiveReporter(console) if console.is_terminal else PlainReporter(console)


class PlainReporter(Reporter):
    """A line for each note, and at most one every `interval` seconds for progress."""

    def __init__(self, console: Console, interval: float = 10.0) -> None:
        self._console = console
        self._interval = interval
        self._started: dict[str, tuple[float, int]] = {}
        self._shown: dict[str, tuple[float, int]] = {}

    def note(self, text: str) -> None:
        """See `Reporter.note`."""
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def progress(self, done: int, total: int, what: str) -> None:
        """See `Reporter.progress`."""
        self._note_now_and_then(f"{what}: {done}/{total}", what, done, total)

    def step(self, line: Mapping[str, Any], total: int) -> None:
        """See `Reporter.step`."""
        self._explain(line)
        budget = f" ({spent(line):,}/{total:,})" if "budget/spent" in line else f"/{total}"
        brief = [f"{name} {shown}" for name, shown in _figures(line).items() if name in _BRIEF]
        text = "  ".join([f"step {line['step']}{budget}", line["phase"], *brief])
        self._note_now_and_then(text, "step", spent(line), total)

    def _note_now_and_then(self, text: str, what: str, done: int, total: int) -> None:
        """Show a line of some work, with the seconds left, unless another one has been shown just now."""
        now = time.monotonic()
        shown_at, shown = self._shown.get(what, (-math.inf, -1))
        if done == shown or (done < total and now - shown_at < self._interval):
            return
        self._shown[what] = now, done
        began, first = self._started.setdefault(what, (now, done))
        if first < done < total:
            text += f", {(now - began) / (done - first) * (total - done):.0f} s left"
        self.note(text)


def spent(line: Mapping[str, Any]) -> int:
    """Amount of its budget that a run has spent by a journal line: steps, or the tokens or seconds that it counts."""
    return int(line.get("budget/spent", line["step"]))


class LiveReporter(Reporter):
    """Progress with remaining time above the figures of the step."""

    def __init__(self, console: Console) -> None:
        columns = (BarColumn(bar_width=32), MofNCompleteColumn(), TimeElapsedColumn(), "left", TimeRemainingColumn())
        named = TextColumn("{task.description}", markup=False)
        self._progress = Progress(named, *columns, console=console)
        self._tasks: dict[str, Task] = {}
        self._live = Live(self._progress, console=console, refresh_per_second=4)
        self._live.start()

    def note(self, text: str) -> None:
        """See `Reporter.note`."""
        self._live.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def progress(self, done: int, total: int, what: str) -> None:
        """See `Reporter.progress`."""
        before = self._advance(what, 0, done, total)
        self._progress.update(self._tasks[what].id, visible=done < total)
        # What is done may be reported as such many times.
        if before < total <= done:
            self.note(f"{what}: done")

    def step(self, line: Mapping[str, Any], total: int) -> None:
        """See `Reporter.step`."""
        self._explain(line)
        self._advance("training", spent(line) - 1, spent(line), total)
        self._live.update(Group(self._progress, *step_view(line)))

    def close(self) -> None:
        """See `Reporter.close`."""
        self._live.stop()

    def _advance(self, what: str, first: int, done: int, total: int) -> float:
        """Set the bar of some work; returns where it was, which is at `first` when it is new."""
        if what not in self._tasks:
            self._progress.add_task(what, total=total, completed=first)
            self._tasks[what] = self._progress.tasks[-1]
        before = self._tasks[what].completed
        self._progress.update(self._tasks[what].id, completed=done, total=total)
        return before


def step_view(line: Mapping[str, Any]) -> tuple[Columns, Text]:
    """The figures of a step that a person watches, and bucket occupancy as one row of bars.

    Each bucket has k, a bar scaled to the fullest one, and its number of questions.
    """
    figures = [Text.assemble((f"{name} ", "dim"), shown) for name, shown in _figures(line).items()]
    prefix = "replay/bucket/"
    buckets = {int(key.removeprefix(prefix)): line[key] for key in line if key.startswith(prefix)}
    fullest = max(buckets.values(), default=0)
    bars = Text("buckets  " if fullest else "buckets: empty", style="dim")
    for k in sorted(buckets) if fullest else ():
        bar = "▁▂▃▄▅▆▇█"[round(7 * buckets[k] / fullest)] if buckets[k] else " "
        bars.append(f"k={k} ", style="dim").append(bar, style="cyan").append(f" {buckets[k]}  ")
    return Columns(figures, padding=(0, 2)), bars


def _figures(line: Mapping[str, Any]) -> dict[str, str]:
    return {name: form.format(line[key]) for name, (key, form) in _FIGURES.items() if key in line}


_PIPE_WIDTH = 120
"""Columns of a table that does not go to a terminal."""
_FEW_WORDS = 18
"""Least columns of text that may wrap."""
_AMPLE = 10_000


def stdout_console() -> Console:
    """A console for data: nothing in it is markup; as wide as the terminal, or _PIPE_WIDTH in a pipe."""
    out = data_stream()
    return PrintableConsole(file=out, markup=False, highlight=False, width=None if out.isatty() else _PIPE_WIDTH)


def print_table(table: Table, console: Console | None = None) -> None:
    """Print a table whose right-aligned columns, the numbers, keep to one line; too wide a one as several tables of
    some of its columns, or, where not even two fit, as lists of its rows.

    Other columns keep the width of a few words. Rich itself would count the longest word of a cell that must not wrap,
    and squeeze others to nothing for it.
    """
    console = console or stdout_console()
    for column in table.columns:
        column.no_wrap = column.no_wrap or column.justify == "right"
        longest = max((len(_plain(cell)) for cell in (column.header, *column.cells)), default=0)
        column.min_width = longest if column.no_wrap else min(longest, _FEW_WORDS)
    for part in [table] if _fits(table, console) else _in_parts(table, console) or (as_lists(table),):
        console.print(part)


def _fits(table: Table, console: Console) -> bool:
    # Measured with room to spare: in a narrow console no minimum is above its width.
    return console.measure(table, options=console.options.update(width=_AMPLE)).minimum <= console.width


def _in_parts(table: Table, console: Console) -> list[Table]:
    """Tables of the first column and as many of the others as fit, whose headings may wrap; none where one does not."""
    names, *others = table.columns
    for column in others:
        longest = max((len(_plain(cell)) for cell in column.cells), default=0)
        if column.no_wrap:
            column.header = "\n".join(textwrap.wrap(_plain(column.header), max(longest, _FEW_WORDS)))
            column.min_width = max(map(len, (*column.header.split("\n"), "0" * longest)))
    parts: list[Table] = []
    for column in others:
        wider = copy(parts[-1] if parts else table)
        wider.columns = [*(parts[-1].columns if parts else [names]), column]
        if not parts or not _fits(wider, console):
            parts.append(copy(table))
            parts[-1].columns = [names, column]
            parts[-1].title = None if len(parts) > 1 else table.title
        else:
            parts[-1] = wider
    for part in parts[:-1]:
        part.caption = None
    return parts if all(_fits(part, console) for part in parts) else []


def as_lists(table: Table) -> RenderableType:
    """Each row as lines of column name and value, one pair a line."""
    names = [_plain(column.header) for column in table.columns]
    wide = max((len(name) for name in names), default=0)
    lines: list[Text] = [Text(_plain(table.title))] if table.title else []
    for row in zip(*(list(column.cells) for column in table.columns), strict=True):
        for name, cell in zip(names, row, strict=True):
            lines.append(Text(f"{name:<{wide}}  {_plain(cell)}".strip(), overflow="fold"))
        lines.append(Text(""))
    return Group(*lines)


def _plain(cell: object) -> str:
    return printable(cell.plain if isinstance(cell, Text) else str(cell))

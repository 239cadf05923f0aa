"""Display of a run for people: a live view on a terminal, a plain line now and then elsewhere.

Everything of it goes to stderr; stdout belongs to the command's data, of which tables keep whole numbers at any width.
"""

import math
import time
from collections.abc import Mapping
from typing import Any

from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from exgrpo_cli.base.console.output import data_stream

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
_BRIEF = ("pass@1", "reward", "entropy", "buffered", "retired")
"""Figures of a plain line."""


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


class SilentReporter(Reporter):
    """Shows nothing."""


def make_reporter(*, quiet: bool) -> Reporter:
    """A live view when stderr is a terminal, plain lines otherwise, nothing when quiet."""
    if quiet:
        return SilentReporter()
    console = Console(stderr=True)
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
        self._note_now_and_then(describe_step(line, total), "step", spent(line), total)

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


def describe_step(line: Mapping[str, Any], total: int) -> str:
    """One plain line of a step: phase, success, reward, buffer and entropy."""
    budget = f" ({spent(line):,}/{total:,})" if "budget/spent" in line else f"/{total}"
    brief = [f"{name} {shown}" for name, shown in _figures(line).items() if name in _BRIEF]
    return "  ".join([f"step {line['step']}{budget}", line["phase"], *brief])


class LiveReporter(Reporter):
    """Progress with remaining time above the figures of the step."""

    def __init__(self, console: Console) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=32),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
        )
        self._tasks: dict[str, Any] = {}
        self._finished: set[str] = set()
        """Work that was said to be done, and may be reported as such many times."""
        self._live = Live(self._progress, console=console, refresh_per_second=4, transient=False)
        self._live.start()

    def note(self, text: str) -> None:
        """See `Reporter.note`."""
        self._live.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def progress(self, done: int, total: int, what: str) -> None:
        """See `Reporter.progress`."""
        if what not in self._tasks:
            if done >= total and what in self._finished:
                return
            self._tasks[what] = self._progress.add_task(what, total=total)
        self._progress.update(self._tasks[what], completed=done, total=total)
        if done >= total:
            self._progress.remove_task(self._tasks.pop(what))
            self._finished.add(what)
            self.note(f"{what}: done")

    def step(self, line: Mapping[str, Any], total: int) -> None:
        """See `Reporter.step`."""
        if "training" not in self._tasks:
            self._tasks["training"] = self._progress.add_task("training", total=total, completed=spent(line) - 1)
        self._progress.update(self._tasks["training"], completed=spent(line))
        self._live.update(Group(self._progress, step_figures(line), bucket_bars(line)))

    def close(self) -> None:
        """See `Reporter.close`."""
        self._live.stop()


def step_figures(line: Mapping[str, Any]) -> Columns:
    """The step's figures a person watches, in as many columns as the terminal has room for."""
    figures = [Text.assemble((f"{name} ", "dim"), shown) for name, shown in _figures(line).items()]
    return Columns(figures, padding=(0, 2))


def _figures(line: Mapping[str, Any]) -> dict[str, str]:
    return {name: form.format(line[key]) for name, (key, form) in _FIGURES.items() if key in line}


def bucket_bars(line: Mapping[str, Any]) -> Text:
    """Bucket occupancy as one row of bars: k, a bar scaled to the fullest bucket, its number of questions."""
    prefix = "replay/bucket/"
    buckets = {int(key.removeprefix(prefix)): line[key] for key in line if key.startswith(prefix)}
    if not any(buckets.values()):
        return Text("buckets: empty", style="dim")
    fullest = max(buckets.values())
    text = Text("buckets  ", style="dim")
    for k in sorted(buckets):
        bar = "▁▂▃▄▅▆▇█"[round(7 * buckets[k] / fullest)] if buckets[k] else " "
        text.append(f"k={k} ", style="dim").append(bar, style="cyan").append(f" {buckets[k]}  ")
    return text


_PIPE_WIDTH = 120
"""Columns of a table that does not go to a terminal."""
_FEW_WORDS = 18
"""Least columns of text that may wrap."""
_AMPLE = 10_000


def stdout_console() -> Console:
    """A console for data: nothing in it is markup; as wide as the terminal, or _PIPE_WIDTH in a pipe."""
    out = data_stream()
    return Console(file=out, markup=False, highlight=False, width=None if out.isatty() else _PIPE_WIDTH)


def print_table(table: Table, console: Console | None = None) -> None:
    """Print a table whose right-aligned columns, the numbers, keep to one line; too wide a one as lists of its rows.

    Other columns keep the width of a few words. Rich itself would count the longest word of a cell that must not wrap,
    and squeeze others to nothing for it.
    """
    console = console or stdout_console()
    for column in table.columns:
        column.no_wrap = column.no_wrap or column.justify == "right"
        longest = max((len(_plain(cell)) for cell in (column.header, *column.cells)), default=0)
        column.min_width = longest if column.no_wrap else min(longest, _FEW_WORDS)
    # Measured with room to spare: in a narrow console no minimum is above its width.
    least = console.measure(table, options=console.options.update(width=_AMPLE)).minimum
    console.print(table if least <= console.width else as_lists(table))


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
    return cell.plain if isinstance(cell, Text) else str(cell)

"""Display of a run for people: a live view on a terminal, a plain line now and then elsewhere.

Everything of it goes to stderr; stdout belongs to the command's data, of which tables keep whole numbers at any width.
"""

import math
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from copy import copy
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
from rich.segment import Segment
from rich.table import Column, Table
from rich.text import Text

from exgrpo_cli.base import data, output

_MEANINGS, _BRIEF, PHASE_WORDS = (data.tables(__file__, "words.toml")[name] for name in ("meanings", "brief", "phases"))
"""Terms that are said in words before the first step; of a figure of a plain line its key and how it is written; words
of the terminal for a phase of a run."""
_MOST_SHOWN = 240
"""Characters of the beginning, and of the end, that are shown of a long answer."""
_LEAST_SHOWN = 2.0
"""Seconds that a phase of a step lasts before the terminal names it: shorter ones would flicker."""


class PrintableConsole(Console):
    """A console whose terminal obeys nothing in a text, whoever wrote it, but what the console itself sends."""

    def render_str(self, text: str, **look: Any) -> Text:
        """The text as it is shown, before a table measures it."""
        return super().render_str(output.printable(text), **look)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """All that is shown, as segments of text and of the console's own control codes."""
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else output.printable(text), style, control)


class Reporter(AbstractContextManager["Reporter"]):
    """Hears what happens and decides what is shown; by itself it shows nothing. In a `with` it is closed at the end."""

    group_size = 0
    """Rollouts of a question, once a run says how many."""
    heldout = ""
    """The newest held-out score in words, for the view of a step."""
    _explained: frozenset[str] = frozenset()

    def note(self, text: str) -> None:
        """Show one line that stays."""

    def rows(self, rows: Mapping[str, str | tuple[str, str]]) -> None:
        """Show texts that stay, below one another, each behind its name; of a pair the second one, the meaning of the
        name, the first time alone."""
        texts = {}
        for name, text in rows.items():
            value, meaning = (text, "") if isinstance(text, str) else text
            texts[name] = f"{value} ({meaning})" if meaning and name not in self._explained else value
            self._explained |= {name}
        self._show_rows(texts)

    def _show_rows(self, rows: Mapping[str, str]) -> None:
        for name, text in rows.items():
            self.note(f"  {name}: {text}")

    def progress(self, done: int, total: int, what: str) -> None:
        """Show work outside the training steps: building the backbone, validation."""

    def phase(self, what: str, done: int = 0, total: int = 0) -> None:
        """Show what is under way, and how much of it is done where that is counted; nothing for an empty `what`."""

    def step(self, line: Mapping[str, Any], total: int) -> None:
        """Show a training step by its journal line; `total` is the run's budget of steps, tokens or seconds."""

    def close(self) -> None:
        """Take what is live off the terminal."""

    def __exit__(self, *error: object) -> None:
        self.close()

    def sampling(self, total: int, what: str) -> Callable[[int], None]:
        """A function that is told how many of `total` answers are sampled; they are graded until something else is."""

        def tell(done: int) -> None:
            self.progress(done, total, what)
            self.phase(f"{what}: grading" if done == total else "")

        tell(0)
        return tell

    @contextmanager
    def showing(self, what: str) -> Iterator[None]:
        """Work whose end alone is known: loading a model, starting an engine."""
        self.phase(what)
        yield
        self.phase("")

    def _explain(self, line: Mapping[str, Any]) -> None:
        """Say once, before the first step, what its terms mean."""
        terms = _MEANINGS if "replay/questions" in line else ("pass@1", "entropy")
        if new := {name: _MEANINGS[name] for name in terms if name not in self._explained}:
            self.rows(new)


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

    @contextmanager
    def showing(self, what: str) -> Iterator[None]:
        """See `Reporter.showing`; a line at the beginning, none for what a step does."""
        self.note(what)
        yield

    def step(self, line: Mapping[str, Any], total: int) -> None:
        """See `Reporter.step`."""
        self._explain(line)
        budget = f" ({spent(line):,}/{total:,})" if "budget/spent" in line else f"/{total}"
        brief = [f"{name} {form.format(line[key])}" for name, (key, form) in _BRIEF.items() if key in line]
        text = "  ".join([f"step {line['step']}{budget}", line["phase"], *brief])
        self._note_now_and_then(text, "step", spent(line), total)

    def _note_now_and_then(self, text: str, what: str, done: int, total: int) -> None:
        """Show a line of some work, with the time left, unless another one has been shown just now."""
        now = time.monotonic()
        shown_at, shown = self._shown.get(what, (-math.inf, -1))
        if done == shown or (done < total and now - shown_at < self._interval):
            return
        self._shown[what] = now, done
        began, first = self._started.setdefault(what, (now, done))
        if first < done < total:
            text += f", {_clock((now - began) / (done - first) * (total - done))} left"
        self.note(text)


def spent(line: Mapping[str, Any]) -> int:
    """Amount of its budget that a run has spent by a journal line: steps, or the tokens or seconds that it counts."""
    return int(line.get("budget/spent", line["step"]))


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}" if minutes >= 60 else f"{minutes}:{rest:02d}"


class _Counted(ProgressColumn):
    """Amount done, time since the work began, and time left: by all of it, however slow."""

    def render(self, task: Task) -> Text:
        first, at, elapsed = int(task.fields["first"]), float(task.fields["at"]), task.elapsed or 0.0
        if task.total is None or task.completed <= first:
            return Text(_clock(elapsed), "dim")
        # By the pace until something was last done, so that the time left never grows while that goes on.
        left = max(0.0, at / (task.completed - first) * (task.total - task.completed) - (elapsed - at))
        text = Text(f"{task.completed:,.0f} of {task.total:,.0f}  ").append(_clock(elapsed), "dim")
        return text.append(f", {_clock(left)} left", "dim") if left else text


class LiveReporter(Reporter):
    """Bars of what is under way, each with the time left, above the figures of the step."""

    def __init__(self, console: Console) -> None:
        named = TextColumn("{task.description}", markup=False)
        self._progress = Progress(named, BarColumn(bar_width=20), _Counted(), console=console)
        self._tasks: dict[str, Task] = {}
        self._phase = self._progress.add_task("", total=None, first=0, at=0.0)
        self._line: Mapping[str, Any] = {}
        self._live = Live(console=console, refresh_per_second=8, get_renderable=self._view)
        self._live.start()

    def note(self, text: str) -> None:
        """See `Reporter.note`; wrapped between words."""
        self._live.console.print(Text(output.printable(text)), highlight=False)

    def _show_rows(self, rows: Mapping[str, str]) -> None:
        self._live.console.print(as_rows(rows), "")

    def progress(self, done: int, total: int, what: str) -> None:
        """See `Reporter.progress`."""
        self._advance(what, done, done, total)
        self._progress.update(self._tasks[what].id, visible=done < total)

    def phase(self, what: str, done: int = 0, total: int = 0) -> None:
        """See `Reporter.phase`; shown once it has lasted a moment."""
        task = self._progress.tasks[0]
        if what != task.description:
            self._progress.reset(self._phase, description=what, visible=False)
        _set(task, done, total)

    def step(self, line: Mapping[str, Any], total: int) -> None:
        """See `Reporter.step`."""
        self._explain(line)
        what = "training" if "budget/spent" in line else "training steps"
        self._advance(what, spent(line) - 1, spent(line), total)
        self._line = line
        self.phase("")

    def close(self) -> None:
        """See `Reporter.close`."""
        self.phase("")
        self._live.stop()

    def _advance(self, what: str, first: int, done: int, total: int) -> None:
        """Set the bar of some work, which began at `first` when it is new; it swings until something is done."""
        if what not in self._tasks:
            self._progress.add_task(what, total=None, first=first, at=0.0)
            self._tasks[what] = self._progress.tasks[-1]
        _set(self._tasks[what], done, total)

    def _view(self) -> RenderableType:
        task = self._progress.tasks[0]
        shows = bool(task.description) and (task.elapsed or 0.0) > _LEAST_SHOWN
        self._progress.update(self._phase, visible=shows)
        figures = step_view(self._line, self.group_size, self.heldout) if self._line else {}
        return Group(self._progress, as_rows(figures)) if figures else self._progress


def _set(task: Task, done: int, total: int) -> None:
    """Set a bar, which swings until something is done."""
    if task.completed != done:
        task.fields["at"] = task.elapsed or 0.0
    task.completed, task.total = done, total if done > task.fields["first"] else None


def as_rows(rows: Mapping[str, str]) -> Table:
    """Texts below one another, each behind its name, wrapped between words."""
    table = Table.grid(Column(style="cyan", no_wrap=True), Column(overflow="fold"), padding=(0, 2))
    for name, text in rows.items():
        shown = Text(output.printable(text))
        for style, marked in {"green": r"\(correct\)$", "red": r"\([^()]* is correct\)$", "cyan": "[▁-█]"}.items():
            shown.highlight_regex(marked, style)
        table.add_row(f"  {name}", shown)
    return table


def answer_rows(prompt: str, gold: str, text: str, verdict: str) -> dict[str, str]:
    """A question, an answer of the model and its verdict for people, long ones without their middle."""
    question, answer = (" ".join(each.split()) for each in (prompt, text))
    if len(answer) > 2 * _MOST_SHOWN:
        answer = f"{answer[:_MOST_SHOWN]} ... {answer[-_MOST_SHOWN:]}"
    said = f"{verdict}, {gold} is correct" if gold and verdict != "correct" else verdict
    return {"question": question[-2 * _MOST_SHOWN :], "answer": f"{answer} ({said})"}


def step_view(line: Mapping[str, Any], group_size: int, heldout: str) -> dict[str, str]:
    """The figures of a step that a person watches, by name, and the buckets as a row of bars, each scaled to the
    fullest one. `heldout` is the newest held-out score in words, or empty."""

    def written(forms: Mapping[str, str]) -> str:
        return ", ".join(form.format(line[key]) for key, form in forms.items() if key in line)

    own = written({"batch/pass_at_1": "{:.3f} on new questions", "replay/pass_at_1": "{:.3f} on replayed ones"})
    rows = {"pass@1": f"held-out {heldout}; " * bool(heldout) + f"this step {own}"}
    if "replay/questions" in line:
        used = line.get("replay/used", 0)
        none = "new rollouts alone" if line["phase"] == "on-policy" else "nothing of the buffer was drawn in this step"
        stored = f"{used} draws from the buffer, beside what is new" if used else none
        rows["phase"] = f"{line['phase']}: {stored}"
        counts = [line[f"replay/{name}"] for name in ("questions", "trajectories", "retired")]
        stored = "{:,} questions with {:,} correct rollouts; {:,} questions retired".format(*counts)
        rows["buffer"] = stored if any(counts) else "empty"
        if counts[0]:
            held = {k: line.get(f"replay/bucket/{k}", 0) for k in range(1, group_size)}
            most = max(held.values(), default=0) or 1
            bars = [f"{k}:{'▁▂▃▄▅▆▇█'[round(7 * n / most)] if n else '-'}{n}" for k, n in held.items()]
            rows["buckets"] = f"correct of {group_size}:  {'  '.join(bars)}"
    lengths = {"length/mean": "{:.0f} tokens long", "policy/entropy": "entropy {:.3f}", "time/step": "{:.2f} s a step"}
    return rows | {"rollouts": written(lengths)}


_PIPE_WIDTH = 120
"""Columns of a table that does not go to a terminal."""
_FEW_WORDS = 18
"""Least columns of text that may wrap."""
_AMPLE = 10_000


def stdout_console() -> Console:
    """A console for data: nothing in it is markup; as wide as the terminal, or _PIPE_WIDTH in a pipe."""
    out = output.data_stream()
    return PrintableConsole(file=out, markup=False, highlight=False, width=None if out.isatty() else _PIPE_WIDTH)


def print_table(table: Table, console: Console | None = None) -> None:
    """Print a table whose right-aligned columns, the numbers, keep to one line; too wide a one as several tables of
    some of its columns, of two at least.

    Other columns keep the width of a few words. Rich itself would count the longest word of a cell that must not wrap,
    and squeeze others to nothing for it.
    """
    console = console or stdout_console()
    for column in table.columns:
        column.no_wrap = column.no_wrap or column.justify == "right"
        longest = max((len(_plain(cell)) for cell in (column.header, *column.cells)), default=0)
        column.min_width = longest if column.no_wrap else min(longest, _FEW_WORDS)
    for part in [table] if _fits(table, console) else _in_parts(table, console):
        console.print(part)


def _fits(table: Table, console: Console) -> bool:
    # Measured with room to spare: in a narrow console no minimum is above its width.
    return console.measure(table, options=console.options.update(width=_AMPLE)).minimum <= console.width


def _in_parts(table: Table, console: Console) -> list[Table]:
    """Tables of the first column and as many of the others as fit, one at least, whose headings may wrap."""
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
    return parts


def _plain(cell: object) -> str:
    return output.printable(cell.plain if isinstance(cell, Text) else str(cell))

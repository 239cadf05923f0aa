"""Streams and signals of a process: stdout for data alone, warnings as lines, Ctrl-C that saves before it stops.

Whatever else is printed on stdout, from Python or C, lands on stderr. Text that may be another's passes `printable` on
its way to a terminal or a page, and `in_markdown` on its way into a card or a table of one.
"""

import _thread
import logging
import os
import re
import shutil
import signal
import sys
import textwrap
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from functools import partial
from types import SimpleNamespace
from typing import Any

from exgrpo_cli.base.errors import DamageWarning, ToolkitWarning

_data: Any = None

_OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Characters that a terminal or a page obeys rather than shows: controls but for tab and newline, separators of lines,
those that turn the direction of text, and halves of a pair, which cannot be written."""


_SECONDS_TO_INTERRUPT = 0.05


def printable(text: str) -> str:
    """The text with what a terminal would obey as `\\u001b`, which JSON and TOML read back as it was."""
    return _OBEYED.sub(lambda found: f"\\u{ord(found[0]):04x}", text.replace("\r\n", "\n"))


def in_markdown(text: str) -> str:
    """The text on one line, for a sentence or a table's cell in Markdown: it makes neither HTML, nor a link or image,
    nor a further cell."""
    line = " ".join(printable(text).split()).replace("&", "&amp;").replace("<", "&lt;")
    # As entities: after a backslash in the text a further one would be undone.
    return line.replace("](", "]&#40;").replace("`", "&#96;").replace("|", "&#124;")


def unmarked(written: Callable[[str], str]) -> Callable[[object], object]:
    """For a template's values: texts as `written`, but for those that are marked up already."""
    return lambda value: written(value) if isinstance(value, str) and not hasattr(value, "__html__") else value


def wrapped(text: str, stream: Any) -> str:
    """The text with its lines wrapped between words where `stream` is a terminal, elsewhere as it is.

    A command that ends a line which is too long stands on one of its own, and indented lines stay whole: both can be
    copied.
    """
    if not stream.isatty():
        return text
    width, lines = shutil.get_terminal_size().columns, []
    for line in text.split("\n"):
        said, colon, command = line.partition(": exgrpo ")
        if len(line) <= width or line.startswith("  "):
            lines.append(line)
        else:
            lines += textwrap.wrap(said + colon[:1], width, break_long_words=False, break_on_hyphens=False)
            lines += [f"  exgrpo {command}"] if command else []
    return "\n".join(lines)


def say(text: str) -> None:
    """Write a line for people to stderr."""
    sys.stderr.write(f"{wrapped(printable(text), sys.stderr)}\n")
    sys.stderr.flush()


def data_stream() -> Any:
    """The text stream of a command's data."""
    return _data or sys.stdout


@contextmanager
def data_alone() -> Iterator[None]:
    """While this lasts, `print` writes to stderr and nothing but `data_stream()` to stdout."""
    global _data
    _data = sys.stdout
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        _data = None


def reserve_stdout() -> None:
    """Point file descriptor 1 of this process at stderr, and `sys.stdout` at a duplicate of what it was."""
    if sys.stdout is None or sys.stderr is None:
        # Started with one of them closed.
        return
    own = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    sys.stdout = os.fdopen(own, "w", encoding=sys.stdout.encoding, errors="backslashreplace")


def give_stdout_to_children() -> None:
    """Point file descriptor 1 at the real stdout again: the processes started from here on have data of their own."""
    data_stream().flush()
    os.dup2(data_stream().fileno(), 1)


SLOW = frozenset({"torch", "transformers", "vllm", "deepspeed", "pyarrow", "matplotlib"})


@contextmanager
def loading_note(say: Callable[[str], None]) -> Iterator[None]:
    """While this lasts, a line is passed to `say` before the first slow package is imported."""

    said = False

    def find_spec(name: str, *where: Any) -> None:
        """Finds nothing: the finders after this one do the work."""
        nonlocal said
        if name in SLOW and not said:
            said = True
            say("exgrpo: loading libraries")

    watching: Any = SimpleNamespace(find_spec=find_spec)
    sys.meta_path.insert(0, watching)
    try:
        yield
    finally:
        sys.meta_path.remove(watching)


def tell_warnings(tell: Callable[[str, bool], None], *, others: bool) -> None:
    """From here on each of the toolkit's warnings is one call `tell(line, is_damage)`.

    Those of other packages are written to stderr where `others`, else not at all.
    """

    def show_line(
        message: Warning | str, category: type[Warning], filename: str, lineno: int, file: Any = None, line: Any = None
    ) -> None:
        if issubclass(category, ToolkitWarning):
            tell(" ".join(str(message).split()), issubclass(category, DamageWarning))
        elif others:
            say(warnings.formatwarning(message, category, filename, lineno, line).rstrip())

    warnings.simplefilter("always", ToolkitWarning)
    warnings.showwarning = show_line


@contextmanager
def interrupts_kept() -> Iterator[None]:
    """Meanwhile a Ctrl-C that comes in the callback of a dying object, where Python can raise nothing, comes again."""
    before, main = sys.unraisablehook, threading.get_ident()
    again = threading.Timer(_SECONDS_TO_INTERRUPT, partial(signal.pthread_kill, main, signal.SIGINT))
    again.daemon = True

    def hook(what: Any) -> None:
        if what.exc_type is not KeyboardInterrupt:
            before(what)
        elif not again.is_alive():
            # From a thread and later: from here it would be raised in the same place.
            with suppress(RuntimeError):
                again.start()

    sys.unraisablehook = hook
    try:
        yield
    finally:
        sys.unraisablehook = before
        again.cancel()


class PrintableRecord(logging.LogRecord):
    """Message that a package logs, printable: it may quote configurations, models and servers."""

    def getMessage(self) -> str:
        """The message as it is shown."""
        return printable(super().getMessage())


SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stopper:
    """Turns the first stop signal into a request that is honoured between steps, the second into KeyboardInterrupt.

    Inside `immediate()` (work that loses nothing when cut short, such as validation) the first one interrupts as well.
    Outside the main thread signals cannot be caught and the default behaviour stays.
    """

    def __init__(self, say: Callable[[], None] | None = None) -> None:
        """`say` is called when work goes on after the first signal, in a thread of its own: what the signal interrupted
        may hold the terminal."""
        self._say = say
        self.requested = False
        self._immediate = False
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> "Stopper":
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, self._handle) for number in SIGNALS}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, *signalled: object) -> None:
        if self.requested or self._immediate:
            raise KeyboardInterrupt
        self.requested = True
        if self._say is not None:
            with suppress(RuntimeError):
                _thread.start_new_thread(self._say, ())

    @contextmanager
    def immediate(self) -> Iterator[None]:
        """Work that may be cut short at any point."""
        if self.requested:
            raise KeyboardInterrupt
        self._immediate = True
        try:
            yield
        finally:
            self._immediate = False

"""Streams and signals of a process: stdout for data alone, warnings as lines, Ctrl-C that saves before it stops.

Whatever else is printed on stdout, from Python or C, lands on stderr.
"""

import _thread
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from types import SimpleNamespace
from typing import Any

from exgrpo_cli.base.errors import DamageWarning, ToolkitWarning

_data: Any = None


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
    sys.stdout = os.fdopen(own, "w", encoding=sys.stdout.encoding, errors=sys.stdout.errors)


def give_stdout_to_children() -> None:
    """Point file descriptor 1 at the real stdout again: the processes started from here on have data of their own."""
    data_stream().flush()
    os.dup2(data_stream().fileno(), 1)


SLOW = frozenset({"torch", "transformers", "vllm", "deepspeed", "pyarrow", "matplotlib"})


@contextmanager
def loading_note(say: Callable[[str], None]) -> Iterator[None]:
    """While this lasts, a line is passed to `say` before the first slow package is imported."""

    def find_spec(name: str, *where: Any) -> None:
        """Finds nothing: the finders after this one do the work."""
        if name in SLOW and watching in sys.meta_path:
            sys.meta_path.remove(watching)
            say(f"exgrpo: loading {name}")

    watching: Any = SimpleNamespace(find_spec=find_spec)
    sys.meta_path.insert(0, watching)
    try:
        yield
    finally:
        if watching in sys.meta_path:
            sys.meta_path.remove(watching)


def tell_warnings(say: Callable[[str, bool], None], *, others: bool) -> None:
    """From here on each of the toolkit's warnings is one call `say(line, is_damage)`.

    Those of other packages are shown as before where `others`, else not at all.
    """
    show = warnings.showwarning

    def show_line(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
        if issubclass(category, ToolkitWarning):
            say(" ".join(str(message).split()), issubclass(category, DamageWarning))
        elif others:
            show(message, category, *where, **more)

    warnings.simplefilter("always", ToolkitWarning)
    warnings.showwarning = show_line


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

"""Standard output carries data alone: whatever else is printed there, from Python or C, lands on stderr."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from typing import Any

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

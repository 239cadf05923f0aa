"""Ctrl-C and SIGTERM: finish what must not be torn, save, stop."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stopper:
    """Turns the first stop signal into a request that is honoured between steps, the second into KeyboardInterrupt.

    Inside `immediate()` (work that loses nothing when cut short, such as validation) the first one interrupts as well.
    Outside the main thread signals cannot be caught and the default behaviour stays.
    """

    def __init__(self) -> None:
        self.requested = False
        self._immediate = False
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> "Stopper":
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, self._handle) for number in SIGNALS}
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested or self._immediate:
            raise KeyboardInterrupt
        self.requested = True

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

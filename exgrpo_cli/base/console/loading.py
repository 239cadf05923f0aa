"""The screen of a command that takes a while to start: the first slow package it imports is named."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import Any

SLOW = frozenset({"torch", "transformers", "vllm", "deepspeed", "pyarrow", "matplotlib"})


class LoadingNote(MetaPathFinder):
    """Finds nothing; says once that a slow package is being loaded."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        """None: the finders after this one do the work."""
        if fullname in SLOW and self in sys.meta_path:
            sys.meta_path.remove(self)
            self._say(f"exgrpo: loading {fullname}")
        return None


@contextmanager
def loading_noted(say: Callable[[str], None]) -> Iterator[None]:
    """Pass a line to `say` before the first slow package is imported; none where all are loaded already."""
    note = LoadingNote(say)
    sys.meta_path.insert(0, note)
    try:
        yield
    finally:
        if note in sys.meta_path:
            sys.meta_path.remove(note)

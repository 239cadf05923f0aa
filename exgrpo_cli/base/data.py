"""Tables in TOML files beside the modules that read them, and patterns in them, in which «name» stands for a piece."""

import re
import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any


@cache
def tables(module: str, name: str) -> dict[str, Any]:
    """Content of the file `name` beside a module, given by its `__file__`, read once; not to be changed by callers."""
    return tomllib.loads(Path(module).with_name(name).read_text(encoding="utf-8"))


def expanded(pattern: str, pieces: Mapping[str, str]) -> str:
    """The pattern with its pieces, which may have pieces of their own."""
    return re.sub("«([a-z0-9_]+)»", lambda found: expanded(pieces[found[1]], pieces), pattern)


def patterns(table: Mapping[str, str], pieces: Mapping[str, str]) -> SimpleNamespace:
    """The patterns of a table, compiled, each under its name."""
    return SimpleNamespace(**{name: re.compile(expanded(own, pieces)) for name, own in table.items()})

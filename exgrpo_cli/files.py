"""Files that are whole or absent: written beside their place, flushed, renamed."""

import json
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from exgrpo_cli.errors import RunError


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` make the file under a temporary name, then put it in place.

    Raises RunError where it cannot be written; what was there before stays.
    """
    partial = path.with_name(f".{path.name}.partial-{os.getpid()}")
    try:
        write(partial)
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError as error:
        raise RunError(f"{path} cannot be written: {error.strerror or error}. Choose another --output.") from error
    finally:
        partial.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    write_whole(path, lambda partial: partial.write_text(text, encoding="utf-8"))


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def write_json_lines(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    write_text(path, "".join(json_line(row) for row in rows))


def json_line(row: Mapping[str, Any]) -> str:
    return json.dumps(row, ensure_ascii=False, separators=(",", ":")) + "\n"

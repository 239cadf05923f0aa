"""What a JSON file of ours holds, checked when it is read, so that a damaged one is named and never half-believed."""

import json
from collections.abc import Mapping
from pathlib import Path
from types import UnionType
from typing import Any

from exgrpo_cli.base.errors import InputError

NUMBER = int | float
Shape = type | UnionType | Mapping[str, Any]
"""A type, or the shapes of an object's keys; a key that ends in "?" may be missing."""


def read_json(path: Path, shape: Shape = dict) -> Any:
    """The value in a JSON file. Raises InputError where it is missing, is not JSON or has another shape."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"{path} is missing: restore it from a copy.") from None
    except ValueError as error:
        raise InputError(f"{path} is not JSON ({error}): restore it from a copy.") from error
    require_shape(value, shape, str(path))
    return value


def require_shape(value: Any, shape: Shape, where: str) -> None:
    """Raise InputError naming the first key of a value, read from `where`, that is missing or of another type."""
    if problem := _misfit(value, shape, ""):
        raise InputError(f"{where} is damaged ({problem}): restore it from a copy.")


def _misfit(value: Any, shape: Shape, name: str) -> str:
    if not isinstance(shape, Mapping):
        return "" if isinstance(value, shape) else f"{name or 'it'} is {value!r:.40}"
    if not isinstance(value, dict):
        return f"{name or 'it'} is {value!r:.40}"
    for key, wanted in shape.items():
        own = key.removesuffix("?")
        inner = f"{name}.{own}" if name else own
        if own not in value and own == key:
            return f"{inner} is missing"
        if own in value and (problem := _misfit(value[own], wanted, inner)):
            return problem
    return ""

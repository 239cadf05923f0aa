"""Functions of the user, named `python:module:function` in a setting."""

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from exgrpo_cli.errors import InputError


def load_function(setting: str, value: str) -> Callable[..., Any]:
    """The function that `value` ("python:module:function") names, looked up as `python -m` would from this folder.

    Raises InputError naming `setting` where the module cannot be imported or has no such function.
    """
    parts = value.split(":")
    if len(parts) != 3 or not all(parts):
        raise InputError(f"{setting} = {value!r}: write python:module:function, for example python:my_metric:score")
    _, module_name, name = parts
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise InputError(
            f"{setting} = {value!r}: cannot import {module_name} ({error}); "
            f"put {module_name}.py into {Path.cwd()} or install it"
        ) from error
    function = getattr(module, name, None)
    if not callable(function):
        known = sorted(key for key in vars(module) if callable(getattr(module, key)) and not key.startswith("_"))
        raise InputError(f"{setting} = {value!r}: {module_name} has no function {name}; it has {', '.join(known)}")
    return function

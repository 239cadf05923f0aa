"""Names in settings: the built-in rules, which plug-ins, command line and studies read here, and the user's functions.

A function of the user is named `python:module:function`: metrics, samplers, priorities and graders alike.
"""

import importlib
import re
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from exgrpo_cli.base.errors import ExgrpoError, InputError, RunError, first_line

DIRECTIONS = ("min", "max")
"""Whether the lowest or the highest of a metric is replayed."""
GRADERS = ("math", "choice", "exact", "oat")
"""Verifiers of an answer."""
BUILT_IN = ("arithmetic", "word-problems", "countdown", "modular")
"""Question sources that the program makes itself, each with held-out questions."""
GYM = "gym:"
"""Prefix of a task of reasoning-gym as a source: `gym:spell_backward`."""
TINY_TASKS = ("arithmetic", "countdown", "countdown-20", "modular")
"""Tasks whose traces the tiny backbone can learn before it trains."""
Device = Literal["auto", "cpu", "cuda", "mps"]
PREFIX = "python:"
"""Prefix of a function of the user: `python:module:function`."""
OFFERED = {"replay.metric": "candidates", "replay.sampler": "buckets", "replay.priority": "units"}
"""First argument of a function of the user, one result for each."""


HUB_ID = re.compile(r"(?!.*(?:--|\.\.))\w(?:[\w.-]{0,94}\w)?/\w(?:[\w.-]{0,94}\w)?", re.ASCII)
"""Form of a hub id, `owner/name`, as the hub has it."""


def is_made(source: str) -> bool:
    """Whether the program makes the questions of a source itself."""
    return source in BUILT_IN or source.startswith(GYM)


def section_of_made(source: str) -> str:
    """Section of the settings of a made source."""
    return source.partition(":")[0].replace("-", "_")


def is_gguf(source: str) -> bool:
    """Whether `source` means a GGUF file of this machine, there or not."""
    return source.lower().endswith(".gguf")


def is_function(value: Any) -> bool:
    """Whether a setting's value names a function of the user, or is a table with one among its keys."""
    return any(map(is_function, value)) if isinstance(value, Mapping) else str(value).startswith(PREFIX)


def named_functions(settings: Any) -> dict[str, str]:
    """{section.key: value} of the settings, a configuration or tables of one, that name a function of the user."""
    tables = settings if isinstance(settings, Mapping) else asdict(settings)
    tables = {name: table for name, table in tables.items() if isinstance(table, Mapping)}
    values = {f"{name}.{key}": value for name, table in tables.items() for key, value in table.items()}
    for name, value in list(values.items()):
        if isinstance(value, Mapping):
            values |= {f"{name}.{label_of(each)}": each for each in value}
    return {name: value for name, value in values.items() if isinstance(value, str) and is_function(value)}


def label_of(name: str) -> str:
    """Short name of a grader: the last part of a function of the user."""
    return name.rpartition(":")[2]


def check_functions(config: Any) -> None:
    """Import every function of the user; raises InputError where one is not there, which may else show hours later."""
    for setting, value in named_functions(config).items():
        load_function(setting, value)


def load_function(setting: str, value: str) -> Callable[..., Any]:
    """The function that `value` ("python:module:function") names, looked up as `python -m` would from this folder.

    Raises InputError naming `setting` where the module cannot be imported or has no such function.
    """
    module_name, name = _parts(setting, value)
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        remedy = f"put {module_name}.py into {Path.cwd()} or install it"
        raise InputError(f"{setting} = {value!r}: cannot import {module_name} ({error}); {remedy}") from error
    except Exception as error:
        raise InputError(f"{setting} = {value!r}: importing {module_name} {_raised(error, module_name)}") from error
    function = getattr(module, name, None)
    if not callable(function):
        known = sorted(key for key in vars(module) if callable(getattr(module, key)) and not key.startswith("_"))
        raise InputError(f"{setting} = {value!r}: {module_name} has no function {name}; it has {', '.join(known)}")
    return function


def replay_function(setting: str, value: str) -> Callable[..., Any]:
    """As `load_function`; whatever the function raises becomes a RunError that names it, its call and its line."""
    function = load_function(setting, value)
    asked = setting.removeprefix("replay.")

    def called(offered: Any, *rest: Any) -> Any:
        try:
            return function(offered, *rest)
        except ExgrpoError:
            raise
        except Exception as error:
            what = f"asked for the {asked} of {len(offered)} {OFFERED[setting]}"
            raise RunError(f"{setting} = {value!r}, {what}, {_raised(error, function.__module__)}") from error

    return called


def _raised(error: BaseException, module_name: str) -> str:
    """Error with the line of the user's module that it came from."""
    file = getattr(sys.modules.get(module_name), "__file__", None)
    frames = traceback.extract_tb(error.__traceback__)
    frame = next((frame for frame in reversed(frames) if frame.filename == file), frames[-1])
    says = f"{type(error).__name__}: {first_line(error)}"
    return f"raised {says} ({frame.filename}, line {frame.lineno}); mend it"


def origin(setting: str, value: str) -> str:
    """Origin of what `load_function` would import, without importing it: a file, or what Python says instead of one."""
    module_name, _ = _parts(setting, value)
    # Of a dotted name the package alone: looking further would import it.
    try:
        spec = find_spec(module_name.partition(".")[0])
    except ValueError:
        spec = None
    return "nowhere to be found" if spec is None else str(spec.origin)


def _parts(setting: str, value: str) -> tuple[str, str]:
    """Module, which may stand in this folder, and function."""
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))
    parts = value.split(":")
    if len(parts) != 3 or not all(parts) or parts[0] + ":" != PREFIX:
        raise InputError(f"{setting} = {value!r}: write python:module:function, for example python:my_metric:score")
    return parts[1], parts[2]

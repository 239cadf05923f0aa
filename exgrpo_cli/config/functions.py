"""Functions of the user, named `python:module:function` in a setting: metrics, samplers and graders alike."""

import functools
import importlib
import sys
import traceback
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from exgrpo_cli.base.errors import ExgrpoError, InputError, RunError, first_line
from exgrpo_cli.config.names import PREFIX
from exgrpo_cli.config.settings import Config

USER_FUNCTIONS = ("replay.metric", "replay.sampler", "replay.priority", "grading.grader")
"""Settings that may name a function of the user."""


def named_functions(config: Config) -> dict[str, str]:
    """{setting: value} of the settings that name a function of the user."""
    values = {name: getattr(getattr(config, name.split(".")[0]), name.split(".")[1]) for name in USER_FUNCTIONS}
    return {name: value for name, value in values.items() if value.startswith(PREFIX)}


def check_functions(config: Config) -> None:
    """Import every function of the user; raises InputError where one is not there, which may else show hours later."""
    for setting, value in named_functions(config).items():
        load_function(setting, value)


def load_function(setting: str, value: str) -> Callable[..., Any]:
    """The function that `value` ("python:module:function") names, looked up as `python -m` would from this folder.

    Raises InputError naming `setting` where the module cannot be imported or has no such function.
    """
    module_name, name = _parts(setting, value)
    _look_here()
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise InputError(
            f"{setting} = {value!r}: cannot import {module_name} ({error}); "
            f"put {module_name}.py into {Path.cwd()} or install it"
        ) from error
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

    @functools.wraps(function)
    def called(offered: Any, *rest: Any) -> Any:
        try:
            return function(offered, *rest)
        except ExgrpoError:
            raise
        except Exception as error:
            what = f"asked for the {asked} of {len(offered)} {OFFERED[setting]}"
            raise RunError(f"{setting} = {value!r}, {what}, {_raised(error, function.__module__)}") from error

    return called


OFFERED = {"replay.metric": "candidates", "replay.sampler": "buckets", "replay.priority": "units"}
"""What a function of the user is given first, which it answers for."""


def _raised(error: BaseException, module_name: str) -> str:
    """What was raised, and the line of the user's module that it came from."""
    file = getattr(sys.modules.get(module_name), "__file__", None)
    frames = traceback.extract_tb(error.__traceback__)
    frame = next((frame for frame in reversed(frames) if frame.filename == file), frames[-1])
    says = first_line(error)
    kind = type(error).__name__
    return f"raised {kind if says == kind else f'{kind}: {says}'} ({frame.filename}, line {frame.lineno}); mend it"


def origin(setting: str, value: str) -> str:
    """Where `load_function` would import from, without importing it: a file, or what Python says instead of one."""
    module_name, _ = _parts(setting, value)
    _look_here()
    # Of a dotted name the package alone: looking further would import it.
    spec = find_spec(module_name.partition(".")[0])
    return "nowhere to be found" if spec is None else str(spec.origin)


def _parts(setting: str, value: str) -> tuple[str, str]:
    parts = value.split(":")
    if len(parts) != 3 or not all(parts) or parts[0] + ":" != PREFIX:
        raise InputError(f"{setting} = {value!r}: write python:module:function, for example python:my_metric:score")
    return parts[1], parts[2]


def _look_here() -> None:
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))

"""The `python:module:function` grader: a user's own function, run in a worker like math-verify."""

import importlib
from collections.abc import Callable

from exgrpo_cli.config.names import PREFIX
from exgrpo_cli.errors import InputError
from exgrpo_cli.types import Verdict

UserGrader = Callable[[str, str], "Verdict | bool"]


def load(grader: str) -> Callable[[str, str], Verdict]:
    """The function that `python:module:function` names, as (gold, text) -> Verdict.

    `text` is the graded text of a response. The function returns a Verdict, or a bool: True is correct, False wrong.
    What it raises ends its worker: the answer counts as crashed.

    Raises:
        InputError: the setting has another form, or the module or function does not exist.
    """
    module_name, _, function_name = grader.removeprefix(PREFIX).partition(":")
    if not module_name or not function_name:
        raise InputError(
            f"grader {grader!r} is not of the form python:module:function, such as python:my_graders:grade."
        )
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise InputError(
            f"grader {grader!r}: module {module_name!r} cannot be imported ({error}). "
            "Install it or put its folder on PYTHONPATH."
        ) from error
    function: UserGrader | None = getattr(module, function_name, None)
    if not callable(function):
        raise InputError(f"grader {grader!r}: module {module_name!r} has no function {function_name!r}.")

    def grade(gold: str, text: str) -> Verdict:
        return _as_verdict(grader, function(gold, text))

    return grade


def _as_verdict(grader: str, result: Verdict | bool) -> Verdict:
    if isinstance(result, Verdict):
        return result
    if isinstance(result, bool):
        return Verdict.CORRECT if result else Verdict.WRONG
    raise TypeError(f"grader {grader!r} returned {result!r}; a bool or a Verdict is needed.")

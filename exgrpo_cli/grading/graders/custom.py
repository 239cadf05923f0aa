"""The `python:module:function` grader: a user's own function, run in a worker like math-verify."""

import inspect
from collections.abc import Callable

from exgrpo_cli.base.types import Verdict
from exgrpo_cli.config.names import load_function
from exgrpo_cli.grading.metadata import read_metadata

UserGrader = Callable[..., "Verdict | bool"]


def load(grader: str) -> Callable[[str, str, str | None], Verdict]:
    """The function that `python:module:function` names, as (gold, text, metadata) -> Verdict.

    `text` is the graded text of a response; a function with a parameter `metadata` gets the table of the question's
    metadata by that name, empty without any. The function returns a Verdict, or a bool: True is correct, False wrong.
    What it raises ends its worker: the answer counts as crashed.

    Raises:
        InputError: the setting has another form, or the module or function does not exist.
    """
    function: UserGrader = load_function("grading.grader", grader)

    wants_metadata = "metadata" in inspect.signature(function).parameters

    def grade(gold: str, text: str, metadata: str | None) -> Verdict:
        more = {"metadata": dict(read_metadata(metadata))} if wants_metadata else {}
        return _as_verdict(grader, function(gold, text, **more))

    return grade


def _as_verdict(grader: str, result: Verdict | bool) -> Verdict:
    if isinstance(result, Verdict):
        return result
    if isinstance(result, bool):
        return Verdict.CORRECT if result else Verdict.WRONG
    raise TypeError(f"grader {grader!r} returned {result!r}; a bool or a Verdict is needed.")

"""One class for each section of the settings; here the roles of fields and the bounds that every section checks.

A refusal names the setting, its value and what to use.
"""

import math
from collections.abc import Callable
from dataclasses import field
from functools import partial
from typing import Any, Literal, NoReturn

from exgrpo_cli.base.errors import InputError, nearest
from exgrpo_cli.config.names import PREFIX

Role = Literal["science", "run", "machine"]


def setting(default: Any, *, role: Role = "science", pinned: bool = False, resumable: bool = False) -> Any:
    """A field with its role.

    `science` says what is trained (a field without a role too), `run` which of the runs of the same settings, `machine`
    what machine and disk are asked for. `pinned` is settled by what a run finds when it starts, without being another
    run for it; `resumable` may change when a run goes on.
    """
    return field(default=default, metadata={"role": role, "pinned": pinned, "resumable": resumable})


def require(condition: bool, key: str, value: object, bound: str) -> None:
    """Raise InputError naming the setting, its value and the bound unless `condition` holds."""
    if not condition:
        raise InputError(f"{key} = {value!r} is out of range: use {bound}.")


def require_each(valid: Callable[[float], bool], bound: str, section: str, settings: object, *names: str) -> None:
    """Raise InputError for the first of the named fields that is not a finite number within the bound."""
    for name in names:
        value = getattr(settings, name)
        require(math.isfinite(value) and valid(value), f"{section}.{name}", value, bound)


require_positive = partial(require_each, lambda value: value > 0, "a finite number above 0")
require_fraction = partial(require_each, lambda value: 0 <= value <= 1, "a number from 0 to 1")
require_non_negative = partial(require_each, lambda value: value >= 0, "a finite number of at least 0")


def require_known(key: str, value: str, known: tuple[str, ...], *, python: bool = False) -> None:
    """Raise InputError unless `value` is one of `known` or, with `python`, names a function of the user."""
    if value in known or (python and value.startswith(PREFIX)):
        return
    raise InputError(f"{key} = {value!r} is not known.{nearest(value, known)}")


def refuse_together(section: str, settings: object, first: str, second: str, reason: str, instead: str) -> NoReturn:
    """Raise InputError for two fields of a section that contradict each other, with the reason and a way out."""
    stated = [f"{section}.{name} = {getattr(settings, name)!r}" for name in (first, second)]
    raise InputError(f"{stated[0]} contradicts {stated[1]}: {reason}; {instead}.")

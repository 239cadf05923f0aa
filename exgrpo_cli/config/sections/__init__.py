"""One class for each section of the settings; here what a field says of itself, and the check that holds all to it.

A refusal names the setting, its value and what to use.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass, field, fields
from typing import Any, Literal

from exgrpo_cli.base.errors import InputError, nearest, shown
from exgrpo_cli.config.names import PREFIX

Role = Literal["science", "run", "machine"]
SET = "a value of its own"
"""Stands for any value but the default."""


@dataclass(frozen=True, slots=True)
class Bound:
    """Values that a field may have."""

    holds: Callable[[Any], bool]
    says: str

    def check(self, key: str, value: object) -> None:
        """Raise InputError naming the setting, its value and the bound where it does not hold."""
        require(self.holds(value), key, value, self.says)


POSITIVE = Bound(lambda value: 0 < value < math.inf, "a finite number above 0")
NON_NEGATIVE = Bound(lambda value: 0 <= value < math.inf, "a finite number of at least 0")
FINITE = Bound(math.isfinite, "a finite number")
FRACTION = Bound(lambda value: 0 <= value < 1, "a number from 0 on, below 1")
SHARE_OF_ONE = Bound(lambda value: 0 < value <= 1, "a number above 0, at most 1")
DURATION = Bound(lambda value: 0 < value <= 1e6, "a number above 0, at most 1,000,000")
PAUSE = Bound(lambda value: 0 <= value <= 1e6, "a number from 0 to 1,000,000")
NAMED = Bound(lambda text: text.strip() not in ("", "."), "the name of a set, a file or a folder below this one")
ONE_LINE = Bound(lambda lines: all(line.isprintable() for line in lines), "one line each, without control characters")
ONE_WORD = Bound(
    lambda text: text.isprintable() and not set(text) & set(" '\"\\`$"),
    "a name without blanks, quotes or control characters",
)


def between(least: float, most: float) -> Bound:
    """From `least` to `most`, both included."""
    return Bound(lambda value: least <= value <= most, f"a number from {least} to {most}")


def at_least(least: float) -> Bound:
    """From `least` on."""
    return Bound(lambda value: value >= least, f"at least {least}")


class Needs:
    """Other fields of the section, one of which must have one of the values named, for a field to be read."""

    def __init__(self, why: str, **others: Any) -> None:
        """`others` are values, tuples of them, or SET; keys that a type of the section lacks do not count."""
        self.why = why
        self.others = {name: own if isinstance(own, tuple) or own is SET else (own,) for name, own in others.items()}


def setting(
    default: Any,
    within: Bound | tuple[str, ...] | None = None,
    needs: Needs | Mapping[Any, Needs] | None = None,
    *,
    role: Role = "science",
    pinned: bool = False,
    resumable: bool = False,
    runs: bool = False,
) -> Any:
    """A field with what it says of itself.

    `within` bounds it, or names what it (or each of its items) may be, PREFIX standing for functions of the user.
    `needs` is what it needs of other fields to be set, or {value: what that value needs}, PREFIX for functions of the
    user.

    `role`: `science` says what is trained (a field without a role too), `run` which of the runs of the same settings,
    `machine` what machine and disk are asked for. `pinned` is settled by what a run finds when it starts, without being
    another run for it; `resumable` may change when a run goes on. `runs` is code itself, whatever its value.
    """
    table = {SET: needs} if isinstance(needs, Needs) else needs or {}
    metadata = dict(within=within, needs=table, role=role, pinned=pinned, resumable=resumable, runs=runs)
    if isinstance(default, dict):
        return field(default_factory=lambda: dict(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def check(section: str, settings: Any) -> None:
    """Raise InputError for the first field that is out of its bound or unknown, or whose needs are not met."""
    for each in fields(settings):
        name, value, within = f"{section}.{each.name}", getattr(settings, each.name), each.metadata.get("within")
        if isinstance(within, Bound):
            within.check(name, value)
        elif within:
            for item in value if isinstance(value, tuple | dict) else (value,):
                require_known(name, item, within)
    if getattr(settings, "enabled", True):
        for each in fields(settings):
            _check_needs(section, settings, each)


def _check_needs(section: str, settings: Any, own: Field[Any]) -> None:
    table, value = own.metadata.get("needs"), getattr(settings, own.name)
    if not table:
        return
    kind = PREFIX if isinstance(value, str) and value.startswith(PREFIX) else value
    needs: Needs | None = table.get(kind) or (table.get(SET) if value != own.default else None)
    others, wanted, stated = needs.others if needs else {}, [], []
    # In lower case what is wanted is TOML.
    for other in [each for each in fields(settings) if each.name in others]:
        name, found, values = f"{section}.{other.name}", getattr(settings, other.name), others[other.name]
        if found != other.default if values is SET else found in values:
            return
        wanted.append(name if values is SET else f"{name} = {' or '.join(map(repr, values))}".lower())
        stated.append(f"{name} = {found!r}")
    if needs and stated:
        raise InputError(
            f"{section}.{own.name} = {value!r} contradicts {' and '.join(stated)}: {needs.why}; set "
            f"{' or '.join(wanted)}, or leave {section}.{own.name} at {repr(own.default).lower()}."
        )


def require(condition: bool, key: str, value: object, bound: str) -> None:
    """Raise InputError naming the setting, its value and the bound unless `condition` holds."""
    if not condition:
        raise InputError(f"{key} = {shown(value)} is out of range: use {bound}.")


def require_known(key: str, value: str, known: tuple[str, ...]) -> None:
    """Raise InputError unless `value` is one of `known`, or of the user's functions where these have their PREFIX."""
    if value not in known and not (PREFIX in known and value.startswith(PREFIX)):
        raise InputError(f"{key} = {shown(value)} is not known.{nearest(value, known)}")

"""Arms of a study: a method with a few settings of its own, in a regime; the on-policy arm is the baseline.

An axis is a list of arms that differ in one thing: the values of a setting (`--vary`), or methods, metrics and samplers
by their names, each a setting or two. Axes are crossed: an arm takes one value of each. Every arm of a seed and a
regime sees the same questions in the same order, since the question stream has a generator of its own.
"""

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from exgrpo_cli.base.errors import InputError
from exgrpo_cli.config.layers import DEFAULT_METHOD
from exgrpo_cli.config.names import DIRECTIONS


@dataclass(frozen=True, kw_only=True, slots=True)
class Arm:
    """One row of a study."""

    name: str
    method: str = DEFAULT_METHOD
    """Method preset, or a method's file."""
    assignments: tuple[str, ...] = ()
    """`section.key=value` texts that set the arm apart."""
    regime: str | None = None
    """Regime preset; None leaves the backbone's own task, start and lengths."""
    baseline: str = ""
    """Name of the arm that this one is compared with, its own where it is one."""

    @property
    def folder_name(self) -> str:
        """The arm's name as a folder name: `ent:min` is `ent-min`."""
        return re.sub(r"[^A-Za-z0-9._=-]+", "-", self.name)


BASELINE = Arm(name="on-policy", method="grpo")
DIRECTED = tuple(f":{direction}" for direction in DIRECTIONS)
REPLAY_ONLY = ("replay.", "objective.replay_", "objective.shaping", "objective.importance", "objective.clip_in_mixed")
"""Prefixes of settings that on-policy training does not read."""


def axis_arms(axis: str, text: str) -> list[Arm]:
    """Arms of one option of `exgrpo ablate`: "vary", "metric", "sampler" or "methods" with its value.

    One metric without a direction is compared both ways and with a random choice: `ent` is ent:min, ent:max and random.
    Raises InputError for an option without a value; whether names are known is for the configuration to say.
    """
    if axis == "vary":
        key, equals, values = text.partition("=")
        if not equals or "." not in key:
            raise InputError(f"--vary {text!r} is not of the form section.key=value,value.")
        settings = [f"{key}={value}" for value in split_list("--vary", values)]
        return [Arm(name=setting, assignments=(setting,)) for setting in settings]
    names = split_list(f"--{axis}", text)
    if axis == "methods":
        return [Arm(name=method_name(method), method=method) for method in names]
    if axis == "sampler":
        return [Arm(name=name, assignments=(f'replay.sampler="{name}"',)) for name in names]
    if len(names) == 1 and names[0] != "random" and not names[0].endswith(DIRECTED):
        names = [f"{names[0]}:min", f"{names[0]}:max", "random"]
    return [_metric_arm(name) for name in names]


def _metric_arm(text: str) -> Arm:
    """The arm of one metric, lowest first unless it says `:max`; a `python:module:function` keeps its own colons."""
    if text == "random":
        return Arm(name="random", assignments=('replay.metric="random"',))
    metric, _, direction = (text if text.endswith(DIRECTED) else f"{text}:min").rpartition(":")
    settings = (f'replay.metric="{metric}"', f'replay.direction="{direction}"')
    return Arm(name=f"{metric}:{direction}", assignments=settings)


def method_name(method: str) -> str:
    """A preset's own name, or that of a method's file without folder and suffix."""
    return Path(method).stem if method.endswith(".toml") else method


def cross(axes: Sequence[Sequence[Arm]], regimes: Sequence[str | None] = (None,)) -> list[Arm]:
    """Every combination of one arm of each axis, in each regime, with the baselines they are compared with.

    A baseline is on-policy training in the same regime with the same settings, those of replay left out, which it does
    not read. Where a method axis names it, that arm is the baseline; else it stands behind the arms of its regime.
    Raises InputError for two arms of one name.
    """
    plain = [arm.name for axis in axes for arm in axis if arm.method == BASELINE.method and not arm.assignments]
    on_policy = replace(BASELINE, name=plain[0]) if plain else BASELINE
    every: dict[str, Arm] = {}
    for regime in regimes:
        baselines: dict[str, Arm] = {}
        for parts in itertools.product(*axes):
            arm = _joined(parts, regime)
            # A replay setting stands first in its axis: those of a metric are its name and its direction.
            shared = [part for part in parts if part.assignments and not part.assignments[0].startswith(REPLAY_ONLY)]
            baseline = _joined([on_policy, *shared], regime)
            baselines[baseline.name] = replace(baseline, baseline=baseline.name)
            if arm.method == BASELINE.method:
                arm = baseline
            elif arm.name in every:
                raise InputError(f"arm {arm.name!r} is named twice: each arm of a study needs a name of its own.")
            every[arm.name] = replace(arm, baseline=baseline.name)
        every = {**every, **{name: arm for name, arm in baselines.items() if name not in every}}
    return list(every.values())


def _joined(parts: Sequence[Arm], regime: str | None) -> Arm:
    """One arm of several: their names and settings side by side; the method is the one that is not the default."""
    name = " ".join(part.name for part in parts)
    return Arm(
        name=name if regime is None else f"{regime}: {name}",
        method=next((part.method for part in parts if part.method != DEFAULT_METHOD), DEFAULT_METHOD),
        assignments=tuple(text for part in parts for text in part.assignments),
        regime=regime,
    )


def split_list(option: str, text: str) -> list[str]:
    """The names of a comma list. Raises InputError naming `option` where there are none."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise InputError(f"{option} {text!r} names nothing.")
    return names

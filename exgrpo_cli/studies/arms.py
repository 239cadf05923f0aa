"""Arms of a study: a method with a few settings of its own, in a regime; the on-policy arm is the baseline.

An axis is a list of arms that differ in one thing: the values of a setting (`--vary`), or methods, metrics and samplers
by their names, each a setting or two. Axes are crossed: an arm takes one value of each. Every arm of a seed and a
regime sees the same questions in the same order, since the question stream has a generator of its own.
"""

import itertools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from exgrpo_cli.base.errors import InputError, nearest
from exgrpo_cli.config.layers import DEFAULT_METHOD
from exgrpo_cli.config.names import DIRECTIONS, METRICS, PREFIX, SAMPLERS
from exgrpo_cli.presets import preset_names


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
REPLAY_ONLY = ("replay.", "objective.replay_", "objective.shaping", "objective.importance", "objective.clip_in_mixed")
"""How settings begin that on-policy training does not read."""


def axis_arms(axis: str, text: str) -> list[Arm]:
    """Arms of one option of `exgrpo ablate`: "vary", "metric", "sampler" or "methods" with its value.

    One metric without a direction is compared both ways and with a random choice: `ent` is ent:min, ent:max and random.
    Raises InputError for an unknown name or direction, for no name, and for two methods of one name.
    """
    if axis == "vary":
        key, equals, values = text.partition("=")
        if not equals or "." not in key:
            raise InputError(f"--vary {text!r} is not of the form section.key=value,value.")
        settings = [f"{key}={value}" for value in split_list("--vary", values)]
        return [Arm(name=setting, assignments=(setting,)) for setting in settings]
    names = split_list(f"--{axis}", text)
    if axis == "methods":
        return _method_arms(names)
    if axis == "sampler":
        for name in names:
            _require_name("--sampler", name, SAMPLERS)
        return [Arm(name=name, assignments=(f'replay.sampler="{name}"',)) for name in names]
    if len(names) == 1 and names[0] != "random" and _direction_of(names[0])[1] is None:
        names = [f"{names[0]}:min", f"{names[0]}:max", "random"]
    return [_metric_arm(name) for name in names]


def _metric_arm(text: str) -> Arm:
    """The arm of one metric, lowest first unless it says `:max`."""
    if text == "random":
        return Arm(name="random", assignments=('replay.metric="random"',))
    metric, direction = _direction_of(text)
    if metric == "random":
        raise InputError(f"--metric {text!r}: a random choice has no direction; write random.")
    _require_name("--metric", metric, METRICS)
    direction = direction or "min"
    settings = (f'replay.metric="{metric}"', f'replay.direction="{direction}"')
    return Arm(name=f"{metric}:{direction}", assignments=settings)


def _direction_of(text: str) -> tuple[str, str | None]:
    """`ppl:max` as ("ppl", "max"); a `python:module:function` keeps its own colons."""
    metric, colon, last = text.rpartition(":")
    if colon and last in DIRECTIONS:
        return metric, last
    if colon and not text.startswith(PREFIX):
        raise InputError(f"--metric {text!r}: the direction is min or max, not {last!r}.")
    return text, None


def _require_name(option: str, name: str, known: tuple[str, ...]) -> None:
    if not name.startswith(PREFIX) and name not in known:
        raise InputError(f"{option} {name!r} is not known.{nearest(name, known)}")


def _method_arms(methods: Sequence[str]) -> list[Arm]:
    known = preset_names("methods")
    arms: dict[str, Arm] = {}
    for method in methods:
        if not method.endswith(".toml") and method not in known:
            raise InputError(f"--methods: no method preset {method!r}.{nearest(method, known)}")
        arm = Arm(name=method_name(method), method=method)
        if arm.name in arms:
            raise InputError(
                f"--methods: {arms[arm.name].method} and {method} are both called {arm.name!r}: each arm of a study "
                "needs a name of its own, and a file's is its name without .toml."
            )
        arms[arm.name] = arm
    return list(arms.values())


def method_name(method: str) -> str:
    """A preset's own name, or that of a method's file without folder and suffix."""
    return Path(method).stem if method.endswith(".toml") else method


def regimes_of(text: str | None) -> list[str | None]:
    """The regimes of `--regimes`; without it None alone, the backbone's own task."""
    if text is None:
        return [None]
    known = preset_names("regimes")
    names = split_list("--regimes", text)
    for name in names:
        if name not in known:
            raise InputError(f"--regimes: no regime preset {name!r}.{nearest(name, known)}")
    return list(names)


def cross(axes: Sequence[Sequence[Arm]], regimes: Sequence[str | None] = (None,)) -> list[Arm]:
    """Every combination of one arm of each axis, in each regime, with the baselines they are compared with.

    A baseline is on-policy training in the same regime with the same settings, those of replay left out, which it does
    not read. Where a method axis names it, that arm is the baseline; else it stands behind the arms of its regime.
    Raises InputError for two arms of one name, or whose folders would have one name.
    """
    plain = [arm.name for axis in axes for arm in axis if arm.method == BASELINE.method and not arm.assignments]
    on_policy = replace(BASELINE, name=plain[0]) if plain else BASELINE
    every: dict[str, Arm] = {}
    for regime in regimes:
        baselines: dict[str, Arm] = {}
        for parts in itertools.product(*axes):
            arm = _joined(parts, regime)
            shared = [part for part in parts if part.assignments and not _is_of_replay(part)]
            baseline = _joined([on_policy, *shared], regime)
            baselines[baseline.name] = replace(baseline, baseline=baseline.name)
            if arm.method == BASELINE.method:
                arm = baseline
            elif arm.name in every:
                raise InputError(f"arm {arm.name!r} is named twice: each arm of a study needs a name of its own.")
            every[arm.name] = replace(arm, baseline=baseline.name)
        every = {**every, **{name: arm for name, arm in baselines.items() if name not in every}}
    require_own_folders(every.values())
    return list(every.values())


def _is_of_replay(arm: Arm) -> bool:
    return any(text.startswith(REPLAY_ONLY) for text in arm.assignments)


def _joined(parts: Sequence[Arm], regime: str | None) -> Arm:
    """One arm of several: their names and settings side by side; the method is the one that is not the default."""
    name = " ".join(part.name for part in parts)
    return Arm(
        name=name if regime is None else f"{regime}: {name}",
        method=next((part.method for part in parts if part.method != DEFAULT_METHOD), DEFAULT_METHOD),
        assignments=tuple(text for part in parts for text in part.assignments),
        regime=regime,
    )


def require_own_folders(arms: Iterable[Arm]) -> None:
    """Raise InputError for two arms whose folders would have one name."""
    folders: dict[str, str] = {}
    for arm in arms:
        other = folders.setdefault(arm.folder_name, arm.name)
        if other != arm.name:
            raise InputError(f"arms {other!r} and {arm.name!r} would both be in the folder {arm.folder_name}/.")


def split_list(option: str, text: str) -> list[str]:
    """The names of a comma list. Raises InputError naming `option` where there are none."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise InputError(f"{option} {text!r} names nothing.")
    return names

"""What a study compares: each arm is a method preset with a few settings of its own, the on-policy run is the baseline.

Axes are crossed: an arm takes one value of each. Every arm of a seed and a regime sees the same questions in the same
order, since the question stream has a generator of its own.
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
    method: str
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


def metric_arms(text: str) -> list[Arm]:
    """Arms of `--metric`.

    One metric is compared both ways and with a random choice: `ent` is ent:min, ent:max and random. A comma list is
    exactly those: `ent,ppl:max` is ent:min and ppl:max. Raises InputError for an unknown metric or direction.
    """
    names = split_list("--metric", text)
    if len(names) == 1 and names[0] != "random" and direction_of(names[0])[1] is None:
        metric = names[0]
        return [metric_arm(f"{metric}:min"), metric_arm(f"{metric}:max"), metric_arm("random")]
    return [metric_arm(name) for name in names]


def metric_arm(text: str) -> Arm:
    """The arm of one metric, lowest first unless it says `:max`."""
    if text == "random":
        return Arm(name="random", method="exgrpo", assignments=('replay.metric="random"',))
    metric, direction = direction_of(text)
    direction = direction or "min"
    if metric == "random":
        raise InputError(f"--metric {text!r}: a random choice has no direction; write random.")
    if not metric.startswith(PREFIX) and metric not in METRICS:
        raise InputError(f"--metric {metric!r} is not known.{nearest(metric, METRICS)}")
    return Arm(
        name=f"{metric}:{direction}",
        method="exgrpo",
        assignments=(f'replay.metric="{metric}"', f'replay.direction="{direction}"'),
    )


def direction_of(text: str) -> tuple[str, str | None]:
    """`ppl:max` as ("ppl", "max"); a `python:module:function` keeps its own colons."""
    metric, colon, last = text.rpartition(":")
    if colon and last in DIRECTIONS:
        return metric, last
    if colon and not text.startswith(PREFIX):
        raise InputError(f"--metric {text!r}: the direction is min or max, not {last!r}.")
    return text, None


def sampler_arms(text: str) -> list[Arm]:
    """Arms of `--sampler`: one question sampler each."""
    arms = []
    for name in split_list("--sampler", text):
        if not name.startswith(PREFIX) and name not in SAMPLERS:
            raise InputError(f"--sampler {name!r} is not known.{nearest(name, SAMPLERS)}")
        arms.append(Arm(name=name, method="exgrpo", assignments=(f'replay.sampler="{name}"',)))
    return arms


def method_arms(text: str) -> list[Arm]:
    """Arms of `--methods`: one method preset each, or a method's file, which names the arm.

    Raises InputError for an unknown preset, and for two methods of one name.
    """
    known = preset_names("methods")
    arms: dict[str, Arm] = {}
    for method in split_list("--methods", text):
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


def vary_arms(text: str) -> list[Arm]:
    """Arms of `--vary section.key=v1,v2`: ExGRPO with each value of one setting."""
    key, equals, values = text.partition("=")
    if not equals or "." not in key:
        raise InputError(f"--vary {text!r} is not of the form section.key=value,value.")
    return [
        Arm(name=f"{key}={value}", method="exgrpo", assignments=(f"{key}={value}",))
        for value in split_list("--vary", values)
    ]


def regimes_of(text: str | None) -> list[str | None]:
    """The regimes of `--regimes`, or none."""
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
            # On-policy training does not read what is about replay alone.
            shared = [part for part in parts if not any(text.startswith(REPLAY_ONLY) for text in part.assignments)]
            shared = [part for part in shared if part.assignments]
            baseline = _joined([on_policy, *shared], regime)
            baseline = replace(baseline, baseline=baseline.name)
            arm = _joined(parts, regime)
            if arm.method == BASELINE.method:
                arm = baseline
            elif arm.name in every:
                raise InputError(f"arm {arm.name!r} is named twice: each arm of a study needs a name of its own.")
            every[arm.name] = replace(arm, baseline=baseline.name)
            baselines[baseline.name] = baseline
        every = every | {name: arm for name, arm in baselines.items() if name not in every}
    require_own_folders(every.values())
    return list(every.values())


def require_own_folders(arms: Iterable[Arm]) -> None:
    """Raise InputError for two arms whose folders would have one name."""
    folders: dict[str, str] = {}
    for arm in arms:
        other = folders.setdefault(arm.folder_name, arm.name)
        if other != arm.name:
            raise InputError(f"arms {other!r} and {arm.name!r} would both be in the folder {arm.folder_name}/.")


def _joined(parts: Sequence[Arm], regime: str | None) -> Arm:
    """One arm of several: their names and settings side by side; the method is the one that is not the default."""
    methods = [part.method for part in parts if part.method != DEFAULT_METHOD]
    name = " ".join(part.name for part in parts)
    return Arm(
        name=name if regime is None else f"{regime}: {name}",
        method=methods[0] if methods else DEFAULT_METHOD,
        assignments=tuple(text for part in parts for text in part.assignments),
        regime=regime,
    )


def split_list(option: str, text: str) -> list[str]:
    """The names of a comma list. Raises InputError naming `option` where there are none."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise InputError(f"{option} {text!r} names nothing.")
    return names

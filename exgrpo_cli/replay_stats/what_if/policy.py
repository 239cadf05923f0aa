"""Another policy: what a user names of it, checked, and how it is written."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from exgrpo_cli.base.errors import InputError, nearest
from exgrpo_cli.config.names import DIRECTIONS, DRAWS
from exgrpo_cli.config.sections.replay import ReplaySettings
from exgrpo_cli.replay_stats.record import RunRecord

REPETITIONS = 4
"""Draws by another sampler or priority at each step; their mean is reported."""
_UNIT_KEYS = ("priority", "draw", "exponent", "age_decay", "max_drift")
_KEYS = ("sampler", "metric", "direction", "mu", "sigma", *_UNIT_KEYS)


@dataclass(frozen=True, kw_only=True, slots=True)
class WhatIf:
    """Another policy: what differs from the run's own. Empty names are not asked about."""

    sampler: str = ""
    mu: float
    sigma: float
    metric: str = ""
    direction: str
    units: ReplaySettings | None = None
    """The run's settings with another priority, or another way to draw by it."""
    max_drift: float | None = None
    """Another bound on the drift."""


def parse_what_if(text: str, own: ReplaySettings) -> WhatIf:
    """Read `sampler=linear,metric=ppl:max,mu=0.4`; what is not named is as in the run.

    Raises InputError for an unknown key, sampler, metric or number.
    """
    given: dict[str, str] = {}
    for item in text.split(","):
        key, equals, value = (part.strip() for part in item.partition("="))
        key = key.removeprefix("replay.")
        if not equals or not value or key in given:
            raise InputError(f"--what-if {text!r}: {item!r} is not a new key=value; write sampler=linear,metric=ppl.")
        if key not in _KEYS:
            raise InputError(f"--what-if {text!r}: unknown key {key!r}.{nearest(key, _KEYS)}")
        given[key] = value
    metric, direction = _split_direction(given.get("metric", ""), given.get("direction", own.direction))
    if direction != given.get("direction", direction):
        raise InputError(f"--what-if {text!r}: metric says {direction} and direction {given['direction']}; give one.")
    if "direction" in given and not metric:
        metric = own.metric
    sampler = given.get("sampler", own.sampler if {"mu", "sigma"} & set(given) else "")
    if sampler != "normal" and {"mu", "sigma"} & set(given):
        raise InputError(f"--what-if {text!r}: mu and sigma are those of the sampler normal, not of {sampler}.")
    return WhatIf(
        sampler=sampler,
        mu=_number(text, "mu", given.get("mu", str(own.mu))),
        sigma=_number(text, "sigma", given.get("sigma", str(own.sigma))),
        metric=metric,
        direction=direction,
        units=_other_units(text, given, own),
        max_drift=_number(text, "max_drift", given["max_drift"]) if "max_drift" in given else None,
    )


def _other_units(text: str, given: Mapping[str, str], own: ReplaySettings) -> ReplaySettings | None:
    """The run's settings with what is given of the priority; None where nothing is."""
    changed: dict[str, Any] = {key: given[key] for key in ("priority", "draw") if key in given}
    changed |= {key: _number(text, key, given[key]) for key in ("exponent", "age_decay") if key in given}
    if not changed:
        return None
    if changed.get("draw", own.draw) not in DRAWS:
        raise InputError(
            f"--what-if {text!r}: draw = {changed['draw']!r} is not known.{nearest(changed['draw'], DRAWS)}"
        )
    if changed.get("priority") == "latest" and changed.get("draw", "top") == "top":
        # A step number is an order, not a weight.
        changed["draw"] = "top"
    return replace(own, **changed)


def _split_direction(metric: str, direction: str) -> tuple[str, str]:
    """`ent:max` is metric `ent` with direction `max`, as in `exgrpo ablate`."""
    name, colon, last = metric.rpartition(":")
    if colon and last in DIRECTIONS:
        metric, direction = name, last
    if direction not in DIRECTIONS:
        raise InputError(f"--what-if: direction = {direction!r} is not known.{nearest(direction, DIRECTIONS)}")
    return metric, direction


def _number(text: str, key: str, value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        raise InputError(f"--what-if {text!r}: {key} = {value!r} is not a number.") from None
    if not np.isfinite(number) or (key == "sigma" and number <= 0):
        raise InputError(f"--what-if {text!r}: {key} = {value} is out of range: use a finite number, sigma above 0.")
    return number


def require_questions(record: RunRecord, what_if: WhatIf) -> None:
    """Raise InputError where the run has no such draw: of questions by a sampler, of a question's rows by a metric."""
    composition = record.config.replay.composition
    asked = "sampler" if what_if.sampler and composition != "replace" else ""
    asked = "metric" if what_if.metric and record.config.replay.draws_units else asked
    if asked:
        raise InputError(
            f"--what-if: {record.run} draws by no {asked} (replay.composition = {composition!r}): ask for another "
            f"{'priority or max_drift' if record.config.replay.draws_units else 'metric'}."
        )


def sampler_title(policy: WhatIf | ReplaySettings) -> str:
    """The sampler's name, with mean and deviation where it is the normal one."""
    return f"normal({policy.mu:g}, {policy.sigma:g})" if policy.sampler == "normal" else policy.sampler


def metric_title(policy: WhatIf | ReplaySettings) -> str:
    """The metric with its direction, which a random choice has not."""
    return policy.metric if policy.metric == "random" else f"{policy.metric}:{policy.direction}"


def priority_title(rules: ReplaySettings) -> str:
    """The priority with what else orders or weighs units."""
    fading = f", fading in {rules.age_decay:g} steps" if rules.age_decay else ""
    power = f"^{rules.exponent:g}" if rules.exponent != 1 else ""
    return f"{rules.priority}{power}, {rules.draw}{fading}"

"""Settings of replay that contradict each other: each refusal names both, the reason and what to use instead."""

import pytest

from exgrpo_cli.base.errors import InputError
from exgrpo_cli.config.contradictions import READ_BY
from exgrpo_cli.config.layers import build_config

GROUPS = ("composition=append", "store=all", "unit=group")
ROWS = ("composition=append", "store=all")
REFILL = ("composition=refill", "store=all")

REFUSED = [
    # Settings of `replay` (or of the section named), then what the line must say.
    (("store=all",), ["replay.composition = 'replace'", "replay.store = 'all'", "store = 'successes'"]),
    (("composition=append", "unit=group"), ["replay.unit = 'group'", "replay.store = 'successes'", "unit = 'row'"]),
    (("composition=refill",), ["replay.composition = 'refill'", "replay.store = 'successes'", "store = 'all'"]),
    ((*GROUPS, "max_per_question=2"), ["replay.unit = 'group'", "replay.max_per_question = 2", "replay.capacity"]),
    ((*REFILL, "rollout.max_rounds=3"), ["replay.composition = 'refill'", "rollout.max_rounds = 3", "at 1"]),
    ((*REFILL, "max_per_question=2"), ["replay.max_per_question = 2", "replay.composition = 'refill'", "append"]),
    (("store=none",), ["replay.store = 'none'", "replay.warm_start = ''", "--replay-from"]),
    (
        ("store=none", "warm_start=x", "collect_before_start=true"),
        ["replay.store = 'none'", "replay.collect_before_start = True", "leave"],
    ),
    (
        ("optim.offload_during_rollouts=true", "optim.engine=deepspeed"),
        ["optim.offload_during_rollouts = True", "optim.engine = 'deepspeed'", "optim.offload = true"],
    ),
    (("lower_bound=-1",), ["replay.lower_bound = -1", "replay.store = 'successes'", "store = 'all'"]),
    (("per_question=8",), ["replay.per_question = 8", "rollout.group_size = 8", "'join'"]),
    (("advantage_over=own",), ["replay.advantage_over = 'own'", "replay.per_question = 1", "at least 2"]),
    (("metric=reward",), ["replay.metric = 'reward'", "replay.store = 'successes'", "store = 'all'"]),
    (("max_drift=0.1",), ["replay.max_drift = 0.1", "replay.composition = 'replace'", "append or refill"]),
    ((*ROWS, "ess_bound=0.1"), ["replay.ess_bound = 0.1", "replay.composition = 'append'", "replace"]),
    ((*ROWS, "draw=top", "exponent=0.5"), ["replay.exponent = 0.5", "replay.draw = 'top'", "'proportional'"]),
    ((*ROWS, "draw=top", "bias_correction=0.4"), ["replay.bias_correction = 0.4", "replay.draw = 'top'", "leave"]),
    ((*ROWS, "priority=latest"), ["replay.priority = 'latest'", "replay.draw = 'proportional'", "draw = 'top'"]),
    ((*ROWS, "priority=signal"), ["replay.priority = 'signal'", "replay.unit = 'row'", "unit = 'group'"]),
    ((*ROWS, "priority=python:a:b"), ["replay.priority = 'python:a:b'", "replay.capacity = 0", "replay.max_age"]),
    ((*ROWS, "max_drift=0.1"), ["replay.max_drift = 0.1", "replay.capacity = 0", "replay.max_age"]),
    (("eviction=lowest-priority", "capacity=9"), ["replay.eviction", "replay.composition = 'replace'", "append"]),
    ((*ROWS, "eviction=lowest-priority"), ["replay.eviction", "replay.capacity = 0", "'oldest'"]),
    (("eviction=highest-entropy", "capacity=9"), ["replay.eviction", "replay.capacity = 9", "max_per_question"]),
    (("warmup_steps=3",), ["replay.warmup_steps = 3", "replay.collect_before_start = False", "= true"]),
    (("retirement=false", "retire_at=3"), ["replay.retire_at = 3", "replay.retirement = False", "= true"]),
    (("retire_at=9",), ["replay.retire_at = 9", "rollout.group_size = 8", "at most K"]),
    (
        ("objective.baseline=history",),
        ["objective.baseline = 'history'", "replay.enabled = True", "replay.enabled = false"],
    ),
    (("lower_bound=4", "upper_bound=4"), ["replay.lower_bound = 4", "replay.upper_bound = 4", "raise the other"]),
    (("upper_bound=8",), ["replay.upper_bound = 8", "replay.retirement = True", "below K", "retirement = false"]),
    (
        ("composition=join", "min_stored=9", "max_per_question=4"),
        ["replay.min_stored = 9", "replay.max_per_question = 4", "at most"],
    ),
    (
        (*ROWS, "draw=top", "priority=python:a:b", "capacity=9", "age_decay=5"),
        ["replay.age_decay = 5.0", "replay.priority = 'python:a:b'", "units.step"],
    ),
    (("retire_at=5", "upper_bound=5"), ["replay.upper_bound = 5", "replay.retire_at = 5", "below"]),
    (
        (*ROWS, "objective.replay_surrogate=likelihood"),
        ["objective.replay_surrogate = 'likelihood'", "replay.store = 'all'", "'successes'"],
    ),
    (
        ("objective.replay_surrogate=likelihood", "objective.importance=old"),
        ["objective.replay_surrogate = 'likelihood'", "objective.importance = 'old'", "'behaviour'"],
    ),
    (
        ("composition=append", "bias_correction=0.4", "objective.replay_surrogate=likelihood"),
        ["objective.replay_surrogate = 'likelihood'", "replay.bias_correction = 0.4", "leave"],
    ),
    (
        ("objective.replay_surrogate=clipped", "objective.shaping=false"),
        ["objective.replay_surrogate = 'clipped'", "objective.shaping = False", "leave shaping out"],
    ),
]


def assignments(settings: tuple[str, ...]) -> list[str]:
    return [text if text.startswith(("objective.", "rollout.", "optim.")) else f"replay.{text}" for text in settings]


@pytest.mark.parametrize(("settings", "said"), REFUSED)
def test_contradictions_are_refused_in_one_line(settings: tuple[str, ...], said: list[str]) -> None:
    with pytest.raises(InputError) as refused:
        build_config(assignments=assignments(settings))
    assert all(part in str(refused.value) for part in said), str(refused.value)
    assert "\n" not in str(refused.value)


ELSEWHERE = {
    "sampler": "linear", "mu": 0.3, "sigma": 0.2, "count_fresh_only": True, "ess_bound": 0.5, "metric": "ppl",
    "direction": "max", "per_question": 2, "advantage_over": "own", "max_score_staleness": 3, "cooldown": 2,
    "min_stored": 2, "ratio": 0.25, "unit": "group", "max_per_question": 4, "priority": "advantage", "draw": "top",
    "exponent": 0.5, "age_decay": 9.0, "bias_correction": 0.4, "max_drift": 0.1, "order": "first",
}  # fmt: skip


@pytest.mark.parametrize("composition", ["replace", "join", "append", "refill"])
@pytest.mark.parametrize("name", READ_BY)
def test_a_setting_that_the_composition_does_not_read_is_refused(name: str, composition: str) -> None:
    """The value alone is what stands in the way: at its default the same configuration is accepted."""
    store = {"replace": "successes", "join": "all", "append": "all", "refill": "all"}[composition]
    base = [f"replay.composition={composition}", f"replay.store={store}"]
    build_config(assignments=base)
    if composition in READ_BY[name]:
        return
    with pytest.raises(InputError, match=rf"replay\.{name} = .*contradicts replay\.composition = '{composition}'"):
        build_config(assignments=[*base, f"replay.{name}={str(ELSEWHERE[name]).lower()}"])


@pytest.mark.parametrize(
    "settings",
    [
        (*GROUPS, "priority=headroom", "draw=top", "max_drift=0.001", "capacity=512", "order=first"),
        (*GROUPS, "priority=latest", "draw=top", "capacity=512"),
        (*ROWS, "priority=reward", "exponent=0.6", "age_decay=500", "bias_correction=0.4", "capacity=50000"),
        (*REFILL, "priority=signal", "capacity=64", "eviction=lowest-priority"),
        ("composition=join", "store=none", "warm_start=run", "metric=random", "per_question=2"),
        ("composition=append", "objective.replay_surrogate=likelihood"),
        ("count_fresh_only=true", "upper_bound=1", "retire_at=5"),
        (*ROWS, "lower_bound=-1", "upper_bound=8", "retirement=false"),
        ("per_question=3", "advantage_over=own"),
    ],
)
def test_what_methods_are_made_of_is_accepted(settings: tuple[str, ...]) -> None:
    build_config(assignments=assignments(settings))


def test_a_run_without_replay_reads_none_of_it() -> None:
    build_config(method="grpo", assignments=["replay.store=all"])

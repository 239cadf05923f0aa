"""Settings of replay that contradict each other: each refusal names both, the reason and what to use instead."""

import tomllib

import pytest

from exgrpo_cli.base.errors import InputError
from exgrpo_cli.config.layers import build_config
from exgrpo_cli.config.settings import SECTIONS, resolve, to_toml

GROUPS = ("composition=append", "store=all", "unit=group")
ROWS = ("composition=append", "store=all")
REFILL = ("composition=refill", "store=all")
LIKELIHOOD = "objective.replay_surrogate=likelihood"

REFUSED = [
    # Settings of `replay` (or of the section named), then what the line must say.
    (("store=all",), ["replay.store = 'all'", "belongs to composition = 'join' or 'append' or 'refill'"]),
    (
        ("composition=append", "unit=group"),
        ["replay.unit = 'group'", "replay.store = 'successes'", "unit at 'row'"],
    ),
    (
        ("composition=refill", "store=successes"),
        ["replay.store = 'successes' is not known", "not to composition = 'refill'"],
    ),
    ((*GROUPS, "max_per_question=2"), ["replay.unit = 'group'", "replay.max_per_question = 2", "capacity"]),
    ((*REFILL, "rollout.max_rounds=3"), ["replay.composition = 'refill'", "rollout.max_rounds = 3", "at 1"]),
    (("store=none",), ["replay.store = 'none'", "replay.warm_start = ''", "--replay-from"]),
    (("store=none", "warm_start=x", "collect_before_start=true"), ["replay.collect_before_start = True", "at false"]),
    (("optim.offload_during_rollouts=true", "optim.engine=deepspeed"), ["optim.engine = 'deepspeed'", "optim.offload"]),
    (("lower_bound=-1",), ["replay.lower_bound = -1", "replay.store = 'successes'", "store = 'all'"]),
    (("per_question=8",), ["replay.per_question = 8", "rollout.group_size = 8", "'join'"]),
    (("advantage_over=own",), ["replay.advantage_over = 'own'", "replay.per_question = 1", "set replay.per_question"]),
    (("metric=reward",), ["replay.metric = 'reward'", "replay.store = 'successes'", "store = 'all' or 'none'"]),
    (("prioritty=reward",), ["unknown key replay.prioritty. Did you mean 'replay.priority'?"]),
    ((*ROWS, "draw=top", "exponent=0.5"), ["replay.exponent = 0.5", "replay.draw = 'top'", "'proportional'"]),
    ((*ROWS, "draw=top", "bias_correction=0.4"), ["replay.bias_correction = 0.4", "replay.draw = 'top'", "leave"]),
    ((*ROWS, "priority=latest"), ["replay.priority = 'latest'", "replay.draw = 'proportional'", "draw = 'top'"]),
    ((*ROWS, "priority=signal"), ["replay.priority = 'signal'", "replay.unit = 'row'", "unit = 'group'"]),
    ((*ROWS, "priority=python:a:b"), ["replay.priority = 'python:a:b'", "replay.capacity = 0", "replay.max_age"]),
    ((*ROWS, "max_drift=0.1"), ["replay.max_drift = 0.1", "replay.capacity = 0", "replay.max_age"]),
    (
        ("eviction=lowest-priority", "capacity=9"),
        ["'lowest-priority'", "belongs to composition = 'append' or 'refill'"],
    ),
    (
        (*ROWS, "eviction=lowest-priority", "priority=python:a:b", "capacity=9"),
        ["replay.eviction = 'lowest-priority'", "replay.priority = 'python:a:b'", "'uniform' or 'latest'"],
    ),
    (("sigma=0.0",), ["replay.sigma = 0.0 is out of range: use a finite number above 0"]),
    (("metric=entropy",), ["replay.metric = 'entropy' is not known. Did you mean 'ent'"]),
    (("sampler=lineer",), ["replay.sampler = 'lineer' is not known. Did you mean 'linear'"]),
    (("eviction=oldst",), ["replay.eviction = 'oldst' is not known", "Did you mean 'oldest'"]),
    (("warmup_steps=3",), ["replay.warmup_steps = 3", "replay.collect_before_start = False", "= true"]),
    (("retirement=false", "retire_at=3"), ["replay.retire_at = 3", "replay.retirement = False", "= true"]),
    (("objective.baseline=history",), ["objective.baseline = 'history'", "= True", "replay.enabled = false"]),
    (("lower_bound=4", "upper_bound=4"), ["replay.lower_bound = 4", "replay.upper_bound = 4", "raise the other"]),
    (("upper_bound=8",), ["replay.upper_bound = 8", "replay.retirement = True", "below K", "retirement = false"]),
    (("composition=join", "min_stored=9", "max_per_question=4"), ["replay.min_stored = 9", "= 4", "at most"]),
    (
        (*ROWS, "draw=top", "priority=python:a:b", "capacity=9", "age_decay=5"),
        ["age_decay = 5.0", "replay.priority = 'python:a:b' and replay.draw = 'top'", "units.step"],
    ),
    (("retire_at=5", "upper_bound=5"), ["replay.upper_bound = 5", "replay.retire_at = 5", "below"]),
    ((*ROWS, LIKELIHOOD), ["objective.replay_surrogate = 'likelihood'", "replay.store = 'all'", "'successes'"]),
    ((LIKELIHOOD, "objective.importance=old"), ["= 'likelihood'", "objective.importance = 'old'", "at 'behaviour'"]),
    (("objective.replay_surrogate=raw", "objective.shaping=false"), ["objective.shaping = False", "at true"]),
]


def assignments(settings: tuple[str, ...]) -> list[str]:
    return [text if text.startswith(("objective.", "rollout.", "optim.")) else f"replay.{text}" for text in settings]


@pytest.mark.parametrize(("settings", "said"), REFUSED)
def test_contradictions_are_refused_in_one_line(settings: tuple[str, ...], said: list[str]) -> None:
    with pytest.raises(InputError) as refused:
        build_config(assignments=assignments(settings))
    assert all(part in str(refused.value) for part in said), str(refused.value)
    assert "\n" not in str(refused.value)


KINDS = {kind.__name__.lower(): kind for kind in SECTIONS["replay"]}
KEYS = sorted({name for kind in KINDS.values() for name in kind.__dataclass_fields__})


@pytest.mark.parametrize("composition", KINDS)
def test_a_key_of_another_place_is_unknown_and_the_place_that_has_it_is_named(composition: str) -> None:
    """Whatever its value: a place has no such key."""
    own = KINDS[composition].__dataclass_fields__
    for name in KEYS:
        value = next(kind() for kind in KINDS.values() if name in kind.__dataclass_fields__)
        assignment = f"replay.{name}={str(getattr(value, name)).lower()}"
        having = " or ".join(repr(other) for other, kind in KINDS.items() if name in kind.__dataclass_fields__)
        if name not in own:
            with pytest.raises(InputError) as refused:
                build_config(assignments=[f"replay.composition={composition}", assignment])
            belongs = f"It belongs to composition = {having}, not to composition = '{composition}'."
            assert f"unknown key replay.{name}. {belongs}" in str(refused.value)


def test_keys_of_a_place_that_a_stronger_layer_replaces_go_with_it() -> None:
    """headroom-drift in the places of groups that are not mixed: `unit` and `ratio` were those of `append`."""
    config = build_config(method="headroom-drift", assignments=["replay.composition=refill"])
    assert config.replay == KINDS["refill"](
        priority="headroom", draw="top", max_drift=0.001, capacity=512, order="first", start_threshold=0.0,
        retirement=False,
    )  # fmt: skip


@pytest.mark.parametrize("method", ["exgrpo", "repo", "adv-per", "trl-refill"])
def test_a_place_is_written_with_its_own_keys_and_read_back(method: str) -> None:
    config = build_config(method=method)
    text = to_toml(config)
    assert ("sampler" in text) == (method == "exgrpo") and ("priority" in text) == (method in ("adv-per", "trl-refill"))
    assert resolve([("config.toml", tomllib.loads(text))]) == config


@pytest.mark.parametrize(
    "settings",
    [
        (*GROUPS, "priority=headroom", "draw=top", "max_drift=0.001", "capacity=512", "order=first"),
        (*GROUPS, "priority=latest", "draw=top", "capacity=512"),
        (*ROWS, "priority=reward", "exponent=0.6", "age_decay=500", "bias_correction=0.4", "capacity=50000"),
        (*REFILL, "priority=signal", "capacity=64", "eviction=lowest-priority"),
        ("composition=join", "store=none", "warm_start=run", "metric=random", "per_question=2"),
        ("composition=append", LIKELIHOOD),
        ("count_fresh_only=true", "upper_bound=1", "retire_at=5"),
        (*ROWS, "lower_bound=-1", "upper_bound=8", "retirement=false"),
        ("per_question=3", "advantage_over=own"),
        # At and above K it is K; what leaves a store without a limit is never asked; entropies are those last measured.
        ("retire_at=9",),
        (*ROWS, "eviction=lowest-priority"),
        ("eviction=highest-entropy", "capacity=9"),
    ],
)
def test_what_methods_are_made_of_is_accepted(settings: tuple[str, ...]) -> None:
    build_config(assignments=assignments(settings))


def test_a_run_without_replay_reads_none_of_it() -> None:
    assert build_config(method="grpo", assignments=["replay.max_drift=0.1"]) == build_config(method="grpo")

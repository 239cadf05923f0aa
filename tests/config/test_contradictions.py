"""Settings of replay that contradict each other: each refusal names both, the reason and what to use instead."""

import tomllib
from collections.abc import Sequence

import pytest

from exgrpo_cli.base import data, errors
from exgrpo_cli.config.layers import build_config
from exgrpo_cli.config.settings import SECTIONS, resolve, to_toml

TABLES = data.tables(__file__, "contradictions.toml")


def assignments(settings: Sequence[str]) -> list[str]:
    return [text if text.split("=")[0].split(".")[0] in SECTIONS else f"replay.{text}" for text in settings]


@pytest.mark.parametrize(("settings", "said"), TABLES["refused"].items())
def test_contradictions_are_refused_in_one_line(settings: str, said: list[str]) -> None:
    with pytest.raises(errors.InputError) as refused:
        build_config(assignments=assignments(settings.split()))
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
            with pytest.raises(errors.InputError) as refused:
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


@pytest.mark.parametrize("settings", TABLES["accepted"])
def test_what_methods_are_made_of_is_accepted(settings: str) -> None:
    build_config(assignments=assignments(settings.split()))


def test_a_run_without_replay_reads_none_of_it() -> None:
    assert build_config(method="grpo", assignments=["replay.max_drift=0.1"]) == build_config(method="grpo")

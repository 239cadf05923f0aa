"""Roles of settings, and sections of several types."""

from dataclasses import dataclass, fields
from typing import Literal

import pytest

from exgrpo_cli.base.errors import InputError
from exgrpo_cli.config.sections.data import DataSettings
from exgrpo_cli.config.settings import NOT_HASHED, PINNED, RESUMABLE, SECTIONS, read_section


def test_which_settings_each_role_holds():
    assert {
        *("run." + name for name in ("seed", "budget_amount", "claims", "device", "threads", "nproc", "rank_timeout")),
        *(
            "run." + name
            for name in ("phase_timeout", "save_every", "save_minutes", "keep_checkpoints", "samples_per_step")
        ),
        *("run.plots", "run.log", "backbone.dtype", "rollout.gpu_memory_fraction", "optim.offload_during_rollouts"),
        *("rollout.max_logprob_gap", "optim.engine"),
        *("grading." + name for name in ("workers", "deadline_seconds", "memory_mb")),
    } == NOT_HASHED
    others = {"optim.engine", "optim.horizon", "optim.warmup_steps", "grading.workers"}
    assert {"run.threads", "run.device", "run.nproc", *others} == PINNED
    of_run = ("steps", "claims", "nproc", "rank_timeout", "phase_timeout")
    assert {*("run." + name for name in of_run), "optim.horizon", "rollout.max_logprob_gap"} == RESUMABLE


@dataclass(frozen=True, kw_only=True)
class Beside:
    place: Literal["beside"] = "beside"
    ratio: float = 0.5


@dataclass(frozen=True, kw_only=True)
class Instead:
    place: Literal["instead"] = "instead"
    mu: float = 0.5


def read(*tables):
    return read_section("replay", (Beside, Instead), tables)


def test_a_section_of_several_types_is_picked_by_its_key():
    assert read() == read(("preset", {"place": "beside"})) == Beside()
    assert read(("preset", {"place": "beside"}), ("--set", {"place": "instead", "mu": 1})) == Instead(mu=1.0)
    with pytest.raises(InputError, match=r"^f: unknown key replay.mu. It belongs to place = 'instead'."):
        read(("f", {"mu": 1.0}))
    with pytest.raises(InputError, match=r"^f: unknown key replay.mi. Did you mean 'replay.mu'"):
        read(("f", {"place": "instead", "mi": 1.0}))
    with pytest.raises(InputError, match=r"^f: replay.place = 'insted' is not known. Did you mean 'instead'"):
        read(("f", {"place": "insted"}))


def test_what_a_field_needs_are_keys_of_its_section():
    """A misspelt one would never be asked for."""
    for section, kinds in SECTIONS.items():
        known = {each.name: each for kind in kinds for each in fields(kind)}
        for own in known.values():
            for needs in own.metadata.get("needs", {}).values():
                assert set(needs.others) <= set(known), f"{section}.{own.name}"


def test_the_barred_share_is_that_of_the_seed_and_the_questions_alone():
    ids = [f"{number:016x}" for number in range(2000)]
    halves = [[DataSettings(barred=0.5).is_barred(each, seed) for each in ids] for seed in (0, 0, 1)]
    assert halves[0] == halves[1] != halves[2] and all(900 < sum(half) < 1100 for half in halves)
    # A larger share holds the smaller one; no share, nobody.
    fewer = [DataSettings(barred=0.2).is_barred(each, 0) for each in ids]
    assert all(half or not few for half, few in zip(halves[0], fewer, strict=True)) and 320 < sum(fewer) < 480
    assert not any(DataSettings().is_barred(each, 0) for each in ids)
    # Recorded: every version has to bar the same.
    assert [number for number, half in enumerate(halves[0][:16]) if half] == [0, 4, 7, 9, 10, 11, 13]

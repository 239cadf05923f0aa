"""Trackers beside the journal; those that are installed are asked to write and are read back."""

import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from exgrpo_cli.base.errors import InputError
from exgrpo_cli.config.layers import build_config
from exgrpo_cli.machine import settle, survey
from exgrpo_cli.training.trackers import numbers, open_trackers


def line(step: int, reward: float) -> dict[str, float | int | str]:
    return {"step": step, "phase": "mixed", "reward/mean": reward, "replay/used": 2 * step}


def track(name: str, folder: Path, first: int, last: int, scale: float) -> None:
    """Steps first .. last of a run that goes on after step first - 1; the reward of step s is scale * s."""
    with ExitStack() as stack:
        (log,) = open_trackers((name,), build_config(), folder, stack, step=first - 1)
        for step in range(first, last + 1):
            log(line(step, scale * step))


def test_numbers_alone_are_tracked_and_nothing_by_default(tmp_path: Path) -> None:
    assert numbers(line(3, 0.5)) == {"reward/mean": 0.5, "replay/used": 6}
    assert open_trackers((), build_config(), tmp_path, ExitStack(), step=0) == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_a_package_that_is_missing_is_named_with_its_extra(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    _, plan = settle.settle(build_config(assignments=[f'run.log=["{name}"]']), survey.survey_machine())
    with pytest.raises(InputError, match=rf"cannot run tiny: {name} is not installed \(pip install .*\[trackers\]'\)"):
        settle.require_runnable(plan)


@pytest.mark.engines
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_shows_a_resumed_run_as_one(tmp_path: Path) -> None:
    """Steps 1-4 are logged, the run is resumed after step 2: steps 3 and 4 of the first part no longer count."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    track("tensorboard", tmp_path, 1, 4, 1.0)
    track("tensorboard", tmp_path, 3, 5, 10.0)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert sorted(events.Tags()["scalars"]) == ["replay/used", "reward/mean"]
    found = {event.step: event.value for event in events.Scalars("reward/mean")}
    assert found == {1: 1.0, 2: 2.0, 3: 30.0, 4: 40.0, 5: 50.0}


@pytest.mark.engines
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_wandb_offline_keeps_one_run_through_a_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`wandb sync` would send both parts under the one id, which is in the names of their folders."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    run = tmp_path / "exgrpo-tiny"
    run.mkdir()
    track("wandb", run, 1, 3, 1.0)
    time.sleep(1.0)  # wandb names what it keeps offline by the second in which it starts
    track("wandb", run, 3, 4, 10.0)
    kept = sorted(path.parent.name for path in run.glob("wandb/offline-run-*/*.wandb"))
    own = (run / "wandb" / "run-id").read_text().strip()
    assert len(kept) == 2 and all(name.endswith(f"-{own}") for name in kept)


@pytest.mark.engines
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_wandb_without_a_login_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import wandb

    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    # wandb reads its environment once per process, and another test may have had it do so.
    wandb.teardown()
    with pytest.raises(InputError, match=r"--log wandb cannot start: .*Run `wandb login`, or set WANDB_MODE=offline"):
        track("wandb", tmp_path, 1, 1, 1.0)

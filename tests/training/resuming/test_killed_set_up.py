"""Runs killed by SIGKILL before their first checkpoint: a new start or --resume goes on, nothing torn stays behind.

The killed process is a fork of this one, so that it costs no imports.
"""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from run_leaves import metrics, timeless

from exgrpo_cli.base import files
from exgrpo_cli.base.console.reporter import SilentReporter
from exgrpo_cli.base.errors import InputError
from exgrpo_cli.runs.folder import RunFolder
from exgrpo_cli.training import checkpoint, questions, run, setup
from exgrpo_cli.training.run import train
from exgrpo_cli.training.start import resumed_config

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")


def killed(owner: Any, name: str, *, of: str = "") -> Callable[[], None]:
    """Replace a function, in a process that is about to die, by one that kills it; `of` a path's name where given."""

    def install() -> None:
        original = getattr(owner, name)

        def die(*arguments: Any, **options: Any) -> Any:
            if not of or of == Path(arguments[-1]).name:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*arguments, **options)

        setattr(owner, name, die)

    return install


NEW = {
    "before it is locked": killed(RunFolder, "locked"),
    "before its questions": killed(setup, "load_questions"),
    "among its questions": killed(questions, "write_manifest"),
    "with all its parts": killed(setup, "sync"),
    "with its ledger": killed(setup, "warm_start"),
    "while config.toml is written": killed(files, "publish", of="config.toml"),
}
"""Moments of a set-up after which there is no configuration to resume with."""
BEGUN = {
    "before its first step": killed(run, "run_steps"),
    "after its first step": killed(RunFolder, "append_metrics"),
    "in its first checkpoint": killed(checkpoint, "finish_folder"),
}


def train_and_die(install: Callable[[], None], path: Path, config: Any = None) -> None:
    """Train in a fork that `install` has prepared, until it is killed; without a configuration, resume."""
    child = os.fork()
    if child == 0:
        try:
            install()
            train(config or resumed_config(path), path, resume=config is None, reporter=SilentReporter())
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL


def left_half_written(path: Path) -> list[Path]:
    return [found for found in path.rglob("*") if "partial" in found.name]


def test_a_run_killed_while_its_configuration_is_written_can_be_started_again(small_config, tmp_path: Path) -> None:
    config, path = small_config(), tmp_path / "run"
    train_and_die(NEW["while config.toml is written"], path, config)
    assert len(left_half_written(path)) == 1
    with pytest.raises(InputError, match=r"it has no config.toml; start without --resume"):
        resumed_config(path)
    again = RunFolder.create(path)
    assert left_half_written(again.path) == [] and not (path / "environment.json").exists()


@pytest.mark.slow
def test_a_run_killed_at_every_point_of_its_set_up_ends_as_if_it_had_not_been(small_config, tmp_path: Path) -> None:
    config = small_config("run.steps=3", "run.save_every=2", "replay.start_threshold=0")
    whole, path = tmp_path / "whole", tmp_path / "run"
    train(config, whole, reporter=SilentReporter())
    for install in NEW.values():
        train_and_die(install, path, config)
        with pytest.raises(InputError, match=r"start without --resume"):
            resumed_config(path)
        RunFolder.check_new(path)
    train_and_die(BEGUN["before its first step"], path, config)
    for install in BEGUN.values():
        with pytest.raises(InputError, match=r"or `exgrpo train --resume --output"):
            RunFolder.check_new(path)
        train_and_die(install, path)
    assert left_half_written(path)
    train(resumed_config(path), path, resume=True, reporter=SilentReporter())
    assert timeless(metrics(path)) == timeless(metrics(whole))
    weights = "model/model.safetensors"
    assert (path / weights).read_bytes() == (whole / weights).read_bytes()
    assert left_half_written(path) == []

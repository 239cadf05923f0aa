"""Runs killed by SIGKILL before their first checkpoint: a new start or --resume goes on, nothing torn stays behind."""

from pathlib import Path

import pytest
from run_leaves import assert_same_run, killed, train_and_die

from exgrpo_cli.base import files
from exgrpo_cli.base.errors import InputError
from exgrpo_cli.base.reporter import SilentReporter
from exgrpo_cli.runs.folder import RunFolder
from exgrpo_cli.training import questions, run, setup
from exgrpo_cli.training.run import train
from exgrpo_cli.training.start import resumed_config

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")


NEW = {
    "before it is locked": killed(RunFolder, "locked"),
    "before its questions": killed(setup, "load_questions"),
    "among its questions": killed(questions, "write_manifest"),
    "with all its parts": killed(setup, "sync"),
    "with its ledger": killed(setup, "warm_start"),
    "while config.toml is written": killed(files, "publish", when=lambda *given: Path(given[-1]).name == "config.toml"),
}
"""Moments of a set-up after which there is no configuration to resume with."""
BEGUN = {
    "before its first step": killed(run, "run_steps"),
    "after its first step": killed(RunFolder, "append_metrics"),
    "in its first checkpoint": killed(files, "finish_folder", when=lambda *given: given[-1].name.startswith("step-")),
}


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
    assert_same_run(path, whole)
    assert left_half_written(path) == []

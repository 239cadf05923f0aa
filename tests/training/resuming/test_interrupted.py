"""Runs that are stopped, killed at any time, refused by the disk or raised in steps, and go on."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from run_leaves import assert_same_run, killed, metrics, train_and_die, wait_for_step

from exgrpo_cli.base import errors, files, reporter
from exgrpo_cli.config.settings import Config, to_toml
from exgrpo_cli.ledger.reader import LedgerReader
from exgrpo_cli.runs.folder import RunFolder
from exgrpo_cli.training import questions, run, setup, start
from exgrpo_cli.training.run import train

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")


def start_training(
    config, run: Path, tmp_path: Path, *options: str, largest_file_kib: int | None = None
) -> subprocess.Popen:
    settings = tmp_path / f"{run.name}.toml"
    settings.write_text(to_toml(config))
    command = [sys.executable, "-m", "exgrpo_cli", "train", "--output", str(run), *options]
    if "--resume" not in options:
        command += ["--config", str(settings)]
    if largest_file_kib is not None:
        command = ["bash", "-c", 'ulimit -f "$0" && exec "$@"', str(largest_file_kib), *command]
    return subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def finish_training(process: subprocess.Popen) -> None:
    _, talk = process.communicate()
    assert process.returncode == 0, talk


@pytest.fixture(scope="module")
def uninterrupted(small_config, tmp_path_factory: pytest.TempPathFactory) -> tuple[Config, Path]:
    config, folder = (
        small_config("run.steps=10", "run.save_every=2", "data.barred=0.4"),
        tmp_path_factory.mktemp("uninterrupted"),
    )
    finish_training(start_training(config, folder / "run", folder))
    return config, folder / "run"


@pytest.mark.engines
@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGKILL])
def test_a_resumed_run_equals_an_uninterrupted_one(stop, uninterrupted, tmp_path) -> None:
    """Same metrics but times, same ledger, same final weights, bit for bit; of barred questions nothing is stored."""
    (config, whole), cut = uninterrupted, tmp_path / "cut"
    process = start_training(config, cut, tmp_path)
    wait_for_step(cut, 3, process)
    process.send_signal(stop)
    _, talk = process.communicate()
    if stop is signal.SIGINT:
        assert process.returncode == 130 and "Traceback" not in talk
        assert "--resume --output" in talk.strip().splitlines()[-1]
    assert len(metrics(cut)) < 10, "the run ended before the signal arrived: the test shows nothing"

    finish_training(start_training(config, cut, tmp_path, "--resume"))
    assert_same_run(cut, whole)
    assert (cut / "config.toml").read_text() == (whole / "config.toml").read_text()
    reader = LedgerReader(cut / "replay")
    asked, scored = ({row["question_id"] for row in rows.to_pylist()} for rows in (reader.visits(), reader.scores()))
    barred = {question for question in asked if config.data.is_barred(question, config.run.seed)}
    assert barred and scored and not barred & scored


@pytest.mark.slow
def test_a_checkpoint_that_the_disk_refuses_stops_the_run_in_one_line(small_config, tmp_path: Path) -> None:
    """No file may grow beyond 100 KiB, which the policy's does: step 2 is in the ledger, nothing half-written stays."""
    run = tmp_path / "run"
    process = start_training(small_config("run.save_every=2"), run, tmp_path, "--quiet", largest_file_kib=100)
    _, talk = process.communicate()
    assert process.returncode == 1 and len(talk.splitlines()) == 1 and "unexpected" not in talk
    assert f"{run / 'checkpoints' / 'step-000002'} cannot be written" in talk
    assert list((run / "checkpoints").iterdir()) == [] and LedgerReader(run / "replay").last_step == 2


@pytest.mark.slow
def test_a_run_goes_on_when_steps_are_raised(small_config, tmp_path: Path) -> None:
    """With a constant schedule, 4 steps and then 2 more are the same as 6 at once."""
    constant = ("optim.schedule=constant", "optim.learning_rate=1e-4")
    train(small_config(*constant, "run.steps=4"), tmp_path / "cut", reporter=reporter.SilentReporter())
    train(small_config(*constant, "run.steps=6"), tmp_path / "cut", resume=True, reporter=reporter.SilentReporter())
    train(small_config(*constant, "run.steps=6"), tmp_path / "whole", reporter=reporter.SilentReporter())
    assert_same_run(tmp_path / "cut", tmp_path / "whole")


@pytest.mark.engines
def test_two_processes_cannot_train_in_one_folder(small_config, tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = start_training(small_config("run.steps=200"), run, tmp_path)
    try:
        wait_for_step(run, 1, process)
        with pytest.raises(errors.InputError, match="another process is training"):
            train(small_config("run.steps=200"), run, resume=True, reporter=reporter.SilentReporter())
    finally:
        process.kill()
        process.communicate()


NEW = {
    "before it is locked": killed(RunFolder, "locked"),
    "before its questions": killed(setup, "load_questions"),
    "among its questions": killed(questions, "write_manifest"),
    "with all its parts": killed(setup.Parts, "sync"),
    "with its ledger": killed(setup, "take_experience"),
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
    with pytest.raises(errors.InputError, match=r"it has no config.toml; .* begin one without --resume"):
        start.resumed_config(path)
    assert left_half_written(RunFolder.create(path).path) == [] and not (path / "environment.json").exists()


@pytest.mark.slow
def test_a_run_killed_at_every_point_of_its_set_up_ends_as_if_it_had_not_been(small_config, tmp_path: Path) -> None:
    config = small_config("run.steps=3", "run.save_every=2", "replay.start_threshold=0")
    whole, path = tmp_path / "whole", tmp_path / "run"
    train(config, whole, reporter=reporter.SilentReporter())
    for install in NEW.values():
        train_and_die(install, path, config)
        with pytest.raises(errors.InputError, match=r"begin one without --resume"):
            start.resumed_config(path)
        RunFolder.check_new(path)
    train_and_die(BEGUN["before its first step"], path, config)
    for install in BEGUN.values():
        with pytest.raises(errors.InputError, match=r"or `exgrpo train --resume --output"):
            RunFolder.check_new(path)
        train_and_die(install, path)
    assert left_half_written(path)
    train(start.resumed_config(path), path, resume=True, reporter=reporter.SilentReporter())
    assert_same_run(path, whole)
    assert left_half_written(path) == []

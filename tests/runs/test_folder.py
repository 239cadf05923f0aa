"""The run folder's files: whole or not there, cut back on resume; thread choice; stop signals."""

import os
import signal
from pathlib import Path

import pytest
import torch

from exgrpo_cli.base.errors import InputError, RunError
from exgrpo_cli.base.files import read_json_lines
from exgrpo_cli.base.output import Stopper
from exgrpo_cli.machine.survey import choose_threads
from exgrpo_cli.runs.folder import RunFolder, writing


def test_cutting_back_drops_later_steps_and_a_torn_line(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run")
    for step in (1, 2, 3):
        folder.append_metrics({"step": step, "phase": "mixed"})
        folder.append_samples(step, [{"text": "a"}])
        folder.append_validation({"step": step})
    with folder.metrics.open("a") as out:
        out.write('{"step": 4, "pha')
    folder.cut_back(2, validates_again=False)
    assert [line["step"] for line in read_json_lines(folder.metrics)] == [1, 2]
    assert [line["step"] for line in read_json_lines(folder.validations)] == [1, 2]
    folder.cut_back(2, validates_again=True)
    assert [line["step"] for line in read_json_lines(folder.metrics)] == [1, 2]
    assert [line["step"] for line in read_json_lines(folder.validations)] == [1]
    assert sorted(path.name for path in folder.samples.iterdir()) == ["step-000001.jsonl", "step-000002.jsonl"]


def test_a_folder_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    """A file in the folder's place stands for one that is read-only, which root can write all the same."""
    (tmp_path / "file").write_text("")
    unmade = r"file/run cannot be written: .*file is not a writable folder \(Not a directory\)"
    with pytest.raises(InputError, match=unmade):
        RunFolder.create(tmp_path / "file" / "run")
    refused = pytest.raises(InputError, match=r"file cannot be written \(.*\): allow it, or go on with a copy")
    with refused, RunFolder(tmp_path / "file").locked():
        pass
    with pytest.raises(InputError, match=r"is not a run folder: it has no config.toml"):
        RunFolder.existing(tmp_path)


def test_only_a_folder_that_holds_a_run_is_said_to_resume(tmp_path: Path) -> None:
    """A run that was killed while it was set up has no configuration, and --resume would refuse it."""
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(InputError, match=r"exists: choose another --output; it holds no run to go on with"):
        RunFolder.create(tmp_path)
    (tmp_path / "config.toml").write_text("")
    with pytest.raises(InputError, match=r"exists: choose another --output, or `exgrpo train --resume --output"):
        RunFolder.create(tmp_path)


def test_a_folder_that_was_killed_while_it_was_set_up_is_made_anew(tmp_path: Path) -> None:
    """It has its lock and some questions, but no configuration; somebody else's files stay."""
    folder = RunFolder.create(tmp_path / "run")
    with folder.locked():
        (folder.data / "train.parquet").write_text("half")
        with pytest.raises(InputError, match="another process is training in it"):
            RunFolder.create(tmp_path / "run")
    again = RunFolder.create(tmp_path / "run")
    assert again.checkpoints.is_dir() and list(again.data.iterdir()) == []

    (again.data / "mine.parquet").write_text("never locked: not a set-up's")
    with pytest.raises(InputError, match="it holds no run to go on with"):
        RunFolder.create(tmp_path / "run")
    (tmp_path / "empty").mkdir()
    assert RunFolder.create(tmp_path / "empty").samples.is_dir()


@pytest.mark.parametrize(("requested", "cores", "expected"), [(0, 1, 1), (0, 2, 1), (0, 16, 8), (3, 2, 3)])
def test_threads_are_half_the_cores_unless_asked_for(requested: int, cores: int, expected: int) -> None:
    assert choose_threads(requested, cores) == expected


def test_the_first_signal_asks_the_second_interrupts_and_handlers_are_put_back() -> None:
    before = signal.getsignal(signal.SIGINT)
    with Stopper() as stopper:
        os.kill(os.getpid(), signal.SIGTERM)
        assert stopper.requested
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) == before


def test_work_that_loses_nothing_is_interrupted_at_once() -> None:
    with Stopper() as stopper, pytest.raises(KeyboardInterrupt), stopper.immediate():
        os.kill(os.getpid(), signal.SIGINT)


def test_torch_on_a_full_disk_is_one_line_and_other_errors_stay_what_they_are(tmp_path: Path) -> None:
    """Running out of GPU memory while weights are gathered is a RuntimeError as well, and no full disk."""
    if not Path("/dev/full").exists():
        # Linux has it and macOS, where people try the tiny backbone, has not; nothing else refuses every byte there.
        pytest.skip("this system has no /dev/full")
    with pytest.raises(RunError, match=r"weights cannot be written: .*free some space"), writing(tmp_path / "weights"):
        torch.save({"weight": torch.zeros(100_000)}, "/dev/full")
    for error in (torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("NCCL communicator was aborted")):
        with pytest.raises(type(error), match=str(error)), writing(tmp_path / "weights"):
            raise error

"""The run folder's files: whole or not there, cut back on resume; thread choice; stop signals."""

import json
import os
import random
import signal
import threading
from pathlib import Path

import pytest
import torch

from exgrpo_cli.base import files, output
from exgrpo_cli.base.errors import InputError, RunError
from exgrpo_cli.config.layers import build_config
from exgrpo_cli.machine.survey import choose_threads
from exgrpo_cli.runs.folder import RunFolder, find_changes, forget_checksums, note_checksums, read_metrics, writing
from exgrpo_cli.training import run, start


def test_cutting_back_drops_later_steps_and_a_torn_line(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run")
    for step in (1, 2, 3):
        folder.append_metrics({"step": step, "phase": "mixed"})
        folder.append_samples(step, [{"text": "a"}])
        folder.append_validation({"step": step})
    with folder.metrics.open("a") as out:
        out.write('{"step": 4, "pha')
    folder.cut_back(2, validates_again=False)
    assert [line["step"] for line in files.read_json_lines(folder.metrics)] == [1, 2]
    assert [line["step"] for line in files.read_json_lines(folder.validations)] == [1, 2]
    folder.cut_back(2, validates_again=True)
    assert [line["step"] for line in files.read_json_lines(folder.metrics)] == [1, 2]
    assert [line["step"] for line in files.read_json_lines(folder.validations)] == [1]
    assert sorted(path.name for path in folder.samples.iterdir()) == ["step-000001.jsonl", "step-000002.jsonl"]


def test_a_folder_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    """A file in the folder's place stands for one that is read-only, which root can write all the same."""
    (tmp_path / "file").write_text("")
    unmade = r"file/run cannot be written: .*file is not a writable folder \(Not a directory\)"
    with pytest.raises(InputError, match=unmade):
        RunFolder.create(tmp_path / "file" / "run")
    refused = pytest.raises(InputError, match=r"file/.lock cannot be written \(.*\): allow it, or go on with a copy")
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

    (again.data / "mine.parquet").write_text("no name of a set-up's")
    with pytest.raises(InputError, match="it holds no run to go on with"):
        RunFolder.create(tmp_path / "run")
    (tmp_path / "empty").mkdir()
    assert RunFolder.create(tmp_path / "empty").samples.is_dir()


THEIRS = ("data/thesis.csv", "wandb/run1", "replay/x/part-1.parquet", "stacks/notes.txt", "train.parquet", "photos/a")
OURS = ("data/train.parquet", "replay/ledger.json", "replay/visits/part-00000001-live.parquet", "environment.json")


@pytest.mark.parametrize("seed", range(12))
def test_nothing_is_removed_that_no_set_up_wrote(tmp_path: Path, seed: int) -> None:
    """Whatever a folder holds: without the marker all of it stays, and beside the marker what no set-up writes."""
    rng = random.Random(seed)
    marked, theirs = seed % 2 == 0, rng.sample(THEIRS, rng.randint(1, 3))
    run = tmp_path / "run"
    if marked:
        RunFolder.create(run)
    for name in [*theirs, *rng.sample(OURS, rng.randint(0, 3)), *[".lock"] * rng.randint(0, 1)]:
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_text("precious")
    if rng.random() < 0.5:
        (tmp_path / "elsewhere").mkdir()
        (run / "samples-of-mine").symlink_to(tmp_path / "elsewhere")
    before = sorted(run.rglob("*"))
    with pytest.raises(InputError, match="it holds no run to go on with"):
        RunFolder.create(run)
    assert sorted(run.rglob("*")) == before
    # Nor where the set-up itself ends with an error.
    RunFolder(run).remove_set_up()
    assert [name for name in theirs if not (run / name).is_file()] == []


def test_a_marked_folder_is_a_set_ups_from_its_first_file_on(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path / "run")
    for name in OURS:
        (run.path / name).parent.mkdir(parents=True, exist_ok=True)
        (run.path / name).write_text("ours")
    assert list(RunFolder.create(run.path).data.iterdir()) == []
    run.remove_set_up()
    assert not run.path.exists()
    (tmp_path / "begun").mkdir()
    for path, first_made in (("runs/new/run", "runs"), ("begun/new/run", "begun/new")):
        RunFolder.create(tmp_path / path).remove_set_up()
        assert (tmp_path / first_made).parent.is_dir() and not (tmp_path / first_made).exists()
    (tmp_path / "begun" / "..exgrpo-set-up.partial-0-1").write_text("ex")
    assert RunFolder.create(tmp_path / "begun").samples.is_dir()


@pytest.mark.parametrize(
    "name", ["samples", "checkpoints", "checkpoints/step-000001", "model", ".x.partial-1", "replay/events"]
)
def test_a_folder_that_is_a_link_out_of_the_run_is_refused(tmp_path: Path, name: str) -> None:
    run, elsewhere = RunFolder.create(tmp_path / "run"), tmp_path / "elsewhere"
    place = run.path / name
    place.parent.mkdir(parents=True, exist_ok=True)
    if place.is_dir():
        place.rmdir()
    # As W&B has one to its latest run.
    (run.path / "inside").symlink_to(run.data)
    run.require_own_folders()
    elsewhere.mkdir()
    (elsewhere / "mine").write_text("precious")
    place.symlink_to(elsewhere)
    with pytest.raises(InputError, match=rf"{name} is a link to a place elsewhere, and a run writes nothing through"):
        run.require_own_folders()
    files.remove_partials(run.path)
    files.finish_folder(files.begin_folder(place), place)
    assert (elsewhere / "mine").read_text() == "precious"


@pytest.mark.parametrize(
    ("steps", "saved", "moment", "said"),
    [
        (3, 3, "in step 4", "stopped after step 3 of 9, state saved; go on with: exgrpo train --resume"),
        (3, 2, "in step 4", "stopped in step 4; its last checkpoint is of step 2, go on from there with: exgrpo"),
        (0, 0, "in step 1", "stopped in step 1, before its first checkpoint: nothing is saved; begin it anew with: ex"),
        (2, 2, "while it was set up", "stopped while it was set up; its last checkpoint is of step 2, go on from"),
        (None, 0, "while it was set up", "stopped while it was set up: nothing is saved, the same command begins"),
    ],
)
def test_a_stopped_run_tells_what_is_saved(
    tmp_path: Path, steps: int | None, saved: int, moment: str, said: str
) -> None:
    folder = RunFolder.create(tmp_path / "run")
    if steps is not None:
        folder.config.write_text("")
    for step in range(1, (steps or 0) + 1):
        folder.append_metrics({"step": step})
    if saved:
        (folder.checkpoints / f"step-{saved:06d}").mkdir()
    config = build_config(assignments=["run.steps=9"])
    assert run.stopped_text(folder, config, moment).startswith(said)
    line = start.RunStart(config=config, folder=folder.path, resume=True).line()
    going_on = (
        f"going on with {folder.path} after step {saved}, 9" if saved else f"beginning {folder.path} anew: it has no"
    )
    assert line.startswith(f"exgrpo: {going_on}")


def test_samples_damaged_before_a_resume_stay_noted_as_they_were_written(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run")
    folder.append_validation({"step": 2, "asked": "heldout", "correct": "1"})
    folder.append_validation({"step": 2, "asked": "train", "correct": "1"})
    whole = folder.validations.read_bytes()
    for step in (1, 2, 3):
        folder.append_samples(step, [{"text": "a"}])
    note_checksums(folder.path)
    sample = folder.samples / "step-000002.jsonl"
    sample.write_text('{"text": "b"}\n')
    (folder.samples / "step-000001.jsonl").unlink()
    # Doubled, as a copy that was put together again has it.
    folder.append_validation({"step": 2, "asked": "train", "correct": "1"})
    forget_checksums(folder.path, 2)
    folder.cut_back(2, validates_again=False)
    assert folder.validations.read_bytes() == whole
    folder.append_samples(3, [{"text": "c"}])
    note_checksums(folder.path)
    gone, damaged = find_changes(folder.path)
    assert "step-000001.jsonl is missing" in gone and f"{sample} is damaged (its checksum differs)" in damaged


@pytest.mark.parametrize("step", [2**31, -1, True, 1.5])
def test_a_step_that_no_run_reaches_is_named(tmp_path: Path, step: object) -> None:
    """The ledger counts steps in 32 bits."""
    (tmp_path / "metrics.jsonl").write_text(f'{{"step": 1}}\n{{"step": {json.dumps(step)}}}\n')
    with pytest.raises(InputError, match=rf"metrics.jsonl, line 2: step is {step!r}. Remove the line or restore it"):
        read_metrics(tmp_path)


@pytest.mark.parametrize(("requested", "cores", "expected"), [(0, 1, 1), (0, 2, 1), (0, 16, 8), (3, 2, 3)])
def test_threads_are_half_the_cores_unless_asked_for(requested: int, cores: int, expected: int) -> None:
    assert choose_threads(requested, cores) == expected


def test_the_first_signal_asks_the_second_interrupts_and_handlers_are_put_back() -> None:
    before = signal.getsignal(signal.SIGINT)
    with output.Stopper() as stopper:
        os.kill(os.getpid(), signal.SIGTERM)
        assert stopper.requested
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) == before


def test_the_first_signal_is_answered_at_once_by_whoever_may_wait_for_the_terminal() -> None:
    """The handler itself waits for nothing."""
    said, terminal = threading.Event(), threading.Lock()

    def say() -> None:
        with terminal:
            said.set()

    with output.Stopper(say) as stopper, terminal:
        os.kill(os.getpid(), signal.SIGINT)
        assert stopper.requested and not said.is_set()
    assert said.wait(60)


def test_work_that_loses_nothing_is_interrupted_at_once() -> None:
    with output.Stopper() as stopper, pytest.raises(KeyboardInterrupt), stopper.immediate():
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

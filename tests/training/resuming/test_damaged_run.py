"""Resuming damaged runs: what is damaged is named, an older checkpoint takes over, and nothing is cut before that."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from exgrpo_cli.base import files, reporter
from exgrpo_cli.base.errors import InputError
from exgrpo_cli.commands import run as exgrpo
from exgrpo_cli.ledger.reader import LedgerReader
from exgrpo_cli.runs.folder import RunFolder, find_changes, note_checksums, require_model
from exgrpo_cli.runs.result import read_result
from exgrpo_cli.training import checkpoint, setup, start
from exgrpo_cli.training.run import train


@pytest.fixture(scope="module")
def cut_run(small_config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six steps with checkpoints of steps 2, 4 and 6, made to look as if it had been killed at the end of step 6."""
    run = tmp_path_factory.mktemp("runs") / "cut"
    config = small_config("run.save_every=2", "run.keep_checkpoints=0", "replay.start_threshold=0")
    train(config, run, reporter=reporter.SilentReporter())
    (run / "summary.json").unlink()
    return run


@pytest.fixture
def run(cut_run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(cut_run, tmp_path / "run"))


def contents(run: Path) -> dict[str, bytes]:
    files = [path for path in run.rglob("*") if path.is_file() and path.name not in (".lock", "writer.lock")]
    return {str(path.relative_to(run)): path.read_bytes() for path in files}


def point_of(run: Path):
    return checkpoint.find_resume_point(RunFolder(run), start.resumed_config(run))


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


NEWEST = Path("checkpoints") / "step-000006"


@pytest.mark.parametrize("damage", [flip, truncate, Path.unlink], ids=["flipped", "truncated", "missing"])
@pytest.mark.parametrize(
    "name",
    ["policy/weights.safetensors", "policy/optimizer.pt", "policy/policy.json", "state.json", "model/config.json"],
)
def test_a_damaged_checkpoint_is_named_and_the_one_before_takes_over(run, name, damage) -> None:
    damage(run / NEWEST / name)
    point = point_of(run)
    assert point.step == 4
    [note] = point.notes
    assert note.startswith("checkpoint of step 6 passed over, going on from step 4: ") and name in note


def test_a_manifest_that_is_gone_is_damage_and_a_stray_folder_is_none(run: Path) -> None:
    for name in ("step-old", "step-000004 (copy)", "step-12"):
        (run / "checkpoints" / name).mkdir()
    assert point_of(run).step == 6
    (run / NEWEST / "manifest.json").unlink()
    point = point_of(run)
    assert point.step == 4 and "step-000006/manifest.json is missing" in point.notes[0]
    with pytest.raises(InputError, match=r"step-000006/manifest.json is missing: restore it from a copy"):
        require_model(run / NEWEST / "model")
    (run / "data" / "manifest.json").unlink()
    with pytest.raises(InputError, match=r"data/manifest.json is missing. Restore it from a copy"):
        point_of(run)


def copied(run: Path) -> None:
    shutil.copytree(run / "checkpoints" / "step-000004", run / "checkpoints" / "step-000005")


def renamed(run: Path) -> None:
    (run / "checkpoints" / "step-000004").rename(run / "checkpoints" / "step-000007")


def emptied(run: Path) -> None:
    (run / "checkpoints" / "step-000008").mkdir()


def other_state(run: Path) -> None:
    (run / "checkpoints" / "step-000006" / "state.json").write_text('{"state": {"step": "6"}, "stream": []}')
    files.write_manifest(run / "checkpoints" / "step-000006")


@pytest.mark.parametrize(
    ("damage", "goes_on_from", "said"),
    [
        (copied, 6, ""),
        (renamed, 6, r"step 7 passed over, going on from step 6: .*state.json holds the state of step 4"),
        (emptied, 6, r"step 8 passed over, going on from step 6: .*manifest.json is missing"),
        (other_state, 4, r"step 6 passed over, going on from step 4: .*state.json is damaged"),
        (
            lambda run: shutil.rmtree(run / "samples"),
            6,
            r"step-000001.jsonl is missing, and 5 more files: restore what",
        ),
        (lambda run: flip(run / "samples" / "step-000002.jsonl"), 6, r"step-000002.jsonl is damaged \(.*\): restore"),
        (lambda run: (run / "environment.json").unlink(), 6, r"environment.json is missing: restore what you need"),
    ],
)
def test_what_is_out_of_place_is_named_and_the_run_goes_on(run: Path, damage, goes_on_from: int, said: str) -> None:
    damage(run)
    point = point_of(run)
    assert point.step == goes_on_from
    assert re.search(said, "; ".join(point.notes)) and bool(said) == bool(point.notes)
    setup.begin_writing(start.resumed_config(run), RunFolder(run), point, validates_again=True)
    assert (run / "samples").is_dir() and (not point.lost or find_changes(run))


@pytest.mark.parametrize("name", ["ledger.json", "metrics.jsonl"])
def test_bytes_that_are_no_text_are_named(run: Path, name: str, capsys) -> None:
    (run / "checksums.json").unlink()
    path = run / ("replay/" if name == "ledger.json" else "") / name
    path.write_bytes(b"\xff\xfe" + path.read_bytes())
    for command in (["train", "--resume", "--output", str(run)], ["replay-stats", str(run)]):
        assert exgrpo(command) in (1, 2) and f"{path}" in (line := capsys.readouterr().err)
        assert "unexpected" not in line


def test_a_run_goes_on_from_the_older_checkpoint_as_if_it_had_been_the_newest(run, cut_run, capsys) -> None:
    """Which it says although it is told to be quiet: damage is no talk."""
    whole = contents(cut_run)
    flip(run / NEWEST / "policy" / "weights.safetensors")
    assert exgrpo(["train", "--resume", "--output", str(run), "--quiet"]) == 0
    note = r"exgrpo: checkpoint of step 6 passed over, going on from step 4: \S+weights.safetensors is damaged \(.*\)\n"
    assert re.fullmatch(note, capsys.readouterr().err)
    assert contents(run)["model/model.safetensors"] == whole["model/model.safetensors"]
    assert (run / "checkpoints" / "step-000006.damaged").is_dir() and (run / NEWEST / "manifest.json").is_file()
    assert LedgerReader(run / "replay").scores().equals(LedgerReader(cut_run / "replay").scores())
    assert start.is_finished(run)


def test_a_damaged_part_of_the_ledger_leads_to_the_checkpoint_before_it(run: Path) -> None:
    """Of the draws, which no resume reads: the report would fail on them."""
    part = sorted((run / "replay" / "draws").glob("part-*"))[-1]
    assert int(part.name[5:13]) > 4
    column = pq.ParquetFile(part).metadata.row_group(0).column(0)
    content = bytearray(part.read_bytes())
    content[column.data_page_offset + column.total_compressed_size - 1] ^= 1
    part.write_bytes(content)
    point = point_of(run)
    assert point.step == 4 and part.name in point.notes[0] and "whole only up to step" in point.notes[0]


def lose_checkpoints(run: Path) -> None:
    shutil.rmtree(run / "checkpoints")
    (run / "checkpoints").mkdir()


def break_journal(run: Path) -> None:
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text(lines[0] + '{"step": 2, oops\n' + "".join(lines[2:]))


def digit_of(name: str, before: str) -> Callable[[Path], None]:
    """Damage of one digit of a file of the run, the first after these characters."""

    def change(run: Path) -> None:
        text = (run / name).read_text()
        place = text.index(before) + len(before)
        (run / name).write_text(text[:place] + str((int(text[place]) + 1) % 10) + text[place + 1 :])

    return change


def folder_at(name: str) -> Callable[[Path], None]:
    """A folder in the place of a file of the run."""

    def change(run: Path) -> None:
        (run / name).unlink(missing_ok=True)
        (run / name).mkdir()

    return change


def damage_every_checkpoint(run: Path) -> None:
    for folder in (run / "checkpoints").glob("step-*"):
        flip(folder / "policy" / "weights.safetensors")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda run: shutil.rmtree(run / "replay"), r"replay/ledger.json is missing, but the run keeps its experience"),
        (lose_checkpoints, r"checkpoints holds no checkpoint, but the run has made 6 steps and saves every 2"),
        (lambda run: (run / "data" / "heldout.parquet").unlink(), r"data/heldout.parquet is missing: restore it"),
        (lambda run: flip(run / "data" / "train.parquet"), r"data/train.parquet is damaged \(its checksum differs\)"),
        (break_journal, r"metrics.jsonl, line 2 is not JSON"),
        (digit_of("config.toml", "learning_rate = "), r"config.toml is damaged .*\. Restore it .* delete .*checksums"),
        (digit_of("metrics.jsonl", '"policy/entropy": 0.'), r"metrics.jsonl is damaged \(its checksum differs\)"),
        (digit_of("validations.jsonl", '"correct": "'), r"validations.jsonl is damaged \(its checksum differs\)"),
        (
            lambda run: truncate(run / "checksums.json"),
            r"checksums.json is not JSON .*: restore it from a copy. Without a copy delete it",
        ),
        (folder_at("checkpoints/best"), r"checkpoints/best is a folder, in the place of a file that the run writes"),
        (folder_at("report.html"), r"report.html is a folder, in the place of a file that the run writes"),
        (damage_every_checkpoint, r"no checkpoint is whole: step 6: .*weights\S+ is damaged.*step 4: .*step 2: "),
    ],
)
def test_a_run_that_cannot_go_on_is_refused_and_left_as_it_is(run, damage, message, capsys) -> None:
    damage(run)
    before = contents(run)
    with pytest.raises(InputError, match=message):
        train(start.resumed_config(run), run, resume=True, reporter=reporter.SilentReporter())
    assert exgrpo(["train", "--resume", "--output", str(run), "--dry-run"]) == 2
    assert re.search(message, capsys.readouterr().err)
    assert contents(run) == before


@pytest.mark.parametrize("command", ["sample", "evaluate", "train"])
def test_a_damaged_model_is_neither_asked_nor_trained(run, command, tmp_path, capsys) -> None:
    """A card may be written anew; of a checkpoint the model alone is looked at, and no other run's is refused."""
    (run / "model" / "README.md").write_text("Mine.")
    flip(run / NEWEST / "policy" / "weights.safetensors")
    for folder in (run / "model", run / NEWEST / "model"):
        require_model(folder)
        flip(folder / "model.safetensors")
        rest = {
            "sample": [str(folder), "1+1="],
            "evaluate": ["arithmetic", "--model", str(folder), "--output", str(tmp_path / "results")],
            "train": ["--backbone", str(folder), "--output", str(tmp_path / "new")],
        }
        assert exgrpo([command, *rest[command]]) == 2
        said = rf"exgrpo: {folder}/model.safetensors is damaged .*: restore it from a copy; of a"
        assert re.search(said, capsys.readouterr().err)


def test_a_digit_of_a_result_is_not_believed(run: Path) -> None:
    digit_of("result.json", '"generated": ')(run)
    with pytest.raises(InputError, match=r"result.json is damaged \(its checksum differs\): restore it"):
        read_result(run / "result.json")


def test_a_finished_run_is_refused_before_anything_is_written(run: Path) -> None:
    (run / "summary.json").write_text(json.dumps({"steps": 6, "finished": "steps reached"}))
    with (run / "metrics.jsonl").open("a") as journal:
        journal.write('{"step": 7, "to')
    before = contents(run)
    with pytest.raises(InputError, match=r"has finished its 6 steps: raise --steps to go on"):
        train(start.resumed_config(run), run, resume=True, reporter=reporter.SilentReporter())
    assert contents(run) == before


def test_a_run_stopped_before_its_first_checkpoint_begins_anew(run: Path) -> None:
    lose_checkpoints(run)
    rows = list(files.read_json_lines(run / "metrics.jsonl"))
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:2]))
    note_checksums(run)
    assert point_of(run).step is None


@pytest.mark.parametrize("name", ["weights.safetensors", "policy.json"])
def test_what_was_damaged_before_it_was_described_is_named(run: Path, name: str) -> None:
    path = run / NEWEST / "policy" / name
    path.write_bytes(path.read_bytes()[:30])
    files.write_manifest(run / NEWEST)
    before = contents(run)
    with pytest.raises(InputError, match=rf"policy/{name} cannot be read \(.*\): restore it from a copy, or remove"):
        train(start.resumed_config(run), run, resume=True, reporter=reporter.SilentReporter())
    assert contents(run) == before


def test_what_killed_processes_left_is_swept(run: Path, cut_run: Path) -> None:
    """And what was asked after the last step is asked again, not counted twice."""
    for name in (
        ".config.toml.partial-1",
        "plots/.learning.png.partial-1",
        "checkpoints/.step-000008.partial-1/policy/weights.safetensors",
        "checkpoints/.step-000009.partial/state.json",
        "replay/scores/.part-00000007-live.parquet.partial-1",
    ):
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_text("half")
    train(start.resumed_config(run), run, resume=True, reporter=reporter.SilentReporter())
    assert list(run.rglob(".*partial*")) == []
    assert (run / "validations.jsonl").read_bytes() == (cut_run / "validations.jsonl").read_bytes()

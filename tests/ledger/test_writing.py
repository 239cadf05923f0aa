"""Writing a ledger: what survives a crash, a full disk, a second writer, a resumption and a compaction."""

import os
import signal
import subprocess
import warnings
from pathlib import Path

import numpy as np
import pytest
from small_ledger import IDENTITY, PARQUET, QUESTIONS, WHOLE, create, in_subprocess, num_rows, one_step, part, reopen

from exgrpo_cli.base.errors import InputError, RunError, ToolkitWarning
from exgrpo_cli.config.sections.replay import ReplaySettings
from exgrpo_cli.ledger.parts import list_parts
from exgrpo_cli.ledger.reader import LedgerReader, LedgerWarning
from exgrpo_cli.ledger.schemas import LedgerIdentity
from exgrpo_cli.replay.buffer import ExperienceBuffer


def test_a_step_that_was_being_written_is_ignored_and_cleared(ledger: Path) -> None:
    part(ledger, "events", 10).unlink()
    (ledger / "trajectories" / ".part-00000011-00000011.parquet.partial-1").write_bytes(b"half")
    with pytest.warns(LedgerWarning, match="not complete .*; 1 unfinished files ignored"):
        assert LedgerReader(ledger).last_step == 9
    with pytest.warns(ToolkitWarning, match="1 unfinished files of a stopped run removed"):
        buffer = reopen(ledger, 9)
    buffer.close()
    assert LedgerReader(ledger).last_step == 9
    assert not list(ledger.rglob(".part-*"))


def test_resuming_drops_later_steps_and_goes_on_as_if_they_had_not_been(ledger: Path) -> None:
    before = {path.relative_to(ledger): path.read_bytes() for path in ledger.rglob("part-*")}
    with reopen(ledger, 4) as buffer:
        assert LedgerReader(ledger).last_step == 4
        for step in range(5, 11):
            one_step(buffer, step)
    assert {path.relative_to(ledger): path.read_bytes() for path in ledger.rglob("part-*")} == before


@pytest.mark.parametrize("name", ["tokenizer_hash", "template", "questions_hash", "logprob_source"])
def test_another_runs_ledger_is_refused(ledger: Path, name: str) -> None:
    values = {field: getattr(IDENTITY, field) for field in IDENTITY.__slots__}
    with pytest.raises(InputError, match=f"{name} is '{values[name]}' in the ledger but 'other' in this run"):
        reopen(ledger, 10, LedgerIdentity(**{**values, name: "other"}))
    with pytest.raises(InputError, match="group_size is 4 in the ledger but 8 in this run"):
        reopen(ledger, 10, LedgerIdentity(**{**values, "group_size": 8}))


def test_folders_that_hold_no_ledger_or_hold_one_already(ledger: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no ledger\.json"):
        LedgerReader(tmp_path)
    with pytest.raises(InputError, match="holds a ledger already"):
        create(ledger)
    (ledger / "ledger.json").write_text("{}")
    with pytest.raises(InputError, match="does not say whose ledger this is"):
        LedgerReader(ledger)
    (ledger / "ledger.json").write_text(IDENTITY.to_json().replace('"format": 2', '"format": 99'))
    with pytest.raises(InputError, match="ledger format 99, this version reads 1, 2;"):
        LedgerReader(ledger)


def test_questions_of_another_file_are_refused(ledger: Path) -> None:
    with pytest.raises(InputError, match=r"1 questions that are not in this run's question file, q3 first"):
        ExperienceBuffer.open(
            ledger,
            identity=IDENTITY,
            rules=ReplaySettings(),
            question_ids=[question for question in QUESTIONS if question != "q3"],
            at_step=10,
        )


def test_one_writer_at_a_time_while_readers_read(ledger: Path) -> None:
    script = """
        with small_ledger.reopen(Path(sys.argv[1]), 10) as buffer:
            small_ledger.one_step(buffer, 11)
            print("written", flush=True)
            sys.stdin.readline()
    """
    process = in_subprocess(script, ledger)
    assert process.stdout.readline() == "written\n"
    with pytest.raises(InputError, match="another process is writing this ledger"):
        reopen(ledger, 10)
    assert LedgerReader(ledger).last_step == 11
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    # A dead writer's lock is free.
    reopen(ledger, 11).close()


@pytest.mark.parametrize("limit_kib", [1, 3, 40])
def test_a_full_disk_stops_the_step_and_keeps_the_others(ledger: Path, limit_kib: int) -> None:
    # The limit on file sizes stands in for a full disk. 2 bodies of 9,000 tokens take 144 kB, the other parts 1 to
    # 4 kB, so each limit stops the step in another table.
    script = """
        import resource, signal
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        from exgrpo_cli.base.errors import RunError
        buffer = small_ledger.reopen(Path(sys.argv[1]), 10)
        small_ledger.one_step(buffer, 11)
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]) * 1024,) * 2)
        try:
            small_ledger.one_step(buffer, 12, num_tokens=9000)
        except RunError as error:
            print(error)
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]) * 1024,) * 2)
    """
    process = in_subprocess(script, ledger, limit_kib)
    output, errors = process.communicate()
    assert "the disk is full" in output and "while step 12 was being written" in output and "--resume" in output, errors
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        reader = LedgerReader(ledger)
    assert reader.last_step == 11 and not list(ledger.rglob(".part-*"))
    assert len(reader.bodies(range(22))) == 22
    reopen(ledger, 11).close()


def test_a_full_file_system_stops_the_step_and_keeps_the_others(tmp_path: Path) -> None:
    mount = tmp_path / "small"
    mount.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", mount], capture_output=True, text=True
    )
    if mounted.returncode:
        # Only a file system of its own runs full without filling the machine's, and only root may mount one.
        pytest.skip(f"a small file system to fill needs root, who may mount one: {mounted.stderr.strip()}")
    try:
        with create(mount / "replay") as buffer:
            one_step(buffer, 1)
            with pytest.raises(RunError, match=r"the disk is full \(0 MiB free\) while step 2"):
                one_step(buffer, 2, num_tokens=60_000)
            assert LedgerReader(mount / "replay").last_step == 1
        reopen(mount / "replay", 1).close()
    finally:
        subprocess.run(["umount", mount], check=True)


def test_compaction_keeps_every_row_and_every_kept_checkpoint(ledger: Path) -> None:
    before = {table: LedgerReader(ledger).table(table) for table in PARQUET}
    bodies = LedgerReader(ledger).bodies(range(20))
    with reopen(ledger, 10) as buffer:
        buffer.compact([3, 7], fewest=2)
        ranges = [(name.first_step, name.last_step) for name in list_parts(ledger, "events")[0]]
        assert ranges == [(1, 3), (4, 7), (8, 8), (9, 9), (10, 10)]
        # The open buffer finds the bodies at their new place.
        assert buffer.load([13])[0].token_ids.tolist() == [71, 71, 71]
        one_step(buffer, 11)
    reader = LedgerReader(ledger)
    for table in PARQUET:
        assert reader.table(table).slice(0, len(before[table])).equals(before[table])
    for old, new in zip(bodies, reader.bodies(range(20)), strict=True):
        np.testing.assert_array_equal(old[0], new[0])
        np.testing.assert_array_equal(old[1], new[1])
    with pytest.raises(InputError, match="holds steps 4 to 7 in one part and cannot be cut at step 5"):
        reopen(ledger, 5)
    reopen(ledger, 7).close()
    with reopen(ledger, 3) as buffer:
        assert buffer.counts.num_trajectories == 6


def test_a_few_parts_or_none_before_a_checkpoint_stay_as_they_are(ledger: Path) -> None:
    before = sorted(ledger.rglob("part-*"))
    with reopen(ledger, 10) as buffer:
        buffer.compact([])
        buffer.compact([7])
        assert sorted(ledger.rglob("part-*")) == before
        buffer.compact([8])
        assert len(list_parts(ledger, "events")[0]) == 3


def test_a_reader_from_before_a_compaction_still_reads_its_own_steps(ledger: Path) -> None:
    reader = LedgerReader(ledger)
    with reopen(ledger, 10) as buffer:
        one_step(buffer, 11)
        buffer.compact([11], fewest=2)
    assert num_rows(reader) == WHOLE
    assert len(reader.bodies(range(20))) == 20


@pytest.mark.parametrize("deleted", [0, 1, 5])
def test_killed_between_rename_and_delete(ledger: Path, deleted: int) -> None:
    # The process kills itself inside the loop that deletes what a merge of bodies has replaced.
    script = """
        import signal
        folder, left = Path(sys.argv[1]), [int(sys.argv[2])]
        unlink = Path.unlink
        def dying(path, missing_ok=False):
            if path.name.startswith("part-"):
                if not left[0]:
                    os.kill(os.getpid(), signal.SIGKILL)
                left[0] -= 1
            unlink(path, missing_ok)
        Path.unlink = dying
        small_ledger.reopen(folder, 10).compact([8], fewest=2)
    """
    process = in_subprocess(script, ledger, deleted)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    current, replaced = list_parts(ledger, "bodies")
    assert len(current) == 3 and len(replaced) == 8 - deleted
    reader = LedgerReader(ledger)
    assert num_rows(reader) == WHOLE and len(reader.bodies(range(20))) == 20
    reopen(ledger, 10).close()
    assert list_parts(ledger, "bodies")[1] == []
    assert num_rows(LedgerReader(ledger)) == WHOLE


def test_steps_in_which_nothing_happened(tmp_path: Path) -> None:
    with create(tmp_path / "replay") as buffer:
        buffer.flush(1)
        one_step(buffer, 2)
        # Steps need not be flushed one by one.
        one_step(buffer, 5)
    assert LedgerReader(tmp_path / "replay").last_step == 5
    with reopen(tmp_path / "replay", 1) as buffer:
        assert buffer.counts.num_questions == 0

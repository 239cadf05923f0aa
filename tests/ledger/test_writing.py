"""Writing a ledger: what survives a crash, a full disk, a second writer and a resumption."""

import os
import signal
import warnings
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from small_ledger import IDENTITY, PARQUET, create, in_subprocess, num_rows, one_step, part, reopen

from exgrpo_cli.base import errors, files
from exgrpo_cli.ledger import schemas, writer
from exgrpo_cli.ledger.reader import LedgerReader, LedgerWarning, list_parts


def names(ledger: Path, table: str = "events") -> list[str]:
    return [path.stem for path in list_parts(ledger, table)]


def test_steps_since_a_checkpoint_are_in_one_live_part_a_table(ledger: Path) -> None:
    before = {table: LedgerReader(ledger).table(table) for table in PARQUET}
    with reopen(ledger, 10) as buffer:
        for step in (11, 12):
            one_step(buffer, step, seal=False)
            assert LedgerReader(ledger).last_step == step
            assert names(ledger)[9:] == names(ledger, "bodies")[9:] == ["part-00000010-00000010", "part-00000011-live"]
        # Step 11 is in no part of its own.
        assert buffer.load([21])[0].token_ids.tolist() == [111, 111, 111]
        buffer.seal()
        assert names(ledger)[9:] == ["part-00000010-00000010", "part-00000011-00000012"]
        assert buffer.load([21])[0].token_ids.tolist() == [111, 111, 111]
        one_step(buffer, 13, seal=False)
    reader = LedgerReader(ledger)
    assert (reader.last_step, reader.dropped) == (13, "")
    for table in PARQUET:
        assert reader.table(table).slice(0, len(before[table])).equals(before[table])
    for step in (11, 13):
        with pytest.raises(errors.InputError, match=f"no closed part that ends at step {step}, of which"):
            reopen(ledger, step)
    with reopen(ledger, 12) as buffer:
        assert buffer.counts.num_trajectories == 24
    assert names(ledger)[-1] == "part-00000011-00000012"


def test_a_reader_keeps_to_the_steps_it_began_with(ledger: Path) -> None:
    """While the live part grows, gets its final name and is followed by another."""
    with reopen(ledger, 10) as buffer:
        one_step(buffer, 11, seal=False)
        reader = LedgerReader(ledger)
        rows = num_rows(reader)
        one_step(buffer, 12, seal=False)
        assert num_rows(reader) == rows
        buffer.seal()
        one_step(buffer, 13, seal=False)
        assert num_rows(reader) == rows
    assert [tokens.tolist() for tokens, _ in reader.bodies([21])] == [[111, 111, 111]]
    with pytest.raises(errors.InputError, match="no trajectory 22"):
        reader.bodies([22])


@pytest.mark.parametrize(
    ("limit", "value", "events", "bodies"),
    [
        ("_LIVE_ROWS", 30, ["part-00000001-00000004"], ["part-00000001-00000004"]),
        ("_LIVE_BYTES", 200, [], ["part-00000001-00000003", "part-00000004-00000006"]),
    ],
)
def test_a_large_live_part_is_closed_without_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, value: int, events: list[str], bodies: list[str]
) -> None:
    """4 rows in the first step and 10 in each other one; bodies take 80 bytes a step."""
    monkeypatch.setattr(writer, limit, value)
    with create(tmp_path / "replay") as buffer:
        for step in range(1, 8):
            one_step(buffer, step, seal=False)
        assert len(buffer.load(range(14))) == 14
    assert names(tmp_path / "replay")[:-1] == events and names(tmp_path / "replay", "bodies")[:-1] == bodies
    reader = LedgerReader(tmp_path / "replay")
    assert (reader.last_step, reader.dropped, len(reader.bodies(range(14)))) == (7, "", 14)


@pytest.mark.parametrize("renamed", range(len(schemas.TABLES)))
def test_killed_while_parts_are_closed(ledger: Path, renamed: int) -> None:
    """The process kills itself before the first, the second, ... of the live parts has its final name."""
    script = """
        import signal
        from exgrpo_cli.ledger import writer
        left, publish = [int(sys.argv[2])], writer.files.publish
        def dying(partial, path):
            if not left[0]:
                os.kill(os.getpid(), signal.SIGKILL)
            left[0] -= 1
            publish(partial, path)
        with small_ledger.reopen(Path(sys.argv[1]), 10) as buffer:
            small_ledger.one_step(buffer, 11, seal=False)
            small_ledger.one_step(buffer, 12, seal=False)
            writer.files.publish = dying
            buffer.seal()
    """
    process = in_subprocess(script, ledger, renamed)
    process.communicate()
    assert process.returncode == (-signal.SIGKILL if renamed < 6 else 0)
    reader = LedgerReader(ledger)
    assert (reader.last_step, reader.dropped, len(reader.bodies(range(24)))) == (12, "", 24)
    with reopen(ledger, 10) as buffer:
        one_step(buffer, 11)
    assert LedgerReader(ledger).last_step == 11


def test_a_step_that_was_being_written_is_ignored_and_cleared(ledger: Path) -> None:
    with reopen(ledger, 10) as buffer:
        one_step(buffer, 11, seal=False)
    part(ledger, "events", 11).unlink()
    (ledger / "trajectories" / ".part-00000011-live.parquet.partial-1").write_bytes(b"half")
    with pytest.warns(LedgerWarning, match="8 rows up to step 11 left out: "):
        assert LedgerReader(ledger).last_step == 10
    reopen(ledger, 10).close()
    assert LedgerReader(ledger).dropped == ""
    assert not list(ledger.rglob(".part-*")) and not list(ledger.rglob("*live*"))


def test_resuming_drops_later_steps_and_goes_on_as_if_they_had_not_been(ledger: Path) -> None:
    before = {path.relative_to(ledger): path.read_bytes() for path in ledger.rglob("part-*")}
    with reopen(ledger, 4) as buffer:
        assert LedgerReader(ledger).last_step == 4
        for step in range(5, 11):
            one_step(buffer, step)
    assert {path.relative_to(ledger): path.read_bytes() for path in ledger.rglob("part-*")} == before


@pytest.mark.parametrize("name", schemas.RESUME_FIELDS)
def test_another_runs_ledger_is_refused(ledger: Path, name: str) -> None:
    other = 8 if name == "group_size" else "other"
    with pytest.raises(
        errors.InputError, match=f"{name} is {getattr(IDENTITY, name)!r} in the ledger but {other!r} in this run"
    ):
        reopen(ledger, 10, replace(IDENTITY, **{name: other}))


def test_folders_that_hold_no_ledger_or_hold_one_already(ledger: Path, tmp_path: Path) -> None:
    with pytest.raises(errors.InputError, match=r"no ledger\.json"):
        LedgerReader(tmp_path)
    with pytest.raises(errors.InputError, match="holds a ledger already"):
        create(ledger)
    for content, message in (
        (asdict(IDENTITY) | {"format": 1}, "ledger format 1, this version reads 2;"),
        (asdict(IDENTITY) | {"template": None}, r"ledger\.json is damaged .*template"),
    ):
        files.write_json(ledger / "ledger.json", content)
        with pytest.raises(errors.InputError, match=message):
            LedgerReader(ledger)


def test_one_writer_at_a_time_while_readers_read(ledger: Path) -> None:
    script = """
        with small_ledger.reopen(Path(sys.argv[1]), 10) as buffer:
            small_ledger.one_step(buffer, 11, seal=False)
            print("written", flush=True)
            sys.stdin.readline()
    """
    process = in_subprocess(script, ledger)
    assert process.stdout.readline() == "written\n"
    with pytest.raises(errors.InputError, match="another process is writing this ledger"):
        reopen(ledger, 10)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    # What a killed writer had flushed is there, and its lock is free.
    assert LedgerReader(ledger).last_step == 11
    reopen(ledger, 10).close()


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
    """
    output, errors = in_subprocess(script, ledger, limit_kib).communicate()
    assert output.startswith("step 12 of ") and "cannot be written: File too large. Everything before" in output, errors
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        reader = LedgerReader(ledger)
    assert reader.last_step == 11 and not list(ledger.rglob(".part-*"))
    assert len(reader.bodies(range(22))) == 22
    reopen(ledger, 11).close()


def test_steps_in_which_nothing_happened(tmp_path: Path) -> None:
    with create(tmp_path / "replay") as buffer:
        buffer.seal()
        buffer.flush(1)
        buffer.seal()
        one_step(buffer, 2)
        # Steps need not be flushed one by one.
        one_step(buffer, 5)
    assert LedgerReader(tmp_path / "replay").last_step == 5
    with reopen(tmp_path / "replay", 1) as buffer:
        assert buffer.counts.num_questions == 0

"""The ledger on disk: what survives crashes, damage, full disks, second writers and compaction."""

import os
import shutil
import signal
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from exgrpo_cli.errors import InputError, RunError
from exgrpo_cli.replay.buffer import ExperienceBuffer
from exgrpo_cli.replay.catalogue import read_catalogue
from exgrpo_cli.replay.parts import list_parts
from exgrpo_cli.replay.reader import LedgerReader, LedgerWarning
from exgrpo_cli.replay.rules import BufferRules
from exgrpo_cli.replay.schemas import SCHEMAS, TABLES, LedgerIdentity
from exgrpo_cli.replay.visits import Success, Visit

K = 4
IDENTITY = LedgerIdentity(
    tokenizer_hash="t", template="plain", group_size=K, questions_hash="h", logprob_source="trainer"
)
QUESTIONS = [f"q{number}" for number in range(20)]
PARQUET = [table for table in TABLES if table != "bodies"]


def one_step(buffer: ExperienceBuffer, step: int, num_tokens: int = 3) -> None:
    """Two new trajectories of one question, and a draw once there is something to draw."""
    draw = buffer.draw(1, step, np.random.default_rng(step))
    for question_id in draw.question_ids:
        candidates = buffer.candidates(question_id)
        buffer.record_scores(step, candidates, 0)
        buffer.record_selected(step, [int(candidates.trajectory_ids[0])])
    successes = [
        Success(
            token_ids=np.full(num_tokens, 10 * step + member, dtype=np.int32),
            behaviour_logprobs=np.full(num_tokens, -0.5, dtype=np.float32),
            entropy=0.5,
            nll=0.5,
        )
        for member in range(2)
    ]
    buffer.record_visit(
        Visit(
            question_id=QUESTIONS[step % len(QUESTIONS)],
            step=step,
            weight_version=step,
            success_count=2,
            num_fresh_successes=2,
            experiential=False,
            verifier_failed=False,
            successes=successes,
        )
    )
    buffer.flush(step)


def create(folder: Path) -> ExperienceBuffer:
    return ExperienceBuffer.create(folder, identity=IDENTITY, rules=BufferRules(), question_ids=QUESTIONS)


def reopen(folder: Path, at_step: int, identity: LedgerIdentity = IDENTITY) -> ExperienceBuffer:
    return ExperienceBuffer.open(
        folder, identity=identity, rules=BufferRules(), question_ids=QUESTIONS, at_step=at_step
    )


@pytest.fixture(scope="module")
def ten_steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished ledger of ten steps; tests copy it before they touch it."""
    folder = tmp_path_factory.mktemp("ledger") / "replay"
    with create(folder) as buffer:
        for step in range(1, 11):
            one_step(buffer, step)
    return folder


@pytest.fixture
def ledger(ten_steps: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(ten_steps, tmp_path / "replay"))


def part(folder: Path, table: str, step: int) -> Path:
    [found] = [name.path for name in list_parts(folder, table)[0] if name.first_step <= step <= name.last_step]
    return found


def num_rows(reader: LedgerReader) -> dict[str, int]:
    return {
        "trajectories": len(reader.trajectories()),
        "scores": len(reader.scores()),
        "draws": len(reader.draws()),
        "events": len(reader.events()),
    }


# Step 1 collects 2; each later step draws from one bucket, scores the 2 candidates, selects 1 and collects 2.
WHOLE = {"trajectories": 20, "scores": 18, "draws": 9, "events": 29}
SIX_STEPS = {"trajectories": 12, "scores": 10, "draws": 5, "events": 17}


def test_a_whole_ledger_reads_without_a_warning(ledger: Path) -> None:
    reader = LedgerReader(ledger)
    assert (reader.last_step, reader.dropped, reader.identity) == (10, "", IDENTITY)
    assert num_rows(reader) == WHOLE
    for table in PARQUET:
        assert reader.table(table).schema.equals(SCHEMAS[table])
    token_ids, logprobs = reader.bodies([19])[0]
    assert token_ids.tolist() == [101, 101, 101] and logprobs.dtype == np.float32
    with pytest.raises(InputError, match="no trajectory 20; ids go from 0 to 19"):
        reader.bodies([20])


def test_columns_can_be_named(ledger: Path) -> None:
    assert LedgerReader(ledger).events(["question_id", "step"]).column_names == ["question_id", "step"]


@pytest.mark.parametrize("table", TABLES)
def test_a_truncated_part_leaves_the_steps_before_it(ledger: Path, table: str) -> None:
    path = part(ledger, table, 7)
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.warns(LedgerWarning, match=rf"read up to step 6; .*{table}/part-00000007-00000007"):
        reader = LedgerReader(ledger)
    assert reader.last_step == 6
    assert num_rows(reader) == SIX_STEPS
    with pytest.raises(InputError, match="whole only up to step 6, but the checkpoint is of step 10"):
        reopen(ledger, 10)
    assert path.exists()
    with reopen(ledger, 6) as buffer:
        assert buffer.num_trajectories == 12
        one_step(buffer, 7)
    assert num_rows(LedgerReader(ledger))["trajectories"] == 14


@pytest.mark.parametrize("table", TABLES)
def test_a_missing_part_leaves_the_steps_before_it(ledger: Path, table: str) -> None:
    part(ledger, table, 4).unlink()
    with pytest.warns(LedgerWarning, match="read up to step 3; .* left out"):
        assert LedgerReader(ledger).last_step == 3


def test_a_warning_counts_what_is_left_out(ledger: Path) -> None:
    part(ledger, "events", 9).unlink()
    # Steps 9 and 10 have 2 bodies, 2 trajectories, 2 scores and 1 draw each, step 10 its 3 events.
    with pytest.warns(
        LedgerWarning, match="read up to step 8; 17 rows of steps 9 to 10 left out: events of steps 9-9 are missing"
    ):
        LedgerReader(ledger)


def test_a_part_with_a_wrong_schema_is_named_with_its_column(ledger: Path) -> None:
    path = part(ledger, "scores", 10)
    table = pq.read_table(path)
    wrong = table.set_column(4, "entropy", table.column("entropy").cast(pa.float32()))
    pq.write_table(wrong, path)
    with pytest.warns(LedgerWarning, match="column entropy is float instead of double"):
        assert LedgerReader(ledger).last_step == 9
    pq.write_table(table.append_column("extra", [[1, 2]]), path)
    with pytest.warns(LedgerWarning, match=r"columns \['extra'\] do not belong"):
        assert LedgerReader(ledger).last_step == 9
    table.to_pandas().to_parquet(path)
    with pytest.warns(LedgerWarning, match=r"column question_id is large_string instead of string"):
        assert LedgerReader(ledger).last_step == 9
    pq.write_table(table.cast(pa.schema([field.with_nullable(True) for field in table.schema])), path)
    with pytest.warns(LedgerWarning, match=r"column step may hold nulls; another program wrote it"):
        assert LedgerReader(ledger).last_step == 9


def test_damaged_rows_behind_a_whole_footer_are_named(ledger: Path) -> None:
    path = part(ledger, "scores", 7)
    content = bytearray(path.read_bytes())
    content[10:60] = bytes(50)
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"scores/part-00000007.*damaged .* delete it to use the steps before step 7"):
        LedgerReader(ledger).scores()


def test_a_truncated_part_leaves_the_steps_before_it_in_merged_parts_of_other_tables(ledger: Path) -> None:
    with reopen(ledger, 10) as buffer:
        # Nine steps, of which the first scores nothing: scores and draws have a part too few to be merged.
        buffer.compact([9], fewest=9)
    assert part(ledger, "events", 7).name == part(ledger, "events", 1).name
    path = part(ledger, "scores", 7)
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.warns(LedgerWarning, match="read up to step 6; .* of steps 7 to 10 left out: scores has 10 rows"):
        reader = LedgerReader(ledger)
    assert num_rows(reader) == SIX_STEPS
    assert reader.events().column("step").to_pylist()[-1] == 6
    assert reader.bodies([11])[0][0].tolist() == [61, 61, 61]
    with pytest.raises(InputError, match="no trajectory 12"):
        reader.bodies([12])
    with pytest.raises(InputError, match="whole only up to step 6, but the checkpoint is of step 10"):
        reopen(ledger, 10)


def test_merged_parts_of_other_tables_may_reach_beyond_the_last_commit_record(ledger: Path) -> None:
    events = {path: path.read_bytes() for path in (ledger / "events").iterdir()}
    with reopen(ledger, 10) as buffer:
        buffer.compact([10], fewest=2)
    part(ledger, "events", 1).unlink()
    for path, content in events.items():
        path.write_bytes(content if "-00000007" not in path.name else content[:-40])
    with pytest.warns(LedgerWarning, match="read up to step 6; events/part-00000007"):
        reader = LedgerReader(ledger)
    assert num_rows(reader) == SIX_STEPS


def test_a_merge_of_merged_parts_keeps_every_commit_record(ledger: Path) -> None:
    with reopen(ledger, 10) as buffer:
        buffer.compact([3, 7], fewest=2)
        buffer.compact([7], fewest=2)
    [merged, *_] = read_catalogue(ledger).parts["events"]
    assert (merged.name.first_step, merged.name.last_step) == (1, 7)
    assert [commit.step for commit in merged.commits] == [1, 2, 3, 4, 5, 6, 7]
    assert [commit.totals["trajectories"] for commit in merged.commits] == [2, 4, 6, 8, 10, 12, 14]


def test_a_step_that_was_being_written_is_ignored_and_cleared(ledger: Path) -> None:
    part(ledger, "events", 10).unlink()
    (ledger / "trajectories" / ".part-00000011-00000011.parquet.tmp").write_bytes(b"half")
    with pytest.warns(LedgerWarning, match="not complete .*; 1 unfinished files ignored"):
        assert LedgerReader(ledger).last_step == 9
    with pytest.warns(LedgerWarning, match="1 unfinished files of a stopped run removed"):
        buffer = reopen(ledger, 9)
    buffer.close()
    assert LedgerReader(ledger).last_step == 9
    assert not list(ledger.rglob("*.tmp"))


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
    (ledger / "ledger.json").write_text(IDENTITY.to_json().replace('"format": 1', '"format": 99'))
    with pytest.raises(InputError, match="ledger format 99, this version reads 1"):
        LedgerReader(ledger)


def test_questions_of_another_file_are_refused(ledger: Path) -> None:
    with pytest.raises(InputError, match=r"1 questions that are not in this run's question file, q3 first"):
        ExperienceBuffer.open(
            ledger,
            identity=IDENTITY,
            rules=BufferRules(),
            question_ids=[question for question in QUESTIONS if question != "q3"],
            at_step=10,
        )


def in_subprocess(script: str, *arguments: object) -> subprocess.Popen[str]:
    prelude = f"""
        import importlib.util, os, sys
        from pathlib import Path
        spec = importlib.util.spec_from_file_location("ledger_tests", {str(Path(__file__))!r})
        tests = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(tests)
    """
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(prelude) + textwrap.dedent(script), *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_one_writer_at_a_time_while_readers_read(ledger: Path) -> None:
    script = """
        with tests.reopen(Path(sys.argv[1]), 10) as buffer:
            tests.one_step(buffer, 11)
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
        from exgrpo_cli.errors import RunError
        buffer = tests.reopen(Path(sys.argv[1]), 10)
        tests.one_step(buffer, 11)
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]) * 1024,) * 2)
        try:
            tests.one_step(buffer, 12, num_tokens=9000)
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
    assert reader.last_step == 11 and not list(ledger.rglob("*.tmp"))
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
        pytest.skip(f"cannot mount a small file system here: {mounted.stderr.strip()}")
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
        assert buffer.num_trajectories == 6


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
        tests.reopen(folder, 10).compact([8], fewest=2)
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
        assert buffer.num_questions == 0

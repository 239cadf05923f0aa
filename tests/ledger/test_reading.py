"""Reading a ledger, whole and damaged: never read as if nothing were wrong, named with its file, cut when checked."""

import os
import random
import re
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import small_ledger
from store_calls import candidates_of

from exgrpo_cli.base.errors import InputError, RunError
from exgrpo_cli.ledger.reader import LedgerReader, LedgerWarning, whole_until
from exgrpo_cli.ledger.schemas import SCHEMAS
from exgrpo_cli.replay import replace, store


def flip(path: Path, position: int, bit: int = 0) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 1 << bit
    path.write_bytes(content)


def flip_value(path: Path, column: str) -> None:
    """Flip a bit of the last value of a column."""
    metadata = pq.read_metadata(path).row_group(0)
    [chunk] = [metadata.column(i) for i in range(metadata.num_columns) if metadata.column(i).path_in_schema == column]
    begin = chunk.dictionary_page_offset if chunk.has_dictionary_page else chunk.data_page_offset
    flip(path, begin + chunk.total_compressed_size - 1)


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("part-*")}


def test_a_whole_ledger_reads_without_a_warning(ledger: Path) -> None:
    reader = LedgerReader(ledger)
    assert (reader.last_step, reader.dropped, reader.identity) == (10, "", small_ledger.IDENTITY)
    assert small_ledger.num_rows(reader) == small_ledger.WHOLE
    for table in small_ledger.PARQUET:
        assert reader.table(table).schema.equals(SCHEMAS[table])
    assert reader.events(["question_id", "step"]).column_names == ["question_id", "step"]
    token_ids, logprobs = reader.bodies([19])[0]
    assert token_ids.tolist() == [101, 101, 101] and logprobs.dtype == np.float32
    with pytest.raises(InputError, match="no trajectory 20; ids go from 0 to 19"):
        reader.bodies([20])


@pytest.mark.parametrize("table", small_ledger.WRITTEN)
def test_a_truncated_or_missing_part_leaves_the_steps_before_it(ledger: Path, table: str) -> None:
    path = small_ledger.part(ledger, table, 7)
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.warns(LedgerWarning, match=rf"read up to step 6; .*{table}/part-00000007-00000007"):
        reader = LedgerReader(ledger)
    assert reader.last_step == 6 and small_ledger.num_rows(reader) == small_ledger.SIX_STEPS
    with pytest.raises(InputError, match="whole only up to step 6 and has no closed part that ends at step 10"):
        small_ledger.reopen(ledger, 10)
    assert path.exists()
    small_ledger.part(ledger, table, 4).unlink()
    with pytest.warns(LedgerWarning, match="read up to step 3; .* left out"):
        assert LedgerReader(ledger).last_step == 3
    with small_ledger.reopen(ledger, 3) as buffer:
        assert buffer.counts.num_trajectories == 6
        small_ledger.one_step(buffer, 4)
    assert small_ledger.num_rows(LedgerReader(ledger))["trajectories"] == 8


def test_a_warning_counts_what_is_left_out(ledger: Path) -> None:
    small_ledger.part(ledger, "events", 9).unlink()
    # Steps 9 and 10 have 2 bodies, 2 trajectories, 2 scores, 1 draw and 1 visit each, step 10 its 3 events.
    with pytest.warns(
        LedgerWarning, match="read up to step 8; 19 rows up to step 10 left out: events of steps 9-9 are missing"
    ):
        LedgerReader(ledger)


def test_a_part_with_a_wrong_schema_is_named_with_its_columns(ledger: Path) -> None:
    path = small_ledger.part(ledger, "scores", 10)
    table = pq.read_table(path)
    for wrong, said in (
        (table.set_column(4, "entropy", table.column("entropy").cast(pa.float32())), "<entropy: float>'] instead of"),
        (table.append_column("extra", [[1, 2]]), "<extra: int64>'] instead of []"),
        (table.select(table.column_names[1:]), "<step: int32 not null>']"),
    ):
        pq.write_table(wrong, path)
        with pytest.warns(LedgerWarning, match=re.escape(said)):
            assert LedgerReader(ledger).last_step == 9


@pytest.mark.parametrize("table", [table for table in small_ledger.WRITTEN if table != "bodies"])
def test_rows_written_anew_by_another_program_are_told(ledger: Path, table: str) -> None:
    path = small_ledger.part(ledger, table, 8)
    pq.write_table(pq.read_table(path), path, write_page_checksum=True)
    with pytest.warns(LedgerWarning, match=f"{table}/{path.name}: another program has written its rows anew"):
        assert LedgerReader(ledger).last_step == 7


@pytest.mark.filterwarnings("ignore::exgrpo_cli.ledger.reader.LedgerWarning")
@pytest.mark.parametrize("table", [table for table in small_ledger.WRITTEN if table != "bodies"])
def test_no_flipped_bit_of_a_part_is_read_as_if_nothing_were_wrong(ledger: Path, table: str) -> None:
    """60 single bits of a part, one at a time: what is read is refused, cut short, or as it was written."""
    path, before = small_ledger.part(ledger, table, 8), LedgerReader(ledger).table(table)
    content, rng = path.read_bytes(), random.Random(0)
    outcomes = {"refused": 0, "cut": 0, "same": 0}
    for _ in range(60):
        flip(path, rng.randrange(len(content)), rng.randrange(8))
        try:
            reader = LedgerReader(ledger)
            after = reader.table(table)
        except InputError as error:
            assert path.name in str(error)
            outcomes["refused"] += 1
        else:
            assert after.equals(before.slice(0, len(after)))
            assert len(after) == len(before) or reader.last_step < 10
            outcomes["same" if len(after) == len(before) else "cut"] += 1
        path.write_bytes(content)
    assert outcomes["refused"] > 5 and outcomes["cut"] > 5, outcomes


@pytest.mark.parametrize("column", ["token_ids", "behaviour_logprobs"])
def test_a_flipped_token_or_logprob_is_named(ledger: Path, column: str) -> None:
    """Trajectory 12 is the first of step 7: three tokens 70, and three log-probs of -0.5."""
    path = small_ledger.part(ledger, "bodies", 7)
    values = np.full(3, 70, dtype=np.int32) if column == "token_ids" else np.full(6, -0.5, dtype=np.float32)
    position = path.read_bytes().find(values.tobytes())
    assert position >= 0
    flip(path, position)
    assert [len(tokens) for tokens, _ in LedgerReader(ledger).bodies([11, 14])] == [3, 3]
    with pytest.raises(InputError, match=rf"{path.name}: trajectory 12 is damaged .*; restore the file from a copy"):
        LedgerReader(ledger).bodies([11, 12])
    with small_ledger.reopen(ledger, 10) as buffer:
        stored = next(q for q in small_ledger.QUESTIONS if 12 in candidates_of(buffer, q).trajectory_ids)
        assert 13 in candidates_of(buffer, stored).trajectory_ids
        with pytest.raises(RunError, match=rf"{path.name}: trajectory 12 is damaged .*, then go on with --resume"):
            buffer.load([12])


def test_nothing_is_cut_before_the_steps_that_stay_can_be_read(ledger: Path) -> None:
    """A resume from step 6 would delete four steps, but the question file is another, or the scores of step 4 turn out
    to be damaged: nothing is deleted."""
    before, others = files(ledger), [question for question in small_ledger.QUESTIONS if question != "q3"]
    with pytest.raises(InputError, match=r"1 questions that are not in this run's question file, q3 first"):
        store.Store(ledger, identity=small_ledger.IDENTITY, rules=replace.Replace(), question_ids=others, at_step=6)
    assert files(ledger) == before
    path = small_ledger.part(ledger, "scores", 4)
    flip_value(path, "entropy")
    before = files(ledger)
    message = rf"{path.name}: the rows of scores in it are damaged .* delete it to use the steps before step 4"
    with pytest.raises(InputError, match=message):
        small_ledger.reopen(ledger, 6)
    assert files(ledger) == before


@pytest.mark.parametrize(("table", "step", "last"), [("draws", 5, 4), ("scores", 2, 1), ("events", 7, 6)])
def test_how_far_a_ledger_is_whole(ledger: Path, table: str, step: int, last: int) -> None:
    assert whole_until(ledger) == (10, "")
    path = small_ledger.part(ledger, table, step)
    flip_value(path, "step")
    step, problem = whole_until(ledger)
    assert step == last and path.name in problem


def test_a_part_that_may_not_be_read_is_not_a_damaged_one(ledger: Path) -> None:
    """Taken for damage, it would cost the steps from 7 on at the next resumption."""
    small_ledger.part(ledger, "scores", 7).chmod(0)
    # Root may read anything, but for these capabilities.
    as_owner = ["setpriv", "--bounding-set", "-dac_override,-dac_read_search"] if os.geteuid() == 0 else []
    script = """
        try:
            small_ledger.reopen(Path(sys.argv[1]), 10)
        except PermissionError as error:
            print(error)
    """
    output, errors = small_ledger.in_subprocess(script, ledger, prefix=as_owner).communicate()
    assert "scores/part-00000007" in output and "Permission denied" in output, errors
    small_ledger.part(ledger, "scores", 7).chmod(0o600)
    assert LedgerReader(ledger).last_step == 10

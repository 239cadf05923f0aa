"""Reading a ledger: whole, damaged, and with merged parts of which one is damaged."""

import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from small_ledger import IDENTITY, PARQUET, SIX_STEPS, WHOLE, WRITTEN, in_subprocess, num_rows, one_step, part, reopen

from exgrpo_cli.base.errors import InputError
from exgrpo_cli.ledger.catalogue import read_catalogue
from exgrpo_cli.ledger.reader import LedgerReader, LedgerWarning
from exgrpo_cli.ledger.schemas import SCHEMAS


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


@pytest.mark.parametrize("table", WRITTEN)
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
        assert buffer.counts.num_trajectories == 12
        one_step(buffer, 7)
    assert num_rows(LedgerReader(ledger))["trajectories"] == 14


@pytest.mark.parametrize("table", WRITTEN)
def test_a_missing_part_leaves_the_steps_before_it(ledger: Path, table: str) -> None:
    part(ledger, table, 4).unlink()
    with pytest.warns(LedgerWarning, match="read up to step 3; .* left out"):
        assert LedgerReader(ledger).last_step == 3


def test_a_warning_counts_what_is_left_out(ledger: Path) -> None:
    part(ledger, "events", 9).unlink()
    # Steps 9 and 10 have 2 bodies, 2 trajectories, 2 scores, 1 draw and 1 visit each, step 10 its 3 events.
    with pytest.warns(
        LedgerWarning, match="read up to step 8; 19 rows of steps 9 to 10 left out: events of steps 9-9 are missing"
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


def test_a_part_that_may_not_be_read_is_not_a_damaged_one(ledger: Path) -> None:
    """Taken for damage, it would cost the steps from 7 on at the next resumption."""
    part(ledger, "scores", 7).chmod(0)
    # Root may read anything, but for these capabilities.
    as_owner = ["setpriv", "--bounding-set", "-dac_override,-dac_read_search"] if os.geteuid() == 0 else []
    script = """
        try:
            small_ledger.reopen(Path(sys.argv[1]), 10)
        except PermissionError as error:
            print(error)
    """
    output, errors = in_subprocess(script, ledger, prefix=as_owner).communicate()
    assert "scores/part-00000007" in output and "Permission denied" in output, errors
    part(ledger, "scores", 7).chmod(0o600)
    assert LedgerReader(ledger).last_step == 10

"""Damage to a ledger: never read as if nothing were wrong, named with its file; nothing is cut before the check."""

import random
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from small_ledger import QUESTIONS, WRITTEN, create, one_step, part, reopen

from exgrpo_cli.base.errors import InputError, RunError
from exgrpo_cli.config.sections.replay import ReplaySettings
from exgrpo_cli.ledger import bodies
from exgrpo_cli.ledger.bodies import CHECKSUMS
from exgrpo_cli.ledger.catalogue import read_catalogue
from exgrpo_cli.ledger.reader import LedgerReader
from exgrpo_cli.ledger.recovery import whole_until
from exgrpo_cli.replay.buffer import ExperienceBuffer

pytestmark = pytest.mark.filterwarnings("ignore::exgrpo_cli.ledger.reader.LedgerWarning")


def flip(path: Path, position: int, bit: int = 0) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 1 << bit
    path.write_bytes(content)


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("part-*")}


def place_of(path: Path, values: np.ndarray) -> int:
    """Where a file holds these values as they lie in memory."""
    position = path.read_bytes().find(values.tobytes())
    assert position >= 0
    return position


def flip_value(path: Path, column: str) -> None:
    """Flip a bit of the last value of a column."""
    metadata = pq.read_metadata(path).row_group(0)
    [chunk] = [metadata.column(i) for i in range(metadata.num_columns) if metadata.column(i).path_in_schema == column]
    begin = chunk.dictionary_page_offset if chunk.has_dictionary_page else chunk.data_page_offset
    flip(path, begin + chunk.total_compressed_size - 1)


@pytest.mark.parametrize("table", [table for table in WRITTEN if table != "bodies"])
def test_no_flipped_bit_of_a_part_is_read_as_if_nothing_were_wrong(ledger: Path, table: str) -> None:
    """60 single bits of a part, one at a time: what is read is refused, cut short, or as it was written."""
    path, before = part(ledger, table, 8), LedgerReader(ledger).table(table)
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


def test_a_body_is_checked_when_it_is_first_read(ledger: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checked, original = [], bodies.checksum
    monkeypatch.setattr(bodies, "checksum", lambda *body: (checked.append(body), original(*body))[1])
    store = bodies.BodyStore(read_catalogue(ledger).parts["bodies"])
    store.read([11, 12])
    store.read([12, 14])
    assert len(checked) == 3


@pytest.mark.parametrize("column", ["token_ids", "behaviour_logprobs"])
def test_a_flipped_token_or_logprob_is_named(ledger: Path, column: str) -> None:
    """Trajectory 12 is the first of step 7: three tokens 70, and three log-probs of -0.5."""
    path = part(ledger, "bodies", 7)
    values = np.full(3, 70, dtype=np.int32) if column == "token_ids" else np.full(6, -0.5, dtype=np.float32)
    flip(path, place_of(path, values))
    assert [len(tokens) for tokens, _ in LedgerReader(ledger).bodies([11, 14])] == [3, 3]
    with pytest.raises(InputError, match=rf"{path.name}: trajectory 12 is damaged .*; restore the file from a copy"):
        LedgerReader(ledger).bodies([11, 12])
    with reopen(ledger, 10) as buffer:
        stored = next(q for q in QUESTIONS if 12 in buffer.questions.candidates(q).trajectory_ids)
        assert 13 in buffer.questions.candidates(stored).trajectory_ids
        with pytest.raises(RunError, match=rf"{path.name}: trajectory 12 is damaged .*, then go on with --resume"):
            buffer.load([12])


def test_a_merged_part_keeps_the_checksums_of_its_bodies(tmp_path: Path) -> None:
    with create(tmp_path / "replay") as buffer:
        for step in range(1, 11):
            one_step(buffer, step)
        buffer.compact([10])
    path = part(tmp_path / "replay", "bodies", 7)
    assert path.name == "part-00000001-00000010.arrow"
    flip(path, place_of(path, np.full(3, 70, dtype=np.int32)))
    assert len(LedgerReader(tmp_path / "replay").bodies([11])) == 1
    with pytest.raises(InputError, match="trajectory 12 is damaged"):
        LedgerReader(tmp_path / "replay").bodies([12])


def without_checksums(ledger: Path) -> None:
    """The same rows as an older version wrote them."""
    for path in ledger.rglob("part-*.parquet"):
        pq.write_table(pq.read_table(path), path, compression="zstd")
    for path in ledger.rglob("part-*.arrow"):
        with pa.OSFile(str(path)) as source:
            table = pa.ipc.open_file(source).read_all()
        with pa.ipc.new_file(str(path), table.schema) as sink:
            sink.write_table(table)


def test_a_ledger_without_checksums_opens_and_goes_on(ledger: Path) -> None:
    before = LedgerReader(ledger).bodies(range(20))
    without_checksums(ledger)
    path = part(ledger, "bodies", 7)
    with pa.OSFile(str(path)) as source:
        _, metadata = pa.ipc.open_file(source).get_batch_with_custom_metadata(0)
    assert CHECKSUMS not in (metadata or {})
    with reopen(ledger, 8) as buffer:
        one_step(buffer, 9)
        buffer.compact([9])
    reader = LedgerReader(ledger)
    assert reader.last_step == 9
    for (tokens, logprobs), (old_tokens, old_logprobs) in zip(reader.bodies(range(16)), before[:16], strict=True):
        np.testing.assert_array_equal(tokens, old_tokens)
        np.testing.assert_array_equal(logprobs, old_logprobs)


def test_nothing_is_cut_before_the_steps_that_stay_can_be_read(ledger: Path) -> None:
    """A resume from step 6 would delete four steps; the scores of step 4 turn out to be damaged: nothing is deleted."""
    path = part(ledger, "scores", 4)
    flip_value(path, "entropy")
    before = files(ledger)
    with pytest.raises(InputError, match=rf"{path.name}: the rows of scores in it are damaged"):
        reopen(ledger, 6)
    assert files(ledger) == before


def test_nothing_is_cut_where_the_question_file_is_another(ledger: Path) -> None:
    before = files(ledger)
    with create(ledger.parent / "other") as other:
        identity = other._writer.identity
    with pytest.raises(InputError, match="questions that are not in this run's question file"):
        ExperienceBuffer.open(ledger, identity=identity, rules=ReplaySettings(), question_ids=["elsewhere"], at_step=6)
    assert files(ledger) == before


@pytest.mark.parametrize(("table", "step", "last"), [("draws", 5, 4), ("scores", 2, 1), ("events", 7, 6)])
def test_how_far_a_ledger_is_whole(ledger: Path, table: str, step: int, last: int) -> None:
    assert whole_until(ledger) == (10, "")
    path = part(ledger, table, step)
    flip_value(path, "step")
    step, problem = whole_until(ledger)
    assert step == last and path.name in problem

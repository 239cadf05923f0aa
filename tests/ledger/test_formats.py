"""Ledgers of format 1: read, resumed in their own format, and refused where they lack what a run replays."""

from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from small_ledger import IDENTITY, QUESTIONS, one_step, part

from exgrpo_cli.base.errors import InputError
from exgrpo_cli.config.sections.replay import ReplaySettings
from exgrpo_cli.ledger.reader import LedgerReader, read_identity
from exgrpo_cli.replay.buffer import ExperienceBuffer


@pytest.fixture
def older(tmp_path: Path) -> Path:
    """Four steps in format 1."""
    folder = tmp_path / "older"
    identity = replace(IDENTITY, format=1)
    with ExperienceBuffer.create(folder, identity=identity, rules=ReplaySettings(), question_ids=QUESTIONS) as buffer:
        for step in range(1, 5):
            one_step(buffer, step)
    return folder


def open_at(folder: Path, step: int) -> ExperienceBuffer:
    return ExperienceBuffer.open(
        folder, identity=IDENTITY, rules=ReplaySettings(), question_ids=QUESTIONS, at_step=step
    )


def test_it_has_none_of_the_later_columns_and_tables(older: Path) -> None:
    assert pq.read_schema(part(older, "trajectories", 2)).names[-1] == "token_hash"
    assert not list((older / "visits").glob("part-*"))


def test_it_reads_as_successes_without_advantages(older: Path) -> None:
    """Two successes of one question a step: their group is the first of them."""
    rows = LedgerReader(older).trajectories().to_pandas()
    assert rows.reward.tolist() == [1.0] * 8
    assert rows.advantage.isna().all() and rows.priority.isna().all()
    assert rows.group_id.tolist() == [0, 0, 2, 2, 4, 4, 6, 6]
    assert LedgerReader(older).trajectories(["group_id"]).column("group_id").to_pylist() == rows.group_id.tolist()
    assert len(LedgerReader(older).visits()) == len(LedgerReader(older).replays()) == 0


def test_its_run_goes_on_in_it(older: Path) -> None:
    with open_at(older, 3) as buffer:
        one_step(buffer, 4)
        one_step(buffer, 5)
        buffer.compact([5], fewest=2)
    assert read_identity(older).format == 1
    reader = LedgerReader(older)
    assert (reader.last_step, reader.dropped, len(reader.trajectories())) == (5, "", 10)
    assert len(reader.visits()) == 0


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"composition": "join", "store": "all"}, "replay.store = 'all'"),
        ({"composition": "append"}, "replay.composition = 'append'"),
        ({"composition": "refill", "store": "all"}, "replay.composition = 'refill'"),
    ],
)
def test_what_needs_failures_or_advantages_refuses_it(
    older: Path, tmp_path: Path, settings: dict[str, str], named: str
) -> None:
    rules = ReplaySettings(**settings)
    with (
        ExperienceBuffer.create(tmp_path / "new", identity=IDENTITY, rules=rules, question_ids=QUESTIONS) as buffer,
        pytest.raises(InputError, match=f"its format 1 kept neither failures nor advantages, which {named}"),
    ):
        buffer.warm_start(older, max_response_tokens=10, with_retired=False)


def test_what_stores_successes_takes_it_over(older: Path, tmp_path: Path) -> None:
    with ExperienceBuffer.create(
        tmp_path / "new", identity=IDENTITY, rules=ReplaySettings(), question_ids=QUESTIONS
    ) as buffer:
        assert buffer.warm_start(older, max_response_tokens=10, with_retired=False).num_trajectories == 8
    assert LedgerReader(tmp_path / "new").trajectories(["group_id"]).column("group_id").to_pylist() == [
        0, 0, 2, 2, 4, 4, 6, 6,
    ]  # fmt: skip

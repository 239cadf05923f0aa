"""Warm start from another run's ledger."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from small_ledger import IDENTITY, K
from store_calls import candidates_of, record, row_of, visit_of

from exgrpo_cli.base.errors import InputError
from exgrpo_cli.config.sections.objective import ObjectiveSettings
from exgrpo_cli.ledger.reader import LedgerReader, LedgerWarning
from exgrpo_cli.replay import append, join, prefix, warm_start
from exgrpo_cli.replay.replace import Replace
from exgrpo_cli.replay.store import Store, StoreCounts, Visit

SOURCE = replace(IDENTITY, questions_hash="of the source", logprob_source="engine")
TARGET = replace(IDENTITY, questions_hash="of the target")
QUESTIONS = ["a", "b", "c", "d"]


def visit(question: str, k: int, step: int, lengths: list[int]) -> Visit:
    rows = [row_of(*range(step, step + length), entropy=length / 10) for length in lengths]
    return visit_of(question, step, rows, success_count=k, num_fresh_successes=k)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """a: bucket 0 with lengths 3, 5; b: bucket 2 with length 6 (one evicted); c: retired with length 4; d: too long."""
    folder = tmp_path_factory.mktemp("source") / "replay"
    rules = Replace(max_per_question=2)
    with Store(folder, identity=SOURCE, rules=rules, question_ids=QUESTIONS) as buffer:
        record(buffer, visit("a", 2, 1, [3, 5]))
        record(buffer, visit("b", 3, 1, [2, 6, 9]))
        record(buffer, visit("c", 1, 1, [4]))
        record(buffer, visit("d", 1, 1, [20]))
        buffer.flush(1)
        record(buffer, visit("a", 0, 2, []))
        record(buffer, visit("b", 2, 2, []))
        record(buffer, visit("c", K, 2, [4] * K))
        buffer.flush(2)
    return folder


def create(folder: Path, identity: object = TARGET, question_ids: list[str] = QUESTIONS) -> Store:
    return Store(folder, identity=identity, rules=Replace(), question_ids=question_ids)


def test_trajectories_and_buckets_come_along(source: Path, tmp_path: Path) -> None:
    with create(tmp_path / "replay", question_ids=["z", *reversed(QUESTIONS)]) as buffer:
        told = warm_start.warm_start(buffer, source, ObjectiveSettings(), 8)
        # a: 3 and 5; b holds 6 and 9 of which 9 is too long; d's only one of 20 too; c is retired.
        assert told.endswith(": 3 trajectories of 2 questions, 0 retired; left out: 2 too long")
        assert buffer.counts == StoreCounts(num_questions=2, num_trajectories=3, num_retired=0, buckets={0: 1, 2: 1})
        candidates = candidates_of(buffer, "a")
        assert candidates.num_tokens.tolist() == [3, 5] and candidates.born_version.tolist() == [-1, -1]
        # Another run's measurements do not count (test_buffer.py).
        assert candidates.measured_version.tolist() == [-1, -1]
        [trajectory] = buffer.load(candidates_of(buffer, "b").trajectory_ids.tolist())
        np.testing.assert_array_equal(trajectory.token_ids, np.arange(1, 7))
        assert (trajectory.behaviour_logprobs == np.float32(-0.5)).all()
        assert (trajectory.step_born, trajectory.weight_version) == (0, -1)
        record(buffer, visit("z", 1, 1, [2]))
        buffer.flush(1)
    rows = LedgerReader(tmp_path / "replay").trajectories().to_pylist()
    assert [row["trajectory_id"] for row in rows] == [0, 1, 2, 3]
    assert [row["logprob_source"] for row in rows] == ["engine", "engine", "engine", "trainer"]
    assert [row["entropy"] for row in rows] == [0.3, 0.5, 0.6, 0.2]


@pytest.mark.parametrize("retired", [False, True])
def test_what_another_run_stored_of_a_barred_question_stays_there(source: Path, tmp_path: Path, retired: bool) -> None:
    """a is in the buffer, c retired with a trajectory: where it is readmitted it has none."""
    rules = Replace(warm_start_retired=retired, readmit_fraction=1.0, readmit_every=1)
    shared = {"identity": TARGET, "rules": rules, "question_ids": QUESTIONS, "barred": ["a", "c"]}
    with Store(tmp_path / "replay", **shared) as buffer:
        warm_start.warm_start(buffer, source, ObjectiveSettings(), 8)
        assert buffer.readmit(1, np.random.default_rng(0)) == ["c"] * retired
        assert [list(each.question_ids) for each in buffer.drawable(1)] == [["b"]]


def test_the_limit_of_the_new_run_holds_from_the_start(source: Path, tmp_path: Path) -> None:
    """a has lengths 3 and 5, b 6 and 9: the longer of each goes. c (retired) has one of 4, d one too long."""
    rules = Replace(
        max_per_question=1, eviction="longest", warm_start_retired=True, readmit_every=1, readmit_fraction=1.0
    )
    with Store(tmp_path / "new", identity=TARGET, rules=rules, question_ids=QUESTIONS) as buffer:
        told = warm_start.warm_start(buffer, source, ObjectiveSettings(), 10)
        assert told.endswith(": 5 trajectories of 3 questions, 1 retired; left out: 1 too long")
        assert [candidates_of(buffer, q).num_tokens.tolist() for q in QUESTIONS] == [[3], [6], [4], []]
    # Also where the run dies before it has written of it.
    with Store(tmp_path / "new", identity=TARGET, rules=rules, question_ids=QUESTIONS, at_step=0) as buffer:
        assert [candidates_of(buffer, q).num_tokens.tolist() for q in QUESTIONS] == [[3], [6], [4], []]
        assert buffer.counts.buckets == {0: 1, 2: 1} and buffer.retired == {"c"}
        assert buffer.readmit(1, np.random.default_rng(0)) == ["c"]
        assert buffer.counts.buckets == {0: 1, 2: 1, K - 1: 1}


def rewarded(folder: Path, rewards: list[float]) -> Path:
    """The ledger of one visit of a question, one row a reward."""
    rows = [
        replace(row, reward=reward, advantage=reward)
        for row, reward in zip(visit("a", 1, 1, [2, 3]).rows, rewards, strict=True)
    ]
    rules = join.Join(store="all")
    with Store(folder, identity=SOURCE, rules=rules, question_ids=QUESTIONS) as buffer:
        record(buffer, replace(visit("a", 1, 1, []), rows=rows))
        buffer.flush(1)
    return folder


def test_the_lowest_priority_goes_by_the_rules_of_the_new_run(tmp_path: Path) -> None:
    """The source drew no units: its rows have no priority of their own."""
    source = rewarded(tmp_path / "source", [0.5, 0.25])
    rules = append.Append(store="all", priority="reward", max_per_question=1, eviction="lowest-priority")
    with Store(tmp_path / "new", identity=TARGET, rules=rules, question_ids=QUESTIONS) as buffer:
        warm_start.warm_start(buffer, source, ObjectiveSettings(), 10)
        assert candidates_of(buffer, "a").reward.tolist() == [0.5]


def test_rewards_below_0_are_no_chances(tmp_path: Path) -> None:
    source = rewarded(tmp_path / "source", [1.0, -1.0])
    said = r"source: trajectory 1 with reward -1 has the priority -0.999999 by replay.priority = 'reward', and nothing "
    for draw in ("proportional", "top"):
        rules = append.Append(store="all", priority="reward", draw=draw)
        with Store(tmp_path / draw, identity=TARGET, rules=rules, question_ids=QUESTIONS) as buffer:
            if draw == "proportional":
                with pytest.raises(InputError, match=said):
                    warm_start.warm_start(buffer, source, ObjectiveSettings(), 10)
            else:
                assert ": 2 trajectories" in warm_start.warm_start(buffer, source, ObjectiveSettings(), 10)


@pytest.mark.parametrize(
    ("kind", "lengths", "left_out"), [("successes", [3], "1 failures"), ("failures", [2], "1 successes")]
)
def test_beginnings_are_of_the_stored_kind(tmp_path: Path, kind: str, lengths: list[int], left_out: str) -> None:
    """No ratio is taken of them: they come without log-probs too."""
    rows = [row_of(1, 2, 3, logprob=np.nan), row_of(1, 2, logprob=np.nan, reward=0)]
    with Store(tmp_path / "source", identity=SOURCE, rules=join.Join(store="all"), question_ids=QUESTIONS) as pool:
        record(pool, visit_of("a", 1, rows))
        pool.flush(1)
    rules = prefix.Prefix(store=kind, retirement=False)
    with Store(tmp_path / "new", identity=TARGET, rules=rules, question_ids=QUESTIONS) as buffer:
        told = warm_start.warm_start(buffer, tmp_path / "source", ObjectiveSettings(), 8)
        assert told.endswith(f": 1 trajectories of 1 questions, 0 retired; left out: {left_out}")
        assert candidates_of(buffer, "a").num_tokens.tolist() == lengths


def test_one_that_was_being_written_when_the_process_died_is_not_half_read(source: Path, tmp_path: Path) -> None:
    with create(tmp_path / "new") as buffer:
        warm_start.warm_start(buffer, source, ObjectiveSettings(), 10)
    [commit_record] = (tmp_path / "new" / "events").iterdir()
    commit_record.unlink()
    with pytest.warns(LedgerWarning, match="rows up to step 0 left out: events has no parts"):
        reader = LedgerReader(tmp_path / "new")
    assert len(reader.trajectories()) == 0
    with pytest.raises(InputError, match="no trajectory 0"):
        reader.bodies([0])


def test_more_trajectories_than_one_batch_of_bodies(tmp_path: Path) -> None:
    with Store(tmp_path / "source", identity=SOURCE, rules=Replace(), question_ids=QUESTIONS) as buffer:
        for step in range(1, 3):
            record(buffer, visit("a", 3, step, list(range(1 + 700 * step, 701 + 700 * step))))
            buffer.flush(step)
    with create(tmp_path / "replay") as buffer:
        assert ": 1400 trajectories" in warm_start.warm_start(buffer, tmp_path / "source", ObjectiveSettings(), 8192)
        for trajectory_id in (0, 699, 700, 1023, 1024, 1399):
            [loaded] = buffer.load([trajectory_id])
            step = 1 + trajectory_id // 700
            assert loaded.token_ids.tolist() == list(range(step, step + 701 + trajectory_id))


@pytest.mark.parametrize(("name", "value"), [("tokenizer_hash", "another"), ("template", "another"), ("group_size", 8)])
def test_another_tokenizer_template_or_k_is_refused(source: Path, tmp_path: Path, name: str, value: object) -> None:
    with create(tmp_path / "replay", replace(TARGET, **{name: value})) as buffer:
        with pytest.raises(InputError, match=f"{name} is .* in the ledger but {value!r} in this run"):
            warm_start.warm_start(buffer, source, ObjectiveSettings(), 8)
        assert buffer.counts.num_questions == 0
        buffer.flush(1)


def test_rows_that_came_along_stay_where_they_are_when_none_is_added(source: Path, tmp_path: Path) -> None:
    with create(tmp_path / "replay") as store:
        warm_start.warm_start(store, source, ObjectiveSettings(), 8)
        ids = store.rows.live().tolist()
        before = [row.token_ids.tolist() for row in store.load(ids)]
        store.flush(1)
        store.seal()
        assert [row.token_ids.tolist() for row in store.load(ids)] == before != []


def test_unknown_questions_are_refused(source: Path, tmp_path: Path) -> None:
    with (
        create(tmp_path / "replay", question_ids=["a", "d", "x"]) as buffer,
        pytest.raises(InputError, match=r"1 of its 3 questions are not in this run's question file, b first"),
    ):
        warm_start.warm_start(buffer, source, ObjectiveSettings(), 8)

"""What test_state_machine.py leaves open of a buffer: what is recorded, bodies, evictions, measurements, refusals."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from small_buffer import asked_of
from small_ledger import IDENTITY, K
from store_calls import candidates_of, chosen_of, draw, place_of, record, replay, row_of, visit_of

from exgrpo_cli.base import errors, types
from exgrpo_cli.ledger.reader import LedgerReader
from exgrpo_cli.replay.replace import Replace
from exgrpo_cli.replay.store import FreshRow, Store, Visit

QUESTIONS = [f"q{number}" for number in range(12)]


def visit(
    question: str, k: int, step: int = 1, rows: Sequence[FreshRow] | None = None, *, experiential: bool = False
) -> Visit:
    """A group with k successes; unless given, its fresh ones are distinct and never seen before."""
    fresh = k - experiential
    rows = rows or [row_of(100 * step + int(question[1:]), member) for member in range(fresh)]
    more = {"weight_version": step - 1, "success_count": k, "num_replayed": int(experiential)}
    return visit_of(question, step, rows, num_fresh_successes=fresh, **more)


class Worlds:
    """Makes buffers below one folder, closed at the end."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder, self._stack = folder, stack

    def create(self, **rules: object) -> Store:
        place = place_of(**rules)
        made = Store(self.folder / "replay", identity=IDENTITY, rules=place, question_ids=QUESTIONS)
        return self._stack.enter_context(made)

    def reopen(self, buffer: Store, at_step: int) -> Store:
        buffer.seal()
        buffer.close()
        shared = {"identity": IDENTITY, "rules": buffer.rules, "question_ids": QUESTIONS}
        return self._stack.enter_context(Store(buffer.folder, at_step=at_step, **shared))


@pytest.fixture
def worlds(tmp_path: Path) -> Iterator[Worlds]:
    with ExitStack() as stack:
        yield Worlds(tmp_path, stack)


def events(buffer: Store) -> list[tuple[object, ...]]:
    rows = LedgerReader(buffer.folder).events().to_pylist()
    return [(row["step"], row["event"], row["question_id"], row["trajectory_id"], row["bucket"]) for row in rows]


def ids(buffer: Store, question: str) -> list[int]:
    return candidates_of(buffer, question).trajectory_ids.tolist()


def test_counting_fresh_members_only(worlds: Worlds) -> None:
    buffer = worlds.create(count_fresh_only=True, sampler="linear")
    record(buffer, visit("q1", 2))
    record(buffer, visit("q2", 2))
    # The replayed success and 2 fresh ones are k = 3 of 4, but k' = 2 of 3.
    assert record(buffer, visit("q1", 3, 2, experiential=True)).bucket == 2
    assert buffer.counts.buckets == {2: 2}
    draw(buffer, 2, 3, np.random.default_rng(0))
    buffer.flush(3)
    rows = LedgerReader(buffer.folder).draws().to_pylist()
    # Pass rates 2/3 and 2/4 give linear weights 4/7 and 3/7; both are drawn, for there are no others.
    assert [row.pop("probability") for row in rows] == pytest.approx([4 / 7, 3 / 7])
    shared = {"step": 3, "bucket": 2, "num_questions": 1, "num_drawn": 1}
    assert rows == [{**shared, "num_members": 3}, {**shared, "num_members": 4}]
    assert record(buffer, visit("q2", K, 4, experiential=True)).retired


def test_bodies_come_back_bit_for_bit(worlds: Worlds) -> None:
    buffer = worlds.create()
    rng = np.random.default_rng(0)
    token_ids = [rng.integers(0, 2**31 - 1, size).astype(np.int32) for size in (1, 2000, 37)]
    # Every kind of float32, also those that arithmetic would change.
    logprobs = [rng.integers(0, 2**32, len(ids), dtype=np.uint32).view(np.float32) for ids in token_ids]
    pairs = zip(token_ids, logprobs, strict=True)
    stored = [replace(row_of(), token_ids=ids, behaviour_logprobs=values) for ids, values in pairs]
    record(buffer, visit("q7", 3, 1, stored))

    def check(candidate: Store) -> None:
        loaded = candidate.load([2, 0, 1])
        for trajectory in loaded:
            np.testing.assert_array_equal(trajectory.token_ids, token_ids[trajectory.trajectory_id])
            expected = logprobs[trajectory.trajectory_id].view(np.uint32)
            np.testing.assert_array_equal(trajectory.behaviour_logprobs.view(np.uint32), expected)
            assert (trajectory.question_id, trajectory.step_born, trajectory.weight_version) == ("q7", 1, 0)

    check(buffer)
    buffer.flush(1)
    check(buffer)
    check(worlds.reopen(buffer, 1))


def test_what_is_stored_does_not_follow_the_callers_arrays(worlds: Worlds) -> None:
    buffer = worlds.create()
    mine = row_of(5, 6)
    record(buffer, visit("q1", 1, 1, [mine]))
    mine.token_ids[:] = 0
    mine.behaviour_logprobs[:] = 0
    assert buffer.load([0])[0].token_ids.tolist() == [5, 6]


@pytest.mark.parametrize(
    ("eviction", "left"),
    # Lengths 3, 1, 2 and entropies 0.2, 0.9, 0.5 of trajectories 0, 1, 2; two may stay.
    [("oldest", [1, 2]), ("longest", [1, 2]), ("highest-entropy", [0, 2])],
)
def test_most_trajectories_per_question(worlds: Worlds, eviction: str, left: list[int]) -> None:
    buffer = worlds.create(max_per_question=2, eviction=eviction)
    three = [row_of(1, 2, 3, entropy=0.2), row_of(4, entropy=0.9), row_of(5, 6, entropy=0.5)]
    outcome = record(buffer, visit("q1", 3, 1, three))
    assert outcome.num_evicted == 1 and ids(buffer, "q1") == left and buffer.counts.num_trajectories == 2
    buffer.flush(1)
    assert ids(worlds.reopen(buffer, 1), "q1") == left


def test_random_eviction_leaves_a_uniform_sample_of_all(tmp_path: Path) -> None:
    questions = [f"q{number}" for number in range(300)]
    rules = Replace(max_per_question=3, eviction="random")
    survivors = [0, 0, 0, 0]
    with Store(tmp_path / "replay", identity=IDENTITY, rules=rules, question_ids=questions) as buffer:
        for round_number in range(4):
            for number, question in enumerate(questions):
                record(buffer, visit(question, 3, 1, [row_of(number, round_number, i) for i in range(3)]))
        for question in questions:
            for trajectory in buffer.load(ids(buffer, question)):
                survivors[int(trajectory.token_ids[1])] += 1
    # 900 survivors: 225 from each of the four rounds, with a standard deviation of at most sqrt(900 * 3/16) = 13.
    assert sum(survivors) == 900 and all(abs(count - 225) < 4 * 13 for count in survivors)


def test_readmission_comes_every_so_many_steps_with_a_share_rounded_up(worlds: Worlds) -> None:
    buffer = worlds.create(readmit_fraction=0.5, readmit_every=3)
    for question in ("q0", "q1", "q2", "q3"):
        record(buffer, visit(question, K, 2))
    rng = np.random.default_rng(0)
    assert [len(buffer.readmit(step, rng)) for step in (2, 3, 6, 9, 12)] == [0, 2, 1, 1, 0]


def test_scores_and_selections_are_recorded_and_survive(worlds: Worlds) -> None:
    buffer = worlds.create(max_score_staleness=1)
    record(buffer, visit("q1", 3))
    buffer.flush(1)
    assert events(buffer) == [(1, "collected", "q1", row, 3) for row in range(3)]
    for name, values in (("entropy", [0.4, 0.1]), ("nll", [0.7, 0.8]), ("measured_version", [2, 2])):
        buffer.rows[name][[0, 1]] = values
    measured = candidates_of(buffer, "q1")
    [chosen] = chosen_of(buffer, measured, np.random.default_rng(0))
    assert chosen == 1
    replay(buffer, 2, measured, chosen)
    buffer.flush(2)
    rows = LedgerReader(buffer.folder).scores().to_pylist()
    names = ("trajectory_id", "entropy", "weight_version", "chosen")
    told = [tuple(row[name] for name in names) for row in rows]
    assert told == [(0, 0.4, 2, False), (1, 0.1, 2, True), (2, 0.5, 0, False)]
    assert events(buffer)[-1] == (2, "selected", "q1", 1, 3)
    again = candidates_of(worlds.reopen(buffer, 2), "q1")
    assert again.entropy.tolist() == [0.4, 0.1, 0.5] and again.measured_version.tolist() == [2, 2, 0]


@pytest.mark.parametrize(("staleness", "measured"), [(0, [1, 2, 3]), (1, [1, 2, 3]), (2, [2, 3]), (10**6, [2, 3])])
def test_what_is_stale_is_measured_again(worlds: Worlds, staleness: int, measured: list[int]) -> None:
    """Of version 6, 4, another run's whatever is allowed, and never; at version 6."""
    buffer = worlds.create(max_score_staleness=staleness, ratio=1.0, upper_bound=K, retirement=False)
    record(buffer, visit("q1", K))
    buffer.rows["measured_version"][:], buffer.rows["entropy"][3] = [6, 4, -1, 6], np.nan
    seen = []

    def score(rows: Sequence[types.Trajectory]) -> list[types.TokenScores]:
        seen.extend(row.trajectory_id for row in rows)
        return [types.TokenScores(logprobs=-np.ones(2, np.float32), entropies=np.ones(2, np.float32)) for _ in rows]

    buffer.rules.before(asked_of(buffer, 6, score))
    assert seen == measured
    assert candidates_of(buffer, "q1").entropy.tolist() == [1.0 if row in measured else 0.5 for row in range(K)]


def test_a_draw_of_what_was_not_offered(worlds: Worlds, workdir: Path) -> None:
    (workdir / "sampler_of_mine.py").write_text(
        "import numpy as np\n"
        "from exgrpo_cli.replay.by_question import QuestionDraw\n"
        "def greedy(buckets, num, rng):\n"
        "    return QuestionDraw(question_ids=('q9',), probabilities=np.ones(len(buckets)))\n"
    )
    buffer = worlds.create(sampler="python:sampler_of_mine:greedy")
    record(buffer, visit("q1", 1))
    with pytest.raises(errors.RunError, match="python:sampler_of_mine:greedy drew question q9, which was not offered"):
        draw(buffer, 1, 2, np.random.default_rng(0))

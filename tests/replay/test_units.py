"""The store of units: the worked numbers of each method (limits: test_unit_machine.py)."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from small_ledger import IDENTITY, K
from store_calls import place_of, record, row_of, visit_of

from exgrpo_cli.ledger.reader import LedgerReader
from exgrpo_cli.replay.by_unit import DrawnUnit
from exgrpo_cli.replay.store import Store, Visit

QUESTIONS = [f"q{number}" for number in range(8)]
ROWS = {"composition": "append", "store": "all", "retirement": False}
GROUPS = {**ROWS, "unit": "group"}


def visit(question: int, rewards: list[float], step: int, logprob: float = -0.5, failed: bool = False) -> Visit:
    """A group with A = r - mean(r) and two tokens a row."""
    own = np.array(rewards)
    rows = [
        row_of(step, member, logprob=logprob, reward=reward, advantage=reward - float(own.mean()))
        for member, reward in enumerate(rewards)
    ]
    return visit_of(QUESTIONS[question], step, rows, verifier_failed=failed)


@pytest.fixture
def buffer_of(tmp_path: Path):
    """`buffer_of(priority="advantage", ...)`: a new buffer with these settings of `replay`."""
    with ExitStack() as stack:
        yield lambda **settings: stack.enter_context(
            Store(tmp_path / "replay", identity=IDENTITY, rules=place_of(**settings), question_ids=QUESTIONS)
        )


def take(store: Store, num: int, step: int, rng: np.random.Generator | None = None) -> list[DrawnUnit]:
    """Draw units and accept them all."""
    units = store.load_units(store.draw_units(store.rules, step, rng or np.random.default_rng(step)).take(num))
    store.record_scan(step, units)
    return units


def test_advantages_as_priorities(buffer_of: Callable[..., Store]) -> None:
    """K = 4, k = 1: |A| .75 and .25 three times; their roots .866 and .5 three times: P .366 and .211."""
    buffer = buffer_of(**ROWS, priority="advantage", exponent=0.5)
    record(buffer, visit(0, [1, 0, 0, 0], 1))
    drawn = {unit.unit_id: unit for unit in take(buffer, 4, 2)}
    assert [drawn[row].probability for row in range(4)] == pytest.approx([0.366, 0.211, 0.211, 0.211], abs=5e-4)
    assert [drawn[row].priority for row in range(4)] == pytest.approx([0.75, 0.25, 0.25, 0.25], abs=1e-5)
    buffer.flush(2)
    replays = LedgerReader(buffer.folder).replays().to_pandas().set_index("unit_id").sort_index()
    assert replays.probability.tolist() == pytest.approx([0.366, 0.211, 0.211, 0.211], abs=5e-4)
    assert replays.accepted.all() and replays.drift.isna().all()


def test_rewards_fade_with_age_and_their_bias_is_corrected(buffer_of: Callable[..., Store]) -> None:
    """Successes of ages 0 and 500: (1, 1/e)^.6 = 1, .549: P .646, .354; weights (.354 / .646)^.4 = .787 and 1."""
    settings = {"priority": "reward", "exponent": 0.6, "age_decay": 500.0, "bias_correction": 0.4}
    buffer = buffer_of(composition="append", retirement=False, **settings)
    for step in (1, 501):
        record(buffer, visit(0, [1, 0, 0, 0], step))
    drawn = sorted(take(buffer, 2, 501), key=lambda unit: -unit.unit_id)
    assert [unit.probability for unit in drawn] == pytest.approx([0.646, 0.354], abs=5e-4)
    assert [unit.weight for unit in drawn] == pytest.approx([0.787, 1.0], abs=5e-4)


def test_a_failure_is_hardly_drawn_and_sets_the_scale(buffer_of: Callable[..., Store]) -> None:
    """(1 + 1e-6)^.6 over (1e-6)^.6 is 10^3.6 = 3981; the success weighs 3981^-.4 = .0363."""
    buffer = buffer_of(**ROWS, priority="reward", exponent=0.6, age_decay=500.0, bias_correction=0.4)
    record(buffer, visit(0, [1, 0, 0, 0], 1))
    drawn = {unit.unit_id: unit for unit in take(buffer, 4, 1)}
    assert drawn[0].probability / drawn[1].probability == pytest.approx(3981, abs=1)
    assert drawn[0].weight == pytest.approx(0.0363, abs=5e-5) and drawn[1].weight == 1.0


def test_signal_of_groups(buffer_of: Callable[..., Store]) -> None:
    """k = 2: 2 * .577 = 1.155; k = 1: 1.5 * .5 = .75: P .606 and .394."""
    buffer = buffer_of(composition="refill", store="all", retirement=False, priority="signal")
    record(buffer, visit(0, [1, 1, 0, 0], 1))
    record(buffer, visit(1, [1, 0, 0, 0], 1))
    drawn = {unit.unit_id: unit for unit in take(buffer, 2, 2)}
    assert [drawn[group].priority for group in (0, K)] == pytest.approx([1.155, 0.75], abs=5e-4)
    assert [drawn[group].probability for group in (0, K)] == pytest.approx([0.606, 0.394], abs=5e-4)
    assert [row.reward for row in drawn[0].trajectories] == [1, 1, 0, 0]
    assert [row.advantage for row in drawn[K].trajectories] == [0.75, -0.25, -0.25, -0.25]


def test_the_top_is_scanned_until_enough_and_headrooms_are_kept(buffer_of: Callable[..., Store]) -> None:
    """Headrooms .9, .7, .6; the first is refused, the second taken: two scanned, two caches renewed."""
    buffer = buffer_of(**GROUPS, priority="headroom", draw="top", max_drift=1e-3, capacity=8)
    # One right of four, all tokens alike: a quarter of the tokens 1 - p, the rest p: p = H + ... solved for H.
    for question, headroom in enumerate((0.9, 0.7, 0.6)):
        chance = (headroom - 0.25) / 0.5 if headroom <= 0.75 else 0.99
        record(buffer, visit(question, [1, 0, 0, 0], 1, logprob=float(np.log(chance))))
    draw = buffer.draw_units(buffer.rules, 2, np.random.default_rng(0))
    [first], [second] = draw.take(1), draw.take(1)
    assert (first.unit_id, second.unit_id) == (0, K)
    verdicts = [
        replace(first, accepted=False, drift=0.02, headroom=0.1),
        replace(second, accepted=True, drift=1e-4, headroom=0.65),
    ]
    buffer.record_scan(2, verdicts)
    assert [unit.priority for unit in take(buffer, 3, 3)] == pytest.approx([0.65, 0.6, 0.1], abs=1e-6)
    buffer.flush(3)
    replays = LedgerReader(buffer.folder).replays().to_pandas()
    assert replays[replays.step == 2].accepted.tolist() == [False, True]
    assert replays[replays.step == 2].headroom.tolist() == [0.1, 0.65]


def test_a_visit_in_which_the_verifier_failed_stores_no_failures(buffer_of: Callable[..., Store]) -> None:
    buffer = buffer_of(**ROWS)
    assert record(buffer, visit(0, [1, 0, 0, 0], 1, failed=True)).collected == ()
    assert len(record(buffer, visit(0, [1, 0, 0, 0], 2)).collected) == K


def test_retired_questions_are_not_drawn_until_they_return(buffer_of: Callable[..., Store]) -> None:
    buffer = buffer_of(composition="append", store="all", priority="advantage", readmit_fraction=1.0, readmit_every=5)
    record(buffer, visit(0, [1, 0, 0, 0], 1))
    record(buffer, visit(0, [1, 1, 1, 1], 2))
    assert take(buffer, 9, 3) == [] and buffer.readmit(5, np.random.default_rng(0)) == [QUESTIONS[0]]
    assert len(take(buffer, 9, 5)) == K


def test_powers_of_ones_own_priorities_do_not_overflow(buffer_of: Callable[..., Store], workdir: Path) -> None:
    """1e200 and 3e200, squared: one to nine."""
    (workdir / "huge.py").write_text("def huge(units, rng):\n    return [1e200, 3e200, 0, 0]\n")
    buffer = buffer_of(**ROWS, priority="python:huge:huge", exponent=2.0, capacity=9)
    record(buffer, visit(0, [1, 0, 0, 0], 1))
    found = {unit.unit_id: unit.probability for unit in take(buffer, 3, 2)}
    assert found == {0: pytest.approx(0.1), 1: pytest.approx(0.9)}


def test_draws_without_replacement_follow_their_probabilities(buffer_of: Callable[..., Store]) -> None:
    """Pairs out of weights .75, .25, .25, .25: the first row is in 1 - 3 * (1/6 * 2/5) = .8 of them."""
    buffer = buffer_of(**ROWS, priority="advantage")
    record(buffer, visit(0, [1, 0, 0, 0], 1))
    rng = np.random.default_rng(5)
    pairs = [{unit.unit_id for unit in take(buffer, 2, 2, rng)} for _ in range(600)]
    assert all(len(pair) == 2 for pair in pairs)
    # Three standard errors of 600 draws: .05.
    assert np.mean([0 in pair for pair in pairs]) == pytest.approx(0.8, abs=0.05)


@pytest.mark.parametrize(
    "settings",
    [
        {**ROWS, "priority": "advantage", "exponent": 0.5, "max_uses": 2},
        {**ROWS, "priority": "reward", "age_decay": 2.0, "bias_correction": 0.4, "capacity": 9},
        {**GROUPS, "priority": "headroom", "draw": "top", "capacity": 3, "max_drift": 0.1},
        {**GROUPS, "priority": "signal", "eviction": "lowest-priority", "capacity": 3, "age_decay": 3.0},
    ],
)
def test_a_resumed_store_draws_as_the_one_that_lived(tmp_path: Path, settings: dict[str, object]) -> None:
    """Reopened after every step: the same units, probabilities, weights, to the last bit."""
    rules = place_of(**settings)
    shared = {"identity": IDENTITY, "rules": rules, "question_ids": QUESTIONS}
    draws = np.random.default_rng(1)
    with ExitStack() as stack:
        buffers = [stack.enter_context(Store(tmp_path / name, **shared)) for name in ("lived", "reopened")]
        for step in range(1, 9):
            seed, told = int(draws.integers(1 << 30)), []
            for buffer in buffers:
                told.append(buffer.draw_units(rules, step, np.random.default_rng(seed)).take(3))
                judged = [
                    replace(unit, accepted=i != 1, drift=0.5, headroom=0.1 * i + 0.01 * step)
                    for i, unit in enumerate(told[-1])
                ]
                buffer.record_scan(step, judged)
                for question in range(3):
                    right = (step + question) % 3 + 1
                    record(buffer, visit(question, [1.0] * right + [0.0] * (K - right), step, -0.1 * step))
                buffer.flush(step)
            assert told[0] == told[1]
            buffers[1].seal()
            buffers[1].close()
            buffers[1] = stack.enter_context(Store(tmp_path / "reopened", at_step=step, **shared))
        assert any(told[0])

"""Dynamic sampling, the baseline of a question's own past, and limits of store and replay, through the real loop."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from run_leaves import Listener, metrics

from exgrpo_cli.algo.advantages import SuccessHistory, normalised_history_advantages, slope_of_pass_at_k
from exgrpo_cli.base.reporter import SilentReporter
from exgrpo_cli.ledger.reader import LedgerReader
from exgrpo_cli.training.run import train

K = 8
ON_POLICY = (
    "replay.enabled=false", "replay.retirement=false", f"rollout.group_size={K}", "optim.minibatches=1",
    "data.heldout=none",
)  # fmt: skip


def test_rounds_draw_what_is_missing_until_the_batch_is_full(small_config, tmp_path, verdicts, batches) -> None:
    """B = 4: rounds of 4, 2 and 1 question yield 2, 1 and 1 mixed groups: 7 groups are generated, 4 trained."""
    verdicts([[3, K, 0, 5], [0, 1], [7], [0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]], K)
    config = small_config(
        *ON_POLICY, "arithmetic.num_train=30", "rollout.questions_per_step=4", "rollout.max_rounds=3", "run.steps=2"
    )
    reporter = Listener()
    summary = train(config, tmp_path / "run", reporter=reporter)
    first, second = metrics(tmp_path / "run")
    assert (first["rollout/rounds"], first["batch/questions"]) == (3, 7)
    assert first["batch/pass_at_1"] == pytest.approx((3 + 8 + 0 + 5 + 0 + 1 + 7) / 56)
    [batch] = batches
    assert (batch.num_rollouts, len(batch.rows)) == (4 * K, 4 * K)
    # Mixed groups in the order drawn: k = 3, 5, 1, 7 of 8.
    right = sorted(sum(row.advantage > 0 for row in batch.rows[at : at + K]) for at in range(0, 4 * K, K))
    assert right == [1, 3, 5, 7]
    # All of step 2 is wrong, in all its rounds: nothing is trained, and every visit counts.
    assert (second["rollout/rounds"], second["batch/questions"], second["tokens/trained"]) == (3, 12, 0)
    assert second["optim/updates_applied"] == second["optim/updates_skipped"] == 0
    assert "step 2: 0 of 4 fresh groups are mixed after 3 rounds, and trained" in reporter.notes
    assert summary["tokens"]["generated"] == first["tokens/generated"] + second["tokens/generated"]
    state = json.loads((tmp_path / "run" / "checkpoints" / "step-000002" / "state.json").read_text())["state"]
    assert sum(state["visits"].values()) == 19
    visits = LedgerReader(tmp_path / "run" / "replay").visits().to_pandas()
    assert visits.k.tolist() == [3, K, 0, 5, 0, 1, 7] + [0] * 12 and visits.alpha.isna().all()


def test_the_baseline_of_a_questions_own_past(small_config, tmp_path, verdicts, batches) -> None:
    """d = 1/2. S = 2: p = 2.5 / 9 = .278; then S = 8: p = 9.25 / 12.5 = .74; a failing verifier changes nothing."""
    verdicts([[2, 2], [8, 8], [None, None]], K)
    for steps in (2, 3):
        config = small_config(
            *ON_POLICY, "arithmetic.num_train=2", "rollout.questions_per_step=2", "objective.baseline=history",
            "objective.history_discount=0.5", f"run.steps={steps}", "run.save_every=1",
        )  # fmt: skip
        train(config, tmp_path / "run", resume=steps == 3, reporter=SilentReporter())
    advantages = [[row.advantage for row in batch.rows] for batch in batches]
    np.testing.assert_allclose(advantages[0], ([1 - 2.5 / 9] * 2 + [-2.5 / 9] * 6) * 2, rtol=1e-12)
    np.testing.assert_allclose(advantages[1], [1 - 9.25 / 12.5] * 16, rtol=1e-12)
    np.testing.assert_allclose(advantages[2], [-9.25 / 12.5] * 16, rtol=1e-12)
    state = json.loads((tmp_path / "run" / "checkpoints" / "step-000003" / "state.json").read_text())["state"]
    assert list(state["history"].values()) == [[9.25, 3.25]] * 2
    # Two questions a step: what the ledger has of each visit, the resumed step's too.
    visits = LedgerReader(tmp_path / "run" / "replay").visits().to_pandas()
    first, second, failed = [1, 2, False, 2.5, 6.5], [2, 8, False, 9.25, 3.25], [3, 0, True, 9.25, 3.25]
    columns = ["step", "k", "verifier_failed", "alpha", "beta"]
    assert visits[columns].values.tolist() == [first, first, second, second, failed, failed]


def slope(right: int, wrong: int, k: int) -> float:
    """E[k (1 - p)^(k - 1)] with p ~ Beta(1 + right, 1 + wrong), 1 at most, by the trapezoid rule."""
    p = np.linspace(0, 1, 200_001)
    density = p**right * (1 - p) ** wrong
    return min(1.0, k * float(np.trapezoid(density * (1 - p) ** (k - 1), p) / np.trapezoid(density, p)))


@pytest.mark.parametrize(
    ("gate", "second", "third"),
    [
        (("objective.gate=unsolved",), [0.0, 1.0], [0.0, 0.0]),
        # 16 * 7 * 8 * 9 / (22 * 23 * 24) = .664; then of 4 right and 12 wrong, and of 2 and 14.
        (
            ("objective.gate=boundary", "objective.gate_k=16"),
            [slope(2, 6, 16), 1.0],
            [slope(4, 12, 16), slope(2, 14, 16)],
        ),
    ],
)
def test_a_gate_by_a_questions_earlier_visits(small_config, tmp_path, verdicts, batches, gate, second, third) -> None:
    """K = 8, two of eight right: advantages .75 and -.25, times the gate by what came before this visit."""
    verdicts([[2, 0], [2, 2], [2, 2]], K)
    assert slope(2, 6, 16) == pytest.approx(0.664, abs=5e-4)
    assert (
        slope_of_pass_at_k(SuccessHistory(), 49) == 1 and 0 <= slope_of_pass_at_k(SuccessHistory(900, 900), 256) < 1e-60
    )
    for steps in (2, 3):
        config = small_config(
            *ON_POLICY, *gate, "arithmetic.num_train=2", "rollout.questions_per_step=2", f"run.steps={steps}",
            "run.save_every=1",
        )  # fmt: skip
        train(config, tmp_path / "run", resume=steps == 3, reporter=SilentReporter())
    # The first of the two is the one that step 1 solved.
    solved = next(tuple(row.sequence.prompt_ids) for row in batches[0].rows if row.advantage > 0)
    for batch, gates, line in zip(batches[1:], (second, third), metrics(tmp_path / "run")[1:], strict=True):
        for at in (0, K):
            weight = gates[tuple(batch.rows[at].sequence.prompt_ids) != solved]
            found = [row.advantage for row in batch.rows[at : at + K]]
            np.testing.assert_allclose(found, [0.75 * weight] * 2 + [-0.25 * weight] * 6, rtol=1e-6)
        assert line["batch/gate"] == pytest.approx(np.mean(gates), rel=1e-6)


def test_normalised_by_the_spread_that_the_past_promises() -> None:
    """p = 1/5: (1 - .2) / .4 and -.2 / .4, less the constant that keeps them finite."""
    found = normalised_history_advantages(np.array([1.0, 0.0]), SuccessHistory(1.0, 4.0))
    np.testing.assert_allclose(found, [2.0, -0.5], rtol=1e-5)
    assert math.isclose(SuccessHistory().after(2, 8, 0.75).pass_rate, 2.75 / 9.5)


LIMITED = ("arithmetic.num_train=24", "data.heldout=none", "rollout.questions_per_step=8", "run.steps=7")


@pytest.mark.slow
def test_a_draw_below_the_bound_is_given_back_and_the_step_is_fresh(small_config, tmp_path: Path) -> None:
    """No policy that has moved reaches a bound of 1: every draw is measured, none is replayed."""
    listener, run = Listener(), tmp_path / "run"
    train(small_config(*LIMITED, "replay.ess_bound=1", "replay.cooldown=3"), run, reporter=listener)
    ledger, lines = LedgerReader(run / "replay"), metrics(run)
    scores, events, draws = (ledger.table(name).to_pandas() for name in ("scores", "events", "draws"))
    drew = [3, 4, 5, 6, 7]
    assert draws.groupby("step").num_drawn.sum().to_dict() == dict.fromkeys(drew, 4)
    assert not scores.chosen.any() and sorted(scores.step.unique()) == drew
    assert "selected" not in set(events.event) and [line["replay/used"] for line in lines] == [0] * 7
    # All 8 are fresh, and what was only drawn is not reported as replayed.
    assert [line["batch/questions"] for line in lines] == [8] * 7
    measured = {line["step"]: line["replay/ess_before"] for line in lines if "replay/ess_before" in line}
    assert list(measured) == drew and all(0 < value < 1 for value in measured.values())
    assert not {"replay/entropy_selected", "replay/age_mean", "replay/pass_at_1"} & set().union(*lines)
    assert [note for note in listener.notes if "replay.ess_bound" in note] == [
        f"step {step}: the draw's effective sample size {measured[step]:.3f} is below replay.ess_bound = 1.0; "
        "its questions stay in the buffer and the step takes fresh ones"
        for step in drew
    ]


def test_collecting_before_the_start_fills_the_buffer_of_the_first_mixed_step(small_config, tmp_path: Path) -> None:
    """Without it the first mixed step has nothing to draw (test_replay.py)."""
    run = tmp_path / "run"
    train(small_config(*LIMITED, "replay.collect_before_start=true", "run.steps=2"), run, reporter=Listener())
    first, second = metrics(run)
    assert (first["phase"], second["phase"]) == ("on-policy", "mixed")
    assert LedgerReader(run / "replay").trajectories().to_pandas().step_born.min() == 1
    assert first["replay/used"] == 0 < second["replay/used"]

"""Settings that limit what is stored and replayed, through the real loop and checked from the ledger it leaves."""

from pathlib import Path

import pytest
from run_leaves import Listener, metrics

from exgrpo_cli.ledger.reader import LedgerReader
from exgrpo_cli.training.run import train

B = 8
SMALL = ("arithmetic.num_train=24", "data.heldout=", f"rollout.questions_per_step={B}", "run.steps=7")


@pytest.mark.slow
def test_a_draw_below_the_bound_is_given_back_and_the_step_is_fresh(small_config, tmp_path: Path) -> None:
    """No policy that has moved reaches a bound of 1: every draw is measured, none is replayed."""
    listener, run = Listener(), tmp_path / "run"
    train(small_config(*SMALL, "replay.ess_bound=1", "replay.cooldown=3"), run, reporter=listener)
    ledger, lines = LedgerReader(run / "replay"), metrics(run)
    scores, events, draws = (ledger.table(name).to_pandas() for name in ("scores", "events", "draws"))
    drew = [3, 4, 5, 6, 7]
    assert draws.groupby("step").num_drawn.sum().to_dict() == dict.fromkeys(drew, B // 2)
    assert not scores.chosen.any() and sorted(scores.step.unique()) == drew
    assert "selected" not in set(events.event) and [line["replay/used"] for line in lines] == [0] * 7
    # All B are fresh, and what was only drawn is not reported as replayed.
    assert [line["batch/questions"] for line in lines] == [B] * 7
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
    train(small_config(*SMALL, "replay.collect_before_start=true", "run.steps=2"), run, reporter=Listener())
    first, second = metrics(run)
    assert (first["phase"], second["phase"]) == ("on-policy", "mixed")
    assert LedgerReader(run / "replay").trajectories().to_pandas().step_born.min() == 1
    assert first["replay/used"] == 0 < second["replay/used"]

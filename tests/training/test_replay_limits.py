"""Settings that limit what is stored and replayed, through the real loop and checked from the ledger it leaves."""

from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest
from run_leaves import Listener, metrics

from exgrpo_cli.ledger.reader import LedgerReader
from exgrpo_cli.training.run import train

K, B = 8, 8


class Run:
    """A finished run of a few steps."""

    def __init__(self, folder: Path, notes: list[str]) -> None:
        ledger = LedgerReader(folder / "replay")
        self.notes = notes
        self.events: pd.DataFrame = ledger.events().to_pandas()
        self.scores: pd.DataFrame = ledger.scores().to_pandas()
        self.draws: pd.DataFrame = ledger.draws().to_pandas()
        self.trajectories: pd.DataFrame = ledger.trajectories().to_pandas()
        self.journal = metrics(folder)

    def of(self, event: str) -> pd.DataFrame:
        """Events of one kind, each with the birth of its trajectory."""
        born = self.trajectories.set_index("trajectory_id")["step_born"]
        return self.events[self.events.event == event].join(born, on="trajectory_id")

    def logged(self, name: str) -> list[float | None]:
        return [line.get(name) for line in self.journal]


Start = Callable[..., Run]


@pytest.fixture
def start(small_config, tmp_path: Path) -> Start:
    def run(*settings: str) -> Run:
        config = small_config(
            "arithmetic.num_train=24", "data.heldout=", f"rollout.questions_per_step={B}", "run.steps=7", *settings
        )
        reporter = Listener()
        train(config, tmp_path / "run", reporter=reporter)
        return Run(tmp_path / "run", reporter.notes)

    return run


@pytest.mark.slow
def test_a_draw_below_the_bound_is_given_back_and_the_step_is_fresh(start: Start) -> None:
    """No policy that has moved reaches a bound of 1: every draw is measured, none is replayed."""
    run = start("replay.ess_bound=1", "replay.cooldown=3")
    drew = sorted(run.draws.step.unique())
    assert drew == [3, 4, 5, 6, 7]
    assert run.draws.groupby("step").num_drawn.sum().tolist() == [B // 2] * 5
    assert not run.scores.chosen.any() and sorted(run.scores.step.unique()) == drew
    assert run.of("selected").empty and run.logged("replay/used") == [0] * 7
    # All B are fresh, and what was only drawn is not reported as replayed.
    assert run.logged("batch/questions") == [B] * 7
    measured = run.logged("replay/ess_before")
    assert measured[:2] == [None, None] and all(0 < value < 1 for value in measured[2:])
    for name in ("replay/entropy_selected", "replay/age_mean", "replay/pass_at_1"):
        assert run.logged(name) == [None] * 7
    said = [line for line in run.notes if "replay.ess_bound" in line]
    assert said == [
        f"step {step}: the draw's effective sample size {measured[step - 1]:.3f} is below replay.ess_bound = 1.0; "
        "its questions stay in the buffer and the step takes fresh ones"
        for step in drew
    ]


def test_collecting_before_the_start_fills_the_buffer_of_the_first_mixed_step(start: Start) -> None:
    run = start("replay.collect_before_start=true", "run.steps=2")
    assert [line["phase"] for line in run.journal[:2]] == ["on-policy", "mixed"]
    assert run.trajectories.step_born.min() == 1
    # Without it the first mixed step has nothing to draw (test_replay.py).
    assert [run.logged("replay/used")[0], run.logged("replay/used")[1] > 0] == [0, True]

"""Settings that limit what is stored and replayed, through the real loop and checked from the ledger it leaves."""

import json
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest

from exgrpo_cli.base.console.reporter import SilentReporter
from exgrpo_cli.ledger.reader import LedgerReader
from exgrpo_cli.training.run import train

K, B = 8, 8


class Notes(SilentReporter):
    """Keeps what a run says."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def note(self, text: str) -> None:
        self.lines.append(text)


class Run:
    """A finished run of a few steps."""

    def __init__(self, folder: Path, notes: list[str]) -> None:
        ledger = LedgerReader(folder / "replay")
        self.notes = notes
        self.events: pd.DataFrame = ledger.events().to_pandas()
        self.scores: pd.DataFrame = ledger.scores().to_pandas()
        self.draws: pd.DataFrame = ledger.draws().to_pandas()
        self.trajectories: pd.DataFrame = ledger.trajectories().to_pandas()
        self.journal = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]

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
        reporter = Notes()
        train(config, tmp_path / "run", reporter=reporter)
        return Run(tmp_path / "run", reporter.lines)

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


@pytest.mark.engines
def test_limits_hold_together_in_every_step(start: Start) -> None:
    run = start(
        "replay.max_per_question=2", "replay.eviction=longest", "replay.max_age=2", "replay.cooldown=1", "run.steps=9"
    )
    selected = run.of("selected")
    assert (selected.step - selected.step_born).max() <= 2
    assert selected.sort_values("step").groupby("question_id").step.diff().min() >= 2
    held: dict[str, list[int]] = {}
    tokens = run.trajectories.set_index("trajectory_id").num_tokens
    reasons = {"age": 0, "number": 0}
    for event in run.events.itertuples():
        mine = held.setdefault(event.question_id, [])
        if event.event == "collected":
            mine.append(int(event.trajectory_id))
        elif event.event == "evicted":
            gone = int(event.trajectory_id)
            if run.trajectories.step_born[gone] < event.step - 2:
                reasons["age"] += 1
            else:
                reasons["number"] += 1
                assert tokens[gone] == tokens[mine].max()
            mine.remove(gone)
    assert min(reasons.values()) > 0
    assert max(map(len, held.values())) == 2


@pytest.mark.slow
def test_fresh_members_alone_count_where_so_set(start: Start) -> None:
    run = start("replay.count_fresh_only=true")
    replayed = run.of("selected")[["step", "question_id"]]
    visited = run.events[run.events.event == "moved"].merge(replayed, on=["step", "question_id"])
    assert len(visited) and (visited.num_members == K - 1).all()
    fresh = run.events[run.events.event == "collected"].merge(
        replayed, on=["step", "question_id"], how="left", indicator=True
    )
    assert (fresh[fresh._merge == "left_only"].num_members == K).all()


@pytest.mark.slow
def test_bounded_staleness_measures_again_only_what_lags_too_far(start: Start) -> None:
    """Two updates a step: versions 2 apart may be used once more, those 4 apart are measured again."""
    run = start("replay.max_score_staleness=2")
    now = 2 * (run.scores.step - 1)
    lag = now - run.scores.weight_version
    assert set(lag) == {0, 2}

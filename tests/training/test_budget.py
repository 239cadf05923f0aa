"""Budgets of a run, through the real loop: where it ends, and the learning rate on the way."""

from pathlib import Path

import pytest
from run_leaves import metrics

from exgrpo_cli.base.errors import InputError
from exgrpo_cli.base.reporter import SilentReporter
from exgrpo_cli.config.layers import build_config
from exgrpo_cli.training.run import train
from exgrpo_cli.training.start import is_finished

PEAK = 1e-4


@pytest.mark.parametrize("budget", ["generated", "trained"])
def test_a_run_ends_with_the_step_that_reaches_its_budget(small_config, tmp_path: Path, budget: str) -> None:
    """Linear decay to 0 over the tokens: each step's updates run at peak * (1 - spent before the step / budget)."""
    amount = {"generated": 2500.0, "trained": 1200.0}[budget]
    config = small_config(
        "data.heldout=", "run.plots=false", "rollout.questions_per_step=4", "optim.schedule=linear",
        f"optim.learning_rate={PEAK}", "optim.warmup_steps=0", "optim.final_fraction=0", "run.steps=8",
        f"run.budget={budget}", f"run.budget_amount={amount}",
    )  # fmt: skip
    run = tmp_path / "run"
    summary = train(config, run, reporter=SilentReporter())
    lines = metrics(run)
    spent = [line[f"tokens/{budget}"] for line in lines]
    assert sum(spent[:-1]) < amount <= sum(spent) == summary["tokens"][budget]
    assert lines[-1]["budget/spent"] == sum(spent)
    assert summary["finished"] == "budget spent"
    assert 1 < len(lines) < 32
    for index, line in enumerate(lines):
        assert line["optim/learning_rate"] == pytest.approx(PEAK * (1 - sum(spent[:index]) / amount), rel=1e-9)
    assert (run / "checkpoints" / "latest").read_text().strip() == f"step-{len(lines):06d}"
    assert is_finished(run)


def test_what_spends_too_little_ends_after_four_times_its_steps(small_config, tmp_path: Path) -> None:
    config = small_config(
        "data.heldout=", "run.plots=false", "rollout.questions_per_step=2", "run.steps=1", "run.budget=seconds",
        "run.budget_amount=1e9",
    )  # fmt: skip
    summary = train(config, tmp_path / "run", reporter=SilentReporter())
    assert (summary["steps"], summary["finished"]) == (4, "steps reached")
    assert is_finished(tmp_path / "run")


@pytest.mark.parametrize(
    ("budget", "amount", "said"),
    [
        ("steps", 5.0, r"run\.budget_amount = 5\.0 contradicts run\.budget = 'steps'.*; set run\.budget"),
        (
            "generated",
            0.0,
            r"run\.budget = 'generated' contradicts run\.budget_amount = 0\.0.*; set ",
        ),
        ("seconds", -1.0, r"run\.budget_amount = -1\.0 is out of range: use "),
    ],
)
def test_a_budget_without_its_amount_is_refused(budget: str, amount: float, said: str) -> None:
    with pytest.raises(InputError, match=said):
        build_config(assignments=[f"run.budget={budget}", f"run.budget_amount={amount}"])

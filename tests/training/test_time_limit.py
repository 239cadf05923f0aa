"""Limits of a run: its budget, the time of a process, which saves before it is over, and of a phase, which may hang."""

import json
import time
from pathlib import Path

import pytest
from processes import python
from run_leaves import metrics

from exgrpo_cli.base import errors, reporter
from exgrpo_cli.commands import run
from exgrpo_cli.config import settings
from exgrpo_cli.ranks import Ranks
from exgrpo_cli.runs import folder, watchdog
from exgrpo_cli.training import run as run_module
from exgrpo_cli.training.run import train
from exgrpo_cli.training.start import is_finished

PEAK = 1e-4


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("3h50m", 13_800), ("45m", 2_700), ("90s", 90), ("1d12h", 129_600), ("1d2h3m4s", 93_784), (" 2h ", 7_200)],
)
def test_durations(text, seconds):
    assert watchdog.TimeLimit.parse(text).seconds == seconds


@pytest.mark.parametrize("text", ["", "3", "50m3h", "-1h", "0m", "1.5h", "3 hours"])
def test_other_texts_are_refused_with_the_text_and_an_example(text):
    with pytest.raises(errors.InputError, match=r"is no length of time: write it like 3h50m") as refused:
        watchdog.TimeLimit.parse(text)
    assert repr(text) in str(refused.value)


def test_a_limit_is_near_when_the_longest_step_and_a_checkpoint_would_not_fit(monkeypatch):
    limit = watchdog.TimeLimit(seconds=1000.0)
    assert not limit.is_near
    limit.count_step(500.0)
    limit.count_step(300.0)
    assert not limit.is_near
    # 500 for a step and twice 250 for the checkpoint leave nothing.
    limit.count_save(250.0)
    assert limit.is_near
    # Two minutes for a checkpoint, and Slurm ends the job in five: a step of 50 s has room, one of 70 has none.
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(round(time.time()) + 300))
    job = watchdog.TimeLimit.of_job()
    job.count_save(120.0)
    job.count_step(50.0)
    assert not job.is_near
    job.count_step(70.0)
    assert job.is_near


@pytest.mark.engines
@pytest.mark.parametrize("by", ["--time-limit", "Slurm"])
def test_a_run_near_its_limit_saves_stops_and_goes_on(by, small_config, workdir, monkeypatch, capsys):
    (workdir / "settings.toml").write_text(settings.to_toml(small_config("run.steps=3", "run.save_every=3")))
    started = ["train", "--quiet", "--config", "settings.toml", "--output", "run"]
    # However fast this machine is, a second step is taken not to fit.
    count_step = watchdog.TimeLimit.count_step
    monkeypatch.setattr(watchdog.TimeLimit, "count_step", lambda self, seconds: count_step(self, max(seconds, 90.0)))
    if by == "Slurm":
        # Rounded down: half a second more, and a fast machine has done with all steps before the limit is near.
        monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) + 90))
    assert run([*started, *(["--time-limit", "90s"] if by == "--time-limit" else [])]) == 130
    assert "the time limit is near: stopped after step 1 of 3, state saved" in capsys.readouterr().err
    assert (workdir / "run" / "checkpoints" / "latest").read_text().strip() == "step-000001"
    assert run(["train", "--quiet", "--resume", "--output", "run", "--time-limit", "1d"]) == 0
    assert json.loads((workdir / "run" / "summary.json").read_text())["steps"] == 3


def test_a_checkpoint_is_due_by_time_too(small_config, tmp_path):
    """And a limit hears what step and checkpoint took."""
    settings = ("data.heldout=none", "run.steps=3", "run.save_every=100", "run.keep_checkpoints=0")
    for minutes, saved in ((1e-9, [1, 2, 3]), (0.0, [3]), (1e5, [3])):
        config = small_config(*settings, f"run.save_minutes={minutes}")
        limit = watchdog.TimeLimit(seconds=1e9)
        train(config, tmp_path / f"{minutes}", reporter=reporter.SilentReporter(), time_limit=limit)
        assert min(limit._longest_step, limit._longest_save) > 0
        assert folder.complete_steps(tmp_path / f"{minutes}" / "checkpoints") == saved


@pytest.mark.engines
def test_a_phase_that_never_ends_stops_the_run_with_its_name_and_stacks(small_config, tmp_path):
    (tmp_path / "hanging.py").write_text("import time\n\ndef metric(candidates, rng):\n    time.sleep(600)\n")
    hanging = ("replay.metric=python:hanging:metric", "replay.start_threshold=0", "run.phase_timeout=0.3")
    (tmp_path / "settings.toml").write_text(settings.to_toml(small_config(*hanging, "run.steps=9")))
    command = ["train", "--quiet", "--allow-code", "--config", "settings.toml", "--output", "run"]
    ended = python("-m", "exgrpo_cli", *command, cwd=tmp_path, timeout=250)
    assert ended.returncode == 1 and "exgrpo: rank 0 has been in phase 'replay' for" in ended.stderr
    assert "hanging.py" in (tmp_path / "run" / "stacks" / "rank-0.txt").read_text()


@pytest.mark.engines
def test_no_exchange_between_ranks_and_no_file_of_a_step_is_outside_a_phase(small_config, tmp_path, monkeypatch):
    """There a rank that hangs would never be found out."""
    watched, outside = [], []
    enter = watchdog.Watchdog.__enter__
    monkeypatch.setattr(watchdog.Watchdog, "__enter__", lambda self: watched.append(self) or enter(self))

    for owner, names in (
        (Ranks, ("gather", "from_main")),
        (folder.RunFolder, ("append_metrics", "append_samples", "append_validation")),
        (run_module, ("write_result", "note_checksums")),
        (run_module.files, ("write_json",)),
    ):
        for name in names:

            def told(*arguments, name=name, function=getattr(owner, name), **options):
                if watched and not watched[0]._phases:
                    outside.append(name)
                return function(*arguments, **options)

            monkeypatch.setattr(owner, name, told)
    train(small_config("run.steps=1", "validation.every=1"), tmp_path / "run", reporter=reporter.SilentReporter())
    assert watched and outside == []


@pytest.mark.parametrize("budget", ["generated", "trained"])
def test_a_run_ends_with_the_step_that_reaches_its_budget(small_config, tmp_path: Path, budget: str) -> None:
    """Linear decay to 0 over the tokens: each step's updates run at peak * (1 - spent before the step / budget)."""
    amount = {"generated": 2500.0, "trained": 1200.0}[budget]
    config = small_config(
        "data.heldout=none", "rollout.questions_per_step=4", "optim.schedule=linear",
        f"optim.learning_rate={PEAK}", "optim.warmup_steps=0", "optim.final_fraction=0", "run.steps=8",
        f"run.budget={budget}", f"run.budget_amount={amount}",
    )  # fmt: skip
    run = tmp_path / "run"
    summary = train(config, run, reporter=reporter.SilentReporter())
    lines = metrics(run)
    spent = [line[f"tokens/{budget}"] for line in lines]
    assert sum(spent[:-1]) < amount <= sum(spent) == summary["tokens"][budget] == lines[-1]["budget/spent"]
    assert summary["finished"] == "budget spent" and 1 < len(lines) < 32
    for index, line in enumerate(lines):
        assert line["optim/learning_rate"] == pytest.approx(PEAK * (1 - sum(spent[:index]) / amount), rel=1e-9)
    assert (run / "checkpoints" / "latest").read_text().strip() == f"step-{len(lines):06d}"
    assert is_finished(run)


def test_what_spends_too_little_ends_after_four_times_its_steps(small_config, tmp_path: Path) -> None:
    short = ("data.heldout=none", "rollout.questions_per_step=2", "run.steps=1")
    config = small_config(*short, "run.budget=seconds", "run.budget_amount=1e9")
    summary = train(config, tmp_path / "run", reporter=reporter.SilentReporter())
    assert (summary["steps"], summary["finished"]) == (4, "steps reached")
    assert is_finished(tmp_path / "run")

"""Which run goes on, and what may change when it does."""

import json
import os

import pytest

import exgrpo_cli.show.report
from exgrpo_cli.base import errors, files
from exgrpo_cli.commands import run as exgrpo
from exgrpo_cli.config import layers, settings
from exgrpo_cli.runs.folder import RunFolder
from exgrpo_cli.training.start import is_finished, newest_unfinished, resumed_config


@pytest.fixture
def run_folder(tmp_path):
    """A run of 150 steps of grpo whose linear decay ends at step 150."""
    folder = tmp_path / "runs" / "first"
    folder.mkdir(parents=True)
    config = layers.build_config(method="grpo", assignments=["optim.horizon=150", "run.seed=3"])
    (folder / "config.toml").write_text(settings.to_toml(config))
    return folder


def test_the_runs_own_configuration_is_used(run_folder):
    assert resumed_config(run_folder) == layers.build_config(config_file=run_folder / "config.toml")
    assert resumed_config(run_folder).run.method == "grpo"


def test_steps_may_be_raised_and_the_decay_keeps_its_horizon(run_folder):
    longer = resumed_config(run_folder, options={"run": {"steps": 200}})
    assert (longer.run.steps, longer.optim.horizon) == (200, 150)
    stretched = resumed_config(run_folder, options={"run": {"steps": 200}}, assignments=["optim.horizon=200"])
    assert stretched.optim.horizon == 200
    changed = ["run.rank_timeout=120", "run.phase_timeout=0", "rollout.max_logprob_gap=0.1"]
    longer = resumed_config(run_folder, assignments=changed)
    assert (longer.run.rank_timeout, longer.run.phase_timeout, longer.rollout.max_logprob_gap) == (120, 0, 0.1)


@pytest.mark.parametrize(("nproc", "threads"), [(1, 6), (2, 6), (4, 3), (16, 1)])
def test_another_number_of_ranks_shares_the_threads(run_folder, nproc, threads):
    """Two ranks of 6 threads each: twelve threads in all are the most there may be, and fewer ranks keep theirs."""
    own = layers.build_config(method="grpo", assignments=["run.nproc=2", "run.threads=6"])
    (run_folder / "config.toml").write_text(settings.to_toml(own))
    config = resumed_config(run_folder, options={"run": {"nproc": nproc}})
    assert (config.run.nproc, config.run.threads) == (nproc, threads)


def test_options_that_repeat_the_configuration_are_accepted(run_folder):
    same = resumed_config(run_folder, backbone="tiny", method="grpo", options={"run": {"seed": 3}})
    assert same == resumed_config(run_folder)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"options": {"run": {"seed": 4}}}, "--resume keeps the run's own run.seed = 3, not 4: only --steps may be"),
        ({"assignments": ["replay.ratio=0.25"]}, "run's own replay.ratio = 0.5, not 0.25"),
        ({"options": {"run": {"steps": 100}}}, "--steps 100 is below the run's own 150"),
        ({"method": "exgrpo"}, "--method exgrpo contradicts 'grpo'"),
        ({"backbone": "qwen-math-7b"}, "--backbone qwen-math-7b contradicts 'tiny'"),
    ],
)
def test_what_would_change_the_run_is_refused(run_folder, arguments, message):
    with pytest.raises(errors.InputError) as caught:
        resumed_config(run_folder, **arguments)
    assert message in str(caught.value)


def write_summary(folder, **values):
    (folder / "summary.json").write_text(json.dumps(values))


def test_a_run_is_finished_at_its_last_step_or_with_all_questions_retired(run_folder):
    assert not is_finished(run_folder)
    write_summary(run_folder, steps=150, finished="steps reached")
    assert is_finished(run_folder)
    write_summary(run_folder, steps=100, finished="steps reached")  # --steps was raised to 150 since
    assert not is_finished(run_folder)
    write_summary(run_folder, steps=100, finished="all questions retired")
    assert is_finished(run_folder)


def test_the_newest_unfinished_run_is_the_one_written_to_last(run_folder):
    runs = run_folder.parent
    assert newest_unfinished(runs / "none") is None
    for name, moment in (("second", 2_000), ("third", 3_000)):
        (runs / name).mkdir()
        (runs / name / "config.toml").write_text((run_folder / "config.toml").read_text())
        (runs / name / "metrics.jsonl").write_text("")
        os.utime(runs / name / "metrics.jsonl", (moment, moment))
    os.utime(run_folder / "config.toml", (1_000, 1_000))
    assert newest_unfinished(runs) == runs / "third"
    write_summary(runs / "third", steps=150, finished="steps reached")
    assert newest_unfinished(runs) == runs / "second"


def test_a_run_stopped_while_its_page_was_written_gets_it_on_resume(tmp_path, monkeypatch, capsys):
    """And says how, when it is stopped; with its page it has finished."""
    run, report = RunFolder.create(tmp_path / "run"), exgrpo_cli.show.report.write_report
    run.config.write_text(settings.to_toml(layers.build_config(assignments=["run.steps=2"])))
    for step in (1, 2):
        run.append_metrics({"step": step, "phase": "mixed"})
    counts = dict.fromkeys(("questions", "trajectories", "retired", "used"), 0)
    summary = {"steps": 2, "finished": "steps reached", "method": "exgrpo", "backbone": "tiny", "seed": 0}
    summary |= {"heldout": {"set": "", "before": {}, "after": {}}, "tokens": {"generated": 1, "trained": 1}}
    files.write_json(run.summary, summary | {"wall_seconds": {"total": 1.0}, "peak_memory_bytes": 1, "replay": counts})

    def interrupted(*given):
        raise KeyboardInterrupt

    again = ["train", "--resume", "--output", str(run.path)]
    monkeypatch.setattr(exgrpo_cli.show.report, "write_report", interrupted)
    assert exgrpo(again) == 130
    assert f"all else is there; write it with: exgrpo report {run.path}" in capsys.readouterr().err
    monkeypatch.setattr(exgrpo_cli.show.report, "write_report", report)
    assert exgrpo(again) == 0
    assert (run.path / "report.html").is_file() and "tokens generated" in capsys.readouterr().out
    assert exgrpo(again) == 2
    assert "has finished its 2 steps: raise --steps" in capsys.readouterr().err

"""Studies: which arms, which runs, what is run again, also after a kill, what each may spend, what is concluded."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import tomllib
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made_results import result_of
from run_leaves import kill_once

from exgrpo_cli.base import files, reporter
from exgrpo_cli.base.errors import DamageWarning, InputError, Interrupted, RunError, ToolkitWarning
from exgrpo_cli.base.versions import code_version, now
from exgrpo_cli.commands import run
from exgrpo_cli.config import layers, settings
from exgrpo_cli.config.requests import StudyRequest
from exgrpo_cli.runs.folder import RunFolder
from exgrpo_cli.runs.result import config_hash, read_result, write_result
from exgrpo_cli.studies import output, worker
from exgrpo_cli.studies.planning import axis_arms, cross, plan_request, plan_study
from exgrpo_cli.studies.schedule import Processes, pass_on_damage, run_study
from exgrpo_cli.studies.study import Arm, Study, StudyRun, budgeted
from exgrpo_cli.training.run import train


def names(arms) -> list[str]:
    return [arm.name for arm in arms]


@pytest.mark.parametrize(
    ("axis", "text", "arms"),
    [
        ("metric", "ent", ["ent:min", "ent:max", "random", "on-policy"]),
        ("metric", "ent,ppl:max", ["ent:min", "ppl:max", "on-policy"]),
        ("metric", "ent:max", ["ent:max", "on-policy"]),
        ("metric", "python:a.b:c", ["python:a.b:c:min", "python:a.b:c:max", "random", "on-policy"]),
        ("sampler", "linear,sqrt", ["linear", "sqrt", "on-policy"]),
        ("methods", "exgrpo,grpo", ["exgrpo", "grpo"]),
        ("vary", "replay.ratio=0.25,0.75", ["replay.ratio=0.25", "replay.ratio=0.75", "on-policy"]),
    ],
)
def test_one_metric_is_compared_both_ways_and_a_comma_list_is_exactly_those(axis, text, arms) -> None:
    assert names(cross([axis_arms(axis, text)])) == arms


def test_a_metric_is_two_settings_and_a_function_of_the_users_own_keeps_its_colons() -> None:
    (arm, ent) = axis_arms("metric", "python:pkg.metrics:longest:max,ent")
    assert arm.assignments == ('replay.metric="python:pkg.metrics:longest"', 'replay.direction="max"')
    assert ent.assignments == ('replay.metric="ent"', 'replay.direction="min"')


def test_axes_are_crossed_and_each_arm_has_the_baseline_of_its_regime_and_settings() -> None:
    """2 regimes x 2 methods x 2 learning rates: replay settings make no baseline of their own, other settings do."""
    rates = axis_arms("vary", "optim.learning_rate=1e-4,3e-4")
    arms = cross([axis_arms("methods", "exgrpo,grpo"), rates], ["strong", "sparse"])
    assert len(arms) == 8 and {arm.regime for arm in arms} == {"strong", "sparse"}
    found = {arm.name: arm for arm in arms}
    own = found["sparse: exgrpo optim.learning_rate=3e-4"]
    assert own.baseline == "sparse: grpo optim.learning_rate=3e-4"
    assert found[own.baseline].method == "grpo" and found[own.baseline].assignments == own.assignments

    arms = cross([axis_arms("metric", "ent:min,random"), axis_arms("vary", "replay.ratio=0.25,0.5")])
    assert names(arms) == [
        "ent:min replay.ratio=0.25", "ent:min replay.ratio=0.5", "random replay.ratio=0.25", "random replay.ratio=0.5",
        "on-policy",
    ]  # fmt: skip
    assert {arm.baseline for arm in arms} == {"on-policy"} and arms[-1].assignments == ()
    assert names(cross([axis_arms("methods", "grpo,exgrpo"), axis_arms("vary", "replay.ratio=0.25,0.5")])) == [
        "grpo", "exgrpo replay.ratio=0.25", "exgrpo replay.ratio=0.5",
    ]  # fmt: skip


def test_an_arm_named_twice_is_refused(tmp_path: Path) -> None:
    for axis, text, name in (("metric", "ent,ent:min", "ent:min"), ("methods", "a/mine.toml,b/mine.toml", "mine")):
        with pytest.raises(InputError, match=f"arm '{name}' is named twice: each arm of a study needs a name"):
            cross([axis_arms(axis, text)])
    arms = cross([axis_arms("methods", "my own.toml,my-own.toml")])
    with pytest.raises(InputError, match=r"arms 'my own' and 'my-own' would both be in the folder my-own/"):
        plan_study(tmp_path / "s", arms, (0,))


def test_methods_files_name_a_study_without_their_folders(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text("[replay]\nratio = 0.25\n")
    study = plan_request(StudyRequest(methods=f"grpo, {file}", seeds="1"))
    assert study.folder.as_posix() == "studies/methods-grpo-mine"
    assert [run.folder.as_posix() for run in study.runs] == [
        "studies/methods-grpo-mine/grpo/seed-0", "studies/methods-grpo-mine/mine/seed-0",
    ]  # fmt: skip


def planned(root: Path, assignment: str, *seeds: int) -> Study:
    arms = cross([axis_arms("methods", "exgrpo,grpo")])
    return plan_study(root / "s", arms, seeds, StudyRequest(assignments=[assignment]))


def test_a_start_of_its_own_for_every_seed(tmp_path: Path) -> None:
    """`{seed}` is the run's; questions stay those of all seeds, since intervals are over them."""
    runs = planned(tmp_path, "tiny.seed={seed}", 7, 8).runs
    assert [run.config.tiny.seed for run in runs] == [run.seed for run in runs] == [7, 7, 8, 8]
    for setting in ("arithmetic.seed", "word_problems.seed", "gym.seed", "data.train", "validation.samples"):
        with pytest.raises(InputError, match="the same held-out questions"):
            planned(tmp_path, f"{setting}={{seed}}", 7)
    # Else all of its runs would be one run.
    for assignment in ("run.seed=5", "run.seed={seed}1"):
        with pytest.raises(InputError, match=r"run\.seed: the seeds of a study are those of --seeds"):
            planned(tmp_path, assignment, 7)


def test_a_study_goes_on_with_other_seeds_and_the_same_settings_alone(tmp_path: Path) -> None:
    for begun in planned(tmp_path, "tiny.seed={seed}", 7, 8).runs:
        begun.folder.mkdir(parents=True)
        (begun.folder / "config.toml").write_text(settings.to_toml(begun.config))
    assert {new.state for new in planned(tmp_path, "tiny.seed={seed}", 9).runs} == {"new"}
    with pytest.raises(InputError, match=r"seed-7 holds a run with another tiny.seed: choose another --name"):
        planned(tmp_path, "tiny.seed=0", 9)


def small_settings(backbone: Path) -> list[str]:
    return [
        "arithmetic.levels=[2]", "arithmetic.num_train=60", "arithmetic.num_heldout=20",
        "rollout.questions_per_step=8", "replay.start_threshold=0.05", "run.steps=4", "run.threads=1",
        "run.plots=false", "validation.samples=2", "validation.train_questions=60", "data.barred=0.5",
        "validation.temperatures=[0.5, 2.0]", f"backbone.source={backbone}",
    ]  # fmt: skip


@pytest.fixture(scope="module")
def study_of(small_backbone: Path):
    """A study of two arms and one seed that takes seconds."""

    def make(root: Path, *assignments: str) -> Study:
        request = StudyRequest(assignments=[*small_settings(small_backbone), *assignments])
        return plan_study(root / "small", cross([axis_arms("metric", "ent:min")]), (0,), request)

    return make


def untimed(line: dict) -> dict:
    return {key: value for key, value in line.items() if not key.startswith(("time/", "memory/"))}


@pytest.mark.engines
def test_a_study_runs_compares_and_is_not_run_again(
    study_of, small_backbone: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study, began = study_of(tmp_path), now()
    torn = study.runs[0].folder  # of a run that was killed while it was set up
    RunFolder.create(torn)
    (torn / ".lock").touch()
    listening = reporter.SilentReporter()
    said: list[str] = []
    listening.phase = lambda what, *_: said.append(what)
    run_study(study, Processes(at_once=2), listening)
    # What a run does between two steps stands on the screen.
    assert any(what.startswith("ent:min, seed 0: ") and re.search("held-out|training", what) for what in said)
    report = output.report_study(study)
    assert report["baseline"] == "on-policy"
    after = {
        name: json.loads((tmp_path / "small" / folder / "seed-0" / "summary.json").read_text())["heldout"]["after"]
        for name, folder in (("ent:min", "ent-min"), ("on-policy", "on-policy"))
    }
    for name in after:
        assert report["arms"][name]["mean"] == after[name]["pass_at_1"]
        assert report["arms"][name]["seeds"] == {0: after[name]["pass_at_1"]}
    difference = after["ent:min"]["pass_at_1"] - after["on-policy"]["pass_at_1"]
    assert report["arms"]["ent:min"]["difference"]["mean"] == pytest.approx(difference)
    written = (tmp_path / "small" / "report.md").read_text()
    assert f"| one seed | {difference:+.3f} |" in written  # one seed has no interval, nor has its difference
    assert "| pass@2 | pass@2 minus on-policy | p (Holm) |" in written
    assert report["warnings"] and "fewer than 3 seeds" in report["warnings"][0]
    kept = tmp_path / "small" / "results" / "ent-min-0.result.json"
    assert kept.read_text() == (tmp_path / "small" / "ent-min" / "seed-0" / "result.json").read_text()
    told = read_result(kept)
    assert told.started is not None and told.ended is not None and began <= told.started <= told.ended <= now()
    assert told.code == code_version() and told.machine["torch"] and told.machine["threads"] == 1
    sample = told.training_sample
    assert sample is not None and len(sample.ids.split()) == 60 and max(sample.visits) > 0
    assert all(sample.successes <= sample.visits * study.runs[0].config.rollout.group_size)
    barred = sample.barred == 1
    assert 0 < barred.sum() < 60 and sample.visits[barred].sum() > 0 == sample.replays[barred].sum()
    gains = (sample.after - sample.before) / sample.samples
    eligible_less_barred = report["arms"]["ent:min"]["endpoints"]["eligible_less_barred"]["mean"]
    assert eligible_less_barred == pytest.approx(gains[~barred].mean() - gains[barred].mean())
    # Another temperature asks the same questions of the same weights.
    assert list(told.after_at) == ["0.5", "2"] and [len(each) for each in told.after_at.values()] == [20, 20]
    assert sum(told.after_at["0.5"]) > sum(told.after_at["2"])
    for name in ("pass_at_1", "pass_at_n"):
        mean = report["arms"]["ent:min"]["endpoints"][f"{name}@2"]["mean"]
        assert mean == np.mean(told.after_at["2"] / 2 if name == "pass_at_1" else told.after_at["2"] > 0)
    assert "held-out pass@1, T = 0.5" in written
    # What it says of memorising can be worked out from the counts.
    replayed, said_of = sample.replays > 0, told.memorising
    assert said_of is not None and said_of.replayed.questions == replayed.sum() > 0
    for counts, rate in ((sample.before, said_of.replayed.before), (sample.after, said_of.replayed.after)):
        assert rate == pytest.approx(counts[replayed].mean() / sample.samples)
    expected = {"results.json", "report.md", "ablation.png", "ablation.svg", "curves.png", "curves.svg"}
    assert expected <= {path.name for path in (tmp_path / "small").iterdir()}

    first_step = [
        json.loads((tmp_path / "small" / folder / "seed-0" / "metrics.jsonl").read_text().splitlines()[0])
        for folder in ("ent-min", "on-policy")
    ]
    assert first_step[0]["batch/pass_at_1"] == first_step[1]["batch/pass_at_1"], "both arms see the same questions"

    # A fork of the study's server gives what a process of its own gives, to the bit.
    alone, forked = tmp_path / "alone", study.runs[0].folder
    assert run(["train", "--config", str(study.runs[0].asked_file), "--output", str(alone), "--quiet"]) == 0
    steps = [[untimed(line) for line in files.read_json_lines(each / "metrics.jsonl")] for each in (alone, forked)]
    assert steps[0] == steps[1] != []
    assert (alone / "model/model.safetensors").read_bytes() == (forked / "model/model.safetensors").read_bytes()
    # What both began with was asked once, training questions and held-out ones, and answers as when asked alone.
    starts = [
        [line for line in files.read_json_lines(each / "validations.jsonl") if line["step"] == 0]
        for each in (alone, *(begun.folder for begun in study.runs))
    ]
    assert starts[0] == starts[1] == starts[2] and len(starts[0]) == 2
    assert len([*(tmp_path / "small" / "starts").glob("answers-*/answers.json")]) == 2

    again = study_of(tmp_path)
    assert {run.state for run in again.runs} == {"finished"}
    before = {run.folder: (run.folder / "summary.json").stat().st_mtime_ns for run in again.runs}
    same = [word for assignment in small_settings(small_backbone) for word in ("--set", assignment)]
    command = ["ablate", "--metric", "ent:min", "--seeds", "1", "--output", str(tmp_path / "small"), *same, "--json"]
    capsys.readouterr()
    assert run(command) == 0
    out, err = capsys.readouterr()
    assert json.loads(out) == json.loads(json.dumps(report))
    assert "2 runs, 2 finished already" in err and f"report: {tmp_path / 'small' / 'report.html'}" in err
    assert before == {run.folder: (run.folder / "summary.json").stat().st_mtime_ns for run in again.runs}

    with pytest.raises(InputError, match=r"holds a run with another .*run.steps: choose another --name"):
        study_of(tmp_path, "run.steps=5")
    # What the machine does is no part of a run's identity; whose log-probs are trained on and in which precision is.
    assert {run.state for run in study_of(tmp_path, "run.save_every=2").runs} == {"finished"}
    for other in ("rollout.logprobs=engine", "backbone.dtype=bfloat16"):
        with pytest.raises(InputError, match=rf"holds a run with another {other.split('=')[0]}: choose another --name"):
            study_of(tmp_path, other)
    (again.runs[0].folder / "config.toml").write_text("[backbone\n")
    with pytest.raises(InputError, match=r"config\.toml is not TOML"):
        study_of(tmp_path)


def test_a_start_is_shared_by_runs_that_multiply_alike(small_backbone: Path, tmp_path: Path) -> None:
    for number, dtype in enumerate(("float32", "bfloat16", "float32")):
        own = [
            "run.steps=1",
            "validation.train_questions=0",
            "validation.temperatures=[]",
            f"optim.matmul_dtype={dtype}",
        ]
        config = layers.build_config(assignments=[*small_settings(small_backbone), *own])
        silent = reporter.SilentReporter()
        train(config, tmp_path / f"run-{number}", reporter=silent, starts=tmp_path / "starts")
    assert len([*(tmp_path / "starts").glob("answers-*/")]) == 2


@pytest.mark.engines
def test_a_run_that_fails_is_named_and_the_others_finish(study_of, tmp_path: Path) -> None:
    """A bound no gradient meets stops every run after five skipped updates; both are told, with the reason."""
    with pytest.raises(RunError, match=r"2 of 2 runs failed, first .*5 consecutive updates were skipped"):
        run_study(study_of(tmp_path, "optim.skip_norm=1e-9"), Processes(at_once=2), reporter.SilentReporter())


def test_what_killed_a_run_is_named(study_of, tmp_path: Path) -> None:
    """As the kernel does where memory runs out: the log ends in the middle of nothing."""
    (run, _) = study_of(tmp_path).runs
    launcher = Processes(at_once=1)
    [job] = launcher.start([run])
    job.kill()
    job.wait()
    assert launcher.failure(run, job) == "ended by a signal (Killed)"


@pytest.mark.engines
def test_a_stop_signal_to_the_study_saves_its_runs(study_of, tmp_path: Path) -> None:
    """What a cluster sends before it takes a machine away counts as Ctrl-C does."""
    study = study_of(tmp_path, "run.steps=200")
    journal = study.runs[0].folder / "metrics.jsonl"

    def stop_when_under_way() -> None:
        while not journal.exists():
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=stop_when_under_way, daemon=True).start()
    with pytest.raises(Interrupted, match="states saved; the same command goes on with the study in"):
        run_study(study, Processes(at_once=1), reporter.SilentReporter())
    saved = int((study.runs[0].folder / "checkpoints" / "latest").read_text().removeprefix("step-"))
    assert saved == len(journal.read_text().splitlines()) < 200
    assert [run.state for run in study.runs] == ["unfinished", "new"]


def test_a_study_that_cannot_be_written_is_refused(study_of, tmp_path: Path) -> None:
    (tmp_path / "small").write_text("")
    with pytest.raises(InputError, match=r"small.study.json cannot be written: .*small is not a writable folder"):
        run_study(study_of(tmp_path), Processes(at_once=1), reporter.SilentReporter())


@pytest.mark.engines
def test_a_run_of_several_ranks_is_started_by_its_worker(study_of, tmp_path: Path) -> None:
    (run, _) = study_of(tmp_path, "run.nproc=2", "run.steps=1", "data.heldout=arithmetic").runs
    [job] = Processes(at_once=1).start([run])
    assert job.wait(timeout=200) == 0, worker.last_line(run.log)
    assert json.loads((run.folder / "environment.json").read_text())["ranks"] == 2
    assert run.state == "finished"


def test_damage_is_told_once_with_the_name_of_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with warnings.catch_warnings():
        worker.warn_in_log()
        warnings.warn("an earlier process said this", DamageWarning, stacklevel=1)
        earlier = capsys.readouterr().err
        warnings.warn("a checkpoint is passed over:\nweights.safetensors", DamageWarning, stacklevel=1)
        warnings.warn("only a hint", ToolkitWarning, stacklevel=1)
        now = capsys.readouterr().err
    (tmp_path / "seed-0.log").write_text(earlier)
    run = StudyRun(arm=Arm(name="exgrpo"), seed=0, folder=tmp_path / "seed-0", config=layers.build_config())
    with run.log.open("a") as file:
        file.write(f"step 1\n{now}")
    with pytest.warns(DamageWarning) as told:
        pass_on_damage(run, len(earlier))
    assert [str(warning.message) for warning in told] == [
        "exgrpo, seed 0: a checkpoint is passed over: weights.safetensors"
    ]


def study_of_equal(small_backbone: Path, root: Path, equal: str) -> Study:
    request = StudyRequest(assignments=[*small_settings(small_backbone), "arithmetic.num_heldout=4", "run.steps=2"])
    return plan_study(root / "small", cross([axis_arms("metric", "random,length")]), [0, 1], request, equal=equal)


@pytest.mark.parametrize(("equal", "amount"), [("generated", 700.0), ("trained", 300.0), ("seconds", 6.5)])
def test_a_budget_is_the_baselines_total_of_the_same_seed(
    small_backbone: Path, tmp_path: Path, equal: str, amount: float
) -> None:
    """Seconds are those of the steps' phases, 6.5, not the 9 with all around them."""
    study = study_of_equal(small_backbone, tmp_path, equal)
    baseline = next(each for each in study.runs if each.arm.name == "on-policy" and each.seed == 1)
    baseline.folder.mkdir(parents=True)
    (baseline.folder / "summary.json").write_text(json.dumps({"steps": 2, "finished": "steps reached"}))
    write_result(baseline.folder / "result.json", result_of([4, 2], generated=700, trained=300, training_seconds=6.5))
    for each in study.runs:
        ready = budgeted(study, each)
        if each.seed == 0 and each.arm.name != "on-policy":
            assert ready is None
        else:
            expected = ("steps", 0.0) if each.arm.name == "on-policy" else (equal, amount)
            assert ready and (ready.config.run.budget, ready.config.run.budget_amount) == expected


@pytest.mark.slow
def test_a_study_of_equal_budgets_runs_and_is_recognised(small_backbone: Path, tmp_path: Path) -> None:
    study = study_of_equal(small_backbone, tmp_path, "generated")
    run_study(study, Processes(at_once=2), reporter.SilentReporter())
    arms = output.report_study(study)["arms"]
    for each in study.runs:
        settings = tomllib.loads((each.folder / "config.toml").read_text())["run"]
        generated = json.loads((each.folder / "summary.json").read_text())["tokens"]["generated"]
        whole = tmp_path / "small" / "on-policy" / f"seed-{each.seed}" / "summary.json"
        spent = json.loads(whole.read_text())["tokens"]["generated"]
        if each.arm.name == "on-policy":
            assert settings["budget"] == "steps"
        else:
            assert (settings["budget"], settings["budget_amount"]) == ("generated", spent)
            assert generated >= spent
    assert arms["random"]["steps"] >= arms["on-policy"]["steps"] == 2
    assert "| random |" in (tmp_path / "small" / "report.md").read_text().split("as that of the baseline")[1]
    assert {each.state for each in study_of_equal(small_backbone, tmp_path, "generated").runs} == {"finished"}


@pytest.mark.parametrize(("setting", "finished"), [("backbone.dtype=float32,bfloat16", 0), ("run.steps=3,4", 1)])
def test_a_result_counts_for_no_arm_where_it_cannot_tell_them_apart(tmp_path, setting, finished):
    def planned(*results: Path) -> Study:
        arms = cross([axis_arms("vary", setting)])
        return plan_study(tmp_path / "varied", arms, (0,), StudyRequest(results=results))

    result = replace(result_of([4, 2]), config_hash=config_hash(planned().runs[0].config), budget_amount=0.0)
    write_result(tmp_path / "found-0.result.json", result)
    assert [each.state for each in planned(tmp_path).runs].count("finished") == finished


ARMS = ["--methods", "exgrpo,grpo", "--seeds", "2", "--jobs", "2", "--equal", "steps"]
TIMES = ("seconds", "training_seconds", "wall_seconds")


def ablate(output: Path, backbone: Path) -> list[str]:
    more = ("run.steps=6", "run.save_every=2", "validation.every=2", "validation.train_questions=10")
    settings = [part for text in (*small_settings(backbone), *more) for part in ("--set", text)]
    return [sys.executable, "-m", "exgrpo_cli", "ablate", *ARMS, "--output", str(output), *settings]


def without_times(value: Any) -> Any:
    """The report but for how long things took."""
    if isinstance(value, dict):
        return {key: without_times(item) for key, item in value.items() if key not in TIMES}
    return value


@pytest.mark.slow
def test_a_study_killed_under_way_gives_the_same_report(small_backbone: Path, tmp_path: Path) -> None:
    through, study = tmp_path / "through" / "study", tmp_path / "study"
    subprocess.run(ablate(through, small_backbone), check=True, capture_output=True)
    process = subprocess.Popen(ablate(study, small_backbone), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    journal = study / "exgrpo" / "seed-0" / "metrics.jsonl"
    kill_once(lambda: journal.is_file() and len(journal.read_text().splitlines()) >= 3, process)
    deadline = time.monotonic() + 200
    # Its runs see that their parent is gone, save and stop; whoever holds a folder's lock is still there.
    again = subprocess.run(ablate(study, small_backbone), capture_output=True, text=True, check=False)
    while "another process" in again.stderr and time.monotonic() < deadline:
        time.sleep(2)
        again = subprocess.run(ablate(study, small_backbone), capture_output=True, text=True, check=False)
    assert again.returncode == 0, again.stderr
    resumed, whole = (without_times(json.loads((each / "results.json").read_text())) for each in (study, through))
    assert resumed == whole

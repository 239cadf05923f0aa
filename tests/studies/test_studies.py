"""Studies: which arms, which runs, what is run again, and what is concluded."""

import json
import os
import signal
import threading
import time
from pathlib import Path

import pytest

from exgrpo_cli.base.console.reporter import SilentReporter
from exgrpo_cli.base.errors import InputError, Interrupted, RunError
from exgrpo_cli.commands import run
from exgrpo_cli.config.settings import to_toml
from exgrpo_cli.studies.arms import axis_arms, cross, regimes_of
from exgrpo_cli.studies.output import report_study
from exgrpo_cli.studies.planning import StudyBase, plan_study
from exgrpo_cli.studies.request import StudyRequest
from exgrpo_cli.studies.schedule import Processes, run_study
from exgrpo_cli.studies.study import Study
from exgrpo_cli.studies.task import last_line


def names(arms) -> list[str]:
    return [arm.name for arm in arms]


def test_one_metric_is_compared_both_ways_and_with_chance() -> None:
    arms = cross([axis_arms("metric", "ent")])
    assert names(arms) == ["ent:min", "ent:max", "random", "on-policy"]
    assert arms[1].assignments == ('replay.metric="ent"', 'replay.direction="max"')
    assert arms[-1].method == "grpo"


def test_a_comma_list_is_exactly_those_and_on_policy() -> None:
    assert names(cross([axis_arms("metric", "ent,ppl:max")])) == ["ent:min", "ppl:max", "on-policy"]
    assert names(cross([axis_arms("metric", "ent:max")])) == ["ent:max", "on-policy"]
    assert names(cross([axis_arms("sampler", "linear,sqrt")])) == ["linear", "sqrt", "on-policy"]
    assert names(cross([axis_arms("methods", "exgrpo,grpo")])) == ["exgrpo", "grpo"]
    assert names(axis_arms("vary", "replay.ratio=0.25,0.75")) == ["replay.ratio=0.25", "replay.ratio=0.75"]


def test_a_function_of_the_users_own_keeps_its_colons() -> None:
    (arm, _) = axis_arms("metric", "python:pkg.metrics:longest:max,ent")
    assert arm.assignments == ('replay.metric="python:pkg.metrics:longest"', 'replay.direction="max"')
    assert names(axis_arms("metric", "python:pkg.metrics:longest")) == [
        "python:pkg.metrics:longest:min",
        "python:pkg.metrics:longest:max",
        "random",
    ]


@pytest.mark.parametrize(
    ("axis", "text", "message"),
    [
        ("metric", "entt", "--metric 'entt' is not known. Did you mean 'ent'?"),
        ("metric", "ent:up", "--metric 'ent:up': the direction is min or max, not 'up'."),
        ("metric", ",", "--metric ',' names nothing."),
        ("sampler", "liner", "--sampler 'liner' is not known. Did you mean 'linear'?"),
        ("vary", "ratio", "--vary 'ratio' is not of the form section.key=value,value."),
    ],
)
def test_a_wrong_arm_is_named(axis: str, text: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        axis_arms(axis, text)
    assert str(caught.value) == message


def test_axes_are_crossed_and_each_arm_has_the_baseline_of_its_regime_and_settings() -> None:
    """2 regimes x 2 methods x 2 learning rates: replay settings make no baseline of their own, other settings do."""
    rates = axis_arms("vary", "optim.learning_rate=1e-4,3e-4")
    arms = cross([axis_arms("methods", "exgrpo,grpo"), rates], regimes_of("strong,sparse"))
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
    with pytest.raises(InputError, match=r"--regimes: no regime preset 'spars'. Did you mean 'sparse'"):
        regimes_of("spars")


def test_an_arm_named_twice_is_refused() -> None:
    with pytest.raises(InputError, match="arm 'ent:min' is named twice"):
        cross([axis_arms("metric", "ent,ent:min")])
    with pytest.raises(InputError, match=r"a/mine.toml and b/mine.toml are both called 'mine'"):
        axis_arms("methods", "a/mine.toml,b/mine.toml")
    with pytest.raises(InputError, match=r"arms 'my own' and 'my-own' would both be in the folder my-own/"):
        cross([axis_arms("methods", "my own.toml,my-own.toml")])


def test_methods_files_name_a_study_without_their_folders(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text("[replay]\nratio = 0.25\n")
    study = StudyRequest(methods=f"grpo, {file}", seeds="1").plan()
    assert study.folder.as_posix() == "studies/methods-grpo-mine"
    assert [run.folder.as_posix() for run in study.runs] == [
        "studies/methods-grpo-mine/grpo/seed-0", "studies/methods-grpo-mine/mine/seed-0",
    ]  # fmt: skip


def test_the_metric_study_has_twelve_runs(tmp_path: Path) -> None:
    study = plan_study(name="metric-ent", root=tmp_path, arms=cross([axis_arms("metric", "ent")]), seeds=(0, 1, 2))
    plan = study.describe()
    assert len(plan["runs"]) == 12
    assert {run["state"] for run in plan["runs"]} == {"new"}
    assert plan["runs"][0]["folder"] == str(tmp_path / "metric-ent" / "ent-min" / "seed-0")
    seeds = {run.seed: run.config.run.seed for run in study.runs}
    assert seeds == {0: 0, 1: 1, 2: 2}


def test_a_start_of_its_own_for_every_seed(tmp_path: Path) -> None:
    """`{seed}` is the run's; questions stay those of all seeds, since intervals are over them."""

    def planned(assignment: str) -> Study:
        base = StudyBase(assignments=[assignment])
        arms = cross([axis_arms("methods", "grpo,exgrpo")])
        return plan_study(name="s", root=tmp_path, arms=arms, seeds=(7, 8), base=base)

    runs = planned("tiny.seed={seed}").runs
    assert {run.arm.name for run in runs} == {"grpo", "exgrpo"}
    assert [run.config.tiny.seed for run in runs] == [run.seed for run in runs] == [7, 7, 8, 8]
    refused = ("arithmetic.seed", "word_problems.seed", "gym.seed", "data.train", "validation.samples")
    for setting in refused:
        with pytest.raises(InputError, match="the same held-out questions"):
            planned(f"{setting}={{seed}}")


def test_the_seeds_of_a_study_are_its_own(tmp_path: Path) -> None:
    """Else all of its runs would be one run."""
    for assignment in ("run.seed=5", "run.seed={seed}1"):
        with pytest.raises(InputError, match=r"run\.seed: the seeds of a study are those of --seeds"):
            plan_study(
                name="s",
                root=tmp_path,
                arms=cross([axis_arms("metric", "ent:min")]),
                seeds=(7, 8),
                base=StudyBase(assignments=[assignment]),
            )


def test_a_study_goes_on_with_other_seeds_and_the_same_settings_alone(tmp_path: Path) -> None:
    def planned(assignment: str, *seeds: int) -> Study:
        arms = cross([axis_arms("metric", "ent:min")])
        return plan_study(name="s", root=tmp_path, arms=arms, seeds=seeds, base=StudyBase(assignments=[assignment]))

    for begun in planned("tiny.seed={seed}", 7, 8).runs:
        begun.folder.mkdir(parents=True)
        (begun.folder / "config.toml").write_text(to_toml(begun.config))
    assert {new.state for new in planned("tiny.seed={seed}", 9).runs} == {"new"}
    with pytest.raises(InputError, match=r"seed-7 holds a run with another tiny.seed: choose another --name"):
        planned("tiny.seed=0", 9)


def small_settings(backbone: Path) -> list[str]:
    return [
        "arithmetic.levels=[2]",
        "arithmetic.num_train=60",
        "arithmetic.num_heldout=20",
        "rollout.questions_per_step=8",
        "replay.start_threshold=0.05",
        "run.steps=4",
        "run.threads=1",
        "run.plots=false",
        "validation.samples=2",
        f"backbone.source={backbone}",
        "backbone.dtype=auto",
    ]


@pytest.fixture(scope="module")
def study_of(small_backbone: Path):
    """A study of two arms and one seed that takes seconds."""

    def make(root: Path, *assignments: str) -> Study:
        base = StudyBase(assignments=[*small_settings(small_backbone), *assignments])
        return plan_study(name="small", root=root, arms=cross([axis_arms("metric", "ent:min")]), seeds=(0,), base=base)

    return make


@pytest.mark.engines
def test_a_study_runs_compares_and_is_not_run_again(
    study_of, small_backbone: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study = study_of(tmp_path)
    torn = study.runs[0].folder  # of a run that was killed while it was set up
    (torn / "data").mkdir(parents=True)
    (torn / ".lock").touch()
    run_study(study, Processes(at_once=2), SilentReporter())
    report = report_study(study).to_json()
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
    row = next(
        line for line in (tmp_path / "small" / "report.md").read_text().splitlines() if line.startswith("| ent:min")
    )
    assert f"| one seed | {difference:+.3f} |" in row  # one seed has no interval, nor has its difference
    # Two samples a question in these runs: coverage is pass@2, compared as pass@1 is.
    coverage = {name: found["pass_at_k"]["2"]["value"] for name, found in after.items()}
    compared = report["arms"]["ent:min"]["pass_at_k"]
    assert set(compared) == {"2"} and compared["2"]["seeds"] == {0: coverage["ent:min"]}
    assert compared["2"]["difference"]["mean"] == pytest.approx(coverage["ent:min"] - coverage["on-policy"])
    assert report["warnings"] and "fewer than 3 seeds" in report["warnings"][0]
    assert coverage["ent:min"] >= after["ent:min"]["pass_at_1"]
    assert "| pass@2 | minus on-policy | p (Holm) |" in (tmp_path / "small" / "report.md").read_text()
    kept = tmp_path / "small" / "results" / "ent-min-0.result.json"
    assert kept.read_text() == (tmp_path / "small" / "ent-min" / "seed-0" / "result.json").read_text()
    expected = {"results.json", "report.md", "ablation.png", "ablation.svg", "curves.png", "curves.svg"}
    assert expected <= {path.name for path in (tmp_path / "small").iterdir()}

    first_step = [
        json.loads((tmp_path / "small" / folder / "seed-0" / "metrics.jsonl").read_text().splitlines()[0])
        for folder in ("ent-min", "on-policy")
    ]
    assert first_step[0]["batch/pass_at_1"] == first_step[1]["batch/pass_at_1"], "both arms see the same questions"

    again = study_of(tmp_path)
    assert {run.state for run in again.runs} == {"finished"}
    before = {run.folder: (run.folder / "summary.json").stat().st_mtime_ns for run in again.runs}
    same = [word for assignment in small_settings(small_backbone) for word in ("--set", assignment)]
    command = ["ablate", "--metric", "ent:min", "--seeds", "1", "--output", str(tmp_path / "small"), *same, "--json"]
    capsys.readouterr()
    assert run(command) == 0
    out, err = capsys.readouterr()
    assert json.loads(out) == report
    assert "2 runs, 2 finished already" in err and f"report: {tmp_path / 'small' / 'report.html'}" in err
    page = (tmp_path / "small" / "report.html").read_text()
    assert "ent:min" in page and "on-policy" in page
    assert before == {run.folder: (run.folder / "summary.json").stat().st_mtime_ns for run in again.runs}

    with pytest.raises(InputError, match=r"holds a run with another run.steps: choose another --name"):
        study_of(tmp_path, "run.steps=5")
    with pytest.raises(InputError, match=r"holds a run with another backbone.dtype: choose another --name"):
        study_of(tmp_path, "backbone.dtype=bfloat16")
    # "auto" is content with what a run chose, and with what an earlier version did; not with other log-probs.
    chosen = again.runs[0].folder / "config.toml"
    assert 'logprobs = "sampler"' in chosen.read_text()
    chosen.write_text(chosen.read_text().replace('logprobs = "sampler"', 'logprobs = "trainer"'))
    assert {run.state for run in study_of(tmp_path).runs} == {"finished"}
    with pytest.raises(InputError, match=r"holds a run with another rollout.logprobs: choose another --name"):
        study_of(tmp_path, "rollout.logprobs=engine")

    # The settings in which both were asked for in bfloat16 are those of another study, whatever its results name.
    for one in again.runs:
        asked = one.asked_file.read_text()
        assert 'dtype = "auto"' in asked
        one.asked_file.write_text(asked.replace('dtype = "auto"', 'dtype = "bfloat16"'))
    with pytest.raises(InputError, match=r"holds a run with another backbone.dtype: choose another --name"):
        study_of(tmp_path)
    again.runs[0].asked_file.write_text("[backbone\n")
    with pytest.raises(InputError, match=r"seed-0\.toml is not TOML"):
        study_of(tmp_path)


@pytest.mark.engines
def test_a_run_that_fails_is_named_and_the_others_finish(study_of, tmp_path: Path) -> None:
    """A bound no gradient meets stops every run after five skipped updates; both are told, with the reason."""
    with pytest.raises(RunError, match=r"2 of 2 runs failed, first .*5 consecutive updates were skipped"):
        run_study(study_of(tmp_path, "optim.skip_norm=1e-9"), Processes(at_once=2), SilentReporter())


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
        run_study(study, Processes(at_once=1), SilentReporter())
    saved = int((study.runs[0].folder / "checkpoints" / "latest").read_text().removeprefix("step-"))
    assert saved == len(journal.read_text().splitlines()) < 200
    assert [run.state for run in study.runs] == ["unfinished", "new"]


def test_a_study_that_cannot_be_written_is_refused(study_of, tmp_path: Path) -> None:
    (tmp_path / "small").write_text("")
    with pytest.raises(InputError, match=r"small cannot be written \(File exists\): choose another --output"):
        run_study(study_of(tmp_path), Processes(at_once=1), SilentReporter())


@pytest.mark.engines
def test_a_run_of_several_ranks_is_started_by_its_worker(study_of, tmp_path: Path) -> None:
    (run, _) = study_of(tmp_path, "run.nproc=2", "run.steps=1", "data.heldout=arithmetic").runs
    [job] = Processes(at_once=1).start([run])
    assert job.wait(timeout=200) == 0, last_line(run.log)
    assert json.loads((run.folder / "environment.json").read_text())["ranks"] == 2
    assert run.state == "finished"


def test_no_seeds_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"seeds \[\] must be at least one"):
        plan_study(name="none", root=tmp_path, arms=cross([axis_arms("metric", "ent")]), seeds=())

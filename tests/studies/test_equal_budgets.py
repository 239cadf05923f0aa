"""Arms that spend what the baseline spent with the same seed."""

import json
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from made_results import result_of

from exgrpo_cli.base.reporter import SilentReporter
from exgrpo_cli.runs.result import config_hash, write_result
from exgrpo_cli.studies.output import report_study
from exgrpo_cli.studies.planning import StudyRequest, axis_arms, cross, plan_study
from exgrpo_cli.studies.schedule import Processes, run_study
from exgrpo_cli.studies.study import Study, budgeted


def study_of(small_backbone: Path, root: Path, equal: str) -> Study:
    request = StudyRequest(assignments=[
        "arithmetic.levels=[2]", "arithmetic.num_train=40", "arithmetic.num_heldout=4",
        "rollout.questions_per_step=4", "replay.start_threshold=0", "run.steps=2", "run.threads=1",
        "run.plots=false", "validation.samples=1", f"backbone.source={small_backbone}",
    ])  # fmt: skip
    return plan_study(root / "small", cross([axis_arms("metric", "random,length")]), [0, 1], request, equal=equal)


@pytest.mark.parametrize(("equal", "amount"), [("generated", 700.0), ("trained", 300.0), ("seconds", 6.5)])
def test_a_budget_is_the_baselines_total_of_the_same_seed(
    small_backbone: Path, tmp_path: Path, equal: str, amount: float
) -> None:
    """Seconds are those of the steps' phases, 6.5, not the 9 with all around them."""
    study = study_of(small_backbone, tmp_path, equal)
    baseline = next(run for run in study.runs if run.arm.name == "on-policy" and run.seed == 1)
    baseline.folder.mkdir(parents=True)
    (baseline.folder / "summary.json").write_text(json.dumps({"steps": 2, "finished": "steps reached"}))
    write_result(baseline.folder / "result.json", result_of([4, 2], generated=700, trained=300, training_seconds=6.5))
    for run in study.runs:
        ready = budgeted(study, run)
        if run.seed == 0 and run.arm.name != "on-policy":
            assert ready is None
        else:
            expected = ("steps", 0.0) if run.arm.name == "on-policy" else (equal, amount)
            assert ready and (ready.config.run.budget, ready.config.run.budget_amount) == expected


@pytest.mark.slow
def test_a_study_of_equal_budgets_runs_and_is_recognised(small_backbone: Path, tmp_path: Path) -> None:
    study = study_of(small_backbone, tmp_path, "generated")
    run_study(study, Processes(at_once=2), SilentReporter())
    arms = report_study(study).to_json()["arms"]
    for run in study.runs:
        settings = tomllib.loads((run.folder / "config.toml").read_text())["run"]
        generated = json.loads((run.folder / "summary.json").read_text())["tokens"]["generated"]
        whole = tmp_path / "small" / "on-policy" / f"seed-{run.seed}" / "summary.json"
        spent = json.loads(whole.read_text())["tokens"]["generated"]
        if run.arm.name == "on-policy":
            assert settings["budget"] == "steps"
        else:
            assert (settings["budget"], settings["budget_amount"]) == ("generated", spent)
            assert generated >= spent
    assert arms["random"]["steps"] >= arms["on-policy"]["steps"] == 2
    assert "| random |" in (tmp_path / "small" / "report.md").read_text().split("Equal in generated.")[1]
    assert {run.state for run in study_of(small_backbone, tmp_path, "generated").runs} == {"finished"}


@pytest.mark.parametrize(("setting", "finished"), [("backbone.dtype=float32,bfloat16", 0), ("run.steps=3,4", 1)])
def test_a_result_counts_for_no_arm_where_it_cannot_tell_them_apart(tmp_path, setting, finished):
    def planned(*results: Path) -> Study:
        arms = cross([axis_arms("vary", setting)])
        return plan_study(tmp_path / "varied", arms, (0,), StudyRequest(results=results))

    result = replace(result_of([4, 2]), config_hash=config_hash(planned().runs[0].config), budget_amount=0.0)
    write_result(tmp_path / "found-0.result.json", result)
    assert [run.state for run in planned(tmp_path).runs].count("finished") == finished

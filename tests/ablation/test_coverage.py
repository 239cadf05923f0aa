"""pass@k in a study's report: compared between arms by seed as pass@1 is, where every run has it."""

from typing import Any

import pytest

from exgrpo_cli.ablation.report import StudyReport, report_arm


def summary(pass_at_1: float, pass_at_4: float | None) -> dict[str, Any]:
    curve = {} if pass_at_4 is None else {"pass_at_k": {"1": {"value": pass_at_1}, "4": {"value": pass_at_4}}}
    return {
        "heldout": {"before": {"pass_at_1": 0.2}, "after": {"pass_at_1": pass_at_1, **curve}},
        "steps": 3,
        "updates": {"applied": 6, "skipped": 0},
        "wall_seconds": {"total": 60.0},
        "tokens": {"generated": 10, "trained": 20},
    }


def report(*, last: float | None) -> StudyReport:
    summaries = {
        ("on-policy", 0): summary(0.5, 0.6),
        ("on-policy", 1): summary(0.5, 0.7),
        ("replay", 0): summary(0.5, 0.7),
        ("replay", 1): summary(0.5, last),
    }
    arms = tuple(report_arm(name, summaries, "on-policy") for name in ("replay", "on-policy"))
    return StudyReport(name="study", baseline="on-policy", arms=arms)


def test_arms_of_one_mean_are_told_apart_by_what_they_reach() -> None:
    replay, baseline = report(last=0.9).arms
    found = replay.pass_at_k[4]
    # 0.7 - 0.6 and 0.9 - 0.7: 0.1 and 0.2, mean 0.15; t = 0.15 / (0.0707 / sqrt(2)) = 3, p = 0.2048 with 1 degree.
    assert found.seeds == {0: 0.7, 1: 0.9} and found.score.mean == pytest.approx(0.8)
    assert found.difference is not None and found.difference.mean == pytest.approx(0.15)
    assert found.p_value == pytest.approx(0.2048, abs=1e-4)
    assert replay.difference is not None and replay.difference.mean == 0.0
    assert baseline.pass_at_k[4].difference is None
    assert replay.to_json()["pass_at_k"]["4"]["seeds"] == {"0": 0.7, "1": 0.9}
    lines = report(last=0.9).markdown().splitlines()
    assert lines[0].endswith("| pass@4 | minus on-policy | p |")
    assert "| 0.800 | +0.150 " in lines[2]
    assert {line.count("|") for line in lines} == {lines[0].count("|")}


def test_a_study_with_a_run_that_has_no_curve_tells_pass_at_1_alone() -> None:
    made = report(last=None)
    assert all(not arm.pass_at_k for arm in made.arms)
    assert "pass@4" not in made.markdown()

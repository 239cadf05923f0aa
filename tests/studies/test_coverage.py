"""What a study's report makes of its runs' results: pass@k beside pass@1, equal tokens, Holm."""

from dataclasses import replace

import numpy as np
import pytest
from made_results import result_of

from exgrpo_cli.base.statistics import holm
from exgrpo_cli.studies.endpoints import AT_EQUAL
from exgrpo_cli.studies.output import endpoint_rows, markdown, score_rows
from exgrpo_cli.studies.report import ArmReport, StudyReport, adjust, report_arm
from exgrpo_cli.studies.study import Arm


def reported(name: str, baseline: str, results: dict) -> ArmReport:
    return report_arm(Arm(name=name, baseline=baseline), results)


def report() -> StudyReport:
    """Four questions, four answers each. On-policy solves 2 questions whole; replay half of the answers to each."""
    results = {
        "on-policy": {0: result_of([4, 4, 0, 0]), 1: result_of([4, 4, 0, 0])},
        "replay": {0: result_of([2, 2, 2, 0]), 1: result_of([2, 2, 2, 4])},
    }
    arms = [reported(name, "on-policy", results) for name in ("replay", "on-policy")]
    adjust(arms)
    return StudyReport(name="study", equal="steps", baselines=("on-policy",), arms=tuple(arms))


def test_arms_of_like_pass_at_1_are_told_apart_by_what_they_reach() -> None:
    replay, baseline = report().arms
    # pass@1: 6/16 and 10/16 against 8/16: -0.125 and +0.125. pass@4: 3/4 and 4/4 against 2/4.
    assert replay.main.seeds == {0: 0.375, 1: 0.625} and replay.main.difference is not None
    assert replay.main.difference.mean == pytest.approx(0.0)
    found = replay.endpoints["pass@4"]
    assert found.seeds == {0: 0.75, 1: 1.0} and found.difference is not None
    assert found.difference.mean == pytest.approx(0.375)
    assert baseline.endpoints["pass@4"].difference is None
    # Intervals of few seeds stay where rates live.
    assert (replay.main.low, replay.main.high, found.high) == (0.0, 1.0, 1.0)
    # pass@2 of 2 right in 4: 1 - C(2,2) / C(4,2) = 5/6; seed 0 has three such questions of four.
    assert replay.endpoints["pass@2"].seeds[0] == pytest.approx(3 / 4 * 5 / 6)
    assert replay.to_json()["pass_at_k"]["4"]["seeds"] == {0: 0.75, 1: 1.0}
    lines = markdown(score_rows(report())).splitlines()
    assert lines[0].endswith("| pass@4 | minus on-policy | p (Holm) |")
    assert "| 0.875 | +0.375 " in lines[2]
    for table in (score_rows(report()), endpoint_rows(report())):
        assert len({len(row) for row in table}) == 1
    assert "fewer than 3 seeds in replay, on-policy" in report().warnings[0]


def test_arms_are_compared_at_equal_tokens_though_they_end_apart() -> None:
    """On-policy rises from .1 to .3 in 1000 tokens; the other by .2 in each 1000, to .5 at 2000: equal at 1000."""
    control = result_of([4, 2], curve=((0, 0.1), (1000, 0.3)))
    own = result_of([4, 2], curve=((0, 0.1), (500, 0.2), (2000, 0.5)))
    old = replace(own, curve=tuple(replace(point, trained=None) for point in own.curve))
    results = {"grpo": {0: control, 1: control}, "latest": {0: own, 1: old}}
    latest = reported("latest", "grpo", results)
    at_generated, at_trained = (latest.endpoints[name] for name in AT_EQUAL)
    assert at_generated.seeds == pytest.approx({0: 0.3, 1: 0.3}) and at_generated.difference is not None
    assert at_generated.difference.mean == pytest.approx(0.0)
    # Results of earlier versions do not say what had been trained.
    assert list(at_trained.seeds) == [0]
    grpo = reported("grpo", "grpo", results)
    assert not set(AT_EQUAL) & set(grpo.endpoints)
    table = endpoint_rows(StudyReport(name="s", equal="generated", baselines=("grpo",), arms=(latest, grpo)))
    assert "pass@1 at equal tokens generated" in table[0]


def warned(results: dict) -> tuple[list[ArmReport], str]:
    """The arms, compared with `grpo`, and the one warning about them."""
    arms = [reported(name, "grpo", results) for name in results]
    (warning,) = StudyReport(name="study", equal="steps", baselines=("grpo",), arms=tuple(arms)).warnings
    return arms, warning


def test_arms_that_update_more_often_than_their_baseline_are_named() -> None:
    updates = {"grpo": 100, "latest": 150, "replay": 110}
    _, warning = warned({arm: {seed: result_of([4, 2], updates=n) for seed in range(3)} for arm, n in updates.items()})
    assert warning.startswith("updates differ: grpo 100, latest 150. More of them act like a higher learning rate")


def test_an_arm_that_never_acted_is_not_compared() -> None:
    """A difference of 0 in all seeds would have the interval of what five seeds cannot rule out: most of -1 to 1."""
    curve = ((0, 0.1), (1000, 0.3))
    results = {name: {seed: result_of([4, 2], curve=curve) for seed in range(5)} for name in ("grpo", "repo", "other")}
    results["other"][4] = result_of([4, 3], curve=curve)
    arms, warning = warned(results)
    assert [arm.is_baseline_again for arm in arms] == [False, True, False]
    assert arms[1].main.difference is None and arms[2].main.difference is not None
    assert warning.startswith("repo produced exactly grpo's results")


def test_arms_that_did_not_start_alike_are_named() -> None:
    """As where a warm start was made on machines of two kinds, and results of one are counted on the other."""
    grpo = {seed: result_of([4, 2], before=[1, 1]) for seed in (200, 201, 202)}
    own = {seed: result_of([4, 3], before=[1, seed == 201]) for seed in grpo}
    _, warning = warned({"grpo": grpo, "own": own})
    assert warning.startswith("own did not start as grpo did (seeds 200, 202): their held-out answers differ before")


def test_p_values_are_adjusted_for_the_arms_that_share_a_baseline() -> None:
    rng = np.random.default_rng(0)

    def arm(shift: int) -> dict:
        return {seed: result_of(rng.binomial(4, 0.3 + 0.1 * shift, size=50), seed=seed) for seed in range(5)}

    results = {"on-policy": arm(0), "a": arm(1), "b": arm(2), "c": arm(3)}
    arms = {name: reported(name, "on-policy", results) for name in results}
    adjust(list(arms.values()))
    raw = [arms[name].main.difference.p_value for name in "abc"]
    assert [arms[name].main.p_holm for name in "abc"] == pytest.approx(holm(raw))
    assert arms["on-policy"].main.p_holm is None

"""Verdicts against studies whose effect is known: error rates at the nominal level, power as calculated."""

from pathlib import Path

import numpy as np
import pytest
from made_results import result_of
from scipy.special import stdtrit

from exgrpo_cli.base.errors import InputError
from exgrpo_cli.studies.claims import FIRST_SEED, claim_of, claim_results, outcome
from exgrpo_cli.studies.endpoints import (
    Verdict,
    effect,
    effect_over_questions,
    effect_over_seeds,
    seeds_needed,
    verdict,
)
from exgrpo_cli.studies.output import claim_rows
from exgrpo_cli.studies.planning import plan_claims

SMALLEST = 0.03


def simulated(effect: float, rng: np.random.Generator, *, seeds: int = 8, unlike: float = 0.1) -> np.ndarray:
    """d[s, q] of 4 responses to each of 200 questions, which differ in difficulty and, by `unlike`, in their effects;
    seeds come out differently."""
    questions = 200
    easy = rng.beta(1, 2, size=questions) * 0.7 + 0.1
    of_questions = rng.normal(0, unlike, size=questions)
    of_questions += effect - of_questions.mean()
    arms = [
        rng.binomial(4, np.clip(easy + shift + rng.normal(0, 0.02, size=(seeds, 1)), 0, 1)) / 4
        for shift in (of_questions, 0.0)
    ]
    return np.asarray(arms[0] - arms[1])


def rates(true_effect: float, studies: int, unlike: float = 0.1) -> dict[Verdict, float]:
    """Share of simulated studies with each verdict about an effect above SMALLEST."""
    rng = np.random.default_rng(7)
    found = [
        verdict(
            [effect_over_questions(simulated(true_effect, rng, unlike=unlike), rng, bounds=(-1.0, 1.0))], [SMALLEST]
        )
        for _ in range(studies)
    ]
    return {each: found.count(each) / studies for each in Verdict}


def test_a_large_effect_is_supported_and_none_is_contradicted() -> None:
    assert rates(0.15, 12)[Verdict.SUPPORTED] == 1.0
    assert rates(-0.10, 12)[Verdict.CONTRADICTED] == 1.0


@pytest.mark.slow
def test_at_the_smallest_effect_either_verdict_is_as_rare_as_promised() -> None:
    """Each tail is nominally 2.5 %; of 1,000 studies a rate of 2.5 % has a standard error of 0.5 %."""
    found = rates(SMALLEST, 1000)
    assert found[Verdict.SUPPORTED] <= 0.04 and found[Verdict.CONTRADICTED] <= 0.04
    assert found[Verdict.SUPPORTED] + found[Verdict.CONTRADICTED] >= 0.01, "intervals that never err are too wide"


@pytest.mark.slow
def test_no_effect_is_hardly_ever_called_supported_and_power_is_as_calculated() -> None:
    assert rates(0.0, 400)[Verdict.SUPPORTED] <= 0.005
    rng = np.random.default_rng(0)
    spread = float(np.std([simulated(0.0, rng, unlike=0.0).mean(axis=1) for _ in range(100)], ddof=1))
    # `seeds_needed` read the other way: t(7) at 0.975 and at 0.8, over sqrt(8).
    far = SMALLEST + float(stdtrit(7, 0.975) + stdtrit(7, 0.8)) * spread / np.sqrt(8)
    assert rates(far, 400, unlike=0.0)[Verdict.SUPPORTED] == pytest.approx(0.8, abs=0.08)


@pytest.mark.parametrize("seeds", [3, 8])
@pytest.mark.slow
def test_intervals_over_seeds_hold_the_truth_as_often_as_they_say(seeds: int) -> None:
    drawn = np.random.default_rng(3).normal(0.1, 0.05, size=(2000, seeds))
    found = [effect_over_seeds(each, bounds=(-1.0, 1.0)) for each in drawn]
    assert np.mean([each.low <= 0.1 <= each.high for each in found]) == pytest.approx(0.95, abs=0.015)


def test_an_effect_over_seeds_by_hand() -> None:
    """Mean 2, s = 1: t = 2 sqrt(3), and with 2 degrees p = 1 - t / sqrt(t^2 + 2); 4.303 / sqrt(3) = 2.484 each way."""
    found = effect_over_seeds(np.array([1.0, 2.0, 3.0]), bounds=(-10.0, 10.0))
    t = 2 * 3**0.5
    assert found.p_value == pytest.approx(1 - t / (t**2 + 2) ** 0.5)
    assert (found.low, found.high) == (pytest.approx(-0.484, abs=1e-3), pytest.approx(4.484, abs=1e-3))


def test_seeds_are_counted_from_the_spread_and_the_distance() -> None:
    """Spread = distance: with 10 seeds t(9) = 2.262, the shift is sqrt(10) = 3.162, P(T > -0.900) = 0.804."""
    assert seeds_needed(spread=0.02, distance=0.02) == 10
    assert seeds_needed(spread=0.02, distance=0.04) < 10 < seeds_needed(spread=0.04, distance=0.02)


def test_all_seeds_alike_do_not_make_certain() -> None:
    """No collapse in 8 runs of either arm: Wilson's upper end at 0 of 8 is 0.324, which is how far it may be off."""
    found = effect_over_seeds(np.zeros(8), bounds=(-1.0, 1.0))
    assert (found.low, found.high) == (pytest.approx(-0.324, abs=1e-3), pytest.approx(0.324, abs=1e-3))
    assert found.p_value is None and verdict([found], [0.3]) is Verdict.UNDECIDED
    assert effect(0.2, 0.0, 1, (-1.0, 1.0)).low == 0.2  # one seed has no interval


def test_every_contrast_must_hold_and_one_that_fails_is_enough() -> None:
    def of(mean: float, seeds: int = 8):
        return effect(mean, 0.01, seeds, (-1.0, 1.0))

    # t(7) = 2.365: 0.06 +- 0.024 and 0.04 +- 0.024 against 0.03.
    assert verdict([of(0.06), of(0.06)], [0.03, 0.03]) is Verdict.SUPPORTED
    assert verdict([of(0.06), of(0.04)], [0.03, 0.03]) is Verdict.UNDECIDED
    assert verdict([of(0.06), of(0.0)], [0.03, 0.03]) is Verdict.CONTRADICTED
    # A single 0.005 is below 0.03 at 95 % (0.0286); as one of two it is judged at 97.5 %: 0.0333.
    assert verdict([of(0.005)], [0.03]) is Verdict.CONTRADICTED
    assert verdict([of(0.06), of(0.005)], [0.03, 0.03]) is Verdict.UNDECIDED
    assert verdict([of(0.06, seeds=7)], [0.03]) is Verdict.NOT_RUN
    assert verdict([], []) is Verdict.NOT_RUN
    assert verdict([of(0.06)], [0.03], needed=9) is Verdict.NOT_RUN


CLAIM = {
    "about": {"title": "more is better", "source": "here"},
    "claim": {"regime": "sparse", "run_minutes": 1},
    "contrast": [
        {"arm": "exgrpo", "control": "grpo", "smallest_effect": 0.05, "spread": 0.01},
        {"arm": "exgrpo", "reference": 0.2, "endpoint": "pass_at_n", "smallest_effect": 0.1, "spread": 0.01},
    ],
}


def test_a_claim_reads_not_run_until_all_of_its_seeds_are_there() -> None:
    claim = claim_of("more", CLAIM)
    assert claim.seeds == tuple(range(FIRST_SEED, FIRST_SEED + 8))
    rng = np.random.default_rng(0)

    def arm(rate: float, seeds: int) -> dict:
        return {FIRST_SEED + n: result_of(rng.binomial(4, rate, size=100), seed=FIRST_SEED + n) for n in range(seeds)}

    own, control = arm(0.6, 8), arm(0.3, 8)
    assert outcome(claim, {"exgrpo": own, "grpo": control}).verdict is Verdict.SUPPORTED
    control.pop(FIRST_SEED + 7)
    found = outcome(claim, {"exgrpo": own, "grpo": control})
    assert found.verdict is Verdict.NOT_RUN and found.seeds == 7
    _, row = claim_rows([outcome(claim, {"exgrpo": {}, "grpo": {}})])
    contrast = "pass_at_1: exgrpo minus grpo > 0.05"
    assert row == ["more is better", "sparse", contrast, "", "", "not run", "0 of 8", "0.0 M", "0 s"]


def test_a_claim_that_runs_suggested_has_seeds_of_its_own(tmp_path: Path) -> None:
    first, again = claim_of("first", CLAIM), claim_of("again", CLAIM | {"claim": CLAIM["claim"] | {"first_seed": 300}})
    assert again.seeds == tuple(range(300, 308))
    study = plan_claims([first, again], tmp_path / "both")
    assert {arm.name for arm in study.arms} == {"sparse: grpo", "sparse: exgrpo"}
    assert sorted({run.seed for run in study.runs}) == [*first.seeds, *again.seeds]
    # The seeds of one do not count for the other.
    results = {
        name: {seed: result_of([4, 2], seed=seed) for seed in first.seeds} for name in (arm.name for arm in study.arms)
    }
    counted = claim_results(again, study.arms, results)
    assert counted == {"exgrpo": {}, "grpo": {}}
    assert claim_results(first, study.arms, results)["grpo"].keys() == set(first.seeds)


def test_an_arm_is_compared_with_the_on_policy_arm_of_its_own_questions(tmp_path: Path) -> None:
    other = {**CLAIM["claim"], "settings": ["countdown.seed=1"]}
    claims = [claim_of("first", CLAIM), claim_of("other", CLAIM | {"claim": other})]
    alone = claim_of("alone", {**CLAIM, "claim": {**other, "regime": "search"}, "contrast": CLAIM["contrast"][1:]})
    study = plan_claims([*claims, alone], tmp_path / "all")
    assert {arm.name: arm.baseline for arm in study.arms} == {
        "sparse: grpo": "sparse: grpo",
        "sparse: exgrpo": "sparse: grpo",
        "sparse: grpo (other)": "sparse: grpo (other)",
        "sparse: exgrpo (other)": "sparse: grpo (other)",
        "search: exgrpo": "",
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"claim": {**CLAIM["claim"], "first_seed": "x"}},
            r"more: Expected `int`, got `str` - at `\$.claim.first",
        ),
        ({"claim": {**CLAIM["claim"], "first_seed": 100}}, r"Expected `int` >= 200 - at `\$.claim.first_seed"),
        ({"contrast": [{"arm": "exgrpo", "endpoint": "luck", "smallest_effect": 1, "spread": 1}]}, "endpoint = 'luck'"),
        ({"contrast": [{"arm": "exgrpo", "smallest_effect": 0, "spread": 1}]}, "smallest_effect = 0.* above 0"),
        ({"contrast": [{"arm": "exgrpo", "smallest_effect": float("nan"), "spread": 1}]}, "a finite number"),
        ({"contrast": []}, r"Expected `array` of length >= 1 - at `\$.contrast`"),
        ({"claim": {"regime": "sparse"}}, "claim more: Object missing required field `run_minutes`"),
    ],
)
def test_a_claim_that_cannot_be_tested_is_refused(change: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        claim_of("more", CLAIM | change)

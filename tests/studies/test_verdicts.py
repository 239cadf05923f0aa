"""Verdicts against studies whose effect is known, and what a report makes of results: equal tokens, pass@k, Holm."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from made_results import result_of
from scipy.special import stdtrit

from exgrpo_cli.base.errors import InputError
from exgrpo_cli.base.statistics import holm
from exgrpo_cli.config.requests import StudyRequest
from exgrpo_cli.runs.result import config_hash, write_result
from exgrpo_cli.studies import output, planning, study
from exgrpo_cli.studies.claims import FIRST_SEED, Claim, claim_of, claim_outcomes, claim_results, outcome
from exgrpo_cli.studies.endpoints import (
    AT_EQUAL,
    Verdict,
    effect,
    effect_over_questions,
    effect_over_seeds,
    seeds_needed,
    verdict,
)
from exgrpo_cli.studies.report import compare_runs

SMALLEST = 0.03
BOUNDS = (-1.0, 1.0)


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


def rates(
    true_effect: float, studies: int, unlike: float = 0.1, asked: Sequence[float] = (SMALLEST,)
) -> dict[Verdict, float]:
    """Share of simulated studies with each verdict about effects above each of `asked`, all of that true size."""
    rng = np.random.default_rng(7)
    found = [
        verdict(
            [effect_over_questions(simulated(true_effect, rng, unlike=unlike), bounds=BOUNDS) for _ in asked], [*asked]
        )
        for _ in range(studies)
    ]
    return {each: found.count(each) / studies for each in Verdict}


def test_a_large_effect_is_supported_and_a_large_loss_reverses() -> None:
    assert rates(0.15, 12)[Verdict.SUPPORTED] == 1.0 and rates(-0.15, 12)[Verdict.REVERSED] == 1.0


def test_an_effect_over_seeds_and_questions_is_that_of_the_formula() -> None:
    """S = 2, Q = 2, d = [[1, 3], [2, 8]]: m = 3.5, seeds 2 and 5, questions 1.5 and 5.5, residuals +-1.

    MS = 4 / 1; SE^2 = (2.25 + 2.25) / (1 * 2) + (8 / 1 - 4 / 2) / 2 = 5.25; t(1) = 12.706.
    """
    found = effect_over_questions(np.array([[1.0, 3.0], [2.0, 8.0]]), bounds=(-99.0, 99.0))
    assert (found.mean, found.error) == (3.5, pytest.approx(5.25**0.5))
    assert found.high - found.mean == pytest.approx(12.7062 * 5.25**0.5, rel=1e-5)
    assert (found.median, found.positive, found.spread) == (3.5, 2, pytest.approx(4.5**0.5))
    # Questions that scatter no more than single answers do add nothing.
    alike = effect_over_questions(np.array([[1.0, 0.0], [0.0, 1.0]]), bounds=(-1.0, 1.0))
    assert alike.mean == 0.5 and alike.spread == 0.0


def test_the_p_value_of_few_seeds_is_exact() -> None:
    """Of 2^5 ways to give five differences signs two have a mean as far from 0 as all of one sign."""
    assert effect_over_seeds(np.array([0.01, 0.02, 0.02, 0.03, 0.9]), bounds=(-1.0, 1.0)).p_value == 2 / 32
    # By signs alone: 2 of 32, and of three with one against them all eight; a difference of 0 has no sign.
    for differences, chance in (([0.1] * 4 + [2.0], 2 / 32), ([3.0, 1.0, -2.0], 1.0), ([0.0, 1.0, 1.0], 0.5)):
        assert effect_over_seeds(np.array(differences), bounds=(-9.0, 9.0)).sign_p == pytest.approx(chance)
    # Sums of (+-3 +-1 +-2): +-6, +-4, +-2 and twice 0; all but the zeros are as far as 2.
    assert effect_over_seeds(np.array([3.0, 1.0, -2.0]), bounds=(-9.0, 9.0)).p_value == 6 / 8
    rng = np.random.default_rng(1)
    flips = [effect_over_seeds(rng.normal(size=8), bounds=(-9.0, 9.0)).p_value for _ in range(200)]
    assert 0.02 <= np.mean([p <= 0.05 for p in flips]) <= 0.09


@pytest.mark.slow
@pytest.mark.parametrize(
    ("truth", "verdicts"),
    [(SMALLEST, (Verdict.SUPPORTED, Verdict.TOO_SMALL)), (-SMALLEST, (Verdict.TOO_SMALL, Verdict.REVERSED))],
)
def test_at_the_end_of_a_verdict_it_is_as_rare_as_promised(truth: float, verdicts: tuple[Verdict, Verdict]) -> None:
    """Each tail is nominally 2.5 %; of 1,000 studies a rate of 2.5 % has a standard error of 0.5 %."""
    found = rates(truth, 1000)
    assert all(found[each] <= 0.04 for each in verdicts)
    assert sum(found[each] for each in verdicts) >= 0.01, "intervals that never err are too wide"


@pytest.mark.slow
def test_claims_of_no_loss_and_of_two_effects_err_as_rarely() -> None:
    """A loss as large as is allowed, called none; two effects at the smallest, or at minus it, of which one errs."""
    assert 0.005 <= rates(-SMALLEST, 1000, asked=[-SMALLEST])[Verdict.SUPPORTED] <= 0.04
    assert rates(SMALLEST, 500, asked=[SMALLEST, SMALLEST])[Verdict.SUPPORTED] <= 0.01
    assert rates(SMALLEST, 500, asked=[SMALLEST, SMALLEST])[Verdict.TOO_SMALL] <= 0.045
    assert rates(-SMALLEST, 500, asked=[SMALLEST, SMALLEST])[Verdict.REVERSED] <= 0.045


@pytest.mark.slow
def test_no_effect_is_hardly_ever_called_supported_and_power_is_as_calculated() -> None:
    assert rates(0.0, 400)[Verdict.SUPPORTED] <= 0.005
    rng = np.random.default_rng(0)
    spread = float(np.std([simulated(0.0, rng, unlike=0.0).mean(axis=1) for _ in range(100)], ddof=1))
    # `seeds_needed` read the other way: t(7) at 0.975 and at 0.8, over sqrt(8).
    far = SMALLEST + float(stdtrit(7, 0.975) + stdtrit(7, 0.8)) * spread / np.sqrt(8)
    assert rates(far, 400, unlike=0.0)[Verdict.SUPPORTED] == pytest.approx(0.8, abs=0.08)


def test_an_effect_over_seeds_by_hand() -> None:
    """Mean 2, s = 1: 4.303 / sqrt(3) = 2.484 each way."""
    found = effect_over_seeds(np.array([1.0, 2.0, 3.0]), bounds=(-10.0, 10.0))
    assert found.p_value == 2 / 8
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
    assert effect(np.array([0.2]), 0.0, (-1.0, 1.0)).low == 0.2  # one seed has no interval


def test_every_contrast_must_hold_and_one_that_fails_is_enough() -> None:
    def of(mean: float, seeds: int = 8):
        return effect(np.full(seeds, mean), 0.01, (-1.0, 1.0))

    # t(7) = 2.365: 0.06 +- 0.024 and 0.04 +- 0.024 against 0.03.
    assert verdict([of(0.06), of(0.06)], [0.03, 0.03]) is Verdict.SUPPORTED
    assert verdict([of(0.06), of(0.04)], [0.03, 0.03]) is Verdict.UNDECIDED
    assert verdict([of(0.06), of(0.0)], [0.03, 0.03]) is Verdict.TOO_SMALL
    # A single 0.005 is below 0.03 at 95 % (0.0286); as one of two it is judged at 97.5 %: 0.0333.
    assert verdict([of(0.005)], [0.03]) is Verdict.TOO_SMALL
    # -0.01 +- 0.024 reaches below -0.03: a gain of 0.03 is ruled out, a loss of it is not.
    assert verdict([of(-0.01)], [0.03]) is Verdict.UNDECIDED
    assert verdict([of(-0.06)], [0.03]) is Verdict.REVERSED
    assert verdict([of(0.06), of(-0.06)], [0.03, 0.03]) is Verdict.REVERSED
    # "No less" than 0.03 below: an effect around 0 supports it, a loss reverses it.
    assert verdict([of(0.0)], [-0.03]) is Verdict.SUPPORTED
    assert verdict([of(-0.02)], [-0.03]) is Verdict.UNDECIDED
    assert verdict([of(-0.06)], [-0.03]) is Verdict.REVERSED
    assert verdict([of(0.06), of(0.005)], [0.03, 0.03]) is Verdict.UNDECIDED
    assert verdict([of(0.06, seeds=7)], [0.03]) is Verdict.NOT_RUN and verdict([], []) is Verdict.NOT_RUN
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
    assert outcome(claim, {"exgrpo": own, "grpo": control})["verdict"] == "supported"
    control.pop(FIRST_SEED + 7)
    found = outcome(claim, {"exgrpo": own, "grpo": control})
    assert found["verdict"] == "not run" and found["seeds"] == 7
    _, row = output.claim_rows([outcome(claim, {"exgrpo": {}, "grpo": {}})])
    contrast = "pass_at_1: exgrpo minus grpo > 0.05"
    assert row == [
        "more is better", "sparse", contrast, "", "", "", "0.05", "not run", "0 of 8, not fixed", "0.0 M", "0 s",
    ]  # fmt: skip


FIXED = "2026-11-01T12:00:00+00:00"


def fixed(tmp_path: Path, **changed: object) -> Claim:
    """CLAIM with `changed` tables, fixed at noon."""
    content = CLAIM | changed
    planned = planning.plan_claims([claim_of("more", content)], tmp_path / "unfixed")
    [(name, digest)] = {tuple(each.split()) for run in planned.runs for each in run.config.run.claims}
    assert name == "more"
    return claim_of("more", content | {"fixed": {"at": FIXED, "hash": digest}})


def planted(folder: Path, claim: Claim, started: str | None, begun_for: dict[str, str] | None = None) -> StudyRequest:
    """Results of all runs of a claim, one begun at `started` and the others a day later."""
    for number, run in enumerate(planning.plan_claims([claim], folder / "unused").runs):
        begun, claims = (started, begun_for or {}) if number == 0 else ("2026-11-02T12:00:00+00:00", {})
        known = {"config_hash": config_hash(run.config), "budget_amount": run.config.run.budget_amount}
        result = replace(result_of([4, 2], seed=run.seed), **known, started=begun, claim=claims)
        write_result(folder / "results" / f"{number}.result.json", result)
    return StudyRequest(results=[folder / "results"])


@pytest.mark.parametrize(
    ("started", "begun_for", "why"),
    [
        ("2026-11-01T11:59:59+00:00", {}, "before claim more was fixed"),
        ("2026-11-01T13:59:59+02:00", {}, "before claim more was fixed"),
        ("2026-11-03T12:00:00+00:00", {"more": "0" * 16}, "for another version of claim more than that fixed"),
    ],
)
def test_a_result_begun_before_its_claim_was_fixed_is_refused_by_name(
    tmp_path: Path, started: str, begun_for: dict[str, str], why: str
) -> None:
    claim = fixed(tmp_path)
    request = planted(tmp_path, claim, started, begun_for)
    with pytest.raises(InputError) as error:
        planning.plan_claims([claim], tmp_path / "study", request)
    assert "\n" not in str(error.value)
    assert str(error.value).startswith(
        f"the result of grpo, seed 200, was begun at {started}, {why} at {FIXED}: leave it out, test the claim on other"
    )
    # Nor does it count where it lies in the study already.
    study = replace(planning.plan_claims([claim], tmp_path / "study"), others={})
    early = replace(result_of([4, 2], seed=200), started=started, claim=begun_for)
    study = replace(study, runs=(replace(study.runs[0], result=early),))
    with pytest.raises(InputError, match="the result of grpo, seed 200, was begun at"):
        claim_outcomes(study)
    exploratory = fixed(tmp_path, about=CLAIM["about"] | {"exploratory": True})
    found = claim_outcomes(planning.plan_claims([exploratory], tmp_path / "study", request))["more"]
    assert found["exploratory"] and found["seeds"] == 8
    assert output.claim_rows([found])[1][-3] == "8 of 8, exploratory"


def test_a_result_without_a_start_counts_and_is_called_undated(tmp_path: Path) -> None:
    claim = fixed(tmp_path)
    found = claim_outcomes(planning.plan_claims([claim], tmp_path / "study", planted(tmp_path, claim, None)))["more"]
    assert (found["seeds"], found["undated"], found["fixed"]) == (8, 1, FIXED)
    assert output.claim_rows([found])[1][-3] == "8 of 8, 1 runs undated"


def test_the_hash_of_a_claim_covers_what_it_is_tested_by_and_no_words(tmp_path: Path) -> None:
    claim = fixed(tmp_path)
    first, second = CLAIM["contrast"]
    for same in (
        {"about": {"title": "other words", "source": "elsewhere"}},
        {"claim": CLAIM["claim"] | {"run_minutes": 9}},
    ):
        planning.plan_claims([claim_of("more", claim.stated | same)], tmp_path / "study")
    for other in (
        {"claim": CLAIM["claim"] | {"first_seed": 300}},
        {"claim": CLAIM["claim"] | {"settings": ["optim.learning_rate=1e-4"]}},
        {"contrast": [first, second | {"endpoint": "pass_at_1"}]},
        {"contrast": [first | {"smallest_effect": 0.06}, second]},
        {"contrast": [first]},
        {"arms": {"grpo": {"settings": ["optim.minibatches=4"]}}},
    ):
        with pytest.raises(InputError, match=r"claim more has hash \w{16}, not \w{16}, as it was fixed at 2026-11-01"):
            planning.plan_claims([claim_of("more", claim.stated | other)], tmp_path / "study")
    with pytest.raises(InputError, match=r"claim more: .* - at `\$.fixed.at`"):
        claim_of("more", CLAIM | {"fixed": {"at": "2026-11-01 12:00", "hash": ""}})


def test_a_claim_that_runs_suggested_has_seeds_of_its_own(tmp_path: Path) -> None:
    first, again = claim_of("first", CLAIM), claim_of("again", CLAIM | {"claim": CLAIM["claim"] | {"first_seed": 300}})
    assert again.seeds == tuple(range(300, 308))
    study = planning.plan_claims([first, again], tmp_path / "both")
    assert {arm.name for arm in study.arms} == {"sparse: grpo", "sparse: exgrpo"}
    assert sorted({run.seed for run in study.runs}) == [*first.seeds, *again.seeds]
    # The seeds of one do not count for the other.
    results = {
        name: {seed: result_of([4, 2], seed=seed) for seed in first.seeds} for name in (arm.name for arm in study.arms)
    }
    assert claim_results(again, study.arms, results) == {"exgrpo": {}, "grpo": {}}
    assert claim_results(first, study.arms, results)["grpo"].keys() == set(first.seeds)


def test_an_arm_is_compared_with_the_on_policy_arm_of_its_own_questions(tmp_path: Path) -> None:
    other = {**CLAIM["claim"], "settings": ["countdown.seed=1"]}
    claims = [claim_of("first", CLAIM), claim_of("other", CLAIM | {"claim": other})]
    alone = claim_of("alone", {**CLAIM, "claim": {**other, "regime": "search"}, "contrast": CLAIM["contrast"][1:]})
    study = planning.plan_claims([*claims, alone], tmp_path / "all")
    assert {arm.name: arm.baseline for arm in study.arms} == {
        "sparse: grpo": "sparse: grpo", "sparse: exgrpo": "sparse: grpo",
        "sparse: grpo (other)": "sparse: grpo (other)", "sparse: exgrpo (other)": "sparse: grpo (other)",
        "search: exgrpo": "",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"claim": {**CLAIM["claim"], "first_seed": 100}}, r"Expected `int` >= 200 - at `\$.claim.first_seed"),
        ({"contrast": [{"arm": "exgrpo", "endpoint": "luck", "smallest_effect": 1, "spread": 1}]}, "endpoint = 'luck'"),
        ({"contrast": [{"arm": "exgrpo", "smallest_effect": 0, "spread": 1}]}, "smallest_effect = 0.* above 0"),
        ({"contrast": []}, r"Expected `array` of length >= 1 - at `\$.contrast`"),
        ({"claim": {"regime": "sparse"}}, "claim more: Object missing required field `run_minutes`"),
    ],
)
def test_a_claim_that_cannot_be_tested_is_refused(change: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        claim_of("more", CLAIM | change)


def report(baseline: str, results: dict[str, dict]) -> dict:
    """The comparison of results by arm and seed."""
    arms = tuple(study.Arm(name=name, baseline=baseline) for name in results)
    others = {(name, seed): result for name, by_seed in results.items() for seed, result in by_seed.items()}
    return compare_runs(study.Study(name="study", folder=Path("study"), arms=arms, runs=(), others=others))


def test_arms_of_like_pass_at_1_are_told_apart_by_what_they_reach() -> None:
    """Four questions, four answers each. On-policy solves 2 questions whole; replay half of the answers to each."""
    found = report(
        "on-policy",
        {
            "replay": {0: result_of([2, 2, 2, 0]), 1: result_of([2, 2, 2, 4])},
            "on-policy": {0: result_of([4, 4, 0, 0]), 1: result_of([4, 4, 0, 0])},
        },
    )
    replay, baseline = found["arms"].values()
    # pass@1: 6/16 and 10/16 against 8/16: -0.125 and +0.125. pass@4: 3/4 and 4/4 against 2/4.
    assert replay["seeds"] == {0: 0.375, 1: 0.625} and replay["difference"]["mean"] == pytest.approx(0.0)
    at_4 = replay["pass_at_k"]["4"]
    assert at_4["seeds"] == {0: 0.75, 1: 1.0} and at_4["difference"]["mean"] == pytest.approx(0.375)
    assert baseline["pass_at_k"]["4"]["difference"] is None
    # Intervals of few seeds stay where rates live.
    assert (replay["low"], replay["high"], at_4["high"]) == (0.0, 1.0, 1.0)
    # pass@2 of 2 right in 4: 1 - C(2,2) / C(4,2) = 5/6; seed 0 has three such questions of four.
    assert replay["pass_at_k"]["2"]["seeds"][0] == pytest.approx(3 / 4 * 5 / 6)
    lines = output.markdown(output.score_rows(found)).splitlines()
    assert lines[0].endswith("| pass@4 | pass@4 minus on-policy | p (Holm) |")
    assert "| 0.875 | +0.375 " in lines[2]
    for table in (output.score_rows(found), output.endpoint_rows(found)):
        assert len({len(row) for row in table}) == 1
    assert "fewer than 3 seeds in replay, on-policy" in found["warnings"][0]


def test_arms_are_compared_at_equal_tokens_though_they_end_apart() -> None:
    """On-policy rises from .1 to .3 in 1000 tokens; the other by .2 in each 1000, to .5 at 2000: equal at 1000."""
    control = result_of([4, 2], curve=((0, 0.1), (1000, 0.3)))
    own = result_of([4, 2], curve=((0, 0.1), (500, 0.2), (2000, 0.5)))
    old = replace(own, curve=tuple(replace(point, trained=None) for point in own.curve))
    found = report("grpo", {"latest": {0: own, 1: old}, "grpo": {0: control, 1: control}})
    latest, grpo = (arm["endpoints"] for arm in found["arms"].values())
    at_generated, at_trained = (latest[name] for name in AT_EQUAL)
    assert at_generated["seeds"] == pytest.approx({0: 0.3, 1: 0.3})
    assert at_generated["difference"]["mean"] == pytest.approx(0.0)
    # Results of earlier versions do not say what had been trained.
    assert list(at_trained["seeds"]) == [0]
    assert not set(AT_EQUAL) & set(grpo)
    assert "pass@1 at equal tokens generated" in output.endpoint_rows(found)[0]


def test_arms_that_update_more_often_than_their_baseline_are_named() -> None:
    updates = {"grpo": 100, "latest": 150, "replay": 110}
    results = {arm: {seed: result_of([4, 2], updates=n) for seed in range(3)} for arm, n in updates.items()}
    (warning,) = report("grpo", results)["warnings"]
    assert warning.startswith("updates differ: grpo 100, latest 150. More of them act like a higher learning rate")


def test_an_arm_that_never_acted_is_not_compared() -> None:
    """A difference of 0 in all seeds would have the interval of what five seeds cannot rule out: most of -1 to 1."""
    curve = ((0, 0.1), (1000, 0.3))
    results = {name: {seed: result_of([4, 2], curve=curve) for seed in range(5)} for name in ("grpo", "repo", "other")}
    results["other"][4] = result_of([4, 3], curve=curve)
    found = report("grpo", results)
    assert [arm for arm, numbers in found["arms"].items() if numbers["difference"]] == ["other"]
    (warning,) = found["warnings"]
    assert warning.startswith("repo produced exactly grpo's results")


def test_arms_that_did_not_start_alike_are_named() -> None:
    """As where a warm start was made on machines of two kinds, and results of one are counted on the other."""
    grpo = {seed: result_of([4, 2], before=[1, 1]) for seed in (200, 201, 202)}
    own = {seed: result_of([4, 3], before=[1, seed == 201]) for seed in grpo}
    (warning,) = report("grpo", {"grpo": grpo, "own": own})["warnings"]
    assert warning.startswith("own did not start as grpo did (seeds 200, 202): their held-out answers differ before")


def test_p_values_are_adjusted_for_the_arms_that_share_a_baseline() -> None:
    rng = np.random.default_rng(0)

    def arm(shift: int) -> dict:
        return {seed: result_of(rng.binomial(4, 0.3 + 0.1 * shift, size=50), seed=seed) for seed in range(5)}

    arms = report("on-policy", {"on-policy": arm(0), "a": arm(1), "b": arm(2), "c": arm(3)})["arms"]
    raw = [arms[name]["difference"]["p_value"] for name in "abc"]
    assert [arms[name]["p_holm"] for name in "abc"] == pytest.approx(holm(raw))
    assert arms["on-policy"]["p_holm"] is None

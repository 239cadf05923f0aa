"""Statistics of a score against closed forms and brute force."""

import itertools
import math
from statistics import NormalDist

import numpy as np
import pytest
from scipy import stats
from scipy.special import betaln

from exgrpo_cli.base import statistics as ours


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def test_average_weighs_questions_alike():
    # Counts 0, 2 and 4 of 4: pass rates 0, 1/2 and 1, mean 1/2.
    score = ours.avg_at_k(np.array([0, 2, 4]), 4, rng())
    assert (score.value, score.samples, score.questions) == (pytest.approx(0.5), 4, 3)
    with pytest.raises(ValueError, match="at least one question"):
        ours.avg_at_k(np.array([], dtype=np.int64), 4, rng())


def test_one_sample_per_question_uses_wilson_which_has_a_width_at_the_ends():
    # 8 of 20, z = 1.959964: the textbook interval, and SciPy's.
    score = ours.avg_at_k(np.array([1] * 8 + [0] * 12), 1, rng())
    expected = stats.binomtest(8, 20).proportion_ci(0.95, method="wilson")
    assert (score.low, score.high) == pytest.approx((expected.low, expected.high), abs=1e-12)
    # At 0 of n the upper end is z^2 / (n + z^2).
    z2 = NormalDist().inv_cdf(0.975) ** 2
    assert ours.wilson(0.0, 30) == (0.0, pytest.approx(z2 / (30 + z2)))
    assert ours.wilson(30.0, 30) == (pytest.approx(30 / (30 + z2)), 1.0)


@pytest.mark.parametrize("count", [0, 8, 32])
def test_questions_all_alike_do_not_get_an_interval_without_width(count):
    """Of 30 questions alike, Wilson's 0.1135 may be unlike them: none of those solved, or all."""
    score, unseen = ours.avg_at_k(np.full(30, count), 32, rng()), ours.wilson(0, 30)[1]
    assert unseen == pytest.approx(0.1135, abs=1e-4)
    rate = count / 32
    assert (score.low, score.high) == pytest.approx((rate * (1 - unseen), rate + unseen * (1 - rate)))


@pytest.mark.parametrize(("questions", "samples"), [(10, 2), (30, 32), (100, 4), (500, 4)])
def test_none_right_is_never_a_wider_interval_than_one_right(questions, samples):
    """0 of 400 used to give [0, 0.037] and 1 of 400 [0, 0.0075]."""
    counts, widths = np.zeros(questions, dtype=np.int64), []
    for position in range(6):
        score = ours.avg_at_k(counts, samples, rng())
        assert 0 <= score.low <= score.value <= score.high <= 1
        widths.append(score.high - score.low)
        mirrored = ours.avg_at_k(samples - counts, samples, rng())
        assert (mirrored.low, mirrored.high) == pytest.approx((1 - score.high, 1 - score.low), abs=0.01)
        counts[position] = 1
    assert widths[0] == pytest.approx(ours.wilson(0, questions)[1]) and min(widths[1:]) >= widths[0] - 1e-12


def test_far_from_the_ends_the_interval_is_the_bootstraps():
    counts = rng(1).binomial(4, rng(2).beta(1, 1, size=200))
    score = ours.avg_at_k(counts, 4, rng())
    assert (score.low, score.high) == ours.bootstrap_interval(counts / 4, rng())


def test_bootstrap_interval_equals_the_enumerated_one():
    # Three questions: all 27 equally likely resamples can be listed; their quantiles are the interval.
    values = np.array([0.0, 0.25, 1.0])
    means = np.sort([np.mean(draw) for draw in itertools.product(values, repeat=3)])
    tail = stats.norm.cdf(-math.sqrt(3 / 2) * stats.t.ppf(0.975, 2))
    low, high = ours.bootstrap_interval(values, rng(), resamples=200_000)
    assert tail < 1 / 27  # so both ends are the extremes of the 27
    assert (low, high) == (means[0], means[-1])


def test_mean_of_scores_by_hand():
    # Below: sqrt(0.1^2 + 0.2^2) / 2 = 0.111803; above: sqrt(0.3^2 + 0.4^2) / 2 = 0.25.
    value, low, high = ours.mean_of_scores([(0.2, 0.1, 0.5), (0.6, 0.4, 1.0)])
    assert (value, value - low, high - value) == pytest.approx((0.4, 0.111803, 0.25), abs=1e-6)
    assert ours.mean_of_scores([(0.3, 0.2, 0.5)]) == pytest.approx((0.3, 0.2, 0.5))


def test_t_interval_by_hand():
    # Mean 0.6, s = 0.1, t(2) = 4.302653 at 97.5 %: half a width of 0.430265 / sqrt(3) = 0.248414.
    interval = ours.t_interval([0.5, 0.6, 0.7])
    assert (interval.mean, interval.low, interval.high) == pytest.approx((0.6, 0.351586, 0.848414), abs=1e-6)
    one = ours.t_interval([0.5])
    assert (one.mean, one.low, one.high) == (0.5, 0.5, 0.5)
    # 0.96 +- 0.172: as a rate, up to 1 alone.
    above = ours.t_interval([0.9, 0.98, 1.0], bounds=(0.0, 1.0))
    assert (above.low, above.high) == (pytest.approx(ours.t_interval([0.9, 0.98, 1.0]).low), 1.0)
    assert ours.t_interval([0.0, 0.1], bounds=(0.0, 1.0)).low == 0.0


def test_pass_at_k_equals_the_share_of_subsets_with_a_success():
    n, k = 6, 3
    for c in range(n + 1):
        subsets = list(itertools.combinations([1] * c + [0] * (n - c), k))
        brute = sum(any(subset) for subset in subsets) / len(subsets)
        assert ours.pass_at_k_by_question(np.array([c]), n, k) == pytest.approx(brute)
    # 1 - C(4,3)/C(6,3) = 1 - 4/20 = 0.8, and 0: a mean of 0.4.
    assert ours.pass_at_k_score(np.array([2, 0]), n, k, rng()).value == pytest.approx(0.4)


def test_the_interval_of_pass_at_k_takes_whole_questions():
    # 40 questions, half always and half never solved in 8 samples: pass@k is 1/2 at every k, and as uncertain as 40
    # coin tosses, however many samples each question has.
    counts = np.array([8, 0] * 20)
    for k in (1, 2, 4):
        score = ours.pass_at_k_score(counts, 8, k, rng())
        assert (score.value, score.samples, score.questions) == (0.5, k, 40)
        assert score.high - score.low == pytest.approx(2 * 1.96 * 0.5 / 40**0.5, rel=0.12)
    # At k = n a question counts whole or not at all: Wilson's interval, as of 20 in 40.
    whole = ours.pass_at_k_score(counts, 8, 8, rng())
    assert (whole.low, whole.high) == ours.wilson(20, 40)
    # Nothing to resample where every question is the same: 0 of 30 has Wilson's upper end.
    assert ours.pass_at_k_score(np.zeros(30, dtype=int), 32, 4, rng()).high == ours.wilson(0, 30)[1]


def test_pass_at_1_has_the_interval_of_the_average():
    counts = np.array([0] * 10 + [1] * 6 + [2] * 2 + [3] * 2)
    one, mean = ours.pass_at_k_score(counts, 4, 1, rng()), ours.avg_at_k(counts, 4, rng())
    assert (one.value, one.low, one.high) == pytest.approx((mean.value, mean.low, mean.high))


def test_the_k_of_a_curve():
    assert [ours.pass_at_ks(samples) for samples in (1, 2, 6, 32)] == [[1], [1, 2], [1, 2, 4, 6], [1, 2, 4, 8, 16, 32]]
    with pytest.raises(ValueError, match="pass@9 cannot be estimated from 8 samples: use k from 1 to 8"):
        ours.pass_at_k_by_question(np.array([1]), 8, 9)


def test_smallest_detectable_difference():
    # 15 of 30 at k=1: variance 0.25 * 30/29; (1.960 + 0.842) * sqrt(2 * 0.2586 / 30) = 0.368.
    assert ours.smallest_detectable_difference(np.array([1, 0] * 15), 1) == pytest.approx(0.3679, abs=2e-4)
    # 0 of 30: shrunk to 2/34, variance 0.0554; 2.802 * sqrt(2 * 0.0554 / 30) = 0.170.
    assert ours.smallest_detectable_difference(np.zeros(30, dtype=np.int64), 32) == pytest.approx(0.1702, abs=2e-4)
    assert ours.smallest_detectable_difference(np.array([0, 1]), 1) == 1.0


def test_paired_p_value_equals_the_enumerated_one():
    first = np.array([0.0, 0.25, 0.5, 0.5, 0.0, 1.0, 0.25, 0.0])
    second = np.array([0.5, 0.25, 0.75, 1.0, 0.25, 0.75, 0.5, 0.5])
    d = second - first
    sums = [abs(np.dot(signs, d)) for signs in itertools.product((-1, 1), repeat=8)]
    exact = np.mean(np.array(sums) >= abs(d.sum()) - 1e-12)
    result = ours.compare_paired(first, second, rng(), resamples=200_000)
    assert result.value == pytest.approx(d.mean()) and result.p_value == pytest.approx(exact, abs=0.003)


def test_pairing_removes_what_questions_share():
    # Hard and easy questions differ by 0.75, the models by 0.125 or 0.25: of the 40 differences the standard error is
    # 0.0625 / sqrt(40) = 0.01, of either model's pass rates six times that.
    base = np.tile([0.0, 0.75], 20)
    result = ours.compare_paired(base, base + np.tile([0.125, 0.25], 20), rng())
    assert (result.low, result.high) == pytest.approx((0.1875 - 0.02, 0.1875 + 0.02), abs=0.003)
    assert result.p_value == pytest.approx(1 / 10_001)
    assert ours.compare_paired(base, base, rng()).p_value == 1.0


def test_models_that_differ_alike_on_every_question_get_an_interval_with_a_width():
    z2 = NormalDist().inv_cdf(0.975) ** 2
    unseen = z2 / (30 + z2)
    neither = ours.compare_paired(np.zeros(30), np.zeros(30), rng())
    assert (neither.value, neither.low, neither.high) == (0.0, pytest.approx(-unseen), pytest.approx(unseen))
    assert neither.p_value == 1.0
    every = ours.compare_paired(np.zeros(30), np.ones(30), rng())
    assert (every.value, every.low, every.high) == (1.0, pytest.approx(1 - 2 * unseen), 1.0)
    # A quarter more on each question: the unseen ones may lose everything, or win the other three quarters.
    quarter = ours.compare_paired(np.full(30, 0.5), np.full(30, 0.75), rng())
    assert (quarter.low, quarter.high) == pytest.approx((0.25 - 1.25 * unseen, 0.25 + 0.75 * unseen))


def test_holm_by_hand():
    # Sorted 0.01, 0.02, 0.03, 0.5 times 4, 3, 2, 1: 0.04, 0.06, 0.06, 0.5; the third is raised to the second's.
    assert ours.holm([0.5, 0.01, 0.03, 0.02]) == pytest.approx([0.5, 0.04, 0.06, 0.06])
    assert ours.holm([0.03]) == [0.03] and ours.holm([0.9, 0.8]) == [1.0, 1.0]
    assert ours.holm([]) == []


def test_holm_keeps_the_chance_of_any_false_difference():
    # Ten comparisons without a difference: unadjusted, 40 % of tables hold a "significant" one.
    tables = rng(1).random((4000, 10))
    assert np.mean([min(table) < 0.05 for table in tables]) == pytest.approx(1 - 0.95**10, abs=0.03)
    assert np.mean([min(ours.holm(list(table))) < 0.05 for table in tables]) == pytest.approx(0.049, abs=0.012)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("questions", "samples", "k"),
    [(30, 1, 1), (30, 32, 1), (500, 1, 1), (500, 4, 1), (60, 32, 2), (60, 32, 8), (60, 32, 32)],
)
@pytest.mark.parametrize("difficulty", [(1.0, 1.0), (0.3, 0.7), (0.5, 4.0)])
def test_an_interval_covers_the_truth(questions, samples, k, difficulty):
    """It holds the true mean 95 % of the time, within 2.5 points (standard error of a trial 0.7); more often where
    thirty questions are mostly unsolved, since it allows for solved ones that these do not show.

    E[1 - (1 - p)^k] of a beta(a, b) p is 1 - B(a, b + k) / B(a, b).
    """
    a, b = difficulty
    truth = 1 - math.exp(betaln(a, b + k) - betaln(a, b))
    draws, hits, trials = rng(6), 0, 1_000
    for _ in range(trials):
        counts = draws.binomial(samples, draws.beta(a, b, size=questions))
        score = ours.avg_at_k(counts, samples, draws) if k == 1 else ours.pass_at_k_score(counts, samples, k, draws)
        hits += score.low <= truth <= score.high
    print(f"pass@{k} of {questions} questions x {samples}, beta({a}, {b}): coverage {hits / trials:.3f}")
    allows = questions == 30 and samples > 1 and a < 1 < b
    assert 0.925 <= hits / trials <= (1.0 if allows else 0.985)


@pytest.mark.slow
def test_the_interval_of_a_mean_of_benchmarks_covers():
    """Three benchmarks of unlike size, skill and k; the bounds are those of the test above."""
    shapes = [(30, 32, 0.5, 4.0), (500, 1, 1.0, 1.0), (200, 4, 4.0, 0.5)]
    truth = np.mean([a / (a + b) for _, _, a, b in shapes])
    draws, hits, trials = rng(8), 0, 1_000
    for _ in range(trials):
        scores = [ours.avg_at_k(draws.binomial(k, draws.beta(a, b, size=n)), k, draws) for n, k, a, b in shapes]
        _, low, high = ours.mean_of_scores([(score.value, score.low, score.high) for score in scores])
        hits += low <= truth <= high
    print(f"mean of three benchmarks: coverage {hits / trials:.3f}")
    assert 0.925 <= hits / trials <= 0.985


@pytest.mark.slow
def test_paired_test_holds_its_level():
    """Two models of equal skill are called different in 5 % of comparisons (standard error 0.7 %)."""
    draws, rejected, trials = rng(7), 0, 1_000
    for _ in range(trials):
        skill = draws.beta(1, 1, size=30)
        first, second = draws.binomial(8, skill) / 8, draws.binomial(8, skill) / 8
        rejected += ours.compare_paired(first, second, draws, resamples=2_000).p_value <= 0.05
    assert rejected / trials == pytest.approx(0.05, abs=0.02)

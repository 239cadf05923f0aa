"""Statistics of a score: avg@k with its interval, pass@k, detectable and paired differences; means over seeds.

Questions are the sampling unit of a score. The k samples of a question share its difficulty, so treating them as
independent would make intervals far too narrow; every interval and test of a score resamples whole questions. Of a
study the seeds are the unit, and its intervals and tests are Student's.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from jaxtyping import Float64, Int

CONFIDENCE = 0.95
POWER = 0.8
RESAMPLES = 10_000

Counts = Int[np.ndarray, " questions"]
"""Correct samples of each question."""
Rates = Float64[np.ndarray, " questions"]
"""A value of each question."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """avg@k: mean over questions of the share of correct samples."""

    value: float
    low: float
    """Lower end of the 95 % interval."""
    high: float
    samples: int
    """k: samples per question."""
    questions: int


@dataclass(frozen=True, kw_only=True, slots=True)
class PairedDifference:
    """Second minus first, over the same questions."""

    value: float
    low: float
    high: float
    p_value: float
    """Two-sided, of the hypothesis that swapping the two models within a question changes nothing."""
    questions: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Interval:
    """A mean over seeds with its 95 % interval; low and high are the mean where there is one seed."""

    mean: float
    low: float
    high: float


def avg_at_k(correct: Counts, samples: int, rng: np.random.Generator) -> Score:
    """Mean pass rate and its 95 % interval, from the number of correct samples per question.

    At k=1 the interval is Wilson's, otherwise the bootstrap over questions, widened to allow for unlike questions that
    these do not show (`_with_unseen`): near 0 and 1 there is little or nothing to resample.
    """
    _num_questions(correct)
    return _score(float(correct.mean()) / samples, correct / samples, samples, rng, is_whole=samples == 1)


def _score(value: float, rates: Rates, k: int, rng: np.random.Generator, *, is_whole: bool) -> Score:
    """The score of mean `value` with its interval: Wilson's where each of the rates is 0 or 1, `is_whole`."""
    if is_whole:
        low, high = wilson(value * len(rates), len(rates))
    else:
        low, high = _with_unseen(bootstrap_interval(rates, rng), value, len(rates), smallest=0.0)
    return Score(value=value, low=low, high=high, samples=k, questions=len(rates))


def mean_of_scores(scores: Sequence[tuple[float, float, float]]) -> tuple[float, float, float]:
    """Mean of independent scores, each weighing the same, with its 95 % interval; each is (value, low, high).

    The distances of the ends from the values add up in squares, each side on its own (Zou & Donner 2008, equation 6:
    the method of variance estimates recovery), so an interval that is lopsided near 0 or 1 stays so.
    """
    values, lows, highs = np.array(scores, dtype=np.float64).T
    value = float(values.mean())
    below, above = (float(np.sqrt(((ends - values) ** 2).sum())) / len(values) for ends in (lows, highs))
    return value, value - below, value + above


def wilson(successes: float, trials: int) -> tuple[float, float]:
    """Wilson's score interval of a proportion (Wilson 1927); stays inside [0, 1] and has a width at 0 and 1."""
    z = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
    p = successes / trials
    scale = 1 / (1 + z * z / trials)
    centre = scale * (p + z * z / (2 * trials))
    half = scale * z * math.sqrt(p * (1 - p) / trials + z * z / (4 * trials * trials))
    # Rounding would otherwise leave ends such as -1e-17 where the exact ones are 0 and 1.
    return (0.0 if p == 0 else max(0.0, centre - half)), (1.0 if p == 1 else min(1.0, centre + half))


def bootstrap_interval(values: Rates, rng: np.random.Generator, *, resamples: int = RESAMPLES) -> tuple[float, float]:
    """Expanded percentile interval of the mean of one value per question (Hesterberg 2015, section 5.3).

    The plain percentile interval is too narrow by sqrt((n-1)/n) and uses normal instead of t quantiles; both matter
    at 30 questions, and both are repaired by reading the quantiles further out.
    """
    questions = _num_questions(values)
    if questions == 1:
        return float(values[0]), float(values[0])
    t = t_quantile(questions - 1)
    tail = NormalDist().cdf(-math.sqrt(questions / (questions - 1)) * t)
    # Questions with equal values are interchangeable: drawing how often each distinct value comes up has the same
    # distribution as drawing questions, at a cost in the number of distinct values (k + 1) instead of questions.
    distinct, counts = np.unique(values, return_counts=True)
    drawn = rng.multinomial(questions, counts / questions, size=resamples)
    low, high = np.quantile((drawn @ distinct) / questions, [tail, 1 - tail])
    return float(low), float(high)


def _with_unseen(interval: tuple[float, float], value: float, number: int, *, smallest: float) -> tuple[float, float]:
    """The interval, at least as wide as a share of questions unlike those seen would make it.

    The share is Wilson's upper end at 0 of n: n questions without an exception do not rule out that many. Counted with
    the smallest value (0 of a rate, -1 of a difference) it gives the lower end, with the largest, 1, the upper one.
    None right of n is therefore never a wider interval than one right; far from the ends the bootstrap is wider still.
    """
    unseen = wilson(0.0, number)[1]
    low, high = min(interval[0], value - unseen * (value - smallest)), max(interval[1], value + unseen * (1 - value))
    # Rounding could leave ends such as 1 + 1e-16.
    return max(smallest, low), min(1.0, high)


def pass_at_k_by_question(correct: Counts, samples: int, k: int) -> Rates:
    """Unbiased pass@k of each question: 1 - C(n-c, k) / C(n, k) (Chen et al. 2021, equation 1).

    Raises ValueError where k exceeds the number of samples: pass@k cannot be estimated from fewer.
    """
    if not 1 <= k <= samples:
        raise ValueError(f"pass@{k} cannot be estimated from {samples} samples: use k from 1 to {samples}.")
    _num_questions(correct)
    subsets = math.comb(samples, k)
    by_count = np.array([(subsets - math.comb(samples - c, k)) / subsets for c in range(samples + 1)])
    return np.asarray(by_count[correct])


def pass_at_k_score(correct: Counts, samples: int, k: int, rng: np.random.Generator) -> Score:
    """pass@k with its 95 % interval over questions; the k samples of a question are never treated as independent.

    Made as that of avg@k, with which it agrees at k = 1. At k = `samples` a question counts whole or not at all, and
    the interval is Wilson's. `Score.samples` is k.
    """
    values = pass_at_k_by_question(correct, samples, k)
    return _score(float(values.mean()), values, k, rng, is_whole=k == samples)


def pass_at_ks(samples: int) -> list[int]:
    """The k at which pass@k is told: 1, 2, 4, ... and the number of samples itself."""
    powers = [2**power for power in range(samples.bit_length())]
    return powers if powers[-1] == samples else [*powers, samples]


def smallest_detectable_difference(correct: Counts, samples: int) -> float:
    """The true difference from another model that these questions would show with 80 % probability at the 5 % level.

    (z_{1-a/2} + z_{power}) * sqrt(2) * standard error over questions, which takes the other model to be as variable
    and uncorrelated; a comparison paired by question can show less. At most 1.
    """
    questions = _num_questions(correct)
    rates = correct / samples
    variance = float(rates.var(ddof=1)) if questions > 1 else 0.0
    if variance == 0:
        # No spread seen is not no spread: Agresti and Coull's shrunk proportion stands in.
        shrunk = (float(rates.sum()) + 2) / (questions + 4)
        variance = shrunk * (1 - shrunk)
    quantiles = NormalDist().inv_cdf((1 + CONFIDENCE) / 2) + NormalDist().inv_cdf(POWER)
    return min(1.0, quantiles * math.sqrt(2 * variance / questions))


def compare_paired(
    first: Rates, second: Rates, rng: np.random.Generator, *, resamples: int = RESAMPLES
) -> PairedDifference:
    """Difference of two models on the same questions: bootstrap interval, sign-flip permutation p-value.

    `first` and `second` hold pass rates of the same questions in the same order. Where all questions differ alike (as
    where neither model solves any) there is nothing to resample: the interval then allows for a share of questions
    unlike those seen, as large as Wilson's upper end at 0 of n.
    """
    # Pass rates are multiples of 1/k: without rounding, equal differences could differ in their last bit.
    differences = np.round(second - first, 12)
    value = float(differences.mean())
    if differences.min() == differences.max():
        low, high = _with_unseen((value, value), value, len(differences), smallest=-1.0)
    else:
        low, high = bootstrap_interval(differences, rng, resamples=resamples)
    return PairedDifference(
        value=value,
        low=low,
        high=high,
        p_value=_sign_flip_p_value(differences, rng, resamples),
        questions=_num_questions(differences),
    )


def holm(p_values: Sequence[float]) -> list[float]:
    """p-values adjusted for being a family (Holm 1979): below 0.05, the chance of any false one is at most 5 %.

    The i-th smallest of m is multiplied by m - i + 1 and never below its predecessor. Valid under any dependence.
    """
    adjusted = [0.0] * len(p_values)
    largest = 0.0
    for rank, place in enumerate(sorted(range(len(p_values)), key=lambda place: p_values[place])):
        largest = max(largest, min(1.0, p_values[place] * (len(p_values) - rank)))
        adjusted[place] = largest
    return adjusted


def t_interval(values: Sequence[float], *, bounds: tuple[float, float] = (-math.inf, math.inf)) -> Interval:
    """Student's 95 % t interval of the mean: mean +- t(n - 1) * s / sqrt(n), s with n - 1 in the denominator.

    What reaches beyond `bounds`, those of the values themselves (0 and 1 of a rate), is cut off.
    """
    mean = float(np.mean(values))
    if len(values) < 2:
        return Interval(mean=mean, low=mean, high=mean)
    half = float(t_quantile(len(values) - 1) * np.std(values, ddof=1) / math.sqrt(len(values)))
    return Interval(mean=mean, low=max(bounds[0], mean - half), high=min(bounds[1], mean + half))


def rank_correlation(pairs: Sequence[tuple[float, float]]) -> Interval | None:
    """Spearman's correlation of ranks, equal values sharing the mean of theirs, with its 95 % interval by Fisher's z,
    whose standard error is 1 / sqrt(n - 3); None of fewer than four pairs, or where one side is constant."""
    from scipy.stats import spearmanr

    if len(pairs) < 4 or not np.ptp(pairs, axis=0).all():
        return None
    value, half = float(spearmanr(pairs).statistic), NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
    # Next to 1 the arctanh is still a number.
    z, error = math.atanh(min(max(value, -1 + 1e-15), 1 - 1e-15)), half / math.sqrt(len(pairs) - 3)
    return Interval(mean=value, low=math.tanh(z - error), high=math.tanh(z + error))


def t_quantile(freedom: int) -> float:
    """Half the width of a 95 % interval, in standard errors, by Student's distribution."""
    # Imported here: scipy takes as long as all else that a plan needs.
    from scipy.special import stdtrit

    return float(stdtrit(freedom, (1 + CONFIDENCE) / 2))


def _sign_flip_p_value(differences: Rates, rng: np.random.Generator, resamples: int) -> float:
    sizes, counts = np.unique(np.abs(differences), return_counts=True)
    # The sum over m questions of equal |d| with random signs is |d| * (2 * Binomial(m, 1/2) - m).
    flipped = (2 * rng.binomial(counts, 0.5, size=(resamples, len(counts))) - counts) @ sizes
    # The tolerance keeps sums that are equal but for rounding on the side of "at least as extreme".
    extreme = np.count_nonzero(np.abs(flipped) >= abs(differences.sum()) - 1e-9)
    # Counting the observed assignment itself keeps the test valid at any number of resamples.
    return (extreme + 1) / (resamples + 1)


def _num_questions(values: np.ndarray) -> int:
    if len(values) == 0:
        raise ValueError("A score needs at least one question.")
    return len(values)

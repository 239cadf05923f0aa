"""What paired runs prove: the hierarchical bootstrap over seeds and questions, power, and verdicts.

Notation: S seeds, both arms with the same ones; Q held-out questions, the same in every run; d[s, q] the difference of
the two arms' scores of question q with seed s.
"""

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

import numpy as np
from jaxtyping import Float64
from scipy.special import stdtr, stdtrit

from exgrpo_cli.base.statistics import CONFIDENCE, POWER, Interval, wilson

RESAMPLES = 4000
FEW_SEEDS = 3
"""With fewer an interval says next to nothing: Student's t has 1 degree of freedom, its quantile is 12.7."""
SEEDS_FOR_A_VERDICT = 8
MOST_SEEDS = 1000


@dataclass(frozen=True, kw_only=True, slots=True)
class Effect:
    """A mean difference over seeds with its interval."""

    mean: float
    low: float
    high: float
    """Ends of the 95 % interval; the mean itself with one seed."""
    p_value: float | None
    """Two-sided, of the hypothesis that there is no difference; None where nothing varies."""
    seeds: int
    error: float
    """Standard error of the mean over seeds and questions; 0 with one seed."""
    spread: float
    """Standard deviation over seeds of the difference, of which `seeds_needed` makes a number; 0 with one seed."""

    @property
    def interval(self) -> Interval:
        """The effect with its 95 % interval."""
        return Interval(mean=self.mean, low=self.low, high=self.high)


def effect_over_questions(
    differences: Float64[np.ndarray, "seeds questions"], rng: np.random.Generator, *, bounds: tuple[float, float]
) -> Effect:
    """Mean of d[s, q] for other seeds and other questions, by a bootstrap of both.

    A resample draws S seeds and Q questions. Its mean is that of the drawn seeds' means, plus how far the drawn
    questions' means lie from the grand mean. The seeds' means carry the sampling noise of single responses already, so
    that part of the questions' scatter which noise explains is taken out first: their deviations are shrunk by
    sqrt(1 - MS_residual / MS_questions) of the two-way table. The standard deviation of the resampled means, its seed
    part raised by S / (S - 1), is the standard error; the interval is Student's with S - 1 degrees of freedom.
    """
    seeds, questions = differences.shape
    mean = float(differences.mean())
    if seeds < 2:
        return effect(mean, 0.0, seeds, bounds)
    of_seeds = differences.mean(axis=1) - mean
    of_questions = (differences.mean(axis=0) - mean) * _shrinkage(differences)
    drawn_seeds = rng.multinomial(seeds, np.full(seeds, 1 / seeds), size=RESAMPLES)
    # Questions with equal means are interchangeable: there are far fewer distinct means than questions.
    values, counts = np.unique(np.round(of_questions, 12), return_counts=True)
    drawn_questions = rng.multinomial(questions, counts / questions, size=RESAMPLES)
    resampled = drawn_seeds @ of_seeds / seeds * math.sqrt(seeds / (seeds - 1)) + drawn_questions @ values / questions
    return effect(mean, float(resampled.std()), seeds, bounds, spread=float(of_seeds.std(ddof=1)))


def _shrinkage(differences: Float64[np.ndarray, "seeds questions"]) -> float:
    """sqrt(1 - MS_residual / MS_questions), 0 where noise explains all scatter of the questions' means."""
    seeds, questions = differences.shape
    if questions < 2:
        return 0.0
    rows, columns = differences.mean(axis=1, keepdims=True), differences.mean(axis=0, keepdims=True)
    residual = ((differences - rows - columns + differences.mean()) ** 2).sum() / ((seeds - 1) * (questions - 1))
    between = seeds * columns.var(ddof=1)
    return math.sqrt(max(0.0, 1 - residual / between)) if between > 0 else 0.0


def effect_over_seeds(differences: Float64[np.ndarray, " seeds"], *, bounds: tuple[float, float]) -> Effect:
    """Mean of one difference a seed, for endpoints that are no mean over questions: Student's t."""
    seeds = len(differences)
    spread = float(differences.std(ddof=1)) if seeds > 1 else 0.0
    return effect(float(differences.mean()), spread / math.sqrt(seeds), seeds, bounds, spread=spread)


def effect(mean: float, error: float, seeds: int, bounds: tuple[float, float], *, spread: float = 0.0) -> Effect:
    """An effect by its standard error, Student's t with S - 1 degrees of freedom; the interval stays in `bounds`.

    Where all seeds agree (no run collapsed, say) the error is that which a share of seeds unlike those seen would make,
    as large as Wilson's upper end at 0 of S: eight runs without a collapse do not rule out one.
    """
    p_value = float(2 * stdtr(seeds - 1, -abs(mean) / error)) if error > 0 else None
    if error == 0 and seeds > 1:
        unseen = wilson(0.0, seeds)[1] * max(mean - bounds[0], bounds[1] - mean)
        error = unseen / float(stdtrit(seeds - 1, 0.5 + CONFIDENCE / 2))
    low, high = ends(mean, error, seeds, CONFIDENCE)
    low, high = max(bounds[0], low), min(bounds[1], high)
    return Effect(mean=mean, low=low, high=high, p_value=p_value, seeds=seeds, error=error, spread=spread)


def ends(mean: float, error: float, seeds: int, confidence: float) -> tuple[float, float]:
    """Ends of Student's interval."""
    half = float(stdtrit(seeds - 1, 0.5 + confidence / 2)) * error if seeds > 1 else 0.0
    return mean - half, mean + half


def seeds_needed(*, spread: float, distance: float) -> int:
    """Fewest seeds with which an effect `distance` away from the threshold of a verdict is told from it.

    `spread` is the standard deviation over seeds of the paired difference. With S seeds the verdict is reached when
    the interval of half width t(S - 1) * spread / sqrt(S) leaves the threshold out, which has probability
    P(T > t - distance * sqrt(S) / spread); the noncentral t is taken as a shifted one. From 2 to `MOST_SEEDS`.
    """
    for seeds in range(2, MOST_SEEDS):
        quantile = float(stdtrit(seeds - 1, 0.5 + CONFIDENCE / 2))
        if stdtr(seeds - 1, distance * math.sqrt(seeds) / spread - quantile) >= POWER:
            return seeds
    return MOST_SEEDS


class Verdict(StrEnum):
    """What a comparison says about a statement."""

    SUPPORTED = "supported"
    CONTRADICTED = "contradicted"
    UNDECIDED = "undecided"
    NOT_RUN = "not run"


Direction = Literal["greater", "no less"]


def threshold_of(smallest_effect: float, direction: Direction) -> float:
    """The effect that separates holding from not holding: "no less" allows a loss smaller than the smallest effect."""
    return smallest_effect if direction == "greater" else -smallest_effect


def verdict(effects: list[Effect], thresholds: list[float], *, needed: int = SEEDS_FOR_A_VERDICT) -> Verdict:
    """Whether each of the effects exceeds its threshold, judged by their intervals.

    Supported where every 95 % interval lies above its threshold (intersection and union: no correction is due);
    contradicted where one of the m intervals of confidence 1 - 0.05 / m lies below; so each is wrong in at most 2.5 %
    where the truth is at the threshold. Fewer than `needed` seeds read "not run".
    """
    if not effects or min(each.seeds for each in effects) < needed:
        return Verdict.NOT_RUN
    pairs = list(zip(effects, thresholds, strict=True))
    if all(ends(each.mean, each.error, each.seeds, CONFIDENCE)[0] > threshold for each, threshold in pairs):
        return Verdict.SUPPORTED
    strict = 1 - (1 - CONFIDENCE) / len(effects)
    if any(ends(each.mean, each.error, each.seeds, strict)[1] < threshold for each, threshold in pairs):
        return Verdict.CONTRADICTED
    return Verdict.UNDECIDED

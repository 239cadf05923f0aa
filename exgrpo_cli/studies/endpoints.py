"""Endpoints that arms are compared by, each declared once, and what paired runs prove: effects, power, verdicts.

Notation: S seeds, both arms with the same ones; Q held-out questions, the same in every run; d[s, q] the difference of
the two arms' scores of question q with seed s.
"""

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float64
from scipy.special import bdtr, stdtr, stdtrit

from exgrpo_cli.base.statistics import CONFIDENCE, POWER, Interval, pass_at_k_by_question, pass_at_ks, wilson
from exgrpo_cli.config.sections import require_known
from exgrpo_cli.runs.result import RunResult
from exgrpo_cli.studies.study import Results

EXACT_SEEDS = 8
"""Most seeds whose p-value is an exact one: five of one sign cannot have less than 0.0625."""
FEW_SEEDS = 3
"""With fewer an interval says next to nothing: Student's t has 1 degree of freedom, its quantile is 12.7."""
SEEDS_FOR_A_VERDICT = 8
MOST_SEEDS = 1000


@dataclass(frozen=True, kw_only=True, slots=True)
class Effect(Interval):
    """A mean difference over seeds with its 95 % interval; the mean itself with one seed."""

    p_value: float | None
    """Two-sided, of the hypothesis that there is no difference; None where nothing varies."""
    seeds: int
    error: float
    """Standard error of the mean over seeds and questions; 0 with one seed."""
    spread: float
    """Standard deviation over seeds of the difference, of which `seeds_needed` makes a number; 0 with one seed."""
    median: float
    """Over seeds: far from the mean where a few seeds make the difference."""
    positive: int
    """Seeds with a difference above 0."""
    sign_p: float
    """Two-sided, by the signs of the seeds that differ: exact; 1 where none does."""


def effect_over_questions(
    differences: Float64[np.ndarray, "seeds questions"], *, bounds: tuple[float, float]
) -> Effect:
    """Mean of d[s, q] for other seeds and other questions: both are random, and crossed.

    With m the mean, r_s and c_q the means of seeds and questions, and MS the mean square of d - r_s - c_q + m,

        SE^2 = sum_s (r_s - m)^2 / ((S - 1) S) + max(0, sum_q (c_q - m)^2 / (Q - 1) - MS / S) / Q.

    The first term carries the sampling noise of single responses already, so the second leaves it out. The interval is
    Student's with S - 1 degrees of freedom, which is conservative.
    """
    seeds, questions = differences.shape
    of_seeds = differences.mean(axis=1)
    if min(seeds, questions) < 2:
        return effect_over_seeds(of_seeds, bounds=bounds)
    mean = differences.mean()
    of_questions = differences.mean(axis=0, keepdims=True)
    noise = ((differences - of_seeds[:, None] - of_questions + mean) ** 2).sum() / ((seeds - 1) * (questions - 1))
    variance = of_seeds.var(ddof=1) / seeds + max(0.0, of_questions.var(ddof=1) - noise / seeds) / questions
    return effect(of_seeds, math.sqrt(variance), bounds)


def effect_over_seeds(differences: Float64[np.ndarray, " seeds"], *, bounds: tuple[float, float]) -> Effect:
    """Mean of one difference a seed, for endpoints that are no mean over questions: Student's t."""
    seeds = len(differences)
    return effect(differences, differences.std(ddof=1) / math.sqrt(seeds) if seeds > 1 else 0.0, bounds)


def effect(differences: Float64[np.ndarray, " seeds"], error: float, bounds: tuple[float, float]) -> Effect:
    """Effect of one difference a seed with a standard error; the interval, Student's with S - 1 degrees of freedom,
    stays in `bounds`.

    Where all seeds agree (no run collapsed, say) the error is that which a share of seeds unlike those seen would make,
    as large as Wilson's upper end at 0 of S: eight runs without a collapse do not rule out one. The p-value of few
    seeds is exact: the share of all ways to give the differences signs whose mean is as far from 0.
    """
    seeds, mean = len(differences), float(differences.mean())
    p_value = float(2 * stdtr(seeds - 1, -abs(mean) / error)) if error > 0 else None
    if p_value is not None and seeds <= EXACT_SEEDS:
        signs = np.array(list(itertools.product((-1, 1), repeat=seeds)))
        p_value = float((abs(signs @ differences) >= abs(differences.sum()) * (1 - 1e-12)).mean())
    if error == 0 and seeds > 1:
        unseen = wilson(0.0, seeds)[1] * max(mean - bounds[0], bounds[1] - mean)
        error = unseen / float(stdtrit(seeds - 1, 0.5 + CONFIDENCE / 2))
    low, high = ends(mean, error, seeds, CONFIDENCE)
    positive, negative = int((differences > 0).sum()), int((differences < 0).sum())
    return Effect(
        mean=mean,
        low=max(bounds[0], low),
        high=min(bounds[1], high),
        p_value=p_value,
        seeds=seeds,
        error=float(error),
        spread=float(differences.std(ddof=1)) if seeds > 1 else 0.0,
        median=float(np.median(differences)),
        positive=positive,
        sign_p=min(1.0, 2 * float(bdtr(min(positive, negative), positive + negative, 0.5))),
    )


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
    seeds = np.arange(2, MOST_SEEDS)
    quantiles = stdtrit(seeds - 1, 0.5 + CONFIDENCE / 2)
    enough = seeds[stdtr(seeds - 1, distance * np.sqrt(seeds) / spread - quantiles) >= POWER]
    return int(min(enough, default=MOST_SEEDS))


class Verdict(StrEnum):
    """Outcome of a comparison about a statement."""

    SUPPORTED = "supported"
    TOO_SMALL = "too small to matter"
    REVERSED = "reversed"
    UNDECIDED = "undecided"
    NOT_RUN = "not run"


def verdict(effects: list[Effect], thresholds: list[float], *, needed: int = SEEDS_FOR_A_VERDICT) -> Verdict:
    """Whether each of the effects exceeds its threshold, judged by their intervals.

    Supported where every 95 % interval lies above its threshold (intersection and union: no correction is due). Else,
    of the m intervals of confidence 1 - 0.05 / m: reversed where one lies below minus the smallest effect, too small to
    matter where one lies between the smallest effect that was asked for and minus it. Each is wrong in at most 2.5 % of
    studies where the truth is at the end that it leaves out. Fewer than `needed` seeds read "not run".
    """
    if not effects or min(each.seeds for each in effects) < needed:
        return Verdict.NOT_RUN
    pairs = list(zip(effects, thresholds, strict=True))
    if all(ends(each.mean, each.error, each.seeds, CONFIDENCE)[0] > threshold for each, threshold in pairs):
        return Verdict.SUPPORTED
    strict = 1 - (1 - CONFIDENCE) / len(effects)
    judged = [(*ends(each.mean, each.error, each.seeds, strict), threshold) for each, threshold in pairs]
    if any(high < -abs(threshold) for _, high, threshold in judged):
        return Verdict.REVERSED
    # A claim of no loss, whose threshold is below 0, is supported by an effect that is too small to matter.
    small = any(-threshold < low and high < threshold for low, high, threshold in judged)
    return Verdict.TOO_SMALL if small else Verdict.UNDECIDED


class Endpoint(NamedTuple):
    """Something that runs are compared by; larger is better."""

    title: str
    value: Callable[[RunResult], Any]
    """Value of a run, an array by held-out question where it is a mean over them; None or empty where unknown."""
    bounds: tuple[float, float] = (0.0, 1.0)
    """Range of one run's value."""


def pass_at_1(result: RunResult) -> Float64[np.ndarray, " questions"]:
    """Pass rate of each held-out question after training."""
    return result.after / result.samples


def pass_at(k: int, result: RunResult) -> Float64[np.ndarray, " questions"]:
    """Chance of a right answer among k, per held-out question."""
    return pass_at_k_by_question(result.after, result.samples, k)


def pass_at_n(result: RunResult) -> Float64[np.ndarray, " questions"]:
    """Whether each held-out question was solved by any of its n responses after training."""
    return pass_at(result.samples, result)


def valid_pass_at_1(result: RunResult) -> Float64[np.ndarray, " questions"]:
    """Share of each held-out question's responses after training that are right in every step."""
    return np.array([]) if result.after_valid is None else result.after_valid / result.samples


def newly_solved_at_end(result: RunResult) -> float | None:
    """Share of the held-out questions without a correct response before training that have one after it."""
    unsolved = result.before == 0
    return float((result.after[unsolved] > 0).mean()) if unsolved.any() else None


def of_traces(name: str) -> Callable[[RunResult], float | None]:
    """A figure of the run's valid traces."""
    return lambda result: getattr(result.valid_traces, name) if result.valid_traces else None


def valid_gap(result: RunResult) -> float | None:
    """Share valid in the third of lowest entropy less that in the third of highest."""
    traces = result.valid_traces
    return None if traces is None or traces.low_entropy is None else traces.low_entropy - (traces.high_entropy or 0.0)


def memorised(result: RunResult) -> float | None:
    """Gain that training brought on replayed questions less that on never seen ones of their level."""
    found = result.memorising
    if found is None or found.replayed.after is None or found.replayed.before is None:
        return None
    gain = found.replayed.after - found.replayed.before
    return gain - ((found.never_seen.after or 0.0) - (found.never_seen.before or 0.0))


def eligible_less_barred(result: RunResult) -> float | None:
    """Gain that training brought on the training questions open to replay less that on those barred from it."""
    sample = result.training_sample
    if sample is None or not 0 < sample.barred.mean() < 1:
        return None
    gain, barred = (sample.after - sample.before) / sample.samples, sample.barred == 1
    return float(gain[~barred].mean() - gain[barred].mean())


def at_equal(treated: Results, control: Results, spent: str) -> dict[int, float]:
    """Held-out pass@1 by seed when a run had spent what the thriftier of the two of its seed spent in all.

    `spent` is "generated" or "trained" tokens. Between validations by a straight line; no seed whose runs do not tell.
    """
    found = {}
    for seed in sorted(treated.keys() & control.keys()):
        tokens = [[getattr(point, spent) for point in run.curve] for run in (treated[seed], control[seed])]
        if all(len(each) > 1 and None not in each for each in tokens):
            rates = [point.pass_at_1 for point in treated[seed].curve]
            found[seed] = float(np.interp(min(each[-1] for each in tokens), tokens[0], rates))
    return found


SIGNED = (-1.0, 1.0)
ENDPOINTS: Mapping[str, Endpoint] = {
    "pass_at_1": Endpoint("held-out pass@1", pass_at_1),
    "pass_at_n": Endpoint("held-out pass@n", pass_at_n),
    "valid_pass_at_1": Endpoint("held-out pass@1, right in every step", valid_pass_at_1),
    "pass_at_1_oat": Endpoint("held-out pass@1 by oat", lambda result: result.second_graders.get("oat")),
    "beyond_pass_at_1": Endpoint("pass@n less pass@1", lambda result: pass_at_n(result) - pass_at_1(result)),
    "area": Endpoint("area under the curve", lambda result: result.area),
    "newly_solved": Endpoint("unsolved questions ever solved", lambda result: result.newly_solved),
    "newly_solved_at_end": Endpoint("unsolved questions solved at the end", newly_solved_at_end),
    # 1 where the run did not collapse.
    "intact": Endpoint("share of uncollapsed runs", lambda run: None if run.collapsed is None else 1.0 - run.collapsed),
    "valid": Endpoint("valid traces", of_traces("valid")),
    "valid_auc": Endpoint("AUC of low entropy for valid traces", of_traces("auc")),
    "valid_auc_within": Endpoint("AUC of low entropy for valid traces of a question", of_traces("auc_within")),
    "valid_gap": Endpoint("valid, lowest less highest entropy", valid_gap, SIGNED),
    "lost": Endpoint("solved questions lost at their next visit", lambda result: result.lost),
    "regained": Endpoint("lost questions regained at their next visit", lambda result: result.regained),
    "memory": Endpoint("effect of a replayed row on gold log-probs", lambda run: run.memory, (-math.inf, math.inf)),
    "memorised": Endpoint("gain on replayed less on new questions", memorised, SIGNED),
    "eligible_less_barred": Endpoint("gain on questions open to replay less on barred", eligible_less_barred, SIGNED),
}
AT_EQUAL = {f"at_equal_{spent}": f"pass@1 at equal tokens {spent}" for spent in ("generated", "trained")}
"""Endpoints that only a comparison with the baseline has, with their titles."""


OF_ANSWERS = ("pass_at_1", "pass_at_n", "beyond_pass_at_1")
"""Endpoints of the answers after training, which other temperatures have too."""


def endpoint_named(name: str) -> Endpoint:
    """The endpoint of that name; `NAME@T` is NAME of the answers at another temperature (`validation.temperatures`).

    Raises InputError for an unknown name.
    """
    plain, _, temperature = name.partition("@")
    require_known("endpoint", plain, OF_ANSWERS if temperature else tuple(ENDPOINTS))
    endpoint = ENDPOINTS[plain]

    def value(result: RunResult) -> Float64[np.ndarray, " questions"]:
        after = result.after_at.get(temperature)
        return np.array([]) if after is None else endpoint.value(replace(result, after=after))

    return endpoint._replace(title=f"{endpoint.title}, T = {temperature}", value=value) if temperature else endpoint


def told_endpoints(results: Results) -> dict[str, Endpoint]:
    """All that these runs may tell, by name: those of every study, of further temperatures, and pass@k at k = 2, 4, ...
    up to the fewest responses that a question was given in any of the runs."""
    names = {f"{name}@{at}" for result in results.values() for at in result.after_at for name in OF_ANSWERS}
    ks = pass_at_ks(min(run.samples for run in results.values()))
    coverage = {f"pass@{k}": Endpoint(f"held-out pass@{k}", partial(pass_at, k)) for k in ks if k > 1}
    return {**ENDPOINTS, **{name: endpoint_named(name) for name in sorted(names)}, **coverage}


def values_of(endpoint: Endpoint, results: Results) -> dict[int, float]:
    """The endpoint by seed, of the runs that tell it."""
    values = {seed: endpoint.value(result) for seed, result in sorted(results.items())}
    return {seed: float(np.mean(value)) for seed, value in values.items() if value is not None and np.size(value)}


def paired_effect(endpoint: Endpoint, treated: Results, control: Results) -> Effect | None:
    """Treated less control over the seeds that both have; None where there is none.

    Over seeds and questions where the endpoint is a mean over questions that all of these runs share, else over seeds.
    """
    mine, other = values_of(endpoint, treated), values_of(endpoint, control)
    seeds = sorted(mine.keys() & other.keys())
    sizes = {(len(arm[seed].after), arm[seed].samples) for arm in (treated, control) for seed in seeds}
    if len(sizes) == 1 and np.ndim(endpoint.value(treated[seeds[0]])) == 1:
        width = endpoint.bounds[1] - endpoint.bounds[0]
        matrix = np.stack([endpoint.value(treated[seed]) - endpoint.value(control[seed]) for seed in seeds])
        return effect_over_questions(matrix, bounds=(-width, width))
    return effect_by_seed(mine, other, endpoint.bounds)


def effect_by_seed(mine: Mapping[int, float], other: Mapping[int, float], bounds: tuple[float, float]) -> Effect | None:
    """Difference of values by seed, each in `bounds`, over the seeds that both have; None where there is none."""
    width = bounds[1] - bounds[0]
    differences = np.array([mine[seed] - other[seed] for seed in sorted(mine.keys() & other.keys())])
    return effect_over_seeds(differences, bounds=(-width, width)) if len(differences) else None


def effect_from(endpoint: Endpoint, treated: Results, reference: float) -> Effect | None:
    """The endpoint less a fixed value, over the seeds that tell it; None where none does."""
    values = np.array(list(values_of(endpoint, treated).values()))
    bounds = (endpoint.bounds[0] - reference, endpoint.bounds[1] - reference)
    return effect_over_seeds(values - reference, bounds=bounds) if len(values) else None

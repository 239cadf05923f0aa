"""The endpoints that arms are compared by, each read from the results of runs, and their paired comparison."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64

from exgrpo_cli.base.statistics import pass_at_k_by_question
from exgrpo_cli.runs.result import RunResult
from exgrpo_cli.studies.results.inference import Effect, effect_over_questions, effect_over_seeds

Results = Mapping[int, RunResult]
"""Results of one arm by seed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Endpoint:
    """Something that runs are compared by; larger is better."""

    title: str
    bounds: tuple[float, float]
    """Where one run's value can lie."""
    value: Callable[[RunResult], float | None] = lambda result: None
    """None where the run or its task does not tell."""
    by_question: Callable[[RunResult], Float64[np.ndarray, " questions"]] | None = None
    """Instead of `value`, where that is a mean over held-out questions: what it is the mean of; empty where the run or
    its task does not tell."""

    def of(self, result: RunResult) -> float | None:
        """One run's value; None where the run or its task does not tell."""
        if self.by_question is None:
            return self.value(result)
        by_question = self.by_question(result)
        return float(by_question.mean()) if len(by_question) else None


def pass_at_1(result: RunResult) -> Float64[np.ndarray, " questions"]:
    """Pass rate of each held-out question after training."""
    return result.after / result.samples


def pass_at_n(result: RunResult) -> Float64[np.ndarray, " questions"]:
    """Whether each held-out question was solved by any of its n responses after training."""
    return pass_at_k_by_question(result.after, result.samples, result.samples)


def valid_pass_at_1(result: RunResult) -> Float64[np.ndarray, " questions"]:
    """Share of each held-out question's responses after training that are right in every step."""
    return np.array([]) if result.after_valid is None else result.after_valid / result.samples


def beyond(result: RunResult) -> Float64[np.ndarray, " questions"]:
    """pass@n less pass@1: what more tries add."""
    return pass_at_n(result) - pass_at_1(result)


def newly_solved_at_end(result: RunResult) -> float | None:
    """Share of the held-out questions without a correct response before training that have one after it."""
    unsolved = result.before == 0
    return float((result.after[unsolved] > 0).mean()) if unsolved.any() else None


def valid_gap(result: RunResult) -> float | None:
    """Share valid in the third of lowest entropy less that in the third of highest."""
    traces = result.valid_traces
    return None if traces is None or traces.low_entropy is None else traces.low_entropy - (traces.high_entropy or 0.0)


def memorised(result: RunResult) -> float | None:
    """What training added to replayed questions less what it added to never seen ones of their level."""
    found = result.memorising
    if found is None or found.replayed.after is None or found.replayed.before is None:
        return None
    gain = found.replayed.after - found.replayed.before
    return gain - ((found.never_seen.after or 0.0) - (found.never_seen.before or 0.0))


def tokens_to(result: RunResult, target: float) -> float | None:
    """Tokens generated until held-out pass@1 first reached `target`, between validations by a straight line."""
    last = None
    for point in result.curve:
        if point.pass_at_1 >= target:
            if last is None or point.pass_at_1 == last.pass_at_1:
                return float(point.generated)
            share = (target - last.pass_at_1) / (point.pass_at_1 - last.pass_at_1)
            return last.generated + share * (point.generated - last.generated)
        last = point
    return None


ENDPOINTS: Mapping[str, Endpoint] = {
    "pass_at_1": Endpoint(title="held-out pass@1", bounds=(0.0, 1.0), by_question=pass_at_1),
    "pass_at_n": Endpoint(title="held-out pass@n", bounds=(0.0, 1.0), by_question=pass_at_n),
    "valid_pass_at_1": Endpoint(
        title="held-out pass@1, right in every step", bounds=(0.0, 1.0), by_question=valid_pass_at_1
    ),
    "pass_at_1_oat": Endpoint(
        title="held-out pass@1 by oat", bounds=(0.0, 1.0), value=lambda result: result.second_graders.get("oat")
    ),
    "beyond_pass_at_1": Endpoint(title="pass@n less pass@1", bounds=(0.0, 1.0), by_question=beyond),
    "area": Endpoint(title="area under the curve", bounds=(0.0, 1.0), value=lambda result: result.area),
    "newly_solved": Endpoint(
        title="unsolved questions ever solved", bounds=(0.0, 1.0), value=lambda result: result.newly_solved
    ),
    "newly_solved_at_end": Endpoint(
        title="unsolved questions solved at the end", bounds=(0.0, 1.0), value=newly_solved_at_end
    ),
    "intact": Endpoint(
        title="share of runs not collapsed",
        bounds=(0.0, 1.0),
        value=lambda result: None if result.collapsed is None else 1.0 - result.collapsed,
    ),
    "valid": Endpoint(
        title="valid traces",
        bounds=(0.0, 1.0),
        value=lambda result: result.valid_traces.valid if result.valid_traces else None,
    ),
    "valid_auc": Endpoint(
        title="AUC of low entropy for valid traces",
        bounds=(0.0, 1.0),
        value=lambda result: result.valid_traces.auc if result.valid_traces else None,
    ),
    "valid_auc_within": Endpoint(
        title="AUC of low entropy for valid traces of a question",
        bounds=(0.0, 1.0),
        value=lambda result: result.valid_traces.auc_within if result.valid_traces else None,
    ),
    "valid_gap": Endpoint(title="valid, lowest less highest entropy", bounds=(-1.0, 1.0), value=valid_gap),
    "memorised": Endpoint(title="gain on replayed less on new questions", bounds=(-1.0, 1.0), value=memorised),
}


AT_EQUAL = {"at_equal_generated": "generated", "at_equal_trained": "trained"}
"""Held-out pass@1 at as many tokens as the baseline of the seed spent, or at all of its own where it spent fewer."""


def at_equal_tokens(own: Results, control: Results, spent: str) -> dict[int, tuple[float, float]]:
    """Held-out pass@1 of both runs of a seed when each had spent what the thriftier of them spent in all.

    `spent` is "generated" or "trained" tokens. Between validations by a straight line; seeds whose validations do not
    tell are left out.
    """
    found = {}
    for seed in sorted(own.keys() & control.keys()):
        both = own[seed].curve, control[seed].curve
        tokens = [[getattr(point, spent) for point in curve] for curve in both]
        if all(len(each) > 1 and None not in each for each in tokens):
            least = min(each[-1] for each in tokens)
            mine, other = (
                float(np.interp(least, each, [point.pass_at_1 for point in curve]))
                for each, curve in zip(tokens, both, strict=True)
            )
            found[seed] = mine, other
    return found


def values_of(endpoint: Endpoint, results: Results) -> dict[int, float]:
    """The endpoint by seed, of the runs that tell it."""
    values = {seed: endpoint.of(result) for seed, result in sorted(results.items())}
    return {seed: value for seed, value in values.items() if value is not None}


def paired_effect(endpoint: Endpoint, own: Results, control: Results, rng: np.random.Generator) -> Effect | None:
    """Own less control over the seeds that both have; None where there is none.

    Over seeds and questions where the endpoint is a mean over questions that all of these runs share, else over seeds.
    """
    mine, other = values_of(endpoint, own), values_of(endpoint, control)
    seeds = sorted(mine.keys() & other.keys())
    if not seeds:
        return None
    width = endpoint.bounds[1] - endpoint.bounds[0]
    sizes = {(len(arm[seed].after), arm[seed].samples) for arm in (own, control) for seed in seeds}
    if endpoint.by_question and len(sizes) == 1:
        matrix = np.stack([endpoint.by_question(own[seed]) - endpoint.by_question(control[seed]) for seed in seeds])
        return effect_over_questions(matrix, rng, bounds=(-width, width))
    return effect_over_seeds(np.array([mine[seed] - other[seed] for seed in seeds]), bounds=(-width, width))


def effect_from(endpoint: Endpoint, own: Results, reference: float) -> Effect | None:
    """The endpoint less a fixed value, over the seeds that tell it; None where none does."""
    values = np.array(list(values_of(endpoint, own).values()))
    bounds = (endpoint.bounds[0] - reference, endpoint.bounds[1] - reference)
    return effect_over_seeds(values - reference, bounds=bounds) if len(values) else None


def tokens_to_match(own: RunResult, control: RunResult) -> float | None:
    """Tokens that a run generated until it reached the other's last score, as a share of what that generated.

    None where it never did.
    """
    if not control.curve or not control.totals.generated:
        return None
    tokens = tokens_to(own, control.curve[-1].pass_at_1)
    return None if tokens is None else tokens / control.totals.generated

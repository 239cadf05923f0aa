"""A study's result: every endpoint per arm, and each arm against its baseline, paired by seed.

What an arm itself reached has Student's interval over seeds: it speaks of training again, on the same questions. A
difference has the interval of the hierarchical bootstrap over seeds and questions. p-values are Holm's over the arms
that share a baseline.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from exgrpo_cli.base.statistics import Interval, holm, pass_at_k_by_question, pass_at_ks, t_interval
from exgrpo_cli.runs.result import RunResult, Totals
from exgrpo_cli.studies.results.endpoints import (
    AT_EQUAL,
    ENDPOINTS,
    Endpoint,
    Results,
    at_equal_tokens,
    paired_effect,
    tokens_to_match,
    values_of,
)
from exgrpo_cli.studies.results.inference import FEW_SEEDS, Effect, effect_over_seeds
from exgrpo_cli.studies.results.parting import Parting, parting_steps
from exgrpo_cli.studies.study import Study

UNLIKE = 1.2
"""How many times more or fewer updates than its baseline's an arm may make before a reader is told."""
MAIN = "pass_at_1"
"""The endpoint of the first table."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Compared:
    """One endpoint of one arm."""

    seeds: dict[int, float]
    """Value by seed."""
    score: Interval
    difference: Effect | None = None
    """To the baseline; None for the baseline itself and where no seed is common."""
    p_holm: float | None = None
    """The difference's p-value, adjusted for the arms that share the baseline."""

    def to_json(self) -> dict[str, Any]:
        """The figure as `results.json` has it."""
        found = self.difference
        return {
            "mean": self.score.mean,
            "low": self.score.low,
            "high": self.score.high,
            "seeds": {str(seed): value for seed, value in self.seeds.items()},
            "difference": found and {name: getattr(found, name) for name in ("mean", "low", "high", "seeds", "spread")},
            "p_value": found.p_value if found else None,
            "p_holm": self.p_holm,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class ArmReport:
    """One arm over its finished seeds."""

    name: str
    baseline: str
    seeds: tuple[int, ...]
    before: float | None
    """Held-out pass@1 before training, mean over seeds."""
    endpoints: dict[str, Compared]
    """By name of the endpoint, those that the runs tell; pass@k as `pass@<k>`; of AT_EQUAL all but the baseline's."""
    match: float | None
    """Tokens generated until the baseline's last score was reached, as a share of what that generated: mean over the
    seeds that reached it."""
    matched: tuple[int, int]
    """Seeds that reached it, and seeds that both have."""
    totals: dict[str, float]
    """Means over seeds of what the runs spent."""
    is_baseline_again: bool = False
    """Whether its runs are the baseline's, so that there is nothing to compare."""
    unlike_starts: tuple[int, ...] = ()
    """Seeds whose held-out answers were other ones than the baseline's before training already."""

    @property
    def main(self) -> Compared:
        """Held-out pass@1."""
        return self.endpoints[MAIN]

    @property
    def coverage(self) -> tuple[str, Compared] | None:
        """pass@k at the largest k above 1."""
        names = [name for name in self.endpoints if name.startswith("pass@")]
        return (names[-1], self.endpoints[names[-1]]) if names else None

    def to_json(self) -> dict[str, Any]:
        """The arm as `results.json` has it."""
        coverage = {name: found for name, found in self.endpoints.items() if name.startswith("pass@")}
        spent = {name: value for name, value in self.totals.items() if name in ("steps", "updates")}
        return {
            **self.main.to_json(),
            "baseline": self.baseline,
            "before": self.before,
            "pass_at_k": {name.removeprefix("pass@"): found.to_json() for name, found in coverage.items()},
            "endpoints": {n: found.to_json() for n, found in self.endpoints.items() if n not in (MAIN, *coverage)},
            "tokens_to_match": {"mean": self.match, "reached": self.matched[0], "seeds": self.matched[1]},
            "wall_seconds": self.totals["seconds"],
            "tokens": {name: self.totals[name] for name in ("generated", "trained", "scored")},
            **spent,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class StudyReport:
    """All arms with at least one finished seed, in the study's order."""

    name: str
    equal: str
    baselines: tuple[str, ...]
    arms: tuple[ArmReport, ...]
    parting: Parting = field(default_factory=dict)
    """Where fresh questions are no longer those of the baseline, of runs whose folders are here."""

    @property
    def warnings(self) -> tuple[str, ...]:
        """What a reader of the intervals must know."""
        found = []
        few = [arm.name for arm in self.arms if len(arm.seeds) < FEW_SEEDS]
        if few:
            found.append(
                f"fewer than {FEW_SEEDS} seeds in {', '.join(few)}: these intervals say next to nothing; add seeds "
                "(--seeds) before reading a difference."
            )
        found += [
            f"{arm.name} is {arm.baseline} once more, question by question: what sets it apart did not come to act in "
            "these runs. Give it more of the budget, or look at what it waits for (exgrpo train --dry-run)."
            for arm in self.arms
            if arm.is_baseline_again
        ]
        found += [
            f"{arm.name} did not start as {arm.baseline} did (seeds {', '.join(map(str, arm.unlike_starts))}): their "
            "held-out answers differ before training. Other settings made the model, or a machine of another kind, and "
            "the differences have that in them."
            for arm in self.arms
            if arm.unlike_starts
        ]
        by_name = {arm.name: arm for arm in self.arms}
        for name in self.baselines:
            usual = by_name[name].totals["updates"] if name in by_name else 0.0
            unlike = [
                f"{arm.name} {updates:.0f}"
                for arm in self.arms
                if arm.baseline == name and not usual / UNLIKE <= (updates := arm.totals["updates"]) <= usual * UNLIKE
            ]
            if usual and unlike:
                found.append(
                    f"updates differ: {name} {usual:.0f}, {', '.join(unlike)}. More of them act like a higher learning "
                    "rate; --vary optim.learning_rate=... tells the two apart."
                )
        return tuple(found)

    def to_json(self) -> dict[str, Any]:
        """The study as `results.json` has it."""
        return {
            "arms": {
                arm.name: arm.to_json()
                | {"fresh_questions_part": {str(s): step for s, step in self.parting.get(arm.name, {}).items()}}
                for arm in self.arms
            },
            "baseline": ", ".join(self.baselines),
            "equal": self.equal,
            "warnings": list(self.warnings),
        }


def compare_runs(study: Study) -> StudyReport:
    """Compare the finished runs of a study; nothing is written."""
    results = study.results()
    # Arms any of whose runs was asked held-out questions.
    scored = [arm for arm in study.arms if any(len(each.after) for each in results.get(arm.name, {}).values())]
    arms = [report_arm(arm.name, arm.baseline, results) for arm in scored]
    return StudyReport(
        name=study.name,
        equal=study.equal,
        baselines=study.baselines,
        arms=with_holm(arms),
        parting=parting_steps(study),
    )


def are_the_same(own: Results, other: Results) -> bool:
    """Whether the seeds that both have went the same way in both, by all that a result tells."""
    seeds = own.keys() & other.keys()
    return bool(seeds) and all(
        np.array_equal(own[seed].after, other[seed].after)
        and _path(own[seed]) == _path(other[seed])
        and (own[seed].totals.updates, own[seed].totals.trained)
        == (other[seed].totals.updates, other[seed].totals.trained)
        for seed in seeds
    )


def _path(result: RunResult) -> list[tuple[int, float]]:
    return [(point.generated, point.pass_at_1) for point in result.curve]


def report_arm(name: str, baseline: str, results: Mapping[str, Results]) -> ArmReport:
    """One arm's endpoints over its seeds, and their paired differences from the arm `baseline`."""
    own, other = results[name], {} if name == baseline else results.get(baseline, {})
    again = are_the_same(own, other)
    if again:
        other = {}
    compared = {}
    for title, endpoint in {**ENDPOINTS, **coverage_endpoints(own)}.items():
        values = values_of(endpoint, own)
        if values:
            compared[title] = Compared(
                seeds=values,
                score=t_interval(list(values.values()), bounds=endpoint.bounds),
                difference=paired_effect(endpoint, own, other, np.random.default_rng(0)),
            )
    for title, kind in AT_EQUAL.items():
        if pairs := at_equal_tokens(own, other, kind):
            compared[title] = Compared(
                seeds={seed: mine for seed, (mine, _) in pairs.items()},
                score=t_interval([mine for mine, _ in pairs.values()], bounds=(0.0, 1.0)),
                difference=effect_over_seeds(np.array([a - b for a, b in pairs.values()]), bounds=(-1.0, 1.0)),
            )
    shares = {seed: tokens_to_match(own[seed], other[seed]) for seed in sorted(own.keys() & other.keys())}
    reached = [share for share in shares.values() if share is not None]
    spent = [result.totals for result in own.values()]
    return ArmReport(
        name=name,
        baseline=baseline,
        seeds=tuple(sorted(own)),
        before=float(np.mean([result.before.mean() / result.samples for result in own.values()])),
        endpoints=compared,
        match=float(np.mean(reached)) if reached else None,
        matched=(len(reached), len(shares)),
        totals={name: float(np.mean([getattr(each, name) for each in spent])) for name in Totals.__slots__},
        is_baseline_again=again,
        unlike_starts=tuple(
            seed
            for seed in sorted(own.keys() & other.keys())
            if not np.array_equal(own[seed].before, other[seed].before)
        ),
    )


def coverage_endpoints(results: Results) -> dict[str, Endpoint]:
    """pass@k at k = 2, 4, ... up to the fewest responses that a question was given in any of the runs."""
    fewest = min(result.samples for result in results.values())

    def endpoint(k: int) -> Endpoint:
        return Endpoint(
            title=f"held-out pass@{k}",
            bounds=(0.0, 1.0),
            by_question=lambda result: pass_at_k_by_question(result.after, result.samples, k),
        )

    return {f"pass@{k}": endpoint(k) for k in pass_at_ks(fewest) if k > 1}


def with_holm(arms: list[ArmReport]) -> tuple[ArmReport, ...]:
    """The arms with p-values adjusted, endpoint by endpoint, over those that share a baseline."""
    adjusted: dict[tuple[str, str], float] = {}
    for baseline in {arm.baseline for arm in arms}:
        for endpoint in {name for arm in arms for name in arm.endpoints}:
            family = {
                arm.name: found.difference.p_value
                for arm in arms
                if arm.baseline == baseline and (found := arm.endpoints.get(endpoint)) and found.difference
            }
            known = {name: p_value for name, p_value in family.items() if p_value is not None}
            for name, p_value in zip(known, holm(list(known.values())), strict=True):
                adjusted[name, endpoint] = p_value
    return tuple(
        replace(
            arm,
            endpoints={
                name: replace(found, p_holm=adjusted.get((arm.name, name))) for name, found in arm.endpoints.items()
            },
        )
        for arm in arms
    )

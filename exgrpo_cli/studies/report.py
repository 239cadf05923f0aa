"""A study's result: every endpoint per arm, and each arm against its baseline, paired by seed.

What an arm itself reached has Student's interval over seeds: it speaks of training again, on the same questions. A
difference has the interval of the hierarchical bootstrap over seeds and questions. p-values are Holm's over the arms
that share a baseline.
"""

import warnings
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from exgrpo_cli.base.errors import DamageWarning, InputError
from exgrpo_cli.base.statistics import Interval, holm, t_interval
from exgrpo_cli.ledger.reader import LedgerReader
from exgrpo_cli.ledger.schemas import EVENTS, VISITS, Event
from exgrpo_cli.runs.result import RunResult, Totals
from exgrpo_cli.studies.endpoints import (
    AT_EQUAL,
    ENDPOINTS,
    FEW_SEEDS,
    Effect,
    at_equal,
    coverage_endpoints,
    effect_over_seeds,
    paired_effect,
    values_of,
)
from exgrpo_cli.studies.study import Arm, Results, Study, StudyRun

UNLIKE = 1.2
"""Factor of more or fewer updates than its baseline's an arm may make before a reader is told."""
MAIN = "pass_at_1"
"""The endpoint of the first table."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Compared(Interval):
    """One endpoint of one arm: its mean over seeds with Student's interval."""

    seeds: dict[int, float]
    """Value by seed."""
    difference: Effect | None = None
    """To the baseline; None for the baseline itself and where no seed is common."""
    p_holm: float | None = None
    """The difference's p-value, adjusted for the arms that share the baseline."""

    @classmethod
    def of(cls, values: dict[int, float], bounds: tuple[float, float], difference: Effect | None) -> "Compared":
        """Mean of the values by seed, which lie in `bounds`, beside their difference from the baseline."""
        return cls(**asdict(t_interval(list(values.values()), bounds=bounds)), seeds=values, difference=difference)

    @property
    def p_value(self) -> float | None:
        """That of the difference."""
        return self.difference.p_value if self.difference else None

    def to_json(self) -> dict[str, Any]:
        """The figures as `results.json` has them."""
        return {**asdict(self), "p_value": self.p_value}


@dataclass(frozen=True, kw_only=True, slots=True)
class ArmReport:
    """One arm over its finished seeds."""

    name: str
    baseline: str
    seeds: tuple[int, ...]
    before: float
    """Held-out pass@1 before training, mean over seeds."""
    endpoints: dict[str, Compared]
    """By name of the endpoint, those that the runs tell; pass@k as `pass@<k>`; of AT_EQUAL all but the baseline's."""
    totals: dict[str, float]
    """Means over seeds of what the runs spent."""
    is_baseline_again: bool = False
    """Whether its runs are the baseline's, so that there is nothing to compare."""
    unlike_starts: tuple[int, ...] = ()
    """Seeds whose held-out answers were other ones than the baseline's before training already."""
    divergence: dict[int, int | None] = field(default_factory=dict)
    """First step by seed with another fresh question than the baseline's, None where there is none, of runs whose
    folders are here."""

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
        endpoints = {name: each.to_json() for name, each in self.endpoints.items()}
        coverage = [name for name in endpoints if name.startswith("pass@")]
        return {
            **endpoints.pop(MAIN),
            "baseline": self.baseline,
            "before": self.before,
            "pass_at_k": {name.removeprefix("pass@"): endpoints.pop(name) for name in coverage},
            "endpoints": endpoints,
            "wall_seconds": self.totals["seconds"],
            "tokens": {name: self.totals[name] for name in ("generated", "trained", "scored")},
            "steps": self.totals["steps"],
            "updates": self.totals["updates"],
            "fresh_questions_part": self.divergence,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class StudyReport:
    """All arms with at least one finished seed, in the study's order."""

    name: str
    equal: str
    baselines: tuple[str, ...]
    arms: tuple[ArmReport, ...]

    @property
    def warnings(self) -> list[str]:
        """Remarks that a reader of the intervals must know."""
        found = []
        if few := [arm.name for arm in self.arms if len(arm.seeds) < FEW_SEEDS]:
            found.append(
                f"fewer than {FEW_SEEDS} seeds in {', '.join(few)}: these intervals say next to nothing; add seeds "
                "(--seeds) before reading a difference."
            )
        found += [
            f"{arm.name} produced exactly {arm.baseline}'s results, question by question: its setting never took "
            "effect in these runs. Give it more of the budget, or look at what it waits for (exgrpo train --dry-run)."
            for arm in self.arms
            if arm.is_baseline_again
        ]
        found += [
            f"{arm.name} did not start as {arm.baseline} did (seeds {', '.join(map(str, arm.unlike_starts))}): their "
            "held-out answers differ before training. Other settings made the model, or a machine of another kind, "
            "and the differences have that in them."
            for arm in self.arms
            if arm.unlike_starts
        ]
        updates = {arm.name: arm.totals["updates"] for arm in self.arms}
        for name in self.baselines:
            usual, arms = updates.get(name, 0.0), [arm.name for arm in self.arms if arm.baseline == name]
            unlike = [each for each in arms if not usual / UNLIKE <= updates[each] <= usual * UNLIKE]
            if usual and unlike:
                listed = ", ".join(f"{each} {updates[each]:.0f}" for each in [name, *unlike])
                found.append(
                    f"updates differ: {listed}. More of them act like a higher learning rate; "
                    "--vary optim.learning_rate=... tells the two apart."
                )
        return found

    def to_json(self) -> dict[str, Any]:
        """The study as `results.json` has it."""
        return {
            "arms": {arm.name: arm.to_json() for arm in self.arms},
            "baseline": ", ".join(self.baselines),
            "equal": self.equal,
            "warnings": self.warnings,
        }


def compare_runs(study: Study) -> StudyReport:
    """Compare the finished runs of a study; nothing is written.

    Warns (DamageWarning) of a ledger that cannot be read.
    """
    results, divergence = study.results(), divergence_by_arm(study)
    # Arms any of whose runs was asked held-out questions.
    scored = [arm for arm in study.arms if any(len(each.after) for each in results.get(arm.name, {}).values())]
    arms = [replace(report_arm(arm, results), divergence=divergence.get(arm.name, {})) for arm in scored]
    adjust(arms)
    return StudyReport(name=study.name, equal=study.equal, baselines=study.baselines, arms=tuple(arms))


def report_arm(arm: Arm, results: Mapping[str, Results]) -> ArmReport:
    """One arm's endpoints over its seeds, and their paired differences from its baseline."""
    mine, other = results[arm.name], {} if arm.name == arm.baseline else results.get(arm.baseline, {})
    common = sorted(mine.keys() & other.keys())
    again = bool(common) and all(_way_of(mine[seed]) == _way_of(other[seed]) for seed in common)
    control = {} if again else other
    compared = {}
    for name, endpoint in {**ENDPOINTS, **coverage_endpoints(mine)}.items():
        if values := values_of(endpoint, mine):
            effect = paired_effect(endpoint, mine, control)
            compared[name] = Compared.of(values, endpoint.bounds, effect)
    for name in AT_EQUAL:
        tokens = name.removeprefix("at_equal_")
        values, others = at_equal(mine, control, tokens), at_equal(control, mine, tokens)
        if values:
            effect = effect_over_seeds(np.array([values[seed] - others[seed] for seed in values]), bounds=(-1.0, 1.0))
            compared[name] = Compared.of(values, (0.0, 1.0), effect)
    spent = [result.totals for result in mine.values()]
    return ArmReport(
        name=arm.name,
        baseline=arm.baseline,
        seeds=tuple(sorted(mine)),
        before=float(np.mean([result.before.mean() / result.samples for result in mine.values()])),
        endpoints=compared,
        totals={name: float(np.mean([getattr(each, name) for each in spent])) for name in Totals.__slots__},
        is_baseline_again=again,
        unlike_starts=tuple(seed for seed in common if not np.array_equal(mine[seed].before, other[seed].before)),
    )


def _way_of(result: RunResult) -> list[Any]:
    """The way that a run went, by all that a result tells."""
    curve = [(point.generated, point.pass_at_1) for point in result.curve]
    return [result.after.tolist(), curve, result.totals.updates, result.totals.trained]


def adjust(arms: Sequence[ArmReport]) -> None:
    """Adjust the arms' p-values, endpoint by endpoint, over those that share a baseline."""
    families: dict[tuple[str, str], list[tuple[ArmReport, float]]] = defaultdict(list)
    for arm in arms:
        for name, found in arm.endpoints.items():
            if found.p_value is not None:
                families[arm.baseline, name].append((arm, found.p_value))
    for (_, name), family in families.items():
        for (arm, _), p_holm in zip(family, holm([p_value for _, p_value in family]), strict=True):
            arm.endpoints[name] = replace(arm.endpoints[name], p_holm=p_holm)


def divergence_by_arm(study: Study) -> dict[str, dict[int, int | None]]:
    """First step, by arm and seed, with another fresh question than the baseline's; None where they never part.

    All arms of a seed draw from one stream, so that the i-th fresh question is the same in each until a question
    retires, waits for its replay to end, or is drawn in a further round of a step. Of the finished runs whose ledgers
    can be read in the study's folder, as far as both went. Warns (DamageWarning) of a ledger that cannot be read.
    """
    here = {(run.arm.name, run.seed): run for run in study.runs if _ledger(run).is_dir() and run.state == "finished"}
    found: dict[str, dict[int, int | None]] = {}
    for (arm, seed), run in here.items():
        baseline = here.get((run.arm.baseline, seed), run)
        try:
            pairs = list(zip(fresh_questions(run), fresh_questions(baseline), strict=False)) if run != baseline else []
        except InputError as error:
            text = f"not said of {arm}, seed {seed}, where its questions part: {error}"
            warnings.warn(text, DamageWarning, stacklevel=2)
            continue
        if pairs:
            found.setdefault(arm, {})[seed] = next((mine[0] for mine, theirs in pairs if mine[1] != theirs[1]), None)
    return found


def fresh_questions(run: StudyRun) -> list[tuple[int, str]]:
    """Step and id of every fresh question, in the order drawn. Raises InputError for a ledger that cannot be read."""
    reader = LedgerReader(_ledger(run))
    stand_in: set[tuple[int, str]] = set()
    if run.config.replay.composition == "replace":
        events = reader.table(EVENTS, ["step", "question_id", "event"]).to_pylist()
        stand_in = {(e["step"], e["question_id"]) for e in events if e["event"] == Event.SELECTED}
    visits = reader.table(VISITS, ["step", "question_id"]).to_pylist()
    return [key for row in visits if (key := (row["step"], row["question_id"])) not in stand_in]


def _ledger(run: StudyRun) -> Path:
    return run.folder / "replay"

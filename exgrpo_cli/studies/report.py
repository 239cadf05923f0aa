"""A study's result: every endpoint per arm, and each arm against its baseline, paired by seed.

What an arm itself reached has Student's interval over seeds: it speaks of training again, on the same questions. A
difference has an interval over seeds and questions, both random. p-values are Holm's over the arms
that share a baseline.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from exgrpo_cli.base.statistics import holm, t_interval
from exgrpo_cli.runs.result import RunResult, Totals
from exgrpo_cli.studies import claims, endpoints
from exgrpo_cli.studies.study import Arm, Results, Study

UNLIKE = 1.2
"""Factor of more or fewer updates than its baseline's an arm may make before a reader is told."""
MAIN = "pass_at_1"
"""The endpoint of the first table."""

Numbers = dict[str, Any]
"""Part of `results.json`."""


def compare_runs(study: Study) -> Numbers:
    """Compare the finished runs of a study, as `results.json` has it; nothing is written.

    Warns (DamageWarning) of a ledger that cannot be read.
    """
    results = study.results()
    # Arms any of whose runs was asked held-out questions.
    scored = [arm for arm in study.arms if any(len(each.after) for each in results.get(arm.name, {}).values())]
    compared = {arm: compare_arm(results[arm.name], control_of(arm, results)) for arm in scored}
    adjust(compared)
    arms = {}
    for arm, told in compared.items():
        mine = results[arm.name].values()
        spent = {name: float(np.mean([getattr(each.totals, name) for each in mine])) for name in Totals.__slots__}
        coverage = [name for name in told if name.startswith("pass@")]
        arms[arm.name] = {
            **told.pop(MAIN),
            "baseline": arm.baseline,
            "before": float(np.mean([each.before.mean() / each.samples for each in mine])),
            "pass_at_k": {name.removeprefix("pass@"): told.pop(name) for name in coverage},
            "endpoints": told,
            "wall_seconds": spent["seconds"],
            "tokens": {name: spent[name] for name in ("generated", "trained", "scored")},
            "steps": spent["steps"],
            "updates": spent["updates"],
        }
    outcomes = claims.claim_outcomes(study)
    return {
        "arms": arms,
        "baseline": ", ".join(study.baselines),
        "equal": study.equal,
        "warnings": [*remarks(scored, results), *updates_remarks(arms)],
        **({"claims": outcomes} if outcomes else {}),
    }


def control_of(arm: Arm, results: Mapping[str, Results]) -> Results:
    """Results of the arm's baseline; none for a baseline itself."""
    return {} if arm.name == arm.baseline else results.get(arm.baseline, {})


def compare_arm(mine: Results, other: Results) -> dict[str, Numbers]:
    """By endpoint that the runs tell: mean over seeds, interval, value by seed, and the difference from `other`.

    pass@k is called `pass@<k>`. `difference` is None where no seed is common or the runs are the same, which leaves
    nothing to compare; `p_holm` is None until `adjust` has set it.
    """
    control = {} if is_same(mine, other) else other
    found = {
        name: (endpoints.values_of(endpoint, mine), endpoint.bounds, endpoints.paired_effect(endpoint, mine, control))
        for name, endpoint in endpoints.told_endpoints(mine).items()
    }
    for name in endpoints.AT_EQUAL:
        tokens = name.removeprefix("at_equal_")
        values, theirs = (endpoints.at_equal(*each, tokens) for each in ((mine, control), (control, mine)))
        found[name] = values, (0.0, 1.0), endpoints.effect_by_seed(values, theirs, (0.0, 1.0))
    return {
        name: {
            **asdict(t_interval(list(values.values()), bounds=bounds)),
            "seeds": values,
            "difference": effect and asdict(effect),
            "p_holm": None,
            "p_value": effect and effect.p_value,
        }
        for name, (values, bounds, effect) in found.items()
        if values
    }


def is_same(mine: Results, other: Results) -> bool:
    """Whether all runs of seeds that both have went the same way, by all that their results tell."""

    def way_of(result: RunResult) -> list[Any]:
        curve = [(point.generated, point.pass_at_1) for point in result.curve]
        return [result.after.tolist(), curve, result.totals.updates, result.totals.trained]

    common = mine.keys() & other.keys()
    return bool(common) and all(way_of(mine[seed]) == way_of(other[seed]) for seed in common)


def adjust(compared: Mapping[Arm, Mapping[str, Numbers]]) -> None:
    """Set the arms' Holm p-values, endpoint by endpoint, over those that share a baseline."""
    families: dict[tuple[str, str], list[Numbers]] = defaultdict(list)
    for arm, told in compared.items():
        for name, found in told.items():
            if found["p_value"] is not None:
                families[arm.baseline, name].append(found)
    for family in families.values():
        for found, p_holm in zip(family, holm([each["p_value"] for each in family]), strict=True):
            found["p_holm"] = p_holm


def remarks(arms: Sequence[Arm], results: Mapping[str, Results]) -> list[str]:
    """Warnings that a reader of the intervals must know: few seeds, nothing to compare, unlike starts."""
    found = []
    if few := [arm.name for arm in arms if len(results[arm.name]) < endpoints.FEW_SEEDS]:
        remedy = "add seeds (--seeds) before reading a difference"
        fewest = f"fewer than {endpoints.FEW_SEEDS} seeds in {', '.join(few)}"
        found.append(f"{fewest}: these intervals say next to nothing; {remedy}.")
    pairs = [(arm, results[arm.name], control_of(arm, results)) for arm in arms]
    found += [
        f"{arm.name} produced exactly {arm.baseline}'s results, question by question: its setting never took "
        "effect in these runs. Give it more of the budget, or look at what it waits for (exgrpo train --dry-run)."
        for arm, mine, other in pairs
        if is_same(mine, other)
    ]
    for arm, mine, other in pairs:
        common = sorted(mine.keys() & other.keys())
        if unlike := [str(seed) for seed in common if not np.array_equal(mine[seed].before, other[seed].before)]:
            found.append(
                f"{arm.name} did not start as {arm.baseline} did (seeds {', '.join(unlike)}): their held-out answers "
                "differ before training. Other settings made the model, or a machine of another kind, and the "
                "differences have that in them."
            )
    return found


def updates_remarks(arms: Mapping[str, Numbers]) -> Iterator[str]:
    """Warnings of arms that make more or fewer updates than their baseline."""
    for name in dict.fromkeys(arm["baseline"] for arm in arms.values() if arm["baseline"] in arms):
        usual = arms[name]["updates"]
        updates = {each: arm["updates"] for each, arm in arms.items() if arm["baseline"] == name}
        unlike = [each for each, number in updates.items() if not usual / UNLIKE <= number <= usual * UNLIKE]
        if usual and unlike:
            listed = ", ".join(f"{each} {updates[each]:.0f}" for each in [name, *unlike])
            remedy = "--vary optim.learning_rate=... tells the two apart"
            yield f"updates differ: {listed}. More of them act like a higher learning rate; {remedy}."

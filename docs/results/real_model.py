"""R1's readings beside its verdict: what replay did to a real language model, for the lab notebook.

    python docs/results/real_model.py docs/results/real

reads `ARM-SEED.result.json` of grpo, exgrpo and dynamic-sampling, and was written before any run of R1. Primary are
three readings of pass@1 at T = 0.6, ExGRPO less on-policy: *ahead* (interval above 0), *worth it* (above 0.03), *no
better* (below 0.04). Secondary, with p-values by Holm over three: pass@4; pass@1 less dynamic-sampling; pass@1 when a
run had trained on as many tokens as the thriftier of its seed in all. The rest is told without a test.
"""

import sys
from pathlib import Path

import numpy as np

from exgrpo_cli.base.statistics import holm
from exgrpo_cli.runs.result import RunResult, read_result
from exgrpo_cli.studies.endpoints import (
    ENDPOINTS,
    SEEDS_FOR_A_VERDICT,
    Effect,
    at_equal,
    effect_by_seed,
    endpoint_named,
    paired_effect,
)

SEEDS = range(500, 512)
ARMS = ("grpo", "exgrpo", "dynamic-sampling")
AHEAD, WORTH_IT, NO_BETTER = 0.0, 0.03, 0.04
TOLD = ("pass_at_1@1", "pass_at_n@1", "newly_solved_at_end", "area", "intact")
"""Endpoints that are told without a test; `@1` is T = 1.0."""

Arms = dict[str, dict[int, RunResult]]


def read(folder: Path) -> Arms:
    """Results by arm and seed, of the seeds that every arm has. Raises ValueError where they are fewer than eight."""
    found = {
        arm: {seed: path for seed in SEEDS if (path := folder / f"{arm}-{seed}.result.json").is_file()} for arm in ARMS
    }
    seeds = sorted(set.intersection(*(set(of_arm) for of_arm in found.values())))
    if len(seeds) < SEEDS_FOR_A_VERDICT:
        raise ValueError(f"{len(seeds)} seeds have all arms: R1 is not looked at before {SEEDS_FOR_A_VERDICT} have.")
    return {arm: {seed: read_result(paths[seed]) for seed in seeds} for arm, paths in found.items()}


def effects(runs: Arms) -> tuple[Effect, dict[str, Effect]]:
    """The primary effect, and the secondary ones by name."""

    def known(found: Effect | None) -> Effect:
        assert found is not None
        return found

    exgrpo, grpo = runs["exgrpo"], runs["grpo"]
    pass_at_1, pass_at_4 = ENDPOINTS["pass_at_1"], ENDPOINTS["pass_at_n"]
    spent = [at_equal(*pair, "trained") for pair in ((exgrpo, grpo), (grpo, exgrpo))]
    return known(paired_effect(pass_at_1, exgrpo, grpo)), {
        "pass@4": known(paired_effect(pass_at_4, exgrpo, grpo)),
        "pass@1 less dynamic-sampling": known(paired_effect(pass_at_1, exgrpo, runs["dynamic-sampling"])),
        "pass@1 at equal tokens trained on": known(effect_by_seed(spent[0], spent[1], (0.0, 1.0))),
    }


def told(effect: Effect) -> str:
    """An effect in one line."""
    interval = f"{effect.mean:+.3f} [{effect.low:.3f}, {effect.high:.3f}]"
    return f"{interval}, median {effect.median:+.3f}, {effect.positive} of {effect.seeds} above 0"


def main(folder: Path) -> None:
    """Print all readings."""
    runs = read(folder)
    for arm, of_arm in runs.items():
        spent = [(run.totals.steps, run.totals.generated, run.totals.trained) for run in of_arm.values()]
        before, after, four = (
            np.mean([measured(run) for run in of_arm.values()])
            for measured in (
                lambda run: run.before.mean() / run.samples,
                lambda run: run.after.mean() / run.samples,
                lambda run: (run.after > 0).mean(),
            )
        )
        steps, generated, trained = np.mean(spent, axis=0)
        print(f"{arm}: pass@1 {before:.3f} to {after:.3f}, pass@4 {four:.3f}; {len(of_arm)} seeds;", end=" ")
        print(f"{steps:.1f} steps, tokens generated {generated:,.0f}, trained on {trained:,.0f}")
    primary, secondary = effects(runs)
    print(f"pass@1: {told(primary)}, p {primary.p_value:.3f}; spread {primary.spread:.3f}")
    print(f"  ahead {primary.low > AHEAD}, worth it {primary.low > WORTH_IT}, no better {primary.high < NO_BETTER}")
    adjusted = holm([1.0 if each.p_value is None else each.p_value for each in secondary.values()])
    for (name, effect), p_value in zip(secondary.items(), adjusted, strict=True):
        print(f"{name}: {told(effect)}, p {p_value:.3f} by Holm over {len(secondary)}")
    for control in ("grpo", "dynamic-sampling"):
        for name in TOLD:
            found = paired_effect(endpoint_named(name), runs["exgrpo"], runs[control])
            print(f"{name} less {control}: {'not told' if found is None else told(found)}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""Entry 45's readings: is it the learning rate that scatters, or replay? For the lab notebook.

    python docs/results/same_rate.py docs/results/real docs/results/real-same-rate

reads `grpo-SEED.result.json` and `exgrpo-SEED.result.json` of the first folder (on-policy training at 1e-5, ExGRPO at
2e-5) and `grpo-SEED.result.json` of the second (on-policy training at 2e-5), and was written before any of the latter
was read. Of pass@1 at T = 0.6, over seeds: on-policy training scatters more at 2e-5 than at 1e-5, and ExGRPO more than
it, where a one-sided F test of two variances has p below 0.05; and the difference, paired by seed, of ExGRPO and
on-policy training at 2e-5. Else told without a test: pass@4, and both at T = 1.
"""

import sys
from pathlib import Path

import numpy as np
from scipy import stats

from exgrpo_cli.runs.result import RunResult, read_result
from exgrpo_cli.studies.endpoints import endpoint_named, paired_effect

SEEDS = range(500, 508)
ENDPOINTS = ("pass_at_1", "pass_at_n", "pass_at_1@1", "pass_at_n@1")

OfSeeds = dict[int, RunResult]


def read(folder: Path, arm: str) -> OfSeeds:
    """Results of all eight seeds. Raises InputError where one is not there."""
    return {seed: read_result(folder / f"{arm}-{seed}.result.json") for seed in SEEDS}


def pass_at_1(runs: OfSeeds) -> np.ndarray:
    """pass@1 at the end, by seed."""
    return np.array([run.after.mean() / run.samples for run in runs.values()])


def scatters_more(left: OfSeeds, right: OfSeeds) -> tuple[float, float]:
    """Variance over seeds of `left` over that of `right`, and p of one at least as large by chance: an F test."""
    ratio = float(pass_at_1(left).var(ddof=1) / pass_at_1(right).var(ddof=1))
    return ratio, float(stats.f.sf(ratio, len(left) - 1, len(right) - 1))


def main(real: Path, same_rate: Path) -> None:
    """Print all readings."""
    slow, exgrpo, fast = read(real, "grpo"), read(real, "exgrpo"), read(same_rate, "grpo")
    for name, runs in (("on-policy, 1e-5", slow), ("on-policy, 2e-5", fast), ("ExGRPO, 2e-5", exgrpo)):
        ends = pass_at_1(runs)
        four = np.mean([(run.after > 0).mean() for run in runs.values()])
        steps, trained = np.mean([(run.totals.steps, run.totals.trained) for run in runs.values()], axis=0)
        print(f"{name}: pass@1 {ends.mean():.3f} (sd {ends.std(ddof=1):.3f}), pass@4 {four:.3f};", end=" ")
        print(f"{steps:.0f} steps, {trained:,.0f} tokens trained on; {', '.join(f'{end:.3f}' for end in ends)}")
    for name, pair in (("the rate", (fast, slow)), ("replay at one rate", (exgrpo, fast))):
        ratio, p_value = scatters_more(*pair)
        print(f"{name}: variance {ratio:.2f} times as large, one-sided F test p {p_value:.3f}")
    for name, pair in (("ExGRPO less on-policy, 2e-5", (exgrpo, fast)), ("on-policy, 2e-5 less 1e-5", (fast, slow))):
        for endpoint in ENDPOINTS:
            effect = paired_effect(endpoint_named(endpoint), *pair)
            assert effect is not None
            interval = f"{effect.mean:+.3f} [{effect.low:.3f}, {effect.high:.3f}]"
            print(
                f"{name}, {endpoint}: {interval}, {effect.positive} of {effect.seeds} above 0, p {effect.p_value:.3f}"
            )


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))

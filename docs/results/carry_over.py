"""Whether carrying over loses anything where a run may fall far: numbers of entry 39 of the lab notebook.

    python docs/results/carry_over.py docs/results/carry-over

The rule is that of benchmarks/carry_over_own_rate.toml.
"""

import sys
from pathlib import Path

import numpy as np
from scipy.stats import binomtest, wilcoxon

from exgrpo_cli.runs.result import read_result
from exgrpo_cli.studies.endpoints import pass_at_1

SEEDS, LEAST = range(740, 764), -0.03
FALLEN = 0.5
"""Held-out pass@1 below which a run of `strong`, which ends at 0.7, has fallen."""


def pseudomedian(differences: np.ndarray) -> tuple[float, float, float]:
    """Hodges and Lehmann's estimate with the ends of its exact 95 % interval.

    Of the n (n + 1) / 2 means of pairs in order, that with k below it and that with k above it, where k is the largest
    sum of signed ranks up to which 0.025 at most lie where nothing differs.
    """
    n = len(differences)
    pairs = np.sort([(differences[i] + differences[j]) / 2 for i in range(n) for j in range(i, n)])
    ways = np.ones(1)
    for rank in range(1, n + 1):
        ways = np.convolve(ways, np.eye(1, rank + 1, 0)[0] + np.eye(1, rank + 1, rank)[0]) / 2
    k = int(np.searchsorted(np.cumsum(ways), 0.025, side="right")) - 1
    return float(np.median(pairs)), float(pairs[k]), float(pairs[-1 - k])


def main(folder: Path) -> None:
    found = {
        arm: [read_result(folder / f"strong-{arm}-{seed}.result.json") for seed in SEEDS]
        for arm in ("exgrpo", "carry-10")
    }
    before, after = (np.array([pass_at_1(run).mean() for run in found[arm]]) for arm in ("exgrpo", "carry-10"))
    lost = np.stack([before, after]) < FALLEN
    differences, whole = after - before, ~lost.any(axis=0)
    middle, low, high = pseudomedian(differences)
    above = int((differences > LEAST).sum())
    print(f"pass@1 {before.mean():.3f}, {after.mean():.3f}; fallen {lost.sum(axis=1)}")
    p_value = wilcoxon(differences - LEAST).pvalue
    print(f"pseudomedian {middle:+.3f} [{low:.3f}, {high:.3f}], p {p_value:.3f} of {LEAST}")
    print(f"above {LEAST}: {above} of {len(differences)}, p {binomtest(above, len(differences)).pvalue:.3f}")
    print(f"mean {differences.mean():+.3f}, of the {whole.sum()} without a fall {differences[whole].mean():+.3f}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

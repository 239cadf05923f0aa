"""ExGRPO less on-policy training on the levels of `hard-tail`: entry 34 of the lab notebook.

Run as `.venv/bin/python docs/results/by_level.py`. Counts in a result are in the order of its held-out questions, which
the settings of the regime make.
"""

from pathlib import Path

import numpy as np

from exgrpo_cli.base.statistics import pass_at_k_by_question
from exgrpo_cli.config.layers import build_config
from exgrpo_cli.questions.made import make_split
from exgrpo_cli.runs.result import RunResult, read_result
from exgrpo_cli.studies.endpoints import effect_over_questions, pass_at_1, pass_at_n

FOLDER = Path(__file__).parent
LEVELS = ((2, 4), (5, 7), (8, 10), (11, 13), (8, 13), (2, 13))
SEEDS = (range(200, 209), range(440, 448), (*range(200, 209), *range(440, 448)))
"""Those of the claim, those of which the outcome was written down before, and both."""


def pass_at_1_before(result: RunResult) -> np.ndarray:
    """Pass rate of each held-out question before training."""
    return result.before / result.samples


def pass_at_n_before(result: RunResult) -> np.ndarray:
    """Whether each held-out question was solved before training."""
    return pass_at_k_by_question(result.before, result.samples, result.samples)


def main() -> None:
    """Print, by seeds, endpoint and levels: start, on-policy training, ExGRPO, the difference, each seed's."""
    questions = make_split("arithmetic", build_config(regime="hard-tail")).heldout
    level = np.array([int(question.level or 0) for question in questions])
    endpoints = (("pass@1", pass_at_1, pass_at_1_before), ("pass@4", pass_at_n, pass_at_n_before))
    for seeds in SEEDS:
        own, other = (
            [read_result(FOLDER / f"hard-tail-{arm}-{seed}.result.json") for seed in seeds]
            for arm in ("exgrpo", "grpo")
        )
        for name, endpoint, before in endpoints:
            for first, last in LEVELS:
                mask = (level >= first) & (level <= last)
                mine, theirs = (np.stack([endpoint(result)[mask] for result in arm]) for arm in (own, other))
                start = np.mean([before(result)[mask].mean() for result in own])
                effect = effect_over_questions(mine - theirs, bounds=(-1.0, 1.0))
                by_seed = (mine - theirs).mean(axis=1)
                print(
                    f"{len(seeds)} seeds from {seeds[0]}, {name}, levels {first} to {last}: {start:.3f} "
                    f"{theirs.mean():.3f} {mine.mean():.3f} {effect.mean:+.3f} [{effect.low:.3f}, {effect.high:.3f}], "
                    f"{(by_seed > 0).sum()} above 0: {' '.join(f'{each:+.3f}' for each in by_seed)}"
                )


if __name__ == "__main__":
    main()

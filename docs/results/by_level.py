"""ExGRPO less on-policy training on the levels of `hard-tail`: entry 34 of the lab notebook.

Run as `.venv/bin/python docs/results/by_level.py`. Counts in a result are in the order of its held-out questions, which
the settings of the regime make.
"""

from pathlib import Path

import numpy as np

from exgrpo_cli.ablation.results.endpoints import pass_at_1, pass_at_n
from exgrpo_cli.ablation.results.inference import effect_over_questions
from exgrpo_cli.config.layers import build_config
from exgrpo_cli.data.made.sources import make_split
from exgrpo_cli.runs.result import RunResult, read_result
from exgrpo_cli.statistics import pass_at_k_by_question

FOLDER = Path(__file__).parent
LEVELS = ((2, 4), (5, 7), (8, 10), (11, 13))


def pass_at_1_before(result: RunResult) -> np.ndarray:
    """Pass rate of each held-out question before training."""
    return result.before / result.samples


def pass_at_n_before(result: RunResult) -> np.ndarray:
    """Whether each held-out question was solved before training."""
    return pass_at_k_by_question(result.before, result.samples, result.samples)


def main() -> None:
    """Print, by endpoint and levels: start, on-policy training, ExGRPO, the difference, and that of each seed."""
    questions = make_split("arithmetic", build_config(regime="hard-tail")).heldout
    level = np.array([int(question.level or 0) for question in questions])
    own, other = (
        [read_result(FOLDER / f"hard-tail-{arm}-{seed}.result.json") for seed in range(200, 209)]
        for arm in ("exgrpo", "grpo")
    )
    endpoints = (("pass@1", pass_at_1, pass_at_1_before), ("pass@4", pass_at_n, pass_at_n_before))
    for name, endpoint, before in endpoints:
        for first, last in LEVELS:
            mask = (level >= first) & (level <= last)
            mine, theirs = (np.stack([endpoint(result)[mask] for result in arm]) for arm in (own, other))
            start = np.mean([before(result)[mask].mean() for result in own])
            effect = effect_over_questions(mine - theirs, np.random.default_rng(0), bounds=(-1.0, 1.0))
            seeds = " ".join(f"{each:+.3f}" for each in (mine - theirs).mean(axis=1))
            print(
                f"{name}, levels {first} to {last}, {mask.sum()} questions: {start:.3f} {theirs.mean():.3f} "
                f"{mine.mean():.3f} {effect.mean:+.3f} [{effect.low:.3f}, {effect.high:.3f}]; seeds {seeds}"
            )


if __name__ == "__main__":
    main()

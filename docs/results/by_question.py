"""Effects on some of the held-out questions: entries 20, 22, 23 and 26 of the lab notebook.

Run as `.venv/bin/python docs/results/by_question.py`. Counts in a result are in the order of its held-out questions,
which the settings of its run make: here those of `search` with `countdown.seed` of 1 or 3. Known are those of seed 0.
"""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np

from exgrpo_cli.base.statistics import pass_at_k_by_question
from exgrpo_cli.base.types import Question
from exgrpo_cli.config.layers import build_config
from exgrpo_cli.questions.made.countdown import make_countdown
from exgrpo_cli.runs.result import RunResult, read_result
from exgrpo_cli.studies.endpoints import effect_over_questions, pass_at_1, pass_at_n
from exgrpo_cli.studies.study import Results

FOLDER = Path(__file__).parent


def heldout(seed: int) -> list[Question]:
    """Held-out questions of `search`."""
    return list(make_countdown(build_config(regime="search", assignments=[f"countdown.seed={seed}"]).countdown).heldout)


def same(question: Question) -> tuple[tuple[int, ...], int]:
    """What two questions have in common that ask the same: numbers in whatever order, and target."""
    content = json.loads(question.metadata)
    return tuple(sorted(content["numbers"])), content["target"]


def published(arm: str, seeds: range, folder: Path) -> Results:
    """Results by seed."""
    paths = {seed: folder / f"search-{arm}-{seed}.result.json" for seed in seeds}
    return {seed: read_result(path) for seed, path in paths.items()}


def shown(endpoint: Callable[..., np.ndarray], own: Results, control: Results, mask: np.ndarray) -> str:
    """Means and difference over the questions of `mask`, paired by seed."""
    mine, other = (np.stack([endpoint(arm[seed])[mask] for seed in own]) for arm in (own, control))
    effect = effect_over_questions(mine - other, bounds=(-1.0, 1.0))
    return f"{other.mean():.3f} {mine.mean():.3f} {effect.mean:+.3f} [{effect.low:.3f}, {effect.high:.3f}]"


COMPARED = (
    ("entry 20", "grpo", range(300, 311), FOLDER, FOLDER, 1),
    ("entry 20", "more-updates", range(300, 308), FOLDER, FOLDER, 1),
    ("entry 22", "grpo", range(300, 311), FOLDER / "lower-rate", FOLDER / "lower-rate", 1),
    ("entry 23", "grpo", range(320, 334), FOLDER / "starts", FOLDER / "starts", 3),
    ("entry 26", "grpo", range(320, 334), FOLDER / "starts", FOLDER / "double-budget", 3),
)
"""Entry, control of `headroom-near`, seeds, folders of both, and `countdown.seed`."""
ENDPOINTS: dict[str, Callable[[RunResult], np.ndarray]] = {
    "pass@4": pass_at_n,
    "pass@2": lambda result: pass_at_k_by_question(result.after, result.samples, 2),
    "pass@1": pass_at_1,
}


def main() -> None:
    """Print, by comparison, subset and endpoint: questions, mean of the control, of the arm, and the difference."""
    earlier = {same(question) for question in heldout(0)}
    for entry, control, seeds, folder, of_control, drawn in COMPARED:
        questions = heldout(drawn)
        new = np.array([same(question) not in earlier for question in questions])
        three = np.array([question.level == "3" for question in questions])
        subsets = {"all": new | True, "new": new, "known": ~new, "three": three, "new three": new & three}
        subsets |= {"four": ~three, "new four": new & ~three}
        own, other = published("headroom-near", seeds, folder), published(control, seeds, of_control)
        for name, mask in subsets.items():
            for title, endpoint in ENDPOINTS.items():
                print(f"{entry}, {control}, {name}, {mask.sum()}, {title}: {shown(endpoint, own, other, mask)}")


if __name__ == "__main__":
    main()

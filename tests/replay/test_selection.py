"""Trajectory selection: metrics, directions, ties and staleness."""

from pathlib import Path

import numpy as np
import pytest

from exgrpo_cli.base.errors import InputError, RunError
from exgrpo_cli.replay.by_question import METRICS, Candidates, choose, resolve_metric


def candidates(entropy: list[float], num_tokens: list[int], nll: list[float] | None = None) -> Candidates:
    size = len(entropy)
    return Candidates(
        question_id="q",
        trajectory_ids=np.arange(10, 10 + size, dtype=np.int64),
        num_tokens=np.array(num_tokens, dtype=np.int32),
        **dict.fromkeys(("step_born", "born_version", "measured_version"), np.ones(size, dtype=np.int32)),
        entropy=np.array(entropy),
        nll=np.array(nll if nll is not None else entropy),
        reward=np.ones(size, dtype=np.float32),
    )


# Means 0.3, 0.5, 0.4 over 30, 4, 10 tokens are sums of 9, 2 and 4: mean and total entropy disagree at both ends.
UNEQUAL = candidates([0.3, 0.5, 0.4], [30, 4, 10], nll=[0.6, 0.9, 0.2])


@pytest.mark.parametrize(
    ("metric", "lowest", "highest"), [("ent", 0, 1), ("ent-sum", 1, 0), ("ppl", 2, 1), ("length", 1, 0)]
)
def test_choice_by_hand(metric: str, lowest: int, highest: int) -> None:
    for direction, position in (("min", lowest), ("max", highest)):
        assert choose(UNEQUAL, METRICS[metric], direction, np.random.default_rng(0)) == [position]


def test_perplexity_is_exp_of_mean_nll() -> None:
    scores = METRICS["ppl"](candidates([0.0], [3], nll=[np.log(5.0)]), np.random.default_rng(0))
    np.testing.assert_allclose(scores, [5.0])


@pytest.mark.parametrize(("direction", "position"), [("min", 1), ("max", 0)])
def test_ties_go_to_the_lowest_id(direction: str, position: int) -> None:
    tied = candidates([0.7, 0.2, 0.2, 0.7], [5] * 4)
    assert choose(tied, METRICS["ent"], direction, np.random.default_rng(0)) == [position]


def test_random_is_uniform_and_comes_from_the_generator() -> None:
    rng = np.random.default_rng(5)
    seen = np.bincount([choose(UNEQUAL, METRICS["random"], "min", rng)[0] for _ in range(3000)])
    # 3000/3 with a standard deviation of sqrt(3000 * 1/3 * 2/3) = 26.
    assert (abs(seen - 1000) < 4 * 26).all()
    again = [choose(UNEQUAL, METRICS["random"], "max", np.random.default_rng(6)) for _ in range(2)]
    assert again[0] == again[1]


def test_metric_must_give_one_finite_score_per_candidate() -> None:
    rng = np.random.default_rng(0)
    with pytest.raises(RunError, match=r"shape \(1,\) for 3, trajectory 10 of question q first"):
        choose(UNEQUAL, lambda group, rng: np.zeros(1), "min", rng)
    with pytest.raises(RunError, match="nan for trajectory 11 of question q"):
        choose(UNEQUAL, lambda group, rng: np.array([0.0, np.nan, 1.0]), "min", rng)


def test_function_of_the_user(workdir: Path) -> None:
    (workdir / "metric_of_mine.py").write_text("def newest(candidates, rng):\n    return -candidates.trajectory_ids\n")
    assert choose(UNEQUAL, resolve_metric("python:metric_of_mine:newest"), "min", np.random.default_rng(0)) == [2]
    for name, message in {
        "python:metric_of_mine:oldest": "metric_of_mine has no function oldest; it has newest",
        "python:nowhere_to_be_found:f": "cannot import nowhere_to_be_found",
        "python:json": "write python:module:function",
    }.items():
        with pytest.raises(InputError, match=f"replay.metric = '{name}': {message}"):
            resolve_metric(name)

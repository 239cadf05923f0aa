"""The chi-square test of what was drawn against what was promised."""

import numpy as np
import pytest
from scipy import stats

from exgrpo_cli.replay.by_question import Bucket, draw_by_weights
from exgrpo_cli.show.draw_test import draw_test
from exgrpo_cli.show.record import Columns


def columns(rows: list[tuple[int, int, int, float, int]]) -> Columns:
    """(step, bucket, num_questions, probability, num_drawn) rows of a run with K = 8."""
    step, bucket, num_questions, probability, num_drawn = (np.array(column) for column in zip(*rows, strict=True))
    return Columns(
        step=step.astype(np.int64),
        bucket=bucket.astype(np.int64),
        num_members=np.full(len(rows), 8),
        num_questions=num_questions.astype(np.int64),
        probability=probability.astype(np.float64),
        num_drawn=num_drawn.astype(np.int64),
    )


def test_with_equal_probabilities_it_is_pearsons() -> None:
    # Two steps draw 50 each from p = (.2, .3, .5): expected (20, 30, 50), drawn (26, 24, 50).
    # 6^2/20 + 6^2/30 + 0 = 1.8 + 1.2 = 3.0 with 2 degrees of freedom: exp(-1.5) = .2231.
    rows = [
        (1, 3, 900, 0.2, 12), (1, 4, 900, 0.3, 13), (1, 5, 900, 0.5, 25),
        (2, 3, 900, 0.2, 14), (2, 4, 900, 0.3, 11), (2, 5, 900, 0.5, 25),
    ]  # fmt: skip
    test = draw_test(columns(rows))
    assert test["chi_square"] == pytest.approx(3.0)
    assert test["degrees_of_freedom"] == 2
    assert test["p_value"] == pytest.approx(0.22313, abs=1e-5)
    assert [(row["bucket"], row["drawn"]) for row in test["buckets"]] == [(3, 26), (4, 24), (5, 50)]
    assert [row["expected"] for row in test["buckets"]] == pytest.approx([20, 30, 50])


def test_rare_buckets_are_pooled() -> None:
    # Expected 2, 4, 44 and 50 of 100: the first two are one cell of 6. Drawn 8, 0 | 42 | 50.
    # Cells (8-6)^2/6 + (42-44)^2/44 + 0 = .6667 + .0909 with 2 degrees of freedom.
    test = draw_test(columns([(1, 1, 900, 0.02, 8), (1, 2, 900, 0.04, 0), (1, 4, 900, 0.44, 42), (1, 5, 900, 0.5, 50)]))
    assert test["degrees_of_freedom"] == 2
    assert test["chi_square"] == pytest.approx(4 / 6 + 4 / 44)


def test_a_draw_without_a_choice_has_no_p_value() -> None:
    # Everything that there is was drawn: 3 of 3 and 4 of 4.
    everything = draw_test(columns([(1, 3, 3, 0.5, 3), (1, 4, 4, 0.5, 4)]))
    assert (everything["p_value"], everything["degrees_of_freedom"]) == (None, 0)
    assert [row["expected"] for row in everything["buckets"]] == [3.0, 4.0]
    assert draw_test(columns([(1, 3, 3, 0.0, 0)]))["p_value"] is None


def simulated(rng: np.random.Generator, promised: np.ndarray, drawn_by: np.ndarray, steps: int = 40) -> float | None:
    """p-value of a run whose sampler promises one thing and draws by another; sizes make buckets overflow often."""
    rows = []
    for step in range(1, steps + 1):
        sizes = rng.integers(2, 40, len(promised))
        buckets = [
            Bucket(success_count=k + 1, num_members=8, question_ids=[f"{k}-{i}" for i in range(size)])
            for k, size in enumerate(sizes.tolist())
        ]
        drawn = draw_by_weights(buckets, drawn_by.tolist(), 16, rng).question_ids
        counts = [sum(question.startswith(f"{k}-") for question in drawn) for k in range(len(promised))]
        rows += [(step, k + 1, int(sizes[k]), float(promised[k]), counts[k]) for k in range(len(promised))]
    return draw_test(columns(rows))["p_value"]


WEIGHTS = np.exp(-0.5 * ((np.arange(1, 8) / 8 - 0.5) / 0.125) ** 2)
PROMISED = WEIGHTS / WEIGHTS.sum()


def test_the_samplers_own_draws_give_uniform_p_values_even_where_buckets_overflow() -> None:
    rng = np.random.default_rng(5)
    values = [simulated(rng, PROMISED, PROMISED) for _ in range(60)]
    # Kolmogorov-Smirnov against the uniform; a test that ignored the overflow would give p near 0 every time.
    assert stats.kstest(values, "uniform").pvalue > 0.01


def test_another_sampler_than_the_promised_one_is_found_out() -> None:
    rng = np.random.default_rng(6)
    flat = np.full(7, 1 / 7)
    assert max(simulated(rng, PROMISED, flat) for _ in range(5)) < 1e-3

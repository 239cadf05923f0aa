"""Question sampling against the closed form of its probabilities."""

from collections import Counter
from itertools import product
from math import factorial

import numpy as np
import pytest
from scipy import stats

from exgrpo_cli.base.errors import RunError
from exgrpo_cli.replay.by_question import Bucket, QuestionDraw, check_draw, draw_by_weights, resolve_sampler


def bucket(k: int, size: int, members: int = 8) -> Bucket:
    return Bucket(success_count=k, num_members=members, question_ids=tuple(f"k{k}-{i:03d}" for i in range(size)))


def counts_by_bucket(draw: QuestionDraw, buckets: list[Bucket]) -> tuple[int, ...]:
    return tuple(sum(question_id in bucket.question_ids for question_id in draw.question_ids) for bucket in buckets)


@pytest.mark.parametrize(
    ("name", "weights"),
    [
        ("linear", [0, 1 / 8, 4 / 8, 7 / 8]),
        ("linear-clip", [0, 1 / 8, 1 / 2, 1 / 2]),
        ("sqrt", [0, 8**-0.5, 0.5**0.5, (7 / 8) ** 0.5]),
        ("uniform", [3, 10, 20, 7]),
        # z of k = 0, 1, 4, 7 at mu 1/4 and sigma 1/4: (k/8 - 1/4) / (1/4) = -1, -1/2, 1, 5/2.
        ("normal", [np.exp(-0.5), np.exp(-0.125), np.exp(-0.5), np.exp(-3.125)]),
    ],
)
def test_every_sampler_by_hand(name: str, weights: list[float]) -> None:
    buckets = [bucket(0, 3), bucket(1, 10), bucket(4, 20), bucket(7, 7)]
    draw = resolve_sampler(name, 0.25, 0.25)(buckets, 5, np.random.default_rng(0))
    np.testing.assert_allclose(draw.probabilities, np.array(weights) / sum(weights), rtol=1e-12)


def test_counts_follow_the_multinomial_law() -> None:
    # Buckets hold at least what is drawn, so nothing overflows: P(n) = 3! / (a! b! c!) p^a q^b r^c.
    buckets = [bucket(2, 3), bucket(4, 3), bucket(6, 3)]
    p = np.array([0.2, 0.5, 0.3])
    rng = np.random.default_rng(1)
    draws = (draw_by_weights(buckets, (7 * p).tolist(), 3, rng) for _ in range(8000))
    seen = Counter(counts_by_bucket(draw, buckets) for draw in draws)
    outcomes = [n for n in product(range(4), repeat=3) if sum(n) == 3]
    expected = [8000 * factorial(3) / np.prod([factorial(i) for i in n]) * np.prod(p ** np.array(n)) for n in outcomes]
    assert stats.chisquare([seen[n] for n in outcomes], expected).pvalue > 1e-3


def test_questions_inside_a_bucket_are_equally_likely_and_distinct() -> None:
    buckets = [bucket(4, 6)]
    rng = np.random.default_rng(2)
    draws = [draw_by_weights(buckets, [1.0], 2, rng).question_ids for _ in range(3000)]
    assert all(len(set(ids)) == 2 for ids in draws)
    seen = Counter(question_id for ids in draws for question_id in ids)
    # Each of 6 questions is in a draw of 2 with probability 1/3.
    assert stats.chisquare(list(seen.values()), [1000] * 6).pvalue > 1e-3


def test_overflow_is_placed_one_by_one_by_renormalised_weights() -> None:
    # Weights 1 : 0.5 : 0.5, and bucket 4 holds a single question. Of 2 questions:
    # multinomial (2,0,0) has probability 1/4, then one is left over and goes to either other bucket with 1/2.
    # P(bucket 2 gives both) = P(0,2,0) = 1/16 only.
    buckets = [bucket(4, 1), bucket(2, 5), bucket(6, 5)]
    rng = np.random.default_rng(3)
    draws = (draw_by_weights(buckets, [1.0, 0.5, 0.5], 2, rng) for _ in range(6400))
    seen = Counter(counts_by_bucket(draw, buckets) for draw in draws)
    expected = {(1, 1, 0): 3 / 8, (1, 0, 1): 3 / 8, (0, 2, 0): 1 / 16, (0, 0, 2): 1 / 16, (0, 1, 1): 1 / 8}
    assert set(seen) == set(expected)
    assert stats.chisquare([seen[key] for key in expected], [6400 * p for p in expected.values()]).pvalue > 1e-3


def test_buckets_of_weight_zero_give_nothing() -> None:
    rng = np.random.default_rng(4)
    draw = draw_by_weights([bucket(0, 5), bucket(3, 2)], [0.0, 1.0], 4, rng)
    assert sorted(draw.question_ids) == ["k3-000", "k3-001"]
    nothing = draw_by_weights([bucket(0, 5)], [0.0], 4, rng)
    assert nothing.question_ids == () and nothing.probabilities.tolist() == [0.0]


def drawn(probabilities: list[float], *ids: str) -> QuestionDraw:
    return QuestionDraw(question_ids=ids, probabilities=np.array(probabilities))


@pytest.mark.parametrize(
    ("draw", "message"),
    [
        (["k1-000"], "python:my:sampler returned a list; it must return a QuestionDraw"),
        (drawn([1.0], "k1-000", "k1-000"), "2 questions, 1 distinct"),
        (drawn([1.0], "k1-000", "k1-001", "k1-002"), "3 questions, 3 distinct, of 2 wanted"),
        (drawn([1.0], "elsewhere"), "elsewhere, which was not offered"),
        (drawn([0.5, 0.5], "k1-000"), "for 1 buckets"),
        (drawn([0.7], "k1-000"), "add up to 1"),
        (drawn([float("nan")], "k1-000"), "none negative"),
    ],
)
def test_a_custom_draw_is_checked(draw: object, message: str) -> None:
    with pytest.raises(RunError, match=message):
        check_draw(draw, [bucket(1, 5)], 2, "python:my:sampler")


@pytest.mark.parametrize("weights", [[-1.0], [float("inf")], [1.0, 1.0]])
def test_weights_are_checked(weights: list[float]) -> None:
    with pytest.raises(RunError, match="for 1 buckets"):
        draw_by_weights([bucket(1, 5)], weights, 2, np.random.default_rng(0))

"""Question sampling: which buffered questions are replayed, by bucket and then uniformly inside it.

The paper draws a bucket with probability proportional to N(k/K; mu, sigma) (section 3): questions solved about half the
time teach most. sigma is on the accuracy scale here; the released code puts sigma = 1 on success counts, which is the
same at K = 8. Bucket sizes play no part in the weight, except for `uniform`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from jaxtyping import Float64, Int64

from exgrpo_cli.base.errors import InputError, RunError, nearest
from exgrpo_cli.config.names import PREFIX, SAMPLERS, replay_function


@dataclass(frozen=True, kw_only=True, slots=True)
class Bucket:
    """Questions with equal latest success count that may be drawn now. Never empty."""

    success_count: int
    num_members: int
    """Members that count was out of: K, or K-1 for experiential groups where only fresh members count."""
    question_ids: Sequence[str]
    """In ascending order; looked up as they are indexed."""

    def __len__(self) -> int:
        return len(self.question_ids)

    @property
    def pass_rate(self) -> float:
        """k / K of the questions in it."""
        return self.success_count / self.num_members


@dataclass(frozen=True, kw_only=True, slots=True)
class QuestionDraw:
    """Questions drawn, and what was promised before the draw."""

    question_ids: tuple[str, ...]
    """Distinct; fewer than asked for where buckets of positive weight ran out."""
    probabilities: Float64[np.ndarray, " buckets"]
    """Of each bucket that was offered, in their order; all 0 where nothing could be drawn."""


Sampler = Callable[[Sequence[Bucket], int, np.random.Generator], QuestionDraw]
"""Non-empty buckets in ascending order, number of questions wanted and the run's generator in, a draw out."""

Weigher = Callable[[Bucket], float]


def normal_weight(bucket: Bucket, *, mu: float, sigma: float) -> float:
    """N(k/K; mu, sigma) up to a factor."""
    return float(np.exp(-0.5 * ((bucket.pass_rate - mu) / sigma) ** 2))


def linear_weight(bucket: Bucket) -> float:
    """k/K."""
    return bucket.pass_rate


def clipped_linear_weight(bucket: Bucket) -> float:
    """min(k/K, 1/2)."""
    return min(bucket.pass_rate, 0.5)


def sqrt_weight(bucket: Bucket) -> float:
    """sqrt(k/K)."""
    return bucket.pass_rate**0.5


def size_weight(bucket: Bucket) -> float:
    """The number of questions: every question is equally likely."""
    return float(len(bucket))


WEIGHERS: dict[str, Weigher] = {
    "linear": linear_weight,
    "linear-clip": clipped_linear_weight,
    "sqrt": sqrt_weight,
    "uniform": size_weight,
}


def resolve_sampler(name: str, mu: float, sigma: float) -> Sampler:
    """The sampler of a setting: one of SAMPLERS, or the user's `python:module:function`. Raises InputError."""
    if name.startswith(PREFIX):
        return replay_function("replay.sampler", name)
    if name not in SAMPLERS:
        raise InputError(f"replay.sampler = {name!r} is not known.{nearest(name, SAMPLERS)}")
    weigher = partial(normal_weight, mu=mu, sigma=sigma) if name == "normal" else WEIGHERS[name]
    return partial(_sample, weigher=weigher)


def _sample(buckets: Sequence[Bucket], num: int, rng: np.random.Generator, *, weigher: Weigher) -> QuestionDraw:
    return draw_by_weights(buckets, [weigher(bucket) for bucket in buckets], num, rng)


def draw_by_weights(
    buckets: Sequence[Bucket], weights: Sequence[float], num: int, rng: np.random.Generator
) -> QuestionDraw:
    """Draw `num` questions: buckets in proportion to their weights, questions uniformly without replacement.

    Counts are multinomial; what a bucket cannot give is placed one by one, by the weights of buckets with room. A
    bucket of weight 0 gives nothing, so the draw may fall short. Raises RunError for weights that are none.
    """
    shares = np.asarray(weights, dtype=np.float64)
    if shares.shape != (len(buckets),) or not np.isfinite(shares).all() or (shares < 0).any():
        raise RunError(
            f"replay.sampler: weights {list(weights)} for {len(buckets)} buckets; they must be >= 0 and finite"
        )
    if shares.sum() == 0 or num <= 0:
        return QuestionDraw(question_ids=(), probabilities=np.zeros(len(buckets)))
    # Divided by the largest first, so that a sum of tiny weights keeps its digits.
    shares = shares / shares.max()
    probabilities = shares / shares.sum()
    counts = _counts(np.array([len(bucket) for bucket in buckets]), probabilities, num, rng)
    drawn = [
        bucket.question_ids[int(rank)]
        for bucket, count in zip(buckets, counts.tolist(), strict=True)
        for rank in rng.choice(len(bucket), size=count, replace=False)
    ]
    return QuestionDraw(question_ids=tuple(drawn), probabilities=probabilities)


def check_draw(drawn: object, buckets: Sequence[Bucket], num: int, name: str) -> QuestionDraw:
    """The draw, once it is sure to be of distinct questions that were offered, with one probability per bucket.

    Raises RunError where a sampler of the user returned anything else.
    """
    if not isinstance(drawn, QuestionDraw):
        raise RunError(f"replay.sampler {name} returned a {type(drawn).__name__}; it must return a QuestionDraw")
    ids, probabilities = drawn.question_ids, np.asarray(drawn.probabilities, dtype=np.float64)
    if len(set(ids)) != len(ids) or len(ids) > num:
        raise RunError(f"replay.sampler {name} drew {len(ids)} questions, {len(set(ids))} distinct, of {num} wanted")
    for question_id in ids:
        if not any(question_id in bucket.question_ids for bucket in buckets):
            raise RunError(f"replay.sampler {name} drew question {question_id}, which was not offered")
    if probabilities.shape != (len(buckets),) or not (probabilities >= 0).all():
        raise RunError(
            f"replay.sampler {name} gave probabilities {probabilities.tolist()} for {len(buckets)} buckets; "
            "return one per bucket, none negative"
        )
    if ids and not np.isclose(probabilities.sum(), 1.0):
        raise RunError(f"replay.sampler {name} gave probabilities that add up to {probabilities.sum():.6g}, not 1")
    return QuestionDraw(question_ids=tuple(ids), probabilities=probabilities)


def _counts(
    sizes: Int64[np.ndarray, " buckets"],
    probabilities: Float64[np.ndarray, " buckets"],
    num: int,
    rng: np.random.Generator,
) -> Int64[np.ndarray, " buckets"]:
    """How many questions each bucket gives."""
    wanted = rng.multinomial(num, probabilities)
    counts = np.minimum(wanted, sizes)
    for _ in range(int(num - counts.sum())):
        room = np.where(counts < sizes, probabilities, 0.0)
        if room.sum() == 0:
            break
        counts[rng.choice(len(room), p=room / room.sum())] += 1
    return counts

"""Replay by question: which buffered questions are drawn, and which of a question's stored rows are replayed.

The paper draws a bucket with probability proportional to N(k/K; mu, sigma) (section 3): questions solved about half the
time teach most. sigma is on the accuracy scale here; the released code puts sigma = 1 on success counts, which is the
same at K = 8. Bucket sizes play no part in the weight, except for `uniform`. Of a question's rows it replays the one
with the lowest H(o; pi_theta), the mean token entropy under the current policy; ties go to the lowest trajectory id.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, NamedTuple, overload

import numpy as np
from jaxtyping import Bool, Float32, Float64, Int32, Int64

from exgrpo_cli.base.errors import InputError, RunError, nearest
from exgrpo_cli.base.types import Trajectory
from exgrpo_cli.config.names import METRICS as METRIC_NAMES
from exgrpo_cli.config.names import PREFIX, SAMPLERS, UNSCORED_METRICS, replay_function
from exgrpo_cli.config.sections import refuse_together, require_known, require_non_negative, require_positive
from exgrpo_cli.replay.place import Asked, Metrics, Place, Replayed

NO_BUCKET = -1
AWAKE = -1


class NamedQuestions(Sequence[str]):
    """Question numbers seen as their ids, in ascending order; an id is looked up as it is indexed."""

    def __init__(self, ids: Sequence[str], numbers: Int64[np.ndarray, " some"]) -> None:
        """`ids` are all of them, in ascending order, and so are the `numbers` of those that are meant."""
        self._ids = ids
        self._numbers = numbers

    def __len__(self) -> int:
        return len(self._numbers)

    def __contains__(self, question_id: object) -> bool:
        if not isinstance(question_id, str):
            return False
        rank = bisect_left(self, question_id)
        return rank < len(self) and self[rank] == question_id

    @overload
    def __getitem__(self, rank: int) -> str: ...
    @overload
    def __getitem__(self, rank: slice) -> list[str]: ...
    def __getitem__(self, rank: int | slice) -> str | list[str]:
        if isinstance(rank, slice):
            return [self._ids[number] for number in self._numbers[rank].tolist()]
        return self._ids[int(self._numbers[rank])]


class BucketKey(NamedTuple):
    """Latest success count, and out of how many members."""

    success_count: int
    num_members: int


class QuestionStates:
    """Bucket, rest and retirement of every question, in flat arrays by its number: the rank of its id among all.

    A question has a bucket exactly while it is in the buffer: it has live rows and is not retired. Drawable are those
    that do not rest after a replay.
    """

    def __init__(self, question_ids: Sequence[str]) -> None:
        self.ids = sorted(question_ids)
        self._number = dict(zip(self.ids, range(len(self.ids)), strict=True))
        if len(self._number) != len(self.ids):
            raise ValueError(f"{len(self.ids) - len(self._number)} question ids occur twice")
        size = len(self.ids)
        self.success_counts: Int32[np.ndarray, " questions"] = np.full(size, NO_BUCKET, dtype=np.int32)
        """Latest success count; NO_BUCKET outside the buffer."""
        self.num_members: Int32[np.ndarray, " questions"] = np.zeros(size, dtype=np.int32)
        self.retired: Bool[np.ndarray, " questions"] = np.zeros(size, dtype=bool)
        self.rests_until: Int32[np.ndarray, " questions"] = np.full(size, AWAKE, dtype=np.int32)
        """Last step at which a question may not be drawn."""

    @property
    def nbytes(self) -> int:
        """Memory in bytes, ids apart."""
        columns = (self.success_counts, self.num_members, self.retired, self.rests_until)
        return sum(column.nbytes for column in columns)

    def number(self, question_id: str) -> int:
        """Number of a question. Raises InputError for one that is not of the run's question file."""
        if question_id not in self._number:
            raise InputError(f"question {question_id} is not in the question file of this run")
        return self._number[question_id]

    def named(self, numbers: Int64[np.ndarray, " some"]) -> NamedQuestions:
        """Questions by their ids."""
        return NamedQuestions(self.ids, numbers)

    def bucket(self, question: int) -> BucketKey | None:
        """The bucket of a question; None where it is in none."""
        count = int(self.success_counts[question])
        return None if count == NO_BUCKET else BucketKey(count, int(self.num_members[question]))

    def place(self, question: int, key: BucketKey | None) -> None:
        """Put a question into a bucket, or take it out of the buffer (None)."""
        self.success_counts[question], self.num_members[question] = key or (NO_BUCKET, 0)

    def can_draw(self, step: int) -> Bool[np.ndarray, " questions"]:
        """Which questions are in a bucket and do not rest at `step`."""
        return (self.success_counts != NO_BUCKET) & (self.rests_until < step)

    def drawable(self, step: int) -> list["Bucket"]:
        """Non-empty buckets in ascending order, each with its drawable questions."""
        questions = np.flatnonzero(self.can_draw(step))
        if not len(questions):
            return []
        members = self.num_members[questions]
        most = int(members.max()) + 1
        keys = self.success_counts[questions] * most + members
        return [
            Bucket(success_count=key // most, num_members=key % most, question_ids=self.named(questions[keys == key]))
            for key in np.flatnonzero(np.bincount(keys)).tolist()
        ]


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
WEIGHERS: dict[str, Weigher] = {
    "linear": lambda bucket: bucket.pass_rate,
    "linear-clip": lambda bucket: min(bucket.pass_rate, 0.5),
    "sqrt": lambda bucket: bucket.pass_rate**0.5,
    # Every question is equally likely.
    "uniform": lambda bucket: float(len(bucket)),
}
"""Weight of a bucket by the name of its sampler; `normal` depends on two settings besides."""


def normal_weight(bucket: Bucket, *, mu: float, sigma: float) -> float:
    """N(k/K; mu, sigma) up to a factor."""
    return float(np.exp(-0.5 * ((bucket.pass_rate - mu) / sigma) ** 2))


def resolve_sampler(name: str, mu: float, sigma: float) -> Sampler:
    """The sampler of a setting: one of SAMPLERS, or the user's `python:module:function`. Raises InputError."""
    if name.startswith(PREFIX):
        return replay_function("replay.sampler", name)
    if name not in SAMPLERS:
        raise InputError(f"replay.sampler = {name!r} is not known.{nearest(name, SAMPLERS)}")
    weigher = partial(normal_weight, mu=mu, sigma=sigma) if name == "normal" else WEIGHERS[name]
    return lambda buckets, num, rng: draw_by_weights(buckets, [weigher(bucket) for bucket in buckets], num, rng)


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidates:
    """The trajectories of one question that may be replayed, in ascending order of id."""

    question_id: str
    trajectory_ids: Int64[np.ndarray, " candidates"]
    num_tokens: Int32[np.ndarray, " candidates"]
    """Response tokens, the EOS included."""
    step_born: Int32[np.ndarray, " candidates"]
    born_version: Int32[np.ndarray, " candidates"]
    """Weight version that sampled it; -1 where that was another run's."""
    entropy: Float64[np.ndarray, " candidates"]
    """Mean over its tokens of the full-vocabulary entropy, in nats, as last measured."""
    nll: Float64[np.ndarray, " candidates"]
    """Mean over its tokens of the negative log-likelihood, in nats, as last measured."""
    measured_version: Int32[np.ndarray, " candidates"]
    """Weight version of that measurement."""
    reward: Float32[np.ndarray, " candidates"]
    chosen: tuple[int, ...] = ()
    """Positions of those that are replayed, best first."""

    def __len__(self) -> int:
        return len(self.trajectory_ids)

    def measured(
        self,
        where: Bool[np.ndarray, " candidates"],
        *,
        entropy: Float64[np.ndarray, " measured"],
        nll: Float64[np.ndarray, " measured"],
        weight_version: int,
    ) -> "Candidates":
        """A copy in which the candidates at `where` carry new measurements, given in their order."""
        entropies, nlls, versions = self.entropy.copy(), self.nll.copy(), self.measured_version.copy()
        entropies[where], nlls[where], versions[where] = entropy, nll, weight_version
        return replace(self, entropy=entropies, nll=nlls, measured_version=versions)

    @property
    def chosen_ids(self) -> list[int]:
        """Trajectories that are replayed, best first."""
        return self.trajectory_ids[list(self.chosen)].tolist()

    def stale(self, weight_version: int, max_staleness: int) -> Bool[np.ndarray, " candidates"]:
        """Which measurements are more than `max_staleness` weight versions old, missing, or another run's."""
        age = weight_version - self.measured_version
        return (age > max_staleness) | (self.measured_version < 0) | ~np.isfinite(self.entropy + self.nll)


Metric = Callable[[Candidates, np.random.Generator], Float64[np.ndarray, " candidates"]]
"""Candidates of one question and the run's generator in, one finite score per candidate out."""


METRICS: dict[str, Metric] = {
    # H(o; pi_theta), the paper's.
    "ent": lambda candidates, rng: candidates.entropy,
    # Prefers short trajectories; near to what the released code computes.
    "ent-sum": lambda candidates, rng: candidates.entropy * candidates.num_tokens,
    "ppl": lambda candidates, rng: np.exp(candidates.nll),
    "length": lambda candidates, rng: candidates.num_tokens.astype(np.float64),
    "random": lambda candidates, rng: rng.random(len(candidates)),
    "reward": lambda candidates, rng: candidates.reward.astype(np.float64),
    # In the order of ages at the step of the draw.
    "age": lambda candidates, rng: -candidates.step_born.astype(np.float64),
}
"""Score of each candidate, by the name of the metric."""


def resolve_metric(name: str) -> Metric:
    """The metric of a setting: one of METRICS, or the user's `python:module:function`. Raises InputError."""
    if name.startswith(PREFIX):
        return replay_function("replay.metric", name)
    if name not in METRICS:
        raise InputError(f"replay.metric = {name!r} is not known.{nearest(name, tuple(METRICS))}")
    return METRICS[name]


def choose(
    candidates: Candidates, metric: Metric, direction: str, rng: np.random.Generator, *, num: int = 1
) -> list[int]:
    """Positions of the `num` candidates of lowest ("min") or highest ("max") score, best first, the first of equals.

    All of them, if fewer. Raises RunError where the metric does not give one finite score per candidate.
    """
    scores = np.asarray(metric(candidates, rng), dtype=np.float64)
    if scores.shape != (len(candidates),):
        raise RunError(
            f"replay.metric gave scores of shape {scores.shape} for the {len(candidates)} candidates "
            f"of question {candidates.question_id}; it must return one score per candidate"
        )
    if not np.isfinite(scores).all():
        position = int(np.flatnonzero(~np.isfinite(scores))[0])
        raise RunError(
            f"replay.metric gave {scores[position]} for trajectory {candidates.trajectory_ids[position]} "
            f"of question {candidates.question_id}; scores must be finite"
        )
    return np.argsort(scores if direction == "min" else -scores, kind="stable")[:num].tolist()


@dataclass(frozen=True, kw_only=True, slots=True)
class QuestionPlace(Place):
    """Replay of rows of a question among its own rollouts: the keys of `replace` and `join`."""

    eviction: Literal["oldest", "highest-entropy", "longest", "random"] = "oldest"
    per_question: int = 1
    """Stored rows that a question replays at most."""
    metric: str = "ent"
    """Which trajectory of a question is replayed: `ent`, `ent-sum`, `ppl`, `length`, `random`, `reward`, `age`, or
    `python:m:f`."""
    direction: Literal["min", "max"] = "min"
    """Whether the lowest or the highest metric is chosen."""
    advantage_over: Literal["group", "own"] = "group"
    """Advantages: over fresh and replayed rows together, or over each kind apart."""
    max_per_question: int = 0
    """Most trajectories kept per question; 0 is unbounded, as in the paper."""
    max_score_staleness: int = 0
    """Weight versions a measured entropy may lag behind before it is measured again; 0 is exact."""
    cooldown: int = 0
    """Steps a question rests after a replay; 0 is none."""

    def __post_init__(self) -> None:
        Place.__post_init__(self)
        require_positive("replay", self, "per_question")
        require_non_negative("replay", self, "max_per_question", "cooldown", "max_score_staleness")
        require_known("replay.metric", self.metric, METRIC_NAMES, python=True)
        if self.enabled and self.advantage_over == "own" and self.per_question < 2:
            instead = "use per_question of at least 2, or advantage_over = 'group'"
            reason = "the advantage of one row over itself is 0"
            refuse_together("replay", self, "advantage_over", "per_question", reason, instead)
        if self.enabled and self.metric == "reward" and self.store == "successes":
            instead = "use another metric, or composition = 'join' with store = 'all'"
            refuse_together("replay", self, "metric", "store", "all stored rewards are equal", instead)

    @property
    def needs_scores(self) -> bool:
        """Whether selection looks at entropies or likelihoods, which take a forward pass."""
        return self.metric not in UNSCORED_METRICS

    def choose(self, asked: Asked, offered: Sequence[Candidates]) -> list[Candidates]:
        """The candidates of each question, measured where the metric looks at it, with those chosen to be replayed."""
        if self.needs_scores:
            offered = self._measured(asked, offered)
        metric, rng = resolve_metric(self.metric), asked.rngs["choice"]
        return [
            replace(each, chosen=tuple(choose(each, metric, self.direction, rng, num=self.per_question)))
            for each in offered
        ]

    def _measured(self, asked: Asked, offered: Sequence[Candidates]) -> list[Candidates]:
        """The candidates, those whose measurements are too old measured under the current policy: all in one pass."""
        version = asked.weight_version
        stale = [each.stale(version, self.max_score_staleness) for each in offered]
        ids = [each.trajectory_ids[where].tolist() for each, where in zip(offered, stale, strict=True)]
        scores = asked.scored(asked.store.load([trajectory_id for own in ids for trajectory_id in own]))
        return [
            each.measured(
                where,
                entropy=np.array([scores[trajectory_id].mean_entropy for trajectory_id in own], dtype=np.float64),
                nll=np.array([scores[trajectory_id].mean_nll for trajectory_id in own], dtype=np.float64),
                weight_version=version,
            )
            for each, where, own in zip(offered, stale, ids, strict=True)
        ]

    def metrics(self, offered: Sequence[Candidates], chosen: Sequence[Trajectory], step: int) -> Metrics:
        """`replay/*` keys of a draw; entropies only where they were measured for it."""
        metrics: Metrics = {
            "replay/used": len(chosen),
            "replay/candidates_mean": float(np.mean([len(each) for each in offered])),
            "replay/age_mean": float(np.mean([step - trajectory.step_born for trajectory in chosen])),
        }
        if self.needs_scores:
            selected = [each.entropy[at] for each in offered for at in each.chosen]
            metrics["replay/entropy_selected"] = float(np.mean(selected))
            metrics["replay/entropy_available"] = float(np.mean(np.concatenate([each.entropy for each in offered])))
        return metrics


def rows_by_question(asked: Asked, trajectories: Sequence[Trajectory]) -> dict[str, tuple[Replayed, ...]]:
    """The rows to replay of each question, in their order."""
    chosen: dict[str, tuple[Replayed, ...]] = {}
    for each in trajectories:
        chosen[each.question_id] = (*chosen.get(each.question_id, ()), asked.replayed(each))
    return chosen

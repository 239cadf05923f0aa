"""Replay by question: which buffered questions are drawn, and which of a question's stored rows are replayed.

The paper draws a bucket with probability proportional to N(k/K; mu, sigma) (section 4.1): questions solved about half
the time teach most (section 3.2). sigma is on the accuracy scale here; the released code puts sigma = 1 on success
counts, which is the same at K = 8. Bucket sizes play no part in the weight, except for `uniform`. Of a question's rows
it replays the one with the lowest H(o; pi_theta), here the mean full-vocabulary entropy of its tokens under the current
policy; ties go to the lowest trajectory id. The paper's algorithm 1 writes the mean of -log pi instead, which orders
trajectories as the metric `ppl` does.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from jaxtyping import Float32, Float64, Int32, Int64

from exgrpo_cli.base.errors import RunError
from exgrpo_cli.base.types import TokenScores, Trajectory
from exgrpo_cli.config.names import PREFIX, replay_function
from exgrpo_cli.config.sections import NON_NEGATIVE, POSITIVE, SET, Needs, setting
from exgrpo_cli.replay.place import Asked, Experience, Metrics, Place, checked_numbers, whole_share


@dataclass(frozen=True, kw_only=True, slots=True)
class Bucket:
    """Questions with equal latest success count that may be drawn now. Never empty."""

    success_count: int
    num_members: int
    """Members of which so many were right: K, or K-1 for experiential groups where only fresh members count."""
    question_ids: Sequence[str]
    """In ascending order."""

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
    probabilities: np.ndarray
    """Probability of each bucket that was offered, in their order; all 0 where nothing could be drawn."""


Sampler = Callable[[Sequence[Bucket], int, np.random.Generator], QuestionDraw]
"""Non-empty buckets in ascending order, number of questions wanted and random generator in, a draw out."""


SAMPLERS: dict[str, Callable[[Bucket, float, float], float]] = {
    # N(k/K; mu, sigma) up to a factor.
    "normal": lambda bucket, mu, sigma: float(np.exp(-0.5 * ((bucket.pass_rate - mu) / sigma) ** 2)),
    "linear": lambda bucket, mu, sigma: bucket.pass_rate,
    "linear-clip": lambda bucket, mu, sigma: min(bucket.pass_rate, 0.5),
    "sqrt": lambda bucket, mu, sigma: bucket.pass_rate**0.5,
    # Every question is equally likely.
    "uniform": lambda bucket, mu, sigma: float(len(bucket)),
}
"""Weight of a bucket, by the name of the sampler."""


def resolve_sampler(name: str, mu: float, sigma: float) -> Sampler:
    """The sampler of a setting: one of SAMPLERS, or the user's `python:module:function`. Raises InputError."""
    if name.startswith(PREFIX):
        own = replay_function("replay.sampler", name)
        return lambda buckets, num, rng: check_draw(own(buckets, num, rng), buckets, num, name)
    weigh = SAMPLERS[name]
    return lambda buckets, num, rng: draw_by_weights(buckets, [weigh(each, mu, sigma) for each in buckets], num, rng)


def check_draw(drawn: object, buckets: Sequence[Bucket], num: int, name: str) -> QuestionDraw:
    """The draw, once it is sure to be of distinct questions that were offered, with one probability per bucket.

    Raises RunError where a sampler of the user returned anything else.
    """
    if not isinstance(drawn, QuestionDraw):
        raise RunError(f"replay.sampler {name} returned a {type(drawn).__name__}; it must return a QuestionDraw")
    ids, probabilities = drawn.question_ids, np.asarray(drawn.probabilities, dtype=np.float64)
    if len(set(ids)) != len(ids) or len(ids) > num:
        raise RunError(f"replay.sampler {name} drew {len(ids)} questions, {len(set(ids))} distinct, of {num} wanted")
    if strange := set(ids) - {question_id for bucket in buckets for question_id in bucket.question_ids}:
        raise RunError(f"replay.sampler {name} drew question {min(strange)}, which was not offered")
    valid = probabilities.shape == (len(buckets),) and (probabilities >= 0).all()
    if not valid or (ids and not np.isclose(probabilities.sum(), 1.0)):
        raise RunError(
            f"replay.sampler {name} gave probabilities {probabilities.tolist()} for {len(buckets)} buckets; "
            "return one per bucket, none negative, that add up to 1"
        )
    return QuestionDraw(question_ids=tuple(ids), probabilities=probabilities)


def draw_by_weights(
    buckets: Sequence[Bucket], weights: Sequence[float], num: int, rng: np.random.Generator
) -> QuestionDraw:
    """Draw `num` questions: buckets in proportion to their weights, questions uniformly without replacement.

    Counts are multinomial (the paper's algorithm 2); what a bucket cannot give is placed one by one, by the weights of
    buckets with room. A bucket of weight 0 gives nothing, so the draw may fall short. Raises RunError for negative or
    infinite weights.
    """
    shares = np.asarray(weights, dtype=np.float64)
    if shares.shape != (len(buckets),) or not np.isfinite(shares).all() or (shares < 0).any():
        raise RunError(f"replay.sampler: weights {list(weights)} for {len(buckets)} buckets; use finite ones >= 0")
    if shares.sum() == 0 or num <= 0:
        return QuestionDraw(question_ids=(), probabilities=np.zeros(len(buckets)))
    # Divided by the largest first, so that a sum of tiny weights keeps its digits.
    shares = shares / shares.max()
    probabilities = shares / shares.sum()
    sizes = np.array([len(bucket) for bucket in buckets])
    counts = np.minimum(rng.multinomial(num, probabilities), sizes)
    for _ in range(int(num - counts.sum())):
        room = np.where(counts < sizes, probabilities, 0.0)
        if room.sum() == 0:
            break
        counts[rng.choice(len(room), p=room / room.sum())] += 1
    drawn = [
        bucket.question_ids[int(rank)]
        for bucket, count in zip(buckets, counts.tolist(), strict=True)
        for rank in rng.choice(len(bucket), size=count, replace=False)
    ]
    return QuestionDraw(question_ids=tuple(drawn), probabilities=probabilities)


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

    def __len__(self) -> int:
        return len(self.trajectory_ids)


Metric = Callable[[Candidates, np.random.Generator], Float64[np.ndarray, " candidates"]]
"""Candidates of one question and random generator in, one finite score per candidate out."""


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
UNSCORED = ("length", "random", "reward", "age")
"""Metrics without a measurement, which need no forward pass."""


def resolve_metric(name: str) -> Metric:
    """The metric of a setting: one of METRICS, or the user's `python:module:function`. Raises InputError."""
    return replay_function("replay.metric", name) if name.startswith(PREFIX) else METRICS[name]


def choose(
    candidates: Candidates, metric: Metric, direction: str, rng: np.random.Generator, *, num: int = 1
) -> list[int]:
    """Positions of the `num` candidates of lowest ("min") or highest ("max") score, best first, the first of equals.

    All of them, if fewer. Raises RunError where the metric does not give one finite score per candidate.
    """
    scores = checked_numbers(
        metric(candidates, rng),
        "replay.metric",
        len(candidates),
        lambda position: f"trajectory {candidates.trajectory_ids[position]} of question {candidates.question_id}",
        least=float(np.finfo(np.float64).min),
        bound="finite",
    )
    return np.argsort(scores if direction == "min" else -scores, kind="stable")[:num].tolist()


def effective_sample_share(chosen: Sequence[Trajectory], current: Sequence[TokenScores]) -> float:
    """Kish's (sum w)^2 / (n sum w^2) over the replayed tokens, w = pi_now / pi_behaviour; 1 when nothing has moved.

    Taken from log w less its maximum, which cancels, so that no ratio overflows.
    """
    pairs = zip(chosen, current, strict=True)
    log_w = np.concatenate([scores.logprobs.astype(np.float64) - row.behaviour_logprobs for row, scores in pairs])
    w = np.exp(log_w - log_w.max())
    return float(w.sum() ** 2 / (len(w) * (w**2).sum()))


@dataclass(frozen=True, kw_only=True, slots=True)
class QuestionPlace(Place):
    """Base of the places that draw questions."""

    eviction: Literal["oldest", "highest-entropy", "longest", "random"] = "oldest"
    max_per_question: int = setting(0, NON_NEGATIVE)
    """Most trajectories kept per question; 0 is unbounded, as in the paper."""
    cooldown: int = setting(0, NON_NEGATIVE)
    """Steps a question rests after a replay, with `revisit` after it was stored too; 0 is none."""

    def drawn(self, asked: Asked, sampler: Sampler, ratio: float) -> tuple[str, ...]:
        """At most floor(ratio * B) questions drawn by a sampler, without those whose group is under way.

        Raises RunError where a sampler of the user's breaks its promises.
        """
        num = whole_share(ratio, asked.questions_per_step)
        drawn = asked.store.draw_questions(sampler, num, asked.step, asked.rngs["draw"])
        return tuple(question_id for question_id in drawn if question_id not in asked.under_way)


@dataclass(frozen=True, kw_only=True, slots=True)
class RowPlace(QuestionPlace):
    """Base of the places that choose among a question's stored rows."""

    metric: str = setting("ent", (*METRICS, PREFIX), {"reward": Needs("all rewards are equal", store=("all", "none"))})
    """Metric that chooses the trajectory of a question: `ent`, `ent-sum`, `ppl`, `length`, `random`, `reward`,
    `age`, or `python:m:f`."""
    direction: Literal["min", "max"] = "min"
    """Whether the lowest or the highest metric is chosen."""
    max_score_staleness: int = setting(0, NON_NEGATIVE)
    """Weight versions a measured entropy may lag behind before it is measured again; 0 is exact."""

    per_question = 1

    @property
    def needs_scores(self) -> bool:
        """Whether selection looks at entropies or likelihoods, which take a forward pass."""
        return self.metric not in UNSCORED

    def replay(self, asked: Asked, question_ids: Sequence[str], *, ess_bound: float = 0.0) -> Experience:
        """Choose among the stored rows of each question, of which each has at least one, and record the choice.

        Rows whose effective sample size, as a share of their tokens, is below `ess_bound` stay in the store.
        """
        store, step = asked.store, asked.step
        if self.needs_scores:
            self._measure(asked, question_ids)
        metric, rng, offered = resolve_metric(self.metric), asked.rngs["choice"], store.candidates(question_ids)
        best = [choose(each, metric, self.direction, rng, num=self.per_question) for each in offered]
        chosen = [each.trajectory_ids[places].tolist() for each, places in zip(offered, best, strict=True)]
        rows = {each.question_id: store.load(own) for each, own in zip(offered, chosen, strict=True)}
        flat = [row for own in rows.values() for row in own]
        metrics: Metrics = {
            "replay/used": len(flat),
            "replay/candidates_mean": float(np.mean([len(each) for each in offered])),
            "replay/age_mean": float(np.mean([step - row.step_born for row in flat])),
        }
        if self.needs_scores:
            selected = store.rows["entropy"][[row.trajectory_id for row in flat]]
            metrics["replay/entropy_selected"] = float(np.mean(selected))
            metrics["replay/entropy_available"] = float(np.mean(np.concatenate([each.entropy for each in offered])))
        if asked.from_old or ess_bound:
            asked.scored(flat)
        if ess_bound:
            ess = effective_sample_share(flat, [asked.scores[row.trajectory_id] for row in flat])
            metrics["replay/ess_before"] = ess
            if ess < ess_bound:
                store.record_choice(step, offered, [[]] * len(offered))
                note = (
                    f"step {step}: the draw's effective sample size {ess:.3f} is below replay.ess_bound = {ess_bound}; "
                    "its questions stay in the buffer and the step takes fresh ones"
                )
                return Experience(metrics={"replay/used": 0, "replay/ess_before": ess}, notes=(note,))
        store.record_choice(step, offered, chosen)
        return Experience(
            by_question={question_id: tuple(map(asked.replayed, own)) for question_id, own in rows.items()},
            own_advantages=self.advantage_over == "own",
            metrics=metrics,
            tokens_scored=asked.tokens_scored,
        )

    def _measure(self, asked: Asked, question_ids: Sequence[str]) -> None:
        """Measure rows of questions under the current policy, all in one pass: those whose last measurement is missing,
        another run's, or more than `max_score_staleness` weight versions old."""
        rows, version = asked.store.rows, asked.weight_version
        ids = np.concatenate(asked.store.held_by(question_ids))
        measured = rows["measured_version"][ids]
        fresh = (measured >= 0) & (version - measured <= self.max_score_staleness)
        stale = ids[~(fresh & np.isfinite(rows["entropy"][ids] + rows["nll"][ids]))]
        scores = asked.scored(asked.store.load(stale.tolist()))
        rows["entropy"][stale] = [scores[trajectory_id].mean_entropy for trajectory_id in stale.tolist()]
        rows["nll"][stale] = [scores[trajectory_id].mean_nll for trajectory_id in stale.tolist()]
        rows["measured_version"][stale] = version


@dataclass(frozen=True, kw_only=True, slots=True)
class MemberPlace(RowPlace):
    """Base of `Replace` and `Join`: rows of a question are replayed in its own group."""

    per_question: int = setting(1, POSITIVE)
    """Stored rows that a question replays at most."""
    advantage_over: Literal["group", "own"] = setting("group", needs=Needs("of one row it is 0", per_question=SET))
    """Advantages: over fresh and replayed rows together, or over each kind apart."""

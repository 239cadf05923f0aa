"""Places of replayed rows: the keys of every place, what a place is given in a step, and what it gives back.

A place is a strategy of replay, named by where in a step's batch the stored rows go: `Replace`, `Join`, `Append` or
`Refill`, chosen by `replay.composition`; each holds the keys that it reads and no other. `before` draws what stands in
for rollouts, ahead of them; `beside` what trains with the step's groups. Rank 0 asks the place; all ranks score what it
wants scored.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

from exgrpo_cli.base.errors import RunError
from exgrpo_cli.base.types import TokenScores, Trajectory
from exgrpo_cli.config.names import METRICS, UNSCORED_METRICS
from exgrpo_cli.config.sections import (
    refuse_together,
    require,
    require_fraction,
    require_known,
    require_non_negative,
    require_positive,
)

if TYPE_CHECKING:
    from exgrpo_cli.replay.store import Store

Metrics = dict[str, float | int]
Clash = tuple[str, str, str, str]
"""Two keys of `replay` that contradict each other, why, and what to use instead."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Replayed:
    """A stored trajectory to train on again."""

    trajectory: Trajectory
    behaviour_logprobs: np.ndarray
    """Denominator of its ratio: the trajectory's own; this step's pi_old in the ablation without importance
    correction."""
    weight: float = 1.0
    """Factor of its advantage."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Experience:
    """Stored rows that a step replays, and how they train."""

    by_question: Mapping[str, tuple[Replayed, ...]] = field(default_factory=dict)
    """Rows replayed in their question's own group, in the order drawn."""
    joined: bool = False
    """These stand beside K rollouts, not in the place of some."""
    own_advantages: bool = False
    """Their advantages are over the replayed rows alone, and those of fresh rollouts over the fresh ones."""
    units: tuple[tuple[Replayed, ...], ...] = ()
    """Units drawn from the whole store, each with the rows that train beside the step's groups."""
    order: Any = "mixed"
    """Units among the fresh mini-batches, or in mini-batches of their own: `mixed`, `first` or `last`."""
    drops_unmixed: bool = False
    """Groups of equal rewards leave the step's N."""
    metrics: Metrics = field(default_factory=lambda: {"replay/used": 0})
    """`replay/*` keys of the draw."""
    tokens_scored: int = 0
    """Response tokens of stored rows that the current policy has scored."""
    notes: tuple[str, ...] = ()
    """Messages for the user about the draw."""


LOWEST = float(np.finfo(np.float64).min)
"""Least finite number."""
NO_EXPERIENCE = Experience()
"""A step without replay."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """Context of a step that a place is given, on rank 0."""

    store: "Store"
    step: int
    weight_version: int
    """Number of weight changes so far: that of the current policy."""
    questions_per_step: int
    """B."""
    from_old: bool
    """Ratios divide by this step's pi_old instead of a row's own behaviour policy (an ablation of the paper)."""
    rngs: Mapping[str, np.random.Generator]
    score: Callable[[Sequence[Trajectory]], Sequence[TokenScores]]
    """Log-probs and entropies of stored rows under the current policy."""
    scores: dict[int, TokenScores] = field(default_factory=dict)
    """Those of this step so far, by trajectory id."""

    def scored(self, trajectories: Sequence[Trajectory]) -> Mapping[int, TokenScores]:
        """The step's scores, those of the trajectories that had none yet added."""
        missing = [trajectory for trajectory in trajectories if trajectory.trajectory_id not in self.scores]
        if missing:
            ids = [trajectory.trajectory_id for trajectory in missing]
            self.scores.update(zip(ids, self.score(missing), strict=True))
        return self.scores

    @property
    def tokens_scored(self) -> int:
        """Response tokens that were scored."""
        return sum(len(each.logprobs) for each in self.scores.values())

    def replayed(self, trajectory: Trajectory, weight: float = 1.0) -> Replayed:
        """A row with the denominator of its ratio, which `scored` must have seen where that is pi_old."""
        logprobs = self.scores[trajectory.trajectory_id].logprobs if self.from_old else trajectory.behaviour_logprobs
        return Replayed(trajectory=trajectory, behaviour_logprobs=logprobs, weight=weight)


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """The keys of every place: what is stored, when replay starts and what leaves the store."""

    draws_units: ClassVar[bool] = False
    """Whether what is replayed is drawn from the whole store by priority."""

    composition: str
    """Place of replayed rows: `replace` fresh questions by stored ones, `join` a question's own stored rows to its
    fresh rollouts, `append` stored units beside the batch, `refill` groups that are not mixed (`docs/methods.md`)."""
    store: str
    """Rows that an eligible visit stores: its successes, all its rollouts, or none (only what `warm_start` brought)."""
    eviction: str
    """Rows that leave a question or a store that is full: `oldest`, `highest-entropy` (as last measured),
    `longest`, `random`, or where units are drawn `lowest-priority`."""
    enabled: bool = True
    """Keep correct trajectories and replay them; off is the on-policy baseline."""
    start_threshold: float = 0.35
    """Delayed start: the step after batch pass@1 exceeds this is the first mixed one. 0 is mixed from step 1."""
    collect_before_start: bool = False
    """Store during the on-policy phase as well."""
    warmup_steps: int = 0
    """Steps before the first replay, whatever the threshold; 0 is none."""
    lower_bound: int = 0
    """A visit stores when lower_bound < k <= upper_bound; -1 admits k = 0."""
    upper_bound: int = -1
    """-1 is K - 1; K and above is K."""
    retirement: bool = True
    """A question solved by all K leaves the stream and the buffer."""
    retire_at: int = 0
    """Successes at which a question retires; 0 is all members, and so is K and above."""
    readmit_fraction: float = 0.0
    """Share of the retired questions, rounded up, that returns every `readmit_every` steps."""
    readmit_every: int = 25
    capacity: int = 0
    """Most units (rows, or groups where groups are drawn) in the store; 0 is unbounded."""
    max_uses: int = 0
    """Replays after which a unit leaves the store; 0 is unbounded."""
    max_age: int = 0
    """Steps after which a trajectory is no longer replayed; 0 is never."""
    warm_start: str = ""
    """Run folder whose ledger fills the buffer before step 1; empty is none."""
    warm_start_retired: bool = False
    """Take the retired questions of that run over as well."""

    def __post_init__(self) -> None:
        require_fraction("replay", self, "start_threshold", "readmit_fraction")
        require_positive("replay", self, "readmit_every")
        require_non_negative("replay", self, "max_age", "warmup_steps", "capacity", "max_uses", "retire_at")
        require(self.lower_bound >= -1, "replay.lower_bound", self.lower_bound, "a count, or -1 to admit k = 0")
        require(self.upper_bound >= -1, "replay.upper_bound", self.upper_bound, "-1 (K - 1) or a count")
        for clash in self.clashes():
            refuse_together("replay", self, *clash)

    def clashes(self) -> Iterator[Clash]:
        """Keys that have no use for each other."""
        if self.retire_at and not self.retirement:
            yield "retire_at", "retirement", "no question retires", "set replay.retirement = true, or leave it at 0"
        if 0 < self.retire_at <= self.upper_bound and self.enabled:
            reason = "a question with so many successes retires before it stores"
            yield "upper_bound", "retire_at", reason, "use an upper_bound below retire_at, or -1"
        if not self.enabled:
            return
        stores = "use store = 'successes' or 'all'"
        if self.store == "none" and not self.warm_start:
            instead = f"name a run to take experience from (--replay-from RUN), or {stores}"
            yield "store", "warm_start", "nothing would ever be stored", instead
        if self.store == "none" and self.collect_before_start:
            instead = f"leave collect_before_start off, or {stores}"
            yield "store", "collect_before_start", "nothing is collected at any time", instead
        if self.warmup_steps and not self.collect_before_start and self.store != "none":
            instead = "set collect_before_start = true, or use replay.start_threshold"
            yield "warmup_steps", "collect_before_start", "nothing would be stored while the run warms up", instead
        if self.lower_bound < 0 and self.store != "all":
            instead = "use lower_bound = 0, or store = 'all' where it is known"
            yield "lower_bound", "store", "a visit without a success has nothing to store", instead

    def before(self, asked: Asked) -> Experience:
        """Rows that stand in for a mixed step's rollouts."""
        return NO_EXPERIENCE

    def beside(self, asked: Asked, groups: Sequence[Any], experience: Experience) -> Experience:
        """All rows that a mixed step replays, chosen after its log-probs under pi_old and before its rows are stored.

        `groups` are those that train (`training.step.groups.Group`), and `experience` is what `before` gave.
        """
        return experience

    @property
    def max_per_question(self) -> int:
        """Most trajectories kept per question; 0 is unbounded."""
        return 0

    @property
    def cooldown(self) -> int:
        """Steps a question rests after a replay; 0 is none."""
        return 0

    @property
    def count_fresh_only(self) -> bool:
        """An experiential group's success count is over its fresh members instead of all K."""
        return False

    @property
    def keeps_buffer(self) -> bool:
        """Whether the run has an experience buffer: to replay from, or to retire questions with."""
        return self.enabled or self.retirement

    @property
    def draws_groups(self) -> bool:
        """Whether the unit that is drawn is the K rows of one visit."""
        return False

    @property
    def keeps_headroom(self) -> bool:
        """Whether a unit's priority is its headroom as last measured."""
        return False

    @property
    def replays_failures(self) -> bool:
        """Whether rows without reward are replayed: as such, or as members of a group."""
        return self.store == "all" or self.draws_groups

    def retires_at(self, num_members: int) -> int:
        """Successes at which a question retires, of a group in which `num_members` count."""
        return min(self.retire_at or num_members, num_members)

    def upper(self, group_size: int) -> int:
        """Largest success count whose trajectories are stored, in groups of K = `group_size`."""
        return group_size - 1 if self.upper_bound < 0 else min(self.upper_bound, group_size)

    def keys(self, priority: np.ndarray, born: np.ndarray) -> np.ndarray:
        """Keys that order units as their priorities do at any one step; equal where none are drawn."""
        return np.zeros(len(priority))


@dataclass(frozen=True, kw_only=True, slots=True)
class QuestionKeys(Place):
    """The keys of `replace` and `join`, which replay rows of a question among its own rollouts."""

    eviction: Literal["oldest", "highest-entropy", "longest", "random"] = "oldest"
    per_question: int = 1
    """Stored rows that a question replays at most."""
    metric: str = "ent"
    """Metric that chooses the trajectory of a question: `ent`, `ent-sum`, `ppl`, `length`, `random`, `reward`,
    `age`, or `python:m:f`."""
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
        require_known("replay.metric", self.metric, METRICS, python=True)

    def clashes(self) -> Iterator[Clash]:
        """Keys that have no use for each other."""
        yield from Place.clashes(self)
        if self.enabled and self.advantage_over == "own" and self.per_question < 2:
            instead = "use per_question of at least 2, or advantage_over = 'group'"
            yield "advantage_over", "per_question", "the advantage of one row over itself is 0", instead
        if self.enabled and self.metric == "reward" and self.store == "successes":
            instead = "use another metric, or composition = 'join' with store = 'all'"
            yield "metric", "store", "all stored rewards are equal", instead

    @property
    def needs_scores(self) -> bool:
        """Whether selection looks at entropies or likelihoods, which take a forward pass."""
        return self.metric not in UNSCORED_METRICS


@dataclass(frozen=True, kw_only=True, slots=True)
class Bucket:
    """Questions with equal latest success count that may be drawn now. Never empty."""

    success_count: int
    num_members: int
    """Members that count was out of: K, or K-1 for experiential groups where only fresh members count."""
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


def effective_sample_share(chosen: Sequence[Trajectory], current: Sequence[TokenScores]) -> float:
    """(sum w)^2 / (n sum w^2) over the replayed tokens, w = pi_now / pi_behaviour; 1 when nothing has moved.

    Taken from log w less its maximum, which cancels, so that no ratio overflows.
    """
    log_w = np.concatenate(
        [
            scores.logprobs.astype(np.float64) - trajectory.behaviour_logprobs
            for trajectory, scores in zip(chosen, current, strict=True)
        ]
    )
    w = np.exp(log_w - log_w.max())
    return float(w.sum() ** 2 / (len(w) * (w**2).sum()))


def checked_numbers(
    given: object, setting: str, num: int, name_of: Callable[[int], str], *, least: float, bound: str
) -> np.ndarray:
    """Numbers that a function of the user's returned, once they are sure to be `num`, not NaN, and within `least` and
    infinity. Raises RunError naming the setting, the value, what it was for, and the `bound`."""
    try:
        values = np.asarray(given, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise RunError(f"{setting} gave no numbers ({error}); it must return one for each") from None
    if values.shape != (num,):
        raise RunError(
            f"{setting} gave numbers of shape {values.shape} for {num}, {name_of(0)} first; it must return one for each"
        )
    wrong = np.flatnonzero(~((values >= least) & (values < np.inf)))
    if len(wrong):
        raise RunError(f"{setting} gave {values[wrong[0]]} for {name_of(int(wrong[0]))}; it must be {bound}")
    return values


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
    if probabilities.shape != (len(buckets),) or not (probabilities >= 0).all():
        raise RunError(
            f"replay.sampler {name} gave probabilities {probabilities.tolist()} for {len(buckets)} buckets; "
            "return one per bucket, none negative"
        )
    if ids and not np.isclose(probabilities.sum(), 1.0):
        raise RunError(f"replay.sampler {name} gave probabilities that add up to {probabilities.sum():.6g}, not 1")
    return QuestionDraw(question_ids=tuple(ids), probabilities=probabilities)

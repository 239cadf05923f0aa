"""Places of replayed rows: the settings of all, what a step gives to one (Asked), and gets of it (Experience).

A place is a strategy of replay, named by where in a step's batch the stored rows go: `Replace`, `Join`, `Append`,
`Refill`, `Prefix` or `Revisit`, chosen by `replay.composition`; each has the settings that it reads and no other.
`before` draws what stands in for rollouts or begins them, ahead of them; `beside` what trains with the step's groups.
Rank 0 asks the place; all ranks score what it wants scored.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from jaxtyping import Float32, Int32

from exgrpo_cli.base.errors import RunError
from exgrpo_cli.base.types import TokenScores, Trajectory
from exgrpo_cli.config.sections import NON_NEGATIVE, POSITIVE, SET, Needs, at_least, between, setting

if TYPE_CHECKING:
    from exgrpo_cli.replay.store import Store

Metrics = dict[str, float | int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Replayed:
    """A stored trajectory to train on again."""

    trajectory: Trajectory
    behaviour_logprobs: Float32[np.ndarray, " tokens"]
    """Denominator of its ratio: the trajectory's own; this step's pi_old in the ablation without importance
    correction."""
    weight: float = 1.0
    """Factor of its advantage."""
    left_out: bool = False
    """It does not train after all, and is no member of its group."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Beginning:
    """The first tokens of a stored trajectory, from which all rollouts of its question go on."""

    trajectory_id: int
    token_ids: Int32[np.ndarray, " tokens"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Experience:
    """Stored rows that a step replays, and how they train."""

    by_question: Mapping[str, tuple[Replayed, ...]] = field(default_factory=dict)
    """Rows replayed in their question's own group, in the order drawn."""
    beginnings: Mapping[str, Beginning | None] = field(default_factory=dict)
    """First tokens of all K rollouts of a question, by its id; None where it is but asked again."""
    joined: bool = False
    """These stand beside K rollouts, not in the place of some."""
    own_advantages: bool = False
    """Their advantages are over the replayed rows alone, and those of fresh rollouts over the fresh ones."""
    units: tuple[tuple[Replayed, ...], ...] = ()
    """Units drawn from the whole store, each with the rows that train beside the step's groups."""
    drops_unmixed: bool = False
    """Fresh groups of equal rewards neither train nor count in N of the loss."""
    metrics: Metrics = field(default_factory=lambda: {"replay/used": 0})
    """`replay/*` keys of the draw."""
    tokens_scored: int = 0
    """Response tokens of stored rows that the current policy has scored."""
    notes: tuple[str, ...] = ()
    """Messages for the user about the draw."""


NO_EXPERIENCE = Experience()
"""A step without replay."""
NEEDS_A_RUN = {"none": Needs("experience then comes from another run (--replay-from RUN)", warm_start=SET)}
"""Needs of `replay.store`, in every place."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """Context in which a step asks a place for rows, on rank 0."""

    store: "Store"
    step: int
    weight_version: int
    """Number of weight changes so far: that of the current policy."""
    questions_per_step: int
    """B."""
    under_way: frozenset[str] = frozenset()
    """Questions whose groups an earlier step has begun and none has trained yet."""
    from_old: bool
    """Ratios divide by this step's pi_old instead of a row's own behaviour policy (an ablation of the paper)."""
    rngs: Mapping[str, np.random.Generator]
    score: Callable[[Sequence[Trajectory]], Sequence[TokenScores]]
    """Log-probs and entropies (nats) of stored rows under the current policy, before this step's updates."""
    scores: dict[int, TokenScores] = field(default_factory=dict)
    """Those asked for so far, by trajectory id."""
    instead: Mapping[int, int | None] = field(default_factory=dict)
    """Trajectories that a fork has train in the place of others; None leaves one out."""

    def scored(self, trajectories: Sequence[Trajectory]) -> Mapping[int, TokenScores]:
        """The step's scores, those of the trajectories that had none yet added."""
        missing = [trajectory for trajectory in trajectories if trajectory.trajectory_id not in self.scores]
        if missing:
            ids = [trajectory.trajectory_id for trajectory in missing]
            self.scores.update(zip(ids, self.score(missing), strict=True))
        return self.scores

    @property
    def tokens_scored(self) -> int:
        """Response tokens of the rows scored."""
        return sum(len(each.logprobs) for each in self.scores.values())

    def replayed(self, trajectory: Trajectory, weight: float = 1.0) -> Replayed:
        """A row with the denominator of its ratio, which `scored` must have seen where that is pi_old."""
        other = self.instead.get(trajectory.trajectory_id, trajectory.trajectory_id)
        if other not in (None, trajectory.trajectory_id):
            [trajectory] = self.store.load([other])
            self.scored([trajectory] if self.from_old else [])
        logprobs = self.scores[trajectory.trajectory_id].logprobs if self.from_old else trajectory.behaviour_logprobs
        return Replayed(trajectory=trajectory, behaviour_logprobs=logprobs, weight=weight, left_out=other is None)


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """The settings of every place: what is stored, when replay starts and what leaves the store."""

    composition: str
    """Place of replayed rows: `replace` fresh questions by stored ones, `join` a question's own stored rows to its
    fresh rollouts, `append` stored units beside the batch, `refill` groups that are not mixed, `prefix` the beginning
    of a stored row before all K rollouts, `revisit` questions alone, asked again (`docs/methods.md`)."""
    store: str
    """Rows that an eligible visit stores: its successes, its failures, all its rollouts, or none (only what
    `warm_start` brought)."""
    eviction: str
    """Rows that leave a question or a store that is full: `oldest`, `highest-entropy` (as last measured, of a
    group its first row's), `longest`, `random`, or where units are drawn `lowest-priority`."""
    enabled: bool = True
    """Keep correct trajectories and replay them; off is the on-policy baseline."""
    start_threshold: float = setting(0.35, between(0, 1))
    """Delayed start: the step after batch pass@1 exceeds this is the first mixed one. 0 is mixed from step 1."""
    collect_before_start: bool = setting(
        False, needs=Needs("nothing is collected", store=("successes", "failures", "all"))
    )
    """Store during the on-policy phase as well."""
    warmup_steps: int = setting(
        0, NON_NEGATIVE, Needs("nothing is stored while the run warms up", collect_before_start=True, store="none")
    )
    """Steps before the first replay, whatever the threshold; 0 is none."""
    lower_bound: int = setting(
        0, at_least(-1), {-1: Needs("without a success it stores nothing", store=("failures", "all"))}
    )
    """A visit stores when lower_bound < k <= upper_bound; -1 admits k = 0."""
    upper_bound: int = setting(-1, at_least(-1))
    """-1 is K - 1; K and above is K."""
    retirement: bool = True
    """A question solved by all K leaves the stream and the buffer."""
    retire_at: int = setting(0, NON_NEGATIVE, Needs("no question retires", retirement=True))
    """Successes at which a question retires; 0 is all members, and so is K and above."""
    readmit_fraction: float = setting(0.0, between(0, 1))
    """Share of the retired questions, rounded up, that returns every `readmit_every` steps."""
    readmit_every: int = setting(25, POSITIVE)
    """Steps between returns of retired questions."""
    capacity: int = setting(0, NON_NEGATIVE)
    """Most units (rows, or groups where groups are drawn) in the store; 0 is unbounded."""
    max_uses: int = setting(0, NON_NEGATIVE)
    """Replays after which a unit leaves the store; 0 is unbounded."""
    max_age: int = setting(0, NON_NEGATIVE)
    """Steps after which a trajectory is no longer replayed; 0 is never."""
    warm_start: str = ""
    """Run folder whose ledger fills the buffer before step 1; empty is none."""
    warm_start_retired: bool = False
    """Take the retired questions of that run over as well."""

    # What a place has no key for.
    max_per_question = cooldown = 0
    count_fresh_only, advantage_over, order, unit = False, "group", "mixed", "row"
    rests_when_stored: ClassVar[bool] = False
    """Whether a question rests not only after a replay, but also after a row of it was stored."""

    def before(self, asked: Asked) -> Experience:
        """Rows that stand in for a mixed step's rollouts.

        Raises RunError where a function of the user's breaks its promises.
        """
        return NO_EXPERIENCE

    def beside(self, asked: Asked, groups: Sequence[Any], experience: Experience) -> Experience:
        """All rows that a mixed step replays, chosen after its log-probs under pi_old and before its rows are stored.

        `groups` are those that train (`training.step.groups.Group`), and `experience` is what `before` gave.
        Raises as `before`.
        """
        return experience

    @property
    def keeps_buffer(self) -> bool:
        """Whether the run has an experience buffer: to replay from, or to retire questions with."""
        return self.enabled or self.retirement

    @property
    def draws_groups(self) -> bool:
        """Whether the unit that is drawn is the K rows of one visit."""
        return self.unit == "group"

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


def whole_share(ratio: float, questions_per_step: int) -> int:
    """floor(rho * B), with rho * B taken to 9 decimals first: 0.29 * 100 is 29 questions, not 28."""
    return math.floor(round(ratio * questions_per_step, 9))


def checked_numbers(
    given: object, setting: str, num: int, name_of: Callable[[int], str], *, least: float, bound: str
) -> np.ndarray:
    """The `num` numbers that a function of the user's returned, as float64, each at least `least` and below infinity.

    Raises RunError where they are not, naming the setting, the value, the `bound`, and by `name_of` its position.
    """
    try:
        values = np.asarray(given, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise RunError(f"{setting} gave no numbers ({error}); it must return one for each") from None
    if values.shape != (num,):
        found = f"numbers of shape {values.shape} for {num}, {name_of(0)} first"
        raise RunError(f"{setting} gave {found}; it must return one for each")
    wrong = np.flatnonzero(~((values >= least) & (values < np.inf)))
    if len(wrong):
        raise RunError(f"{setting} gave {values[wrong[0]]} for {name_of(int(wrong[0]))}; it must be {bound}")
    return values

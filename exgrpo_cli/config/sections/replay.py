"""The experience buffer and what is drawn from it (paper, section 3)."""

import math
from dataclasses import dataclass
from typing import Literal

from exgrpo_cli.config.names import EVICTIONS, METRICS, PRIORITIES, SAMPLERS, UNSCORED_METRICS
from exgrpo_cli.config.sections import require, require_fraction, require_known, require_non_negative, require_positive


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplaySettings:
    """The experience buffer and what is drawn from it (paper, section 3)."""

    enabled: bool = True
    """Keep correct trajectories and replay them; off is the on-policy baseline."""
    composition: Literal["replace", "join", "append", "refill"] = "replace"
    """Where replayed rows go: `replace` fresh questions by stored ones, `join` a question's own stored rows to its
    fresh rollouts, `append` stored units beside the batch, `refill` groups that are not mixed (`docs/methods.md`)."""
    store: Literal["successes", "all", "none"] = "successes"
    """What an eligible visit stores: its successes, all its rollouts, or nothing (only what `warm_start` brought)."""
    unit: Literal["row", "group"] = "row"
    """What `append` draws: single rows, or the K rows of one visit."""
    ratio: float = 0.5
    """rho: in `replace` the share of a mixed step's questions that are experiential; in `append` groups per question of
    the step, or rows per row of its mixed groups."""
    start_threshold: float = 0.35
    """Delayed start: the step after batch pass@1 exceeds this is the first mixed one. 0 is mixed from step 1."""
    collect_before_start: bool = False
    """Store during the on-policy phase as well."""
    warmup_steps: int = 0
    """Steps before the first replay, whatever the threshold; 0 is none."""
    per_question: int = 1
    """Stored rows that a question replays at most, in `replace` and `join`."""
    min_stored: int = 1
    """Stored rows that a fresh question must have before any of them joins it."""
    metric: str = "ent"
    """Which trajectory of a question is replayed: `ent`, `ent-sum`, `ppl`, `length`, `random`, `reward`, `age`, or
    `python:m:f`."""
    direction: Literal["min", "max"] = "min"
    """Whether the lowest or the highest metric is chosen."""
    sampler: str = "normal"
    """Which questions are replayed: `normal`, `linear`, `linear-clip`, `sqrt`, `uniform`, or `python:m:f`."""
    mu: float = 0.5
    """Mean of the `normal` sampler, on the accuracy scale."""
    sigma: float = 0.125
    """Standard deviation of the `normal` sampler, on the accuracy scale."""
    priority: str = "uniform"
    """What a unit weighs in `append` and `refill`: `uniform`, `latest`, `advantage`, `reward`, `headroom`, `signal`, or
    `python:m:f`."""
    draw: Literal["proportional", "top"] = "proportional"
    """Units drawn without replacement, P ~ priority^exponent, or those of highest priority."""
    exponent: float = 1.0
    age_decay: float = 0.0
    """Steps in which a priority falls to 1/e; 0 is never."""
    bias_correction: float = 0.0
    """b: a replayed unit's rows weigh (N P)^-b over the largest such weight in the store; 0 is off."""
    max_drift: float = 0.0
    """A drawn unit is replayed only if the mean over its tokens of (log pi_old - log pi_birth)^2 is at most this; 0 is
    off."""
    advantage_over: Literal["group", "own"] = "group"
    """Advantages in `replace` and `join`: over fresh and replayed rows together, or over each kind apart."""
    order: Literal["mixed", "first", "last"] = "mixed"
    """Replayed units of `append` and `refill` among the fresh mini-batches, or in mini-batches of their own."""
    lower_bound: int = 0
    """A visit stores when lower_bound < k <= upper_bound; -1 admits k = 0."""
    upper_bound: int = -1
    """-1 is K - 1; K and above is K."""
    retirement: bool = True
    """A question solved by all K leaves the stream and the buffer."""
    retire_at: int = 0
    """Successes at which a question retires; 0 is all members."""
    readmit_fraction: float = 0.0
    """Share of the retired questions, rounded up, that returns every `readmit_every` steps."""
    readmit_every: int = 25
    max_per_question: int = 0
    """Most trajectories kept per question; 0 is unbounded, as in the paper."""
    eviction: str = "oldest"
    """What leaves a full question or a full store: `oldest`, `highest-entropy`, `longest`, `random`, or
    `lowest-priority`."""
    capacity: int = 0
    """Most units (rows, or groups where groups are drawn) in the store; 0 is unbounded."""
    max_uses: int = 0
    """Replays after which a unit leaves the store; 0 is unbounded."""
    max_age: int = 0
    """Steps after which a trajectory is no longer replayed; 0 is never."""
    cooldown: int = 0
    """Steps a question rests after a replay; 0 is none."""
    count_fresh_only: bool = False
    """An experiential group's success count is over its K-1 fresh members instead of all K."""
    max_score_staleness: int = 0
    """Weight versions a measured entropy may lag behind before it is measured again; 0 is exact."""
    warm_start: str = ""
    """Run folder whose ledger fills the buffer before step 1; empty is none."""
    warm_start_retired: bool = False
    """Take the retired questions of that run over as well."""
    ess_bound: float = 0.0
    """Least effective sample size (share of tokens) of a replayed draw; below it the step stays fresh. 0 is off."""

    def __post_init__(self) -> None:
        require_fraction("replay", self, "ratio", "start_threshold", "readmit_fraction", "ess_bound")
        require_positive("replay", self, "sigma", "readmit_every", "per_question", "min_stored", "exponent")
        require(math.isfinite(self.mu), "replay.mu", self.mu, "a finite number")
        require_non_negative("replay", self, "max_per_question", "max_age", "cooldown", "max_score_staleness")
        require_non_negative("replay", self, "age_decay", "bias_correction", "max_drift")
        require_non_negative("replay", self, "warmup_steps", "capacity", "max_uses", "retire_at")
        require(self.lower_bound >= -1, "replay.lower_bound", self.lower_bound, "a count, or -1 to admit k = 0")
        require(self.upper_bound >= -1, "replay.upper_bound", self.upper_bound, "-1 (K - 1) or a count")
        require_known("replay.metric", self.metric, METRICS, python=True)
        require_known("replay.sampler", self.sampler, SAMPLERS, python=True)
        require_known("replay.priority", self.priority, PRIORITIES, python=True)
        require_known("replay.eviction", self.eviction, EVICTIONS)

    @property
    def keeps_buffer(self) -> bool:
        """Whether the run has an experience buffer: to replay from, or to retire questions with."""
        return self.enabled or self.retirement

    @property
    def needs_scores(self) -> bool:
        """Whether selection looks at entropies or likelihoods, which take a forward pass."""
        return self.metric not in UNSCORED_METRICS

    @property
    def draws_units(self) -> bool:
        """Whether what is replayed is drawn from the whole store by priority."""
        return self.composition in ("append", "refill")

    @property
    def draws_groups(self) -> bool:
        """Whether such a unit is the K rows of one visit."""
        return self.composition == "refill" or (self.composition == "append" and self.unit == "group")

    @property
    def replays_failures(self) -> bool:
        """Whether rows without reward are replayed: as such, or as members of a group."""
        return self.store == "all" or self.draws_groups

    @property
    def keeps_units(self) -> bool:
        """Whether the buffer keeps an order of all units: to draw by, or to evict by."""
        return self.draws_units or self.capacity > 0

    @property
    def drops_unmixed(self) -> bool:
        """Whether groups of equal rewards leave a mixed step's batch."""
        return self.composition == "refill"

    def retires_at(self, num_members: int) -> int:
        """Successes at which a question retires, of a group in which `num_members` count."""
        return min(self.retire_at or num_members, num_members)

    def upper(self, group_size: int) -> int:
        """Largest success count whose trajectories are stored, in groups of K = `group_size`."""
        return group_size - 1 if self.upper_bound < 0 else min(self.upper_bound, group_size)

    def readmits_at(self, step: int) -> bool:
        """Whether retired questions return at the beginning of `step`."""
        return self.readmit_fraction > 0 and step % self.readmit_every == 0

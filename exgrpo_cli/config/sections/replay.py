"""The experience buffer and what is drawn from it (paper, section 3)."""

import math
from dataclasses import dataclass
from typing import Literal

from exgrpo_cli.config.checks import require, require_fraction, require_known, require_non_negative, require_positive
from exgrpo_cli.config.names import EVICTIONS, METRICS, SAMPLERS, UNSCORED_METRICS


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplaySettings:
    """The experience buffer and what is drawn from it (paper, section 3)."""

    enabled: bool = True
    """Keep correct trajectories and replay them; off is the on-policy baseline."""
    ratio: float = 0.5
    """rho: share of a mixed step's questions that are experiential."""
    start_threshold: float = 0.35
    """Delayed start: the step after batch pass@1 exceeds this is the first mixed one. 0 is mixed from step 1."""
    collect_before_start: bool = False
    """Store successes during the on-policy phase as well."""
    metric: str = "ent"
    """Which trajectory of a question is replayed: `ent`, `ent-sum`, `ppl`, `length`, `random`, or `python:m:f`."""
    direction: Literal["min", "max"] = "min"
    """Whether the lowest or the highest metric is chosen."""
    sampler: str = "normal"
    """Which questions are replayed: `normal`, `linear`, `linear-clip`, `sqrt`, `uniform`, or `python:m:f`."""
    mu: float = 0.5
    """Mean of the `normal` sampler, on the accuracy scale."""
    sigma: float = 0.125
    """Standard deviation of the `normal` sampler, on the accuracy scale."""
    lower_bound: int = 0
    """A visit stores its successes when lower_bound < k <= upper_bound."""
    upper_bound: int = -1
    """-1 is K - 1; at most K counts."""
    retirement: bool = True
    """A question solved by all K leaves the stream and the buffer."""
    readmit_fraction: float = 0.0
    """Share of the retired questions, rounded up, that returns every `readmit_every` steps."""
    readmit_every: int = 25
    max_per_question: int = 0
    """Most trajectories kept per question; 0 is unbounded, as in the paper."""
    eviction: str = "oldest"
    """Which trajectory leaves a full question: `oldest`, `highest-entropy`, `longest`, `random`."""
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
        require_positive("replay", self, "sigma", "readmit_every")
        require(math.isfinite(self.mu), "replay.mu", self.mu, "a finite number")
        require_non_negative(
            "replay", self, "lower_bound", "max_per_question", "max_age", "cooldown", "max_score_staleness"
        )
        require(self.upper_bound >= -1, "replay.upper_bound", self.upper_bound, "-1 (K - 1) or a count")
        require_known("replay.metric", self.metric, METRICS, python=True)
        require_known("replay.sampler", self.sampler, SAMPLERS, python=True)
        require_known("replay.eviction", self.eviction, EVICTIONS)

    @property
    def keeps_buffer(self) -> bool:
        """Whether the run has an experience buffer: to replay from, or to retire questions with."""
        return self.enabled or self.retirement

    @property
    def needs_scores(self) -> bool:
        """Whether selection looks at entropies or likelihoods, which take a forward pass."""
        return self.metric not in UNSCORED_METRICS

    def upper(self, group_size: int) -> int:
        """Largest success count whose trajectories are stored, in groups of K = `group_size`."""
        return group_size - 1 if self.upper_bound < 0 else min(self.upper_bound, group_size)

    def readmits_at(self, step: int) -> bool:
        """Whether retired questions return at the beginning of `step`."""
        return self.readmit_fraction > 0 and step % self.readmit_every == 0

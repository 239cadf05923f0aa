"""The policy objective (paper, section 3.3; `docs/algorithm.md`)."""

import math
from dataclasses import dataclass
from typing import Literal

from exgrpo_cli.config.sections import refuse_together, require, require_non_negative, require_positive

Aggregation = Literal["constant", "token-mean"]
Surrogate = Literal["shaped", "raw", "clipped", "likelihood"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ObjectiveSettings:
    """The policy objective (paper, section 3.3; `docs/algorithm.md`)."""

    advantage: Literal["mean", "normalised"] = "mean"
    """`mean`: r - mean(r) (Dr.GRPO); `normalised`: divided by the group's standard deviation as well (GRPO)."""
    baseline: Literal["group", "history"] = "group"
    """Baseline of the rewards: the group's mean, or the question's own discounted pass rate over its visits."""
    history_discount: float = 0.5
    """d of the baseline `history`: what an older visit counts, beside the next one."""
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float = 0.0
    """c: a clipped token of negative advantage costs at most c |A|, however likely it has become; 0 is off."""
    clip_in_mixed_phase: bool = False
    """Keep the PPO clip on fresh tokens in the mixed phase."""
    shaping: bool = True
    """Off: the `shaped` surrogate reads as `raw`."""
    shaping_beta: float = 0.1
    replay_surrogate: Surrogate = "shaped"
    """Loss of a replayed token: -f(w) A with f(w) = w / (w + beta); -w A; PPO's clipped one; or -log pi."""
    replay_weight: float = 1.0
    """c: factor of the replayed tokens' part of the loss."""
    replay_denominator: Literal["joint", "own"] = "joint"
    """Denominator of fresh and replayed sums: all rows of the mini-batch, or each kind by its own rows."""
    importance: Literal["behaviour", "old"] = "behaviour"
    """Denominator of a replayed token's ratio: the policy that generated it, or this step's pi_old (an ablation)."""
    tis_cap: float = 2.0
    """With rollout.logprobs = "engine", fresh tokens weigh min(pi_old / pi_engine, tis_cap)."""
    aggregation: Aggregation = "constant"
    """`constant`: sum over tokens / (N * max_response_tokens); `token-mean`: / number of tokens."""
    loss_scale: float = 1.0
    """Multiplies the policy term; 64 gives the published clip, skip bound and entropy coefficient their meaning."""
    entropy_coefficient: float = 0.0
    kl_coefficient: float = 0.0
    """k3 KL to the initial policy, fresh tokens only."""

    @property
    def surrogate(self) -> Surrogate:
        """Loss used for replayed tokens."""
        return self.replay_surrogate if self.shaping else "raw"

    def __post_init__(self) -> None:
        require_positive("objective", self, "shaping_beta", "replay_weight", "loss_scale", "tis_cap")
        valid = 0 < self.history_discount <= 1
        require(valid, "objective.history_discount", self.history_discount, "a number above 0, at most 1")
        require_non_negative("objective", self, "clip_low", "clip_high", "kl_coefficient")
        valid = self.dual_clip == 0 or 1 < self.dual_clip < math.inf
        require(valid, "objective.dual_clip", self.dual_clip, "a number above 1, or 0 for none")
        finite = math.isfinite(self.entropy_coefficient)
        require(finite, "objective.entropy_coefficient", self.entropy_coefficient, "a finite number")
        if self.replay_surrogate == "likelihood" and self.importance == "old":
            instead = "leave importance at 'behaviour', or use another surrogate"
            reason = "-log pi has no importance ratio"
            refuse_together("objective", self, "replay_surrogate", "importance", reason, instead)
        if self.replay_surrogate != "shaped" and not self.shaping:
            reason = "shaping = false is replay_surrogate = 'raw'"
            refuse_together("objective", self, "replay_surrogate", "shaping", reason, "leave shaping out")

"""The policy objective (arXiv 2510.02245, section 4.2; `docs/algorithm.md`)."""

import math
from dataclasses import dataclass
from typing import Literal

from exgrpo_cli.config.sections import FINITE, NON_NEGATIVE, POSITIVE, SHARE_OF_ONE, Bound, Needs, setting

Aggregation = Literal["constant", "token-mean"]
Surrogate = Literal["shaped", "raw", "clipped", "likelihood", "m2po"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ObjectiveSettings:
    """The policy objective (arXiv 2510.02245, section 4.2; `docs/algorithm.md`)."""

    advantage: Literal["mean", "normalised"] = "mean"
    """`mean`: r - mean(r) (Dr.GRPO); `normalised`: divided by the group's standard deviation as well (GRPO)."""
    baseline: Literal["group", "history", "virtual", "confidence"] = "group"
    """Baseline of the rewards: the group's mean, the question's own discounted pass rate over its visits, the
    group's mean with a `virtual` reward of 1, or that of rewards less pi_old's `confidence` in wrong answers. By the
    last two all-wrong groups train."""
    all_wrong_weight: float = setting(1.0, POSITIVE, Needs("the weight is LENS's", baseline="confidence"))
    """Factor of the advantages of all-wrong groups under the baseline `confidence`."""
    gate: Literal["none", "unsolved", "boundary"] = setting(
        "none", needs=Needs("the history is that baseline's", baseline=("group", "virtual", "confidence"))
    )
    """Factor of a group's advantages by the successes of earlier visits: 1 for all, 1 for questions never `unsolved`
    before and else 0, or what a question adds to pass@k at the `boundary` of what is solved."""
    gate_k: int = setting(256, POSITIVE, Needs("k is the boundary's", gate="boundary"))
    """k of the gate `boundary`."""
    history_discount: float = setting(0.5, SHARE_OF_ONE)
    """d of the baseline `history`: what an older visit counts, beside the next one."""
    clip_low: float = setting(0.2, NON_NEGATIVE)
    """Clip of a fresh token's ratio: from 1 - clip_low on."""
    clip_high: float = setting(0.2, NON_NEGATIVE)
    """Clip of a fresh token's ratio: up to 1 + clip_high."""
    dual_clip: float = setting(0.0, Bound(lambda c: c == 0 or 1 < c < math.inf, "a number above 1, or 0 for none"))
    """c: a clipped token of negative advantage costs at most c |A|, however likely it has become; 0 is off."""
    clip_in_mixed_phase: bool = False
    """Keep the PPO clip on fresh tokens in the mixed phase, as eq. 4 of the paper has it; its appendix D drops it."""
    shaping: bool = setting(True, needs=Needs("without shaping it is 'raw'", replay_surrogate="shaped"))
    """Off: the `shaped` surrogate reads as `raw`."""
    shaping_beta: float = setting(0.1, POSITIVE)
    """beta of policy shaping, f(w) = w / (w + beta)."""
    replay_surrogate: Surrogate = "shaped"
    """Loss of a replayed token: -f(w) A with f(w) = w / (w + beta); -w A; PPO's clipped one; -log pi; or
    M2PO's, -w A of the tokens that it does not mask."""
    second_moment: float = setting(0.04, POSITIVE, Needs("the bound is M2PO's", replay_surrogate="m2po"))
    """`m2po` masks the largest (log w)^2 of a mini-batch's replayed tokens with w > 1, A > 0 or w < 1, A < 0 until the
    mean of the others is at most this."""
    replay_weight: float = setting(1.0, POSITIVE)
    """c: factor of the replayed tokens' part of the loss."""
    replay_denominator: Literal["joint", "own"] = "joint"
    """Denominator of fresh and replayed sums: all rows of the mini-batch, or each kind by its own rows."""
    importance: Literal["behaviour", "old"] = setting(
        "behaviour", needs=Needs("-log pi has no ratio", replay_surrogate=("shaped", "raw", "clipped", "m2po"))
    )
    """Denominator of a replayed token's ratio: the policy that generated it, or this step's pi_old (an ablation)."""
    tis_cap: float = setting(2.0, POSITIVE)
    """With rollout.logprobs = "engine", fresh tokens weigh min(pi_old / pi_engine, tis_cap)."""
    aggregation: Aggregation = "constant"
    """`constant`: sum over tokens / (N * max_response_tokens); `token-mean`: / number of tokens."""
    loss_scale: float = setting(1.0, POSITIVE)
    """Multiplies the policy term; 64 gives the published clip, skip bound and entropy coefficient their meaning."""
    entropy_coefficient: float = setting(0.0, FINITE)
    """Bonus on the mean token entropy; negative is a penalty."""
    kl_coefficient: float = setting(0.0, NON_NEGATIVE)
    """k3 KL to the initial policy, fresh tokens only."""

    @property
    def keeps_history(self) -> bool:
        """Whether a run counts the successes of each question over its visits."""
        return self.baseline == "history" or self.gate != "none"

    @property
    def surrogate(self) -> Surrogate:
        """Loss used for replayed tokens."""
        return self.replay_surrogate if self.shaping else "raw"

"""The optimizer and how a step's batch is cut into updates."""

from dataclasses import dataclass
from typing import Literal

from exgrpo_cli.base.errors import InputError
from exgrpo_cli.config.checks import require, require_fraction, require_non_negative, require_positive


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimSettings:
    """The optimizer and how a step's batch is cut into updates."""

    engine: Literal["torch", "deepspeed"] = "torch"
    learning_rate: float = 1e-6
    """Peak learning rate of AdamW."""
    schedule: Literal["constant", "linear"] = "constant"
    """`linear` decays to `final_fraction` of the learning rate over `horizon` steps."""
    final_fraction: float = 0.05
    """Of the learning rate, at the end of a linear schedule."""
    horizon: int = 0
    """Steps of the decay; 0 is run.steps at the start of the run."""
    warmup_steps: int = 0
    """Steps over which the learning rate rises; a run with a decaying schedule gives it at most half its steps."""
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    """Added to the root of Adam's second moment."""
    weight_decay: float = 0.01
    """Decoupled, on every parameter."""
    minibatches: int = 2
    """M: optimizer updates per step, each on whole groups."""
    microbatch_tokens: int = 16384
    """Token budget (prompt and response, padding included) of one forward and backward pass."""
    grad_clip: float = 1.0
    """Gradients of a larger norm are scaled down to it."""
    skip_norm: float = 500.0
    """An update with a larger or non-finite gradient norm, before clipping, is skipped."""
    max_skipped: int = 5
    """Consecutive skipped updates after which the run stops."""
    zero_stage: int = 2
    """DeepSpeed ZeRO stage."""
    offload: bool = False
    """DeepSpeed: keep optimizer state in CPU memory."""
    offload_during_rollouts: bool = False
    """The torch engine: keep optimizer state and master weights in CPU memory between updates."""

    def __post_init__(self) -> None:
        require_positive(
            "optim", self, "learning_rate", "epsilon", "minibatches", "microbatch_tokens", "grad_clip", "skip_norm"
        )
        require_positive("optim", self, "max_skipped")
        require_fraction("optim", self, "final_fraction", "beta1", "beta2")
        require_non_negative("optim", self, "horizon", "warmup_steps", "weight_decay")
        require(self.zero_stage in (1, 2, 3), "optim.zero_stage", self.zero_stage, "1, 2 or 3")
        if self.schedule == "linear" and 0 < self.horizon <= self.warmup_steps:
            raise InputError(
                f"the linear schedule ends at step {self.horizon}, within the warm-up of {self.warmup_steps}: raise "
                "optim.horizon or lower optim.warmup_steps."
            )

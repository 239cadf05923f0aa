"""AdamW with a learning-rate schedule whose length does not depend on when the run is stopped or resumed."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from exgrpo_cli.errors import InputError

Schedule = Literal["constant", "linear"]


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerSettings:
    """How gradients become weights."""

    learning_rate: float
    """Peak learning rate."""
    betas: tuple[float, float] = (0.9, 0.999)
    epsilon: float = 1e-8
    weight_decay: float = 0.01
    """Decoupled, on every parameter."""
    schedule: Schedule = "constant"
    """After warm-up: "constant", or "linear" to `final_fraction` of the peak at `horizon_updates`, then flat."""
    warmup_updates: int = 0
    """Updates of linear rise: the first one runs at 1 / warmup_updates of the peak."""
    horizon_updates: int = 0
    """Update at which a linear schedule ends; fixed when the run begins, so that more steps do not stretch it."""
    final_fraction: float = 0.0
    """Of the peak learning rate, at the end of a linear schedule."""
    max_grad_norm: float = 1.0
    """Gradients of a larger norm are scaled down to it."""
    skip_grad_norm: float = 500.0
    """An update whose gradient norm exceeds this, before clipping, or is not finite, is skipped."""

    def __post_init__(self) -> None:
        if self.schedule == "linear" and self.horizon_updates <= self.warmup_updates:
            raise InputError(
                f"the linear schedule ends at update {self.horizon_updates}, within the warm-up of "
                f"{self.warmup_updates}: raise optim.horizon or lower optim.warmup_steps."
            )


def learning_rate_at(settings: OptimizerSettings, update: int) -> float:
    """Learning rate of update number `update`, counted from 0 over applied and skipped updates alike."""
    if update < settings.warmup_updates:
        return settings.learning_rate * (update + 1) / settings.warmup_updates
    if settings.schedule == "constant":
        return settings.learning_rate
    span = settings.horizon_updates - settings.warmup_updates
    progress = min(1.0, (update - settings.warmup_updates) / span)
    return settings.learning_rate * (1 - (1 - settings.final_fraction) * progress)


def build_adamw(parameters: Iterable[Tensor], settings: OptimizerSettings) -> torch.optim.AdamW:
    """AdamW over float32 (or wider) parameters; fused, which is also the fastest on a CPU."""
    return torch.optim.AdamW(
        parameters,
        lr=settings.learning_rate,
        betas=settings.betas,
        eps=settings.epsilon,
        weight_decay=settings.weight_decay,
        fused=True,
    )


def skip_reason(grad_norm: float, settings: OptimizerSettings) -> str:
    """Why an update of this gradient norm must not be applied; empty when it may be."""
    if not grad_norm < float("inf"):
        return "non-finite gradient"
    if grad_norm > settings.skip_grad_norm:
        return f"gradient norm above {settings.skip_grad_norm:g}"
    return ""

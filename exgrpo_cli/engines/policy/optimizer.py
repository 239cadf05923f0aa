"""AdamW with a learning-rate schedule whose length does not depend on when the run is stopped or resumed."""

from collections.abc import Iterable

import torch
from torch import Tensor

from exgrpo_cli.config.sections.run import OptimSettings


def learning_rate_at(settings: OptimSettings, update: float) -> float:
    """Learning rate of update number `update`, counted from 0 over applied and skipped updates alike.

    A linear rise over the warm-up, the first update at 1 / (its updates) of the peak; then flat, or a linear fall to
    `final_fraction` of the peak at the horizon, and flat from there. `settings.horizon` must be set where it falls.
    """
    warmup = settings.warmup_steps * settings.minibatches
    if update < warmup:
        return settings.learning_rate * (update + 1) / warmup
    if settings.schedule == "constant":
        return settings.learning_rate
    span = settings.horizon * settings.minibatches - warmup
    progress = min(1.0, (update - warmup) / span)
    return settings.learning_rate * (1 - (1 - settings.final_fraction) * progress)


def build_adamw(parameters: Iterable[Tensor], settings: OptimSettings) -> torch.optim.AdamW:
    """AdamW over float32 (or wider) parameters; fused, which is also the fastest on a CPU."""
    return torch.optim.AdamW(
        parameters,
        lr=settings.learning_rate,
        betas=(settings.beta1, settings.beta2),
        eps=settings.epsilon,
        weight_decay=settings.weight_decay,
        fused=True,
    )


def skip_reason(grad_norm: float, settings: OptimSettings) -> str:
    """Why an update of this gradient norm must not be applied; empty when it may be."""
    if not grad_norm < float("inf"):
        return "non-finite gradient"
    if grad_norm > settings.skip_norm:
        return f"gradient norm above {settings.skip_norm:g}"
    return ""

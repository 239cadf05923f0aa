"""The disk plan: what a run will write, before its first step."""

import math
import shutil
from dataclasses import dataclass
from pathlib import Path

from exgrpo_cli.base.errors import InputError
from exgrpo_cli.config.settings import Config
from exgrpo_cli.machine.shapes import Shape

MASTER_BYTES = 4
"""Weights are saved in float32, whatever the model computes in."""
OPTIMIZER_BYTES = 8
"""Adam's two moments in float32."""
TOKEN_BYTES = 8
"""A stored token: its id (int32) and its log-prob (float32)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DiskPlan:
    """Bytes on disk at the end of a run, and while its last checkpoint is written."""

    checkpoint: int
    """One checkpoint: weights, optimizer, and the weights once more as a Hugging Face folder."""
    num_checkpoints: int
    """As many as lie there at a time: those kept, the best one, and the one being written."""
    model: int
    """The final Hugging Face folder."""
    experience: int
    """The ledger at most: every rollout of every step stored, all as long as they may be."""

    @property
    def certain(self) -> int:
        """What the run cannot do without: checkpoints and model."""
        return self.num_checkpoints * self.checkpoint + self.model

    @property
    def at_most(self) -> int:
        """With the largest ledger that is possible."""
        return self.certain + self.experience


def disk_plan(config: Config, shape: Shape) -> DiskPlan:
    """What a run of `config` with a model of `shape` will write."""
    run, rollout = config.run, config.rollout
    model = shape.num_parameters * (4 if config.backbone.dtype == "float32" else 2)
    saved = math.ceil(run.steps / run.save_every)
    kept = min(saved, run.keep_checkpoints) if run.keep_checkpoints else saved
    rollouts = run.steps * rollout.questions_per_step * rollout.group_size
    return DiskPlan(
        checkpoint=(MASTER_BYTES + OPTIMIZER_BYTES) * shape.num_parameters + model,
        num_checkpoints=kept + 1 + (config.validation.every > 0),
        model=model,
        experience=rollouts * rollout.max_response_tokens * TOKEN_BYTES if config.replay.keeps_buffer else 0,
    )


def require_disk(plan: DiskPlan, output: Path) -> None:
    """Raise InputError where the disk of `output` has less room than the run certainly takes."""
    place = output.absolute()
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if plan.certain > free:
        raise InputError(
            f"{output} will take {size(plan.certain)} for {plan.num_checkpoints} checkpoints and the model, and "
            f"{place} has {size(free)} free: choose another --output, or lower run.keep_checkpoints."
        )


def size(num_bytes: int) -> str:
    """A number of bytes as people read it."""
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.1f} MiB"

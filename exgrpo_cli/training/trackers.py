"""Step metrics to TensorBoard or Weights & Biases, beside the journal.

The journal stays the record of a run. A resumed run goes on in the same chart: TensorBoard hides what was logged after
the checkpoint, W&B takes up the run whose id is in the run folder, and sends it where its own variables say
(WANDB_MODE, ...).
"""

import dataclasses
import os
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from exgrpo_cli.base import errors, files
from exgrpo_cli.config.settings import Config

Tracker = Callable[[Mapping[str, Any]], None]
"""Takes the journal line of each step, and shows its numbers."""


def open_trackers(
    names: Sequence[str], config: Config, run_folder: Path, stack: ExitStack, *, step: int
) -> list[Tracker]:
    """The trackers `names`, for a run that goes on after `step`; `stack` closes them."""
    return [
        start_wandb(config, run_folder, stack) if name == "wandb" else start_tensorboard(run_folder, stack, step=step)
        for name in names
    ]


def start_tensorboard(run_folder: Path, stack: ExitStack, *, step: int) -> Tracker:
    """Event files in `tensorboard/`: `tensorboard --logdir runs` shows all runs beside each other."""
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(run_folder / "tensorboard"), purge_step=step + 1)
    stack.callback(writer.close)

    def log(line: Mapping[str, Any]) -> None:
        for name, value in numbers(line).items():
            writer.add_scalar(name, value, global_step=line["step"])
        writer.flush()

    return log


def start_wandb(config: Config, run_folder: Path, stack: ExitStack) -> Tracker:
    """A run of Weights & Biases in `wandb/`, named after the run folder, with the settings as its config."""
    import wandb

    # Made once, the same after a resume.
    path = run_folder / "wandb" / "run-id"
    path.parent.mkdir(exist_ok=True)
    if not path.exists():
        files.write_text(path, uuid.uuid4().hex + "\n")
    try:
        run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "exgrpo"),
            name=run_folder.name,
            id=path.read_text().strip(),
            resume="allow",
            dir=run_folder,
            config=dataclasses.asdict(config),
        )
    except wandb.Error as error:
        raise errors.InputError(
            f"--log wandb cannot start: {errors.first_line(error)} Run `wandb login`, or set WANDB_MODE=offline."
        ) from error
    stack.callback(run.finish)
    # A resumed run repeats steps after its checkpoint; W&B's own counter only goes up and would drop them.
    run.define_metric("step")
    run.define_metric("*", step_metric="step")
    return lambda line: run.log({"step": line["step"], **numbers(line)})


def numbers(line: Mapping[str, Any]) -> dict[str, float]:
    """Numbers of a journal line, `step` apart."""
    return {name: value for name, value in line.items() if name != "step" and isinstance(value, int | float)}

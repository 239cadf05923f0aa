"""Step metrics to TensorBoard or Weights & Biases, beside the journal, which stays the record of a run.

Both keep their files in the run folder, and a resumed run goes on in the same chart: TensorBoard hides what was logged
after the checkpoint, W&B takes up the run id stored beside its files. Whether W&B goes online its WANDB_MODE says.
"""

import contextlib
import dataclasses
import os
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from exgrpo_cli.config.settings import Config
from exgrpo_cli.errors import InputError
from exgrpo_cli.files import write_text

WANDB_PROJECT = "exgrpo"
"""Unless WANDB_PROJECT says otherwise."""


@runtime_checkable
class Tracker(Protocol):
    """Somewhere metrics of steps are shown."""

    def log(self, line: Mapping[str, Any]) -> None:
        """One line of the journal, `step` among its keys."""

    def close(self) -> None:
        """Write what is still held back."""


def require_trackers(names: Sequence[str]) -> None:
    """Raise InputError for the first tracker whose package is not installed."""
    for name in names:
        if find_spec(name) is None:
            raise InputError(f"--log {name} needs the {name} package: pip install 'exgrpo[trackers]', or leave it out.")


@contextlib.contextmanager
def open_trackers(names: Sequence[str], config: Config, run_folder: Path, *, step: int) -> Iterator[list[Tracker]]:
    """The trackers `names`, for a run that goes on after `step`; all are closed at the end."""
    makers: dict[str, Callable[..., Tracker]] = {"tensorboard": TensorBoardTracker, "wandb": WandbTracker}
    with contextlib.ExitStack() as stack:
        trackers: list[Tracker] = []
        for name in names:
            trackers.append(makers[name](config, run_folder, step=step))
            stack.callback(trackers[-1].close)
        yield trackers


class TensorBoardTracker:
    """Event files in `tensorboard/`: `tensorboard --logdir runs` shows all runs beside each other."""

    def __init__(self, config: Config, run_folder: Path, *, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(run_folder / "tensorboard"), purge_step=step + 1)

    def log(self, line: Mapping[str, Any]) -> None:
        """Write the numbers of one journal line at its step."""
        for name, value in numbers(line).items():
            self._writer.add_scalar(name, value, global_step=line["step"])
        self._writer.flush()

    def close(self) -> None:
        """Finish the event file."""
        self._writer.close()


class WandbTracker:
    """A run of Weights & Biases in `wandb/`, named after the run folder, with the settings as its config."""

    def __init__(self, config: Config, run_folder: Path, *, step: int) -> None:
        import wandb

        folder = run_folder / "wandb"
        folder.mkdir(exist_ok=True)
        id_file = folder / "run-id"
        if not id_file.exists():
            write_text(id_file, uuid.uuid4().hex + "\n")
        try:
            self._run = wandb.init(
                project=os.environ.get("WANDB_PROJECT", WANDB_PROJECT),
                name=run_folder.name,
                id=id_file.read_text().strip(),
                resume="allow",
                dir=run_folder,
                config=dataclasses.asdict(config),
            )
        except wandb.Error as error:
            first = str(error).strip().splitlines()[0]
            raise InputError(
                f"--log wandb cannot start: {first} Run `wandb login`, or set WANDB_MODE=offline."
            ) from error
        # A resumed run repeats steps after its checkpoint; W&B's own counter only goes up and would drop them.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, line: Mapping[str, Any]) -> None:
        """Write the numbers of one journal line at its step."""
        self._run.log({"step": line["step"], **numbers(line)})

    def close(self) -> None:
        """Finish the upload, or the offline files."""
        self._run.finish()


def numbers(line: Mapping[str, Any]) -> dict[str, float]:
    """What a chart can show of a journal line: its numbers, `step` apart."""
    return {name: value for name, value in line.items() if name != "step" and isinstance(value, int | float)}

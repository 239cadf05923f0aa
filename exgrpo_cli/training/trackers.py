"""Step metrics, sample tables and figures to TensorBoard, Weights & Biases or Trackio, beside the journal.

The journal stays the record of a run. A resumed run goes on in the same chart: TensorBoard hides what was logged after
the checkpoint, the others take up the run whose id is in the run folder. Where W&B and Trackio send or keep it, their
own variables say (WANDB_MODE, TRACKIO_DIR, TRACKIO_SPACE_ID, ...).
"""

import contextlib
import dataclasses
import os
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from exgrpo_cli.base.errors import InputError, first_line
from exgrpo_cli.base.files import write_text
from exgrpo_cli.config.settings import Config

PROJECT = "exgrpo"
"""Unless WANDB_PROJECT or TRACKIO_PROJECT says otherwise."""
SAMPLE_COLUMNS = ("prompt", "answer", "text", "reward", "verdict", "num_tokens")
"""Columns of a table of samples."""


@contextlib.contextmanager
def open_trackers(names: Sequence[str], config: Config, run_folder: Path, *, step: int) -> Iterator[list["Tracker"]]:
    """The trackers `names`, for a run that goes on after `step`; all are closed at the end."""
    makers: dict[str, Callable[..., Tracker]] = {
        "tensorboard": TensorBoardTracker,
        "wandb": start_wandb,
        "trackio": start_trackio,
    }
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

    def show_samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write them as a text: a Markdown table."""
        lines = [SAMPLE_COLUMNS, ("---",) * len(SAMPLE_COLUMNS), *cells(rows)]
        escaped = [[str(cell).replace("|", "\\|").replace("\n", "<br>") for cell in line] for line in lines]
        self._writer.add_text("samples", "\n".join(f"| {' | '.join(line)} |" for line in escaped), global_step=step)

    def show_figures(self, step: int, figures: Mapping[str, Path]) -> None:
        """Write them as images."""
        import numpy as np
        from PIL import Image

        for name, path in figures.items():
            with Image.open(path) as image:
                pixels = np.asarray(image.convert("RGB"))
            self._writer.add_image(f"plots/{name}", pixels, global_step=step, dataformats="HWC")

    def close(self) -> None:
        """Finish the event file."""
        self._writer.close()


class ChartService:
    """A run of Weights & Biases or of Trackio, whose calls are alike but for where the step goes."""

    def __init__(self, package: Any, run: Any, *, step_is_a_value: bool) -> None:
        self._package, self._run, self._step_is_a_value = package, run, step_is_a_value

    def log(self, line: Mapping[str, Any]) -> None:
        """Write the numbers of one journal line at its step."""
        self._log(line["step"], numbers(line))

    def show_samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write them as a table."""
        self._log(step, {"samples": self._package.Table(columns=list(SAMPLE_COLUMNS), data=cells(rows))})

    def show_figures(self, step: int, figures: Mapping[str, Path]) -> None:
        """Write them as images."""
        self._log(step, {f"plots/{name}": self._package.Image(str(path)) for name, path in figures.items()})

    def close(self) -> None:
        """Write, or send, what is left."""
        self._run.finish()

    def _log(self, step: int, values: Mapping[str, Any]) -> None:
        if self._step_is_a_value:
            self._run.log({"step": step, **values})
        else:
            self._run.log(values, step=step)


Tracker = TensorBoardTracker | ChartService
"""Somewhere metrics of steps, samples and figures are shown."""


def start_wandb(config: Config, run_folder: Path, *, step: int) -> ChartService:
    """A run of Weights & Biases in `wandb/`, named after the run folder, with the settings as its config."""
    import wandb

    try:
        run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=run_folder.name,
            id=stored_id(run_folder / "wandb"),
            resume="allow",
            dir=run_folder,
            config=dataclasses.asdict(config),
        )
    except wandb.Error as error:
        raise InputError(
            f"--log wandb cannot start: {first_line(error)} Run `wandb login`, or set WANDB_MODE=offline."
        ) from error
    # A resumed run repeats steps after its checkpoint; W&B's own counter only goes up and would drop them.
    run.define_metric("step")
    run.define_metric("*", step_metric="step")
    return ChartService(wandb, run, step_is_a_value=True)


def start_trackio(config: Config, run_folder: Path, *, step: int) -> ChartService:
    """A run of Trackio, named after the run folder and its id: `trackio show --project exgrpo` shows all runs."""
    import trackio

    try:
        run = trackio.init(
            project=os.environ.get("TRACKIO_PROJECT", PROJECT),
            name=f"{run_folder.name}-{stored_id(run_folder / 'trackio')[:8]}",
            config=dataclasses.asdict(config),
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
    except (ValueError, OSError) as error:
        raise InputError(f"--log trackio cannot start: {error} Look at its TRACKIO_ variables.") from error
    return ChartService(trackio, run, step_is_a_value=False)


def stored_id(folder: Path) -> str:
    """The id that a run has at a tracker: made once, kept in `folder`/run-id, the same after a resume."""
    folder.mkdir(exist_ok=True)
    path = folder / "run-id"
    if not path.exists():
        write_text(path, uuid.uuid4().hex + "\n")
    return path.read_text().strip()


def cells(rows: Sequence[Mapping[str, Any]]) -> list[list[Any]]:
    """Rows of samples as a table shows them."""
    return [[row[name] for name in SAMPLE_COLUMNS] for row in rows]


def numbers(line: Mapping[str, Any]) -> dict[str, float]:
    """Numbers of a journal line, `step` apart."""
    return {name: value for name, value in line.items() if name != "step" and isinstance(value, int | float)}

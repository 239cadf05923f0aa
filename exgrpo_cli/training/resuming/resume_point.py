"""Where a resumed run goes on: the newest checkpoint that is whole, with the ledger whole up to it.

All that the run will read is checked here, before anything of the folder is changed.
"""

import shutil
from dataclasses import dataclass

from exgrpo_cli.base.errors import InputError
from exgrpo_cli.base.manifest import find_damage
from exgrpo_cli.base.shapes import read_json
from exgrpo_cli.config.settings import Config
from exgrpo_cli.ledger.reader import whole_until
from exgrpo_cli.ledger.writer import IDENTITY_FILE
from exgrpo_cli.runs.checksums import CHECKSUMS_FILE, RESUMED_FROM, find_changes
from exgrpo_cli.runs.folder import RunFolder
from exgrpo_cli.runs.summary import has_ended
from exgrpo_cli.training.resuming.checkpoint import complete_steps, folder_name


@dataclass(frozen=True, kw_only=True, slots=True)
class ResumePoint:
    """The checkpoint to go on from."""

    step: int | None = None
    """None where the run was stopped before its first checkpoint: it begins anew."""
    passed_over: tuple[tuple[int, str], ...] = ()
    """Newer checkpoints, newest first, each with what is wrong with it or with the ledger before it."""

    @property
    def notes(self) -> list[str]:
        """What the user should know about the checkpoints that are passed over."""
        going_on = "from the start" if self.step is None else f"from step {self.step}"
        return [
            f"checkpoint of step {step} passed over, going on {going_on}: {what}" for step, what in self.passed_over
        ]


def find_resume_point(folder: RunFolder, config: Config) -> ResumePoint:
    """The newest checkpoint with which everything is in order.

    Raises InputError where the run has finished, where its files show that a checkpoint or the ledger is lost, and
    where no checkpoint is whole; nothing has been changed then.
    """
    steps = complete_steps(folder.checkpoints)
    require_unfinished(folder, config)
    reached = max((line["step"] for line in folder.metrics_lines()), default=0)
    require_unchanged(folder)
    if not steps:
        if reached > config.run.save_every:
            raise InputError(
                f"{folder.checkpoints} holds no checkpoint, but the run has made {reached} steps and saves every "
                f"{config.run.save_every}: restore the folder from a copy, or start a new run."
            )
        return ResumePoint()
    ledger_step, problem = max(steps), ""
    has_ledger = (folder.replay / IDENTITY_FILE).is_file()
    if config.replay.keeps_buffer or has_ledger:
        if not has_ledger:
            raise InputError(
                f"{folder.replay / IDENTITY_FILE} is missing, but the run keeps its experience there: restore the "
                "folder from a copy, or start a new run."
            )
        ledger_step, problem = whole_until(folder.replay)
    passed_over: list[tuple[int, str]] = []
    for step in reversed(steps):
        damage = find_damage(folder.checkpoints / folder_name(step))
        if not damage and ledger_step < step:
            damage = f"{folder.replay} is whole only up to step {ledger_step}: {problem}"
        if not damage:
            return ResumePoint(step=step, passed_over=tuple(passed_over))
        passed_over.append((step, damage))
    reasons = "; ".join(f"step {step}: {damage}" for step, damage in passed_over)
    raise InputError(
        f"{folder.path} cannot go on, no checkpoint is whole: {reasons}. Restore what is damaged from a copy, or start "
        "a new run."
    )


def require_unfinished(folder: RunFolder, config: Config) -> None:
    """Raise InputError where the run has its summary and is asked for no further step."""
    if (
        has_ended(folder.path, config.run.last_step)
        and (done := read_json(folder.summary)["steps"]) >= config.run.last_step
    ):
        raise InputError(f"{folder.path} has finished its {done} steps: raise --steps to go on.")


def require_unchanged(folder: RunFolder) -> None:
    """Raise InputError naming what a resume reads and is not as the run wrote it."""
    if changes := find_changes(folder.path, RESUMED_FROM):
        raise InputError(
            f"{'; '.join(changes)}. Restore it from a copy; to go on with a file that you changed yourself, delete "
            f"{folder.path / CHECKSUMS_FILE}."
        )


def set_aside(folder: RunFolder, point: ResumePoint) -> None:
    """Rename the checkpoints that were passed over, `step-000050.damaged`: kept to be looked at, never resumed from."""
    for step, _ in point.passed_over:
        path = folder.checkpoints / folder_name(step)
        aside = path.with_name(f"{path.name}.damaged")
        if aside.exists():
            shutil.rmtree(aside)
        path.rename(aside)

"""Everything a resume needs, in one folder that appears only when it is complete, and which one a resumed run takes.

`checkpoints/step-000050/` holds `policy/` (weights, optimizer), `model/` (a Hugging Face folder of the same weights,
where an adapter is trained `adapter/` instead),
`state.json` (loop state, stream position, generators) and `manifest.json` (size and checksum of each file). `latest`
and `best` are files that name a folder. What a resumed run will read is checked before its folder is changed.
"""

import collections
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from exgrpo_cli.base import errors, files
from exgrpo_cli.config.settings import Config
from exgrpo_cli.ledger import reader, schemas
from exgrpo_cli.models.adapters import Base, export_adapter
from exgrpo_cli.models.export import export_model
from exgrpo_cli.runs import folder as run_folder
from exgrpo_cli.runs.result import has_ended
from exgrpo_cli.training.state import Parts, RunState


def folder_name(step: int) -> str:
    """Name of the checkpoint after `step`."""
    return f"step-{step:06d}"


def save_checkpoint(checkpoints: Path, parts: Parts, state: RunState, *, keep: int) -> None:
    """Write the checkpoint of `state.step`, point `latest` at it, and drop all but the `keep` newest, the best and
    those of `validation.forks`.

    A `keep` of 0 keeps all. Raises RunError when the disk is full; what was there stays.
    """
    name = folder_name(state.step)

    def complete() -> None:
        saved = {
            "state": files.as_json(state),
            "stream": parts.stream.state(),
            "generators": {name: rng.bit_generator.state for name, rng in parts.rngs.items()},
        }
        (partial / "state.json").write_text(json.dumps(saved), encoding="utf-8")
        files.write_manifest(partial)
        files.finish_folder(partial, checkpoints / name)
        files.write_text(checkpoints / "latest", name + "\n")
        if state.best_step == state.step:
            files.write_text(checkpoints / "best", name + "\n")
        for step in run_folder.complete_steps(checkpoints)[: -keep or None] if keep else []:
            if step not in (state.best_step, *parts.config.validation.forks):
                shutil.rmtree(checkpoints / folder_name(step))

    if parts.store is not None:
        parts.store.seal()
    try:
        with run_folder.writing(checkpoints / name):
            partial = parts.ranks.from_main(lambda: files.begin_folder(checkpoints / name))
            parts.policy.save(partial / "policy")
            if not save_adapter(parts, partial / "adapter"):
                export_weights(parts, partial / "model")
            parts.ranks.from_main(complete)
    except errors.RunError:
        files.remove_partials(checkpoints)
        raise


def export_weights(parts: Parts, folder: Path, *, card: str | None = None) -> None:
    """Write the current weights as a Hugging Face folder; every rank takes part, rank 0 writes."""
    backbone, policy = parts.backbone, parts.policy
    weights = policy.named_weights() if policy.is_sharded or policy.base else None
    if parts.ranks.is_main:
        export_model(backbone.model, backbone.tokenizer, folder, eos_ids=backbone.eos_ids, card=card, weights=weights)
    elif policy.is_sharded:
        # Gathering a weight takes all ranks.
        collections.deque(weights or (), maxlen=0)


def save_adapter(parts: Parts, folder: Path) -> bool:
    """Write the adapter with what it belongs to, on rank 0; whether one is trained at all."""
    config, policy = parts.config, parts.policy
    if policy.base and parts.ranks.is_main:
        base = Base(backbone=config.backbone, tiny=config.tiny, fingerprint=policy.base)
        export_adapter(policy.model, parts.backbone.tokenizer, folder, base)
    return bool(policy.base)


def load_checkpoint(folder: Path, parts: Parts) -> RunState:
    """Restore policy, stream and generators in place and return the loop's state."""
    saved = parts.ranks.from_main(lambda: files.read_json(folder / "state.json"))
    parts.policy.load(folder / "policy")
    parts.stream.restore(saved["stream"])
    for name, rng in parts.rngs.items():
        rng.bit_generator.state = saved["generators"][name]
    return files.require_shape(saved["state"], RunState, str(folder / "state.json"))


@dataclass(frozen=True, kw_only=True, slots=True)
class ResumePoint:
    """The checkpoint to go on from."""

    step: int | None = None
    """None where the run was stopped before its first checkpoint: it begins anew."""
    passed_over: Mapping[int, str] = field(default_factory=dict)
    """Newer checkpoints by step, newest first, with what is wrong with each or with the ledger before it."""
    lost: Sequence[str] = ()
    """A sentence for each file that nothing is computed from and that is not as it was."""

    @property
    def notes(self) -> list[str]:
        """Warnings about the checkpoints that are passed over, and about what is lost."""
        going_on = f"passed over, going on from step {self.step}"
        notes = [f"checkpoint of step {step} {going_on}: {what}" for step, what in self.passed_over.items()]
        if self.lost:
            more = f", and {len(self.lost) - 1} more files" if len(self.lost) > 1 else ""
            notes.append(f"{self.lost[0]}{more}: restore what you need from a copy; training goes on without.")
        return notes


def find_resume_point(folder: run_folder.RunFolder, config: Config) -> ResumePoint:
    """The newest checkpoint with which everything is in order.

    Raises InputError where the run has finished, where its files show that a checkpoint or the ledger is lost, and
    where no checkpoint is whole; nothing has been changed then.
    """
    steps, last_step = run_folder.complete_steps(folder.checkpoints), config.run.last_step
    if has_ended(folder.path, last_step) and (done := files.read_json(folder.summary)["steps"]) >= last_step:
        raise errors.InputError(f"{folder.path} has finished its {done} steps: raise --steps to go on.")
    reached = max((line["step"] for line in folder.metrics_lines()), default=0)
    if changes := run_folder.find_changes(folder.path, run_folder.RESUMED_FROM):
        raise errors.InputError(
            f"{'; '.join(changes)}. Restore it from a copy; to go on with a file that you changed yourself, delete "
            f"{folder.path / run_folder.CHECKSUMS_FILE}."
        )
    if not steps:
        if reached > config.run.save_every:
            raise errors.InputError(
                f"{folder.checkpoints} holds no checkpoint, but the run has made {reached} steps and saves every "
                f"{config.run.save_every}: restore the folder from a copy, or start a new run."
            )
        return ResumePoint()
    if not (folder.replay / schemas.IDENTITY_FILE).is_file():
        raise errors.InputError(
            f"{folder.replay / schemas.IDENTITY_FILE} is missing, but the run keeps its experience there: restore the "
            "folder from a copy, or start a new run."
        )
    ledger_step, problem = reader.whole_until(folder.replay)
    passed_over: dict[int, str] = {}
    for step in reversed(steps):
        damage = files.find_damage(folder.checkpoints / folder_name(step)) or _misplaced(folder.checkpoints, step)
        if not damage and ledger_step < step:
            damage = f"{folder.replay} is whole only up to step {ledger_step}: {problem}"
        if not damage:
            lost = files.find_differences(folder.path, run_folder.written_once(folder.path, step))
            return ResumePoint(step=step, passed_over=passed_over, lost=lost)
        passed_over[step] = damage
    reasons = "; ".join(f"step {step}: {damage}" for step, damage in passed_over.items())
    raise errors.InputError(
        f"{folder.path} cannot go on, no checkpoint is whole: {reasons}. Restore what is damaged from a copy, or start "
        "a new run."
    )


def _misplaced(checkpoints: Path, step: int) -> str:
    """A sentence where a checkpoint holds no state, or that of another step, as a renamed or copied folder does."""
    path = checkpoints / folder_name(step) / "state.json"
    try:
        saved = files.read_json(path, {"state": RunState, "stream": dict, "generators": dict})["state"]["step"]
    except errors.InputError as error:
        return str(error)
    return f"{path} holds the state of step {saved}" if saved != step else ""


def set_aside(folder: run_folder.RunFolder, point: ResumePoint) -> None:
    """Rename the checkpoints that were passed over, `step-000050.damaged`: kept to be looked at, never resumed from."""
    for step in point.passed_over:
        path = folder.checkpoints / folder_name(step)
        aside = path.with_name(f"{path.name}.damaged")
        files.remove_path(aside)
        path.rename(aside)

"""Everything a resume needs, in one folder that appears only when it is complete.

`checkpoints/step-000050/` holds `policy/` (weights, optimizer), `model/` (a Hugging Face folder of the same weights),
`state.json` (loop state, stream position, generators) and `manifest.json` (size and checksum of each file). `latest`
and `best` are files that name a folder.
"""

import json
import re
import shutil
from pathlib import Path
from typing import Any

from exgrpo_cli.base.errors import InputError, RunError
from exgrpo_cli.base.files import begin_folder, finish_folder, remove_partials, write_text
from exgrpo_cli.base.manifest import write_manifest
from exgrpo_cli.models.export import export_model
from exgrpo_cli.runs.folder import writing
from exgrpo_cli.training.parts import Parts
from exgrpo_cli.training.resuming.state import RunState

_NAME = re.compile(r"step-(\d{6,})")


def folder_name(step: int) -> str:
    """Name of the checkpoint after `step`."""
    return f"step-{step:06d}"


def complete_steps(checkpoints: Path) -> list[int]:
    """Steps with a complete checkpoint, ascending; folders with other names are somebody else's."""
    found = ((path, _NAME.fullmatch(path.name)) for path in checkpoints.glob("step-*"))
    return sorted(int(match[1]) for path, match in found if match and path.is_dir())


def save_checkpoint(checkpoints: Path, parts: Parts, state: RunState, *, keep: int) -> None:
    """Write the checkpoint of `state.step`, point `latest` at it, and drop all but the `keep` newest and the best.

    Raises RunError when the disk is full; what was there stays.
    """
    name = folder_name(state.step)

    def complete() -> None:
        (partial / "state.json").write_text(json.dumps(snapshot(parts, state)), encoding="utf-8")
        write_manifest(partial)
        finish_folder(partial, checkpoints / name)
        point_at(checkpoints, name, state, keep=keep)

    if parts.store is not None:
        parts.store.seal()
    try:
        with writing(checkpoints / name):
            partial = parts.ranks.from_main(lambda: begin_folder(checkpoints / name))
            parts.policy.save(partial / "policy")
            export_weights(parts, partial / "model")
            parts.ranks.from_main(complete)
    except RunError:
        remove_partials(checkpoints)
        raise


def export_weights(parts: Parts, folder: Path, *, card: str | None = None) -> None:
    """Write the current weights as a Hugging Face folder; every rank takes part, rank 0 writes."""
    backbone, weights = parts.backbone, parts.policy.named_weights() if parts.policy.is_sharded else None
    if parts.ranks.is_main:
        export_model(backbone.model, backbone.tokenizer, folder, eos_ids=backbone.eos_ids, card=card, weights=weights)
    elif weights is not None:
        for _ in weights:
            # Gathering a weight takes all ranks.
            pass


def point_at(checkpoints: Path, name: str, state: RunState, *, keep: int) -> None:
    """Name the new checkpoint the latest, and the best where it is, then drop old ones."""
    write_text(checkpoints / "latest", name + "\n")
    if state.best_step == state.step:
        write_text(checkpoints / "best", name + "\n")
    drop_old(checkpoints, keep=keep, best=state.best_step)


def drop_old(checkpoints: Path, *, keep: int, best: int) -> None:
    """Remove all but the `keep` newest checkpoints and the best; `keep` 0 keeps all."""
    for step in complete_steps(checkpoints)[: -keep or None] if keep else []:
        if step != best:
            shutil.rmtree(checkpoints / folder_name(step))


def snapshot(parts: Parts, state: RunState) -> dict[str, Any]:
    """What `state.json` holds: counts, place in the question stream, states of the random generators."""
    return {
        "state": state.to_json(),
        "stream": parts.stream.state(),
        "generators": {name: rng.bit_generator.state for name, rng in parts.rngs.items()},
    }


def load_checkpoint(folder: Path, parts: Parts) -> RunState:
    """Restore policy, stream and generators in place and return the loop's state.

    Raises InputError when the folder is not a whole checkpoint.
    """
    path = folder / "state.json"
    saved = parts.ranks.from_main(lambda: read_state(path))
    parts.policy.load(folder / "policy")
    try:
        parts.stream.restore(saved["stream"])
        for name, rng in parts.rngs.items():
            rng.bit_generator.state = saved["generators"][name]
        return RunState.from_json(saved["state"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InputError(
            f"{path} does not hold what a checkpoint holds ({error!r}): resume from another checkpoint or start anew."
        ) from error


def read_state(path: Path) -> dict[str, Any]:
    """A checkpoint's `state.json`; raises InputError where it cannot be read."""
    try:
        return dict(json.loads(path.read_text()))
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read ({error}): resume from another checkpoint or start anew.") from error


def latest_step(checkpoints: Path) -> int | None:
    """Step of the newest complete checkpoint; None when there is none yet."""
    steps = complete_steps(checkpoints)
    return steps[-1] if steps else None

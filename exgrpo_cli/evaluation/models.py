"""The model that a name means: a run or its checkpoint, a model folder, a GGUF file, a backbone preset, a hub id."""

import re
from pathlib import Path
from typing import NamedTuple

from exgrpo_cli.base.errors import InputError, nearest
from exgrpo_cli.config.layers import build_config, run_label
from exgrpo_cli.config.names import HUB_ID, is_gguf
from exgrpo_cli.config.settings import Author, Config
from exgrpo_cli.models.adapters import is_adapter
from exgrpo_cli.presets import preset_names

RUNS = Path("runs")


class ModelChoice(NamedTuple):
    """A model by name, and the settings it is to be loaded and asked with."""

    name: str
    """For tables and folder names."""
    config: Config
    """The run's or the preset's settings; `backbone.source` is the folder or hub id to load."""
    run: Path | None = None
    """The run folder it came from."""


def choose_model(text: str | None, runs: Path = RUNS) -> ModelChoice:
    """The model that `--model` names; without one, the newest finished run under `runs`.

    `RUN@step-000050`, `RUN@best` and `RUN@latest` name a checkpoint; a run folder alone is its final model. Raises
    InputError where nothing of that name is there.
    """
    if text is None:
        return _of_run(newest_finished(runs), "")
    run, at, checkpoint = text.rpartition("@")
    if at and _is_run(Path(run)):
        if not checkpoint:
            raise InputError(f"--model {text!r} names no checkpoint after the @: write {run}, {run}@best or the like.")
        return _of_run(Path(run), checkpoint)
    path = Path(text).expanduser()
    if _is_run(path):
        return _of_run(path, "")
    if path.is_dir():
        return _of_folder(path)
    if text in preset_names("backbones") or (is_gguf(text) and path.is_file()):
        return ModelChoice(name=path.name, config=build_config(backbone=str(path)))
    hub_id, at, revision = text.partition("@")
    if HUB_ID.fullmatch(hub_id) and bool(at) == bool(revision) and not text.startswith((".", "/", "runs/", "results/")):
        options = {"backbone": {"revision": revision}} if revision else {}
        return ModelChoice(name=text, config=build_config(backbone=hub_id, options=options))
    kinds = "neither a run folder, a model folder, a GGUF file, a hub id (owner/name), nor a backbone preset"
    raise InputError(f"model {text!r} is {kinds}.{nearest(text, preset_names('backbones'))}")


def newest_finished(runs: Path) -> Path:
    """The run folder whose `summary.json` is the newest. Raises InputError when no run has finished."""
    finished = [path.parent for path in runs.glob("*/summary.json") if _is_run(path.parent)]
    if not finished:
        raise InputError(f"no finished run under {runs}/: name a model with --model, or train one with `exgrpo train`.")
    return max(finished, key=lambda run: (run / "summary.json").stat().st_mtime)


def _is_run(path: Path) -> bool:
    return (path / "config.toml").is_file()


def _of_run(run: Path, checkpoint: str) -> ModelChoice:
    checkpoints = run / "checkpoints"
    if checkpoint in ("latest", "best") and (checkpoints / checkpoint).is_file():
        checkpoint = (checkpoints / checkpoint).read_bytes()[:20].decode(errors="replace").strip()
    if checkpoint and not re.fullmatch(r"step-\d{6}", checkpoint):
        raise InputError(f"{run}@{checkpoint}: no such checkpoint. Known: {_known(run)}.")
    folder = (checkpoints / checkpoint if checkpoint else run) / "model"
    folder = folder.with_name("adapter") if is_adapter(folder.with_name("adapter")) and checkpoint else folder
    return _exported(run, folder, run_label(run) + (f"@{checkpoint}" if checkpoint else ""))


def _of_folder(folder: Path) -> ModelChoice:
    # The exported model of a run is asked as the run itself would be.
    parents = [parent for parent in (folder.resolve().parent, folder.resolve().parents[2]) if _is_run(parent)]
    if folder.name in ("model", "adapter") and parents:
        return _exported(parents[0], folder, run_label(parents[0]))
    if not ((folder / "config.json").is_file() or is_adapter(folder)):
        raise InputError(f"{folder} is neither a run folder (config.toml) nor a model folder (config.json).")
    return ModelChoice(name=folder.resolve().name, config=build_config(backbone=str(folder)))


def _exported(run: Path, folder: Path, name: str) -> ModelChoice:
    if not ((folder / "config.json").is_file() or is_adapter(folder)):
        remedy = f"is the run finished? Checkpoints: {_known(run)}; name one as {run}@latest"
        raise InputError(f"{run} has no model in {folder} (no file config.json): {remedy}.")
    # Weights as exported: the run's own overrides of rope base and window are in the exported config already.
    backbone = {"source": str(folder.resolve()), "rope_theta": 0.0, "max_position_embeddings": 0}
    # Whatever functions the run names: an evaluation calls none of them.
    config = build_config(config_file=run / "config.toml", options={"backbone": backbone}, files=Author.READ)
    return ModelChoice(name=name, config=config, run=run)


def _known(run: Path) -> str:
    checkpoints = run / "checkpoints"
    pointers = [name for name in ("latest", "best") if (checkpoints / name).is_file()]
    return ", ".join([*pointers, *sorted(path.name for path in checkpoints.glob("step-*") if path.is_dir())]) or "none"

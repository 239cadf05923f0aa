"""Checksums of a run's small files that no manifest covers: settings, journals, the newest samples, final figures.

Journals and samples grow: a checksum is of the bytes that were there when it was made, and a longer file may hold it.
"""

import hashlib
from collections.abc import Collection
from pathlib import Path

from exgrpo_cli.base.errors import InputError
from exgrpo_cli.base.files import write_json
from exgrpo_cli.base.manifest import MANIFEST, Files, describe, find_damage, first_difference
from exgrpo_cli.base.shapes import Shape, read_json, require_shape

CHECKSUMS_FILE = "checksums.json"
RESUMED_FROM = ("config.toml", "metrics.jsonl", "validations.jsonl", f"data/{MANIFEST}")
"""What a resume reads."""
HAS_MANIFEST = "has_manifest"
"""In the `state.json` of a checkpoint: that a missing manifest has been lost, not left out by an older version."""
_AT_THE_END = ("result.json", "summary.json")
_ALWAYS = (*RESUMED_FROM, "environment.json")
_ENTRY: Shape = {"bytes": int, "sha256": str}
_SAMPLE_FILES = 20
"""The newest, which a report shows; there is one for each step."""


def note_checksums(run: Path, *, at_the_end: bool = False) -> None:
    """Write down what the run's files hold now, `at_the_end` with final figures and model.

    Raises RunError where the disk refuses.
    """
    samples = sorted((run / "samples").glob("step-*.jsonl"))[-_SAMPLE_FILES:]
    names = [*_ALWAYS, *(_AT_THE_END if at_the_end else ()), *(f"samples/{path.name}" for path in samples)]
    sizes = {name: (run / name).stat().st_size for name in names if (run / name).is_file()}
    files = {name: {"bytes": size, "sha256": _digest(run / name, size)} for name, size in sizes.items()}
    write_json(run / CHECKSUMS_FILE, {"files": files, **({"model": describe(run / "model")} if at_the_end else {})})


def forget_checksums(run: Path) -> None:
    """Before files are cut back: a process killed under way leaves none that would be wrong."""
    (run / CHECKSUMS_FILE).unlink(missing_ok=True)


def find_changes(run: Path, among: Collection[str] = ()) -> list[str]:
    """What is not as the run wrote it, one sentence a file, of the files named or of all.

    Empty where a run of an older version noted nothing. Raises InputError where the checksums themselves are damaged.
    """
    path = run / CHECKSUMS_FILE
    if not path.is_file():
        return []
    files = _noted(path, "files")
    chosen = [name for name in files if not among or name in among]
    return [problem for name in chosen if (problem := _change(run / name, **files[name]))]


def checkpoint_damage(folder: Path, below: str = "") -> str:
    """What is not as the manifest of a checkpoint says, as `find_damage` does; a lost manifest is damage as well."""
    state = folder / "state.json"
    if not (folder / MANIFEST).is_file() and state.is_file():
        try:
            if read_json(state).get(HAS_MANIFEST):
                return f"{folder / MANIFEST} is missing"
        except InputError as error:
            return str(error).rstrip(".")
    return find_damage(folder, below)


def require_model(folder: Path) -> None:
    """Raise InputError where `folder` is the model of a run, final or of a checkpoint, and not as it was written.

    Its card may have been changed. Hashes the weights.
    """
    owner, damage = folder.absolute().parent, ""
    if folder.name == "model" and (owner / CHECKSUMS_FILE).is_file():
        files = _noted(owner / CHECKSUMS_FILE, "model")
        damage = first_difference(folder, {name: files[name] for name in files if name != "README.md"})
    elif folder.name == "model" and owner.parent.name == "checkpoints":
        damage = checkpoint_damage(owner, below="model/")
    if damage:
        raise InputError(f"{damage}: restore it from a copy; of a model that you changed yourself, name a copy.")


def _noted(path: Path, key: str) -> Files:
    try:
        files: Files = read_json(path, {f"{key}?": dict}).get(key, {})
        for entry in files.values():
            require_shape(entry, _ENTRY, str(path))
    except InputError as error:
        raise InputError(
            f"{error} Without a copy delete it: settings, journals and model are then not checked."
        ) from error
    return files


def _change(path: Path, bytes: int, sha256: str) -> str:
    if not path.is_file():
        return f"{path} is missing"
    size = path.stat().st_size
    if size < bytes:
        return f"{path} has {size} bytes instead of {bytes}"
    return "" if _digest(path, bytes) == sha256 else f"{path} is damaged (its checksum differs)"


def _digest(path: Path, size: int) -> str:
    with path.open("rb") as file:
        return hashlib.sha256(file.read(size)).hexdigest()

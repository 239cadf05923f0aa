"""Manifests: name, size and SHA-256 of files, written with them and compared before they are used.

Checkpoints, questions and caches each have one; `checksums.json` of a run covers what no other does: settings,
journals, newest samples, final figures and model.
"""

import hashlib
import json
from collections.abc import Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from exgrpo_cli.base.errors import InputError
from exgrpo_cli.base.files import read_json, write_json

MANIFEST = "manifest.json"
Files = Mapping[str, Mapping[str, Any]]
"""{name below the folder: {"bytes": size, "sha256": digest}}."""
_GROWING = ".jsonl"


def write_manifest(folder: Path, names: Iterable[str] | None = None, *, file: str = MANIFEST) -> None:
    """Describe files in `folder`/`file`: those named, or all, those of subfolders included."""
    if names is None:
        names = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    sizes = {name: (folder / name).stat().st_size for name in sorted(names) if name != file}
    # Hashing releases the interpreter: large files are read side by side.
    with ThreadPoolExecutor() as pool:
        digests = pool.map(lambda name: file_digest(folder / name, sizes[name]), sizes)
    files = {name: {"bytes": sizes[name], "sha256": digest} for name, digest in zip(sizes, digests, strict=True)}
    write_json(folder / file, {"files": files})


def read_manifest(path: Path) -> Files:
    """The files that a manifest describes. Raises InputError where it is missing or damaged."""
    files: Files = read_json(path, {"files": {str: {"bytes": int, "sha256": str}}})["files"]
    return files


def find_differences(folder: Path, files: Files) -> list[str]:
    """One sentence for each file that is not as described; of JSON lines, which grow, the beginning is compared."""

    def difference(name: str) -> str:
        path, size = folder / name, files[name]["bytes"]
        if not path.is_file():
            return f"{path} is missing"
        found = path.stat().st_size
        if found < size or (found > size and path.suffix != _GROWING):
            return f"{path} has {found} bytes instead of {size}"
        return "" if file_digest(path, size) == files[name]["sha256"] else f"{path} is damaged (its checksum differs)"

    with ThreadPoolExecutor() as pool:
        return [problem for problem in pool.map(difference, files) if problem]


def find_damage(folder: Path, below: str = "") -> str:
    """The first file, of those whose name begins with `below`, that is not as the folder's manifest says; or "".

    A manifest that is missing or damaged is damage as well.
    """
    path = folder / MANIFEST
    try:
        files = {name: entry for name, entry in read_manifest(path).items() if name.startswith(below)}
    except InputError:
        return f"{path} {'cannot be read' if path.is_file() else 'is missing'}"
    return next(iter(find_differences(folder, files)), "")


def values_digest(values: Mapping[str, Any]) -> str:
    """Short SHA-256 (16 digits) of a JSON object, to detect edits."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]


def file_digest(path: Path, size: int | None = None) -> str:
    """The SHA-256 of a file, of one that grows its first `size` bytes, in hexadecimal digits."""
    with path.open("rb") as file:
        if path.suffix == _GROWING:
            return hashlib.sha256(file.read(size)).hexdigest()
        return hashlib.file_digest(file, "sha256").hexdigest()


CHECKSUMS_FILE = "checksums.json"
RESUMED_FROM = ("config.toml", "metrics.jsonl", "validations.jsonl", f"data/{MANIFEST}")
"""Files that a resume reads."""
_SAMPLE_FILES = 20
"""The newest, which a report shows; there is one for each step."""
_MODEL = "model/"


def note_checksums(run: Path, *, at_the_end: bool = False) -> None:
    """Write down what the run's files hold now, `at_the_end` with final figures and model.

    Raises RunError where the disk refuses.
    """
    names = [*RESUMED_FROM, "environment.json"]
    names += [f"samples/{path.name}" for path in sorted((run / "samples").glob("step-*.jsonl"))[-_SAMPLE_FILES:]]
    if at_the_end:
        names += ["result.json", "summary.json"]
        names += [path.relative_to(run).as_posix() for path in (run / _MODEL).rglob("*")]
    write_manifest(run, [name for name in names if (run / name).is_file()], file=CHECKSUMS_FILE)


def forget_checksums(run: Path) -> None:
    """Remove the checksums before files are cut back: a process killed under way leaves none that would be wrong."""
    (run / CHECKSUMS_FILE).unlink(missing_ok=True)


def find_changes(run: Path, among: Collection[str] = ()) -> list[str]:
    """One sentence for each file that is not as the run wrote it, of those named or of all but the model's.

    Empty where nothing is noted. Raises InputError where the checksums themselves are damaged.
    """
    noted = _noted(run).items()
    chosen = {name: entry for name, entry in noted if (name in among if among else not name.startswith(_MODEL))}
    return find_differences(run, chosen)


def require_model(folder: Path) -> None:
    """Raise InputError where `folder` is the model of a run, final or of a checkpoint, and not as it was written.

    Its card may have been changed. Hashes the weights.
    """
    owner = folder.absolute().parent
    if folder.name != "model":
        damage = ""
    elif (owner / "state.json").is_file():
        damage = find_damage(owner, below=_MODEL)
    else:
        own = {name: entry for name, entry in _noted(owner).items() if name.startswith(_MODEL)}
        own.pop(f"{_MODEL}README.md", None)
        damage = next(iter(find_differences(owner, own)), "")
    if damage:
        raise InputError(f"{damage}: restore it from a copy; of a model that you changed yourself, name a copy.")


def _noted(run: Path) -> Files:
    path = run / CHECKSUMS_FILE
    try:
        return read_manifest(path) if path.is_file() else {}
    except InputError as error:
        raise InputError(
            f"{error} Without a copy delete it: settings, journals and model are then not checked."
        ) from error

"""Manifests: name, size and SHA-256 of files, written with them and compared before they are used."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from exgrpo_cli.base.errors import InputError
from exgrpo_cli.base.files import write_json
from exgrpo_cli.base.shapes import Shape, read_json, require_shape

MANIFEST = "manifest.json"
Files = Mapping[str, Mapping[str, Any]]
"""{name below the folder: {"bytes": size, "sha256": digest}}."""
_ENTRY: Shape = {"bytes": int, "sha256": str}
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
    files: Files = read_json(path, {"files": dict})["files"]
    for entry in files.values():
        require_shape(entry, _ENTRY, str(path))
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
    if not path.is_file():
        return f"{path} is missing"
    try:
        files = {name: entry for name, entry in read_manifest(path).items() if name.startswith(below)}
    except InputError:
        return f"{path} cannot be read"
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

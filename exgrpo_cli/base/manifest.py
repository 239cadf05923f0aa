"""Manifests: name, size and SHA-256 of every file of a folder, written with it and checked before it is used."""

import hashlib
import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from exgrpo_cli.base.files import write_json

MANIFEST = "manifest.json"


Files = Mapping[str, Mapping[str, Any]]
"""{name below the folder: {"bytes": size, "sha256": digest}}."""


def write_manifest(folder: Path) -> None:
    """Describe all files of `folder`, those of its subfolders included, in `folder`/manifest.json."""
    write_json(folder / MANIFEST, {"files": describe(folder)})


def describe(folder: Path) -> Files:
    """Size and SHA-256 of all files of `folder`, but for a manifest of it."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path != folder / MANIFEST)
    # Hashing lets go of the interpreter: large files are read side by side.
    with ThreadPoolExecutor() as pool:
        digests = pool.map(file_digest, paths)
    return {
        path.relative_to(folder).as_posix(): {"bytes": path.stat().st_size, "sha256": digest}
        for path, digest in zip(paths, digests, strict=True)
    }


def find_damage(folder: Path, below: str = "") -> str:
    """What is not as the manifest says, first found first named, of files whose name begins with `below`.

    Empty where all is, or where there is no manifest: folders of older versions have none.
    """
    manifest = folder / MANIFEST
    if not manifest.is_file():
        return ""
    try:
        files = json.loads(manifest.read_text(encoding="utf-8"))["files"]
        return first_difference(folder, {name: entry for name, entry in files.items() if name.startswith(below)})
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"{manifest} cannot be read"


def first_difference(folder: Path, files: Files) -> str:
    """The first file that is not as described; empty where all are."""
    sizes = {name: entry["bytes"] for name, entry in files.items()}
    expected = {name: entry["sha256"] for name, entry in files.items()}
    for name, size in sizes.items():
        path = folder / name
        if not path.is_file():
            return f"{path} is missing"
        if path.stat().st_size != size:
            return f"{path} has {path.stat().st_size} bytes instead of {size}"
    with ThreadPoolExecutor() as pool:
        for name, digest in zip(expected, pool.map(lambda name: file_digest(folder / name), expected), strict=True):
            if digest != expected[name]:
                return f"{folder / name} is damaged (its checksum differs)"
    return ""


def values_digest(values: Mapping[str, Any]) -> str:
    """Sixteen digits of the SHA-256 of an object of JSON, by which a file tells that what it says was changed."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]


def file_digest(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

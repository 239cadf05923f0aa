"""Folders built once under the user's cache folder, complete and checked or not there at all."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path

import platformdirs
from filelock import FileLock

from exgrpo_cli.base import errors, files

Notice = Callable[[str], None]
"""Receives the reason for which a folder that exists is built again."""


def cache_root() -> Path:
    """$EXGRPO_CACHE, or the user's cache folder."""
    override = os.environ.get("EXGRPO_CACHE", "")
    return Path(override).expanduser() if override else Path(platformdirs.user_cache_dir("exgrpo"))


def cached_folder(
    *,
    name: str,
    key: Mapping[str, object],
    build: Callable[[Path], None],
    notice: Notice = lambda reason: None,
    cache_dir: Path | None = None,
) -> Path:
    """The folder `<cache>/<name>-<hash of key>`, built by `build` when it is missing or does not match its manifest.

    A second process that wants the same folder waits for the first. A build happens in a temporary folder that is
    renamed when it is complete, so one that is killed leaves nothing that looks finished. `notice` is told why a
    folder that exists is built again.

    Raises InputError when the cache folder cannot be written.
    """
    root = cache_root() if cache_dir is None else cache_dir
    folder = root / f"{name}-{files.values_digest(key)}"
    try:
        root.mkdir(parents=True, exist_ok=True)
        lock = FileLock(root / f"{folder.name}.lock").acquire()
    except OSError as error:
        refusal = f"cannot be written ({error.filename}: {error.strerror})"
        raise errors.InputError(f"The cache folder {root} {refusal}: set EXGRPO_CACHE to one that can.") from error
    with lock:
        if os.path.lexists(folder):
            damage = files.find_damage(folder) or _unlisted(folder) if folder.is_dir() else "it is no folder"
            if not damage:
                return folder
            notice(f"{folder} is built again: {damage}")
            files.remove_path(folder)
        # Folders of other names as well: nobody may ever ask for those again.
        files.remove_abandoned(root)
        with files.whole_folder(folder) as partial:
            build(partial)
            files.write_manifest(partial)
    return folder


def _unlisted(folder: Path) -> str:
    """A file of a folder that its manifest does not vouch for, in a sentence; or ""."""
    listed = {files.MANIFEST, *files.read_manifest(folder / files.MANIFEST)}
    found = (path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*")) if path.is_file())
    return next((f"{folder / name} is not in its {files.MANIFEST}" for name in found if name not in listed), "")

"""Files and folders that are whole or absent; JSON and JSON lines, checked when they are read; manifests.

Whatever is written goes to a hidden name beside its place (`.NAME.partial-HOST-PID`), is flushed to the disk, and is
then renamed; the folder that holds the name is flushed last, so a power cut leaves the old content or the new. What a
killed writer left is removed by the next one of the same name. A manifest holds name, size and SHA-256 of files, and is
compared before they are used.
"""

import base64
import glob
import hashlib
import json
import os
import platform
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, BinaryIO, TypedDict
from zlib import crc32

import msgspec
from filelock import AcquireReturnProxy, FileLock, Timeout

from exgrpo_cli.base.errors import InputError, RunError

_PARTIAL = ".partial"
"""Between the name of what is being written, with a dot before it, and the process that writes it."""
_TAIL_BYTES = 1 << 14
_DEVICES = ("/dev/", "/proc/", "/sys/")
_MOST_BYTES = 256 << 20
"""Bytes of JSON read into memory at once: no file and no line of ours has more."""
UNCHANGED = "What was there before is unchanged: make room, or choose another place."


def stage(path: Path, write: Callable[[BinaryIO], object], *, sync: bool = True) -> Path:
    """Let `write` make the file under a temporary name; `publish` puts it in place.

    With `sync` it is on the disk when this returns; without, a power cut may take it.

    Raises OSError (a full disk, say); nothing is left behind then, nor where `write` raises.
    """
    partial = partial_path(path)
    remove_abandoned(path.parent, path.name)
    try:
        with partial.open("wb") as file:
            write(file)
            if sync:
                file.flush()
                os.fsync(file.fileno())
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    return partial


def publish(partial: Path, path: Path) -> None:
    """Rename what was staged into place, durably."""
    partial.replace(path)
    sync_folder(path.parent)


def write_whole(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Replace `path` by what `write` puts into the open file, its folder made where needed.

    Raises InputError where `path` is no place for a file, RunError where it cannot be written; what was there before
    stays.
    """
    require_place(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        publish(stage(path, write), path)
    except OSError as error:
        raise cannot_write(path, error) from error


def require_place(path: Path) -> None:
    """Raise InputError where a file would take the place of a folder, a device or a pipe.

    A link to a file is replaced, not followed, but for one into /dev or /proc, such as /dev/stdout.
    """
    device = path.is_symlink() and str(path.readlink()).startswith(_DEVICES)
    if device or (path.exists() and not path.is_file()):
        kind = "a folder" if path.is_dir() else "a device or a pipe"
        raise InputError(f"{path} is {kind}, where a file is to go: name another file.")


def require_writable(path: Path) -> None:
    """Raise InputError unless a new file could be written where `path` is to go; tried, since root may all but that."""
    parent = next(folder for folder in path.absolute().parents if folder.exists() or folder.is_symlink())
    try:
        with TemporaryFile(dir=parent):
            pass
    except OSError as error:
        reason = f"{parent} is not a writable folder ({error.strerror})"
        raise InputError(f"--output {path} cannot be written: {reason}.") from error


def take(lock: FileLock, in_use: str) -> AcquireReturnProxy:
    """Acquire a lock at once, for good or in a `with`. Raises InputError where another process has it, or it cannot be
    written."""
    try:
        return lock.acquire(timeout=0)
    except Timeout:
        raise InputError(in_use) from None
    except OSError as error:
        refused = f"{lock.lock_file} cannot be written ({error.strerror})"
        raise InputError(f"{refused}: allow it, or go on with a copy of the folder.") from error


def write_text(path: Path, text: str) -> None:
    """Replace `path` by `text` in UTF-8. Raises RunError as `write_whole` does."""
    write_whole(path, lambda file: file.write(text.encode()))


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Replace `path` by an indented JSON object. Raises ValueError for NaN or infinity, RunError as `write_whole`."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def write_json_lines(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Replace `path` by one line per row. Raises RunError as `write_whole` does."""
    write_text(path, json_lines(rows))


def append_json_lines(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Add one line per row, in one write that is on the disk when this returns.

    Raises ValueError for NaN or infinity, and RunError where the disk refuses; earlier lines stay readable.
    """
    lines = json_lines(rows).encode()
    try:
        with path.open("ab") as file:
            file.write(lines)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise cannot_write(path, error) from error


def read_json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Objects of a file of JSON lines; a last line without its end, which a kill tore off, is left out.

    Raises InputError for what is no file, and naming the first line that is no object or longer than `_MOST_BYTES`.
    """
    with _opened(path) as lines:
        for number, line in enumerate(iter(lambda: lines.readline(_MOST_BYTES), b""), start=1):
            if not line.endswith(b"\n") and len(line) < _MOST_BYTES:
                return
            try:
                value = parse_json(line)
            except ValueError as error:
                remedy = "remove the line, or restore the file from a copy"
                raise InputError(f"{path}, line {number} is not JSON ({error}): {remedy}.") from error
            if not isinstance(value, dict):
                raise InputError(f"{path}, line {number} is no JSON object but {value!r:.40}: remove the line.")
            yield value


def drop_torn_line(path: Path) -> None:
    """Cut off a last line without its end, so that the next one can be appended; a whole file is left untouched."""
    content = path.read_bytes()
    if not content.endswith(b"\n"):
        os.truncate(path, content.rfind(b"\n") + 1)


def last_json_line(path: Path) -> dict[str, Any] | None:
    """The last whole line of a growing file of JSON lines that is an object, read from its end; None without one."""
    if not path.is_file():
        return None
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
        *lines, _ = file.read().split(b"\n")
    for line in reversed(lines):
        with suppress(ValueError):
            if isinstance(value := parse_json(line), dict):
                return value
    return None


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON text. Raises ValueError for anything else, nesting beyond what Python follows included."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    """A file to read. Raises InputError where it is missing, a device (which may have no end) or the system refuses."""
    if path.exists() and not path.is_file():
        raise InputError(f"{path} is no file: restore it from a copy.")
    try:
        with path.open("rb") as file:
            yield file
    except FileNotFoundError:
        raise InputError(f"{path} is missing: restore it from a copy.") from None
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror}): restore it from a copy.") from error


def begin_folder(folder: Path) -> Path:
    """An empty folder beside `folder`, to be filled and then put in place by `finish_folder`."""
    partial = partial_path(folder)
    remove_partials(folder.parent, folder.name)
    partial.mkdir(parents=True)
    return partial


def finish_folder(partial: Path, folder: Path) -> None:
    """Put a filled folder in place, every file of it on the disk first; an older one is replaced."""
    # A rename must never name lost data.
    for path in [partial, *partial.rglob("*")]:
        sync_folder(path)
    remove_path(folder)
    publish(partial, folder)


@contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """The body fills the folder this gives; only then is it put in place. A body that raises leaves nothing."""
    partial = begin_folder(folder)
    try:
        yield partial
        finish_folder(partial, folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def remove_partials(folder: Path, name: str = "") -> None:
    """Remove what killed processes left, of `name` alone where given, in a folder that nobody else writes."""
    for path in partials(folder, name):
        remove_path(path)


def remove_abandoned(folder: Path, name: str = "") -> None:
    """Remove what processes of this host left that are gone, of `name` alone where given."""
    for path in partials(folder, name):
        host, _, pid = path.name.rpartition(f"{_PARTIAL}-")[2].partition("-")
        if host == _host() and pid.isdecimal() and not _is_running(int(pid)):
            remove_path(path)


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (OSError, OverflowError) as error:
        # What may not be asked is another user's.
        return isinstance(error, PermissionError)
    return True


def remove_path(path: Path) -> None:
    """Remove a file, a folder with all that is in it, or a link, never what that leads to; nothing is fine as well."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def partials(folder: Path, name: str = "") -> list[Path]:
    """Files being written in `folder`, of `name` alone where given, or left by a writer that was killed."""
    return list(folder.glob(f".{glob.escape(name) or '*'}{_PARTIAL}*"))


def sync_folder(folder: Path) -> None:
    """Make renames in a folder, or the bytes of a file, survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def cannot_write(path: Path | str, error: Exception, then: str = UNCHANGED) -> RunError:
    """The one line for a write that the system refused; `then` says what is whole all the same, and what to do."""
    # Arrow wraps the system's reason in words of its own.
    number = getattr(error, "errno", None)
    return RunError(f"{path} cannot be written: {os.strerror(number) if number else error}. {then}")


def partial_path(path: Path) -> Path:
    """Path at which this process writes what will become `path`."""
    return path.with_name(f".{path.name}{_PARTIAL}-{_host()}-{os.getpid()}")


def _host() -> str:
    return f"{crc32(platform.node().encode()):08x}"


def json_lines(rows: Iterable[Mapping[str, Any]]) -> str:
    """A line of JSON for each row. Raises ValueError for NaN or infinity."""
    return "".join(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n" for row in rows)


NUMBER = int | float
Shape = Any
"""A type, or the shapes of an object's keys."""


def read_json(path: Path, shape: Shape = dict) -> Any:
    """The value in a JSON file. Raises InputError where it is missing, is not JSON or has another shape."""
    with _opened(path) as file:
        content = file.read(_MOST_BYTES)
    try:
        value = parse_json(content.decode())
    except ValueError as error:
        raise InputError(f"{path} is not JSON ({error}): restore it from a copy.") from error
    require_shape(value, shape, str(path))
    return value


def require_shape(value: Any, shape: Shape, where: str) -> Any:
    """The value, read from `where`, as one of `shape`.

    Raises InputError naming its first key that is missing or of another type.
    """
    try:
        return msgspec.convert(value, type_of(shape), dec_hook=_array, str_keys=True)
    except msgspec.ValidationError as error:
        raise InputError(f"{where} is damaged ({error}): restore it from a copy.") from error


def as_json(value: Any) -> Any:
    """The value of JSON types that `require_shape` reads again: of an array its bytes, the dtype is its field's."""
    return msgspec.to_builtins(value, enc_hook=lambda array: array.tobytes())


def _array(kind: Any, value: str) -> Any:
    import numpy as np

    return np.frombuffer(base64.b64decode(value), dtype=kind.dtypes[0]).copy()


def type_of(shape: Shape) -> Any:
    """The type that values of a shape are checked against."""
    if isinstance(shape, Mapping):
        return TypedDict("Shape", {name: type_of(own) for name, own in shape.items()})  # type: ignore[operator]
    return shape


MANIFEST = "manifest.json"


class FileEntry(TypedDict):
    """Size and digest of a file."""

    bytes: int
    sha256: str


Files = Mapping[str, FileEntry]
"""By name below the folder."""
_GROWING = ".jsonl"


def write_manifest(
    folder: Path, names: Iterable[str] | None = None, *, file: str = MANIFEST, known: Files | None = None
) -> None:
    """Describe files in `folder`/`file`: those named, or all, those of subfolders included. What is `known` of some is
    taken over as it is."""
    known = known or {}
    if names is None:
        names = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    sizes = {name: (folder / name).stat().st_size for name in sorted(names) if name != file and name not in known}
    # Hashing releases the interpreter: large files are read side by side.
    with ThreadPoolExecutor() as pool:
        digests = pool.map(lambda name: file_digest(folder / name, sizes[name]), sizes)
    files = {name: {"bytes": sizes[name], "sha256": digest} for name, digest in zip(sizes, digests, strict=True)}
    write_json(folder / file, {"files": {**known, **files}})


def read_manifest(path: Path) -> Files:
    """The files that a manifest describes. Raises InputError where it is missing or damaged."""
    return read_json(path, {"files": dict[str, FileEntry]})["files"]


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

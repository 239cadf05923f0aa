"""Whether a folder can be used from several hosts: seen by all of them, and locked for all of them."""

import errno
import fcntl
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile

from exgrpo_cli.base.errors import InputError

MOUNTS = Path("/proc/mounts")
OF_ONE_HOST = frozenset({"tmpfs", "ramfs", "overlay", "ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs"})
"""File systems that no other host sees, unless it is exported from here."""
LOCKS_OF_ONE_HOST = frozenset({"nolock", "localflock", "local_lock=all", "local_lock=flock"})
"""Mount options with which a lock holds on its own host alone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Mount:
    """A line of /proc/mounts."""

    point: str
    kind: str
    options: frozenset[str]


def read_mounts(text: str) -> list[Mount]:
    """The mounts that a text like /proc/mounts lists."""
    rows = [line.split() for line in text.splitlines()]
    return [
        Mount(point=row[1].replace("\\040", " "), kind=row[2], options=frozenset(row[3].split(",")))
        for row in rows
        if len(row) > 3
    ]


def mount_of(folder: Path, mounts: Sequence[Mount]) -> Mount | None:
    """The mount that holds the folder: of those above it the nearest, the latest of equal ones."""
    place = folder.resolve()
    above = [mount for mount in mounts if place.is_relative_to(mount.point)]
    return max(enumerate(above), key=lambda pair: (len(Path(pair[1].point).parts), pair[0]))[1] if above else None


def require_shared(folder: Path, *, shared: bool, mounts: Sequence[Mount] | None = None) -> None:
    """Raise InputError where other hosts do not see `folder`, or where a lock in it would not hold on them.

    `shared` says that they see it whatever its file system is; locks are checked all the same.
    """
    mount = mount_of(folder, read_mounts(MOUNTS.read_text()) if mounts is None else mounts)
    if mount is not None and mount.kind in OF_ONE_HOST and not shared:
        raise InputError(
            f"{folder} is on {mount.kind} ({mount.point}), a file system of this host: name a folder on a shared one "
            "with --output, or say slurm.shared = true where every node sees it."
        )
    if mount is not None and mount.options & LOCKS_OF_ONE_HOST:
        option = sorted(mount.options & LOCKS_OF_ONE_HOST)[0]
        raise InputError(
            f"{folder}: {mount.point} is mounted with {option}, so a lock does not hold across hosts and two tasks "
            "could write one run. Use a file system that locks for all hosts."
        )
    try:
        with TemporaryFile(dir=folder) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        reason = errno.errorcode.get(error.errno or 0, str(error))
        raise InputError(f"{folder}: files in it cannot be locked ({reason}): use another file system.") from error

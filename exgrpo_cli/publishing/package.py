"""What goes into one repository of the hub: names, where each file lies, and whose content it is."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

MARKER = "exgrpo.json"
"""File of a repository that says what was published into it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Package:
    """The content of one repository."""

    repo_type: str
    """"model" or "dataset"."""
    origin: Mapping[str, str]
    """Which run or study this is: a repository with another origin is not overwritten."""
    files: Mapping[str, Path]
    """Name in the repository to a file of this machine."""

    @property
    def num_bytes(self) -> int:
        """Of all files together."""
        return sum(path.stat().st_size for path in self.files.values())

    def describe(self, repo: str) -> dict[str, object]:
        """What `--dry-run` shows: the repository, its files and their sizes in bytes."""
        sizes = {name: path.stat().st_size for name, path in sorted(self.files.items())}
        return {"repository": repo, "type": self.repo_type, "bytes": self.num_bytes, "files": sizes}


def make_package(repo_type: str, origin: Mapping[str, str], staged: Path, linked: Mapping[str, Path]) -> Package:
    """All files under `staged`, the marker added, and those that are uploaded from where they lie."""
    (staged / MARKER).write_text(json.dumps(dict(origin), indent=2) + "\n", encoding="utf-8")
    own = {path.relative_to(staged).as_posix(): path for path in sorted(staged.rglob("*")) if path.is_file()}
    return Package(repo_type=repo_type, origin=origin, files={**linked, **own})

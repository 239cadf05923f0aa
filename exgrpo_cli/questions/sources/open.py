"""From what the user typed to local files: a file, a folder, or a data set of the hub."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from exgrpo_cli.base.errors import InputError
from exgrpo_cli.config.names import BUILT_IN, is_made
from exgrpo_cli.questions.sources.formats import FORMATS, SUFFIXES, stem_of, suffix_of
from exgrpo_cli.questions.sources.hub import FetchProgress, HubId, fetch, parse_hub_id, read_card
from exgrpo_cli.questions.sources.splits import select_files


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """Local files that hold the rows of one question set."""

    name: str
    """What questions without a source of their own are said to come from."""
    revision: str | None
    """Commit on the hub; None for local files."""
    split: str | None
    """Configuration and split that were chosen, where there was a choice."""
    files: tuple[Path, ...]


def is_local(text: str) -> bool:
    """Whether a source is read from this machine's disk."""
    return _split_local(text) is not None


def hub_id_of(text: str) -> HubId:
    """The hub id that a source which is not on disk must be; raises InputError where it cannot be one."""
    hub = parse_hub_id(text)
    if hub is None or text.lower().endswith(SUFFIXES) or text.startswith((".", "/", "~")):
        raise InputError(
            f"{text} does not exist: a source is one of {', '.join(BUILT_IN)}, gym:TASK, a file ({FORMATS}), a folder, "
            f"or a Hugging Face id (owner/name@revision:split)."
        )
    return hub


def default_name(text: str) -> str:
    """File name, without suffix, of the questions of a source: `openai/gsm8k:main` gives `gsm8k-main`."""
    if is_made(text):
        return text.replace(":", "-")
    local = _split_local(text)
    hub = None if local else parse_hub_id(text)
    if hub is not None:
        return "-".join([hub.repo.partition("/")[2], *(part.replace("/", "-") for part in hub.selectors)])
    path, selectors = local if local else (Path(text), ())
    stem = stem_of(path.resolve()) if path.is_file() else path.resolve().name
    return "-".join([stem, *(part.replace("/", "-") for part in selectors)])


def open_source(text: str, progress: FetchProgress) -> Source:
    """Find the files, fetching them where they are on the hub.

    Raises InputError for what does not exist or leaves a choice open, RunError for a download that breaks off.
    """
    local = _split_local(text)
    if local is not None:
        path, selectors = local
        return _open_folder(path, selectors) if path.is_dir() else _open_file(path)
    hub = hub_id_of(text)
    fetched = fetch(hub, progress)
    split = f"{fetched.selection.config}/{fetched.selection.split}"
    return Source(name=hub.repo, revision=fetched.commit, split=split, files=fetched.files)


def _split_local(text: str) -> tuple[Path, tuple[str, ...]] | None:
    """The longest leading part, cut at colons, that exists on disk, and what follows it."""
    parts = text.split(":")
    for end in range(len(parts), 0, -1):
        path = Path(":".join(parts[:end])).expanduser()
        if path.exists() and (end == len(parts) or path.is_dir()):
            return path, tuple(part for part in parts[end:] if part)
    return None


def _open_file(path: Path) -> Source:
    if not suffix_of(path.name):
        raise InputError(f"{path} has the suffix {path.suffix!r}: questions are read from {FORMATS} files.")
    return Source(name=stem_of(path), revision=None, split=None, files=(path,))


def _open_folder(folder: Path, selectors: Sequence[str]) -> Source:
    paths = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    card: Mapping[str, Any] = read_card(folder / "README.md") if "README.md" in paths else {}
    selection = select_files(str(folder), paths, card, selectors)
    return Source(
        name=folder.resolve().name,
        revision=None,
        split=f"{selection.config}/{selection.split}",
        files=tuple(folder / path for path in selection.files),
    )

"""From what the user typed to local files: a file, a folder, or a data set of the hub, and which files of it are meant.

Of a folder or a data set what its card (`configs` in the README's front matter) says comes first; without one the
folders are the configurations and the file names tell the splits, as the hub itself reads them.
"""

import fnmatch
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from exgrpo_cli.base.errors import InputError, nearest
from exgrpo_cli.config.names import BUILT_IN, is_made
from exgrpo_cli.questions.files import FORMATS, SUFFIXES, stem_of, suffix_of
from exgrpo_cli.questions.hub import FetchProgress, HubId, fetch, parse_hub_id, read_card

_SPLIT_NAMES = {
    "train": ("train", "training"),
    "test": ("test", "testing", "eval", "evaluation"),
    "validation": ("validation", "valid", "val", "dev"),
}
_SPLIT_OF_WORD = {word: split for split, words in _SPLIT_NAMES.items() for word in words}
_SHARD = re.compile(r"(.*)-(\d{5})-of-(\d{5})")

Splits = Mapping[str, tuple[str, ...]]
"""Split name to its files, relative to the top of the data set."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """Local files that hold the rows of one question set."""

    name: str
    """Source of questions that name none of their own."""
    revision: str | None = None
    """Commit on the hub; None for local files."""
    split: str | None = None
    """Configuration and split that were chosen, where there was a choice."""
    files: tuple[Path, ...]

    def to_json(self) -> dict[str, str | None]:
        """Description in reports and metadata."""
        return {"source": self.name, "revision": self.revision, "split": self.split}


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
        stem, selectors = hub.repo.partition("/")[2], hub.selectors
    else:
        path, selectors = local or (Path(text), ())
        stem = stem_of(path.resolve()) if path.is_file() else path.resolve().name
    return "-".join([stem, *(part.replace("/", "-") for part in selectors)])


def open_source(text: str, progress: FetchProgress) -> Source:
    """Find the files, fetching them where they are on the hub.

    Raises InputError for what does not exist or leaves a choice open, RunError for a download that breaks off.
    """
    local = _split_local(text)
    if local is None:
        hub = hub_id_of(text)
        commit, split, files = fetch(hub, select_files, progress)
        return Source(name=hub.repo, revision=commit, split=split, files=files)
    path, selectors = local
    if not path.is_dir():
        if not suffix_of(path.name):
            raise InputError(f"{path} has the suffix {path.suffix!r}: questions are read from {FORMATS} files.")
        return Source(name=stem_of(path), files=(path,))
    paths = [each.relative_to(path).as_posix() for each in path.rglob("*") if each.is_file()]
    card: Mapping[str, Any] = read_card(path / "README.md") if "README.md" in paths else {}
    split, chosen = select_files(str(path), paths, card, selectors)
    return Source(name=path.resolve().name, split=split, files=tuple(path / each for each in chosen))


def _split_local(text: str) -> tuple[Path, tuple[str, ...]] | None:
    """The longest leading part, cut at colons, that exists on disk, and what follows it."""
    parts = text.split(":")
    for end in range(len(parts), 0, -1):
        path = Path(":".join(parts[:end])).expanduser()
        if path.exists() and (end == len(parts) or path.is_dir()):
            return path, tuple(part for part in parts[end:] if part)
    return None


def select_files(
    where: str, paths: Sequence[str], card: Mapping[str, Any], selectors: Sequence[str]
) -> tuple[str, tuple[str, ...]]:
    """`configuration/split` and its files in order, chosen among `paths` (relative, with forward slashes).

    `selectors` are the parts after the colons of a source: a configuration, a split, both, or one file. Without a split
    `train` is meant, or the only one. Raises InputError, listing what there is, for an unknown name, a choice that is
    still open, a missing shard or files of several formats.
    """
    data = sorted(path for path in paths if _is_data(path))
    if not data:
        scripts = [path for path in paths if path.endswith(".py")]
        hint = f" Its loading script {scripts[0]} is not run; try {where}@refs/convert/parquet." if scripts else ""
        raise InputError(f"{where} has no {FORMATS} files: there are no questions to read.{hint}")
    if len(selectors) == 1 and selectors[0] in data:
        return "default/file", (selectors[0],)
    configs = _configs_of_card(where, data, card) or _configs_of_names(data)
    rest = list(selectors)
    config = _choose(where, "configuration", configs, rest, "default")
    split = _choose(where, "split", configs[config], rest, "train")
    if rest:
        raise InputError(f"{where} has no split {rest[0]!r}.{nearest(rest[0], [*configs[config], *configs])}")
    _check_files(where, configs[config][split])
    return f"{config}/{split}", configs[config][split]


def _is_data(path: str) -> bool:
    parts = PurePosixPath(path).parts
    hidden = any(part.startswith((".", "_")) for part in parts)
    return bool(suffix_of(path)) and not hidden and parts[-1] != "dataset_infos.json"


def _configs_of_card(where: str, data: Sequence[str], card: Mapping[str, Any]) -> dict[str, Splits]:
    try:
        entries = card.get("configs") or []
        configs = {str(entry.get("config_name", "default")): _splits_of_entry(data, entry) for entry in entries}
    except (AttributeError, KeyError, TypeError) as error:
        raise InputError(
            f"{where}: `configs` in the front matter of its README.md is not a list of configurations with "
            f"`data_files`: name one file, for example {where}:{data[0]}."
        ) from error
    return {name: splits for name, splits in configs.items() if splits}


def _splits_of_entry(data: Sequence[str], entry: Mapping[str, Any]) -> Splits:
    folder = str(entry.get("data_dir") or "").strip("/")
    inside = [path for path in data if not folder or path.startswith(f"{folder}/")]
    listed = _listed(entry.get("data_files"))
    if not listed:
        return _splits_of_names(inside)
    named = (each if isinstance(each, Mapping) else {"split": "train", "path": each} for each in listed)
    return _grouped(
        (each["split"], path)
        for each in named
        for path in inside
        if any(fnmatch.fnmatchcase(path, pattern) for pattern in _listed(each["path"]))
    )


def _listed(value: Any) -> list[Any]:
    """A value of a card that may be a list or the one element of it."""
    return value if isinstance(value, list) else [value] if value else []


def _grouped(pairs: Iterable[tuple[str, str]]) -> Splits:
    """Files by split, from pairs of both."""
    splits: dict[str, tuple[str, ...]] = {}
    for name, path in pairs:
        splits[name] = (*splits.get(name, ()), path)
    return splits


def _configs_of_names(data: Sequence[str]) -> dict[str, Splits]:
    tops = {path.partition("/")[0] for path in data if "/" in path}
    if len(tops) < 2 or tops & {"data", *_SPLIT_OF_WORD} or any("/" not in path for path in data):
        return {"default": _splits_of_names(data)}
    return {top: _splits_of_names([path for path in data if path.startswith(f"{top}/")]) for top in sorted(tops)}


def _splits_of_names(data: Sequence[str]) -> Splits:
    return _grouped((_split_of_name(path), path) for path in data)


def _split_of_name(path: str) -> str:
    """The split that the name or a folder tells, the name first."""
    words = (word for part in reversed(PurePosixPath(path).parts) for word in re.split(r"[^a-z]+", part.lower()))
    return next((_SPLIT_OF_WORD[word] for word in words if word in _SPLIT_OF_WORD), "train")


def _choose(where: str, kind: str, names: Collection[str], selectors: list[str], preferred: str) -> str:
    """The name that a selector, which is then taken out, the preference or the lack of another chooses."""
    for selector in selectors:
        if selector in names:
            selectors.remove(selector)
            return selector
    if preferred in names or len(names) == 1:
        return preferred if preferred in names else next(iter(names))
    raise InputError(f"{where} has the {kind}s {', '.join(names)}: say which, for example {where}:{next(iter(names))}.")


def _check_files(where: str, files: Sequence[str]) -> None:
    """Raise InputError for files of several formats, and where a part of a numbered series is missing."""
    suffixes = sorted({suffix_of(path) for path in files})
    if len(suffixes) > 1:
        raise InputError(f"{where} mixes {' and '.join(suffixes)} files: name one of them, for example {files[0]}.")
    matches = (_SHARD.fullmatch(path[: -len(suffix_of(path))]) for path in files)
    for (name, wanted), found in Counter((match[1], int(match[3])) for match in matches if match).items():
        if found < wanted:
            raise InputError(f"{where} has {found} of the {wanted} parts of {name}: fetch the missing ones first.")

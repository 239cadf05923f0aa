"""From what the user typed to local files: a file, a folder, or a data set of the hub, and which files of it are meant.

Of a folder or a data set what its card (`configs` in the README's front matter) says comes first; without one the
folders are the configurations and the file names tell the splits, as the hub itself reads them.
"""

import fnmatch
import re
from collections import Counter
from collections.abc import Mapping, Sequence
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
    """What questions without a source of their own are said to come from."""
    revision: str | None = None
    """Commit on the hub; None for local files."""
    split: str | None = None
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
    config, rest = _choose_config(where, configs, selectors)
    split = _choose_split(where, configs[config], rest)
    _check_files(where, configs[config][split])
    return f"{config}/{split}", configs[config][split]


def _is_data(path: str) -> bool:
    parts = PurePosixPath(path).parts
    hidden = any(part.startswith((".", "_")) for part in parts)
    return bool(suffix_of(path)) and not hidden and parts[-1] != "dataset_infos.json"


def _configs_of_card(where: str, data: Sequence[str], card: Mapping[str, Any]) -> dict[str, Splits]:
    configs: dict[str, Splits] = {}
    entries = card.get("configs") or []
    if not isinstance(entries, list) or not all(_is_config(entry) for entry in entries):
        raise InputError(
            f"{where}: `configs` in the front matter of its README.md is not a list of configurations with "
            f"`data_files`: name one file, for example {where}:{data[0]}."
        )
    for entry in entries:
        folder = str(entry.get("data_dir") or "").strip("/")
        inside = [path for path in data if not folder or path.startswith(f"{folder}/")]
        listed = _listed(entry.get("data_files"))
        splits = _splits_of_entry(inside, listed) if listed else _splits_of_names(inside)
        if any(splits.values()):
            configs[str(entry.get("config_name", "default"))] = splits
    return configs


def _is_config(entry: Any) -> bool:
    return isinstance(entry, Mapping) and all(
        isinstance(each, str) or (isinstance(each, Mapping) and {"split", "path"} <= each.keys())
        for each in _listed(entry.get("data_files"))
    )


def _listed(value: Any) -> list[Any]:
    """A value of a card that may be a list or the one element of it."""
    return value if isinstance(value, list) else [value] if value else []


def _splits_of_entry(data: Sequence[str], data_files: Sequence[Any]) -> Splits:
    splits: dict[str, tuple[str, ...]] = {}
    for entry in data_files:
        name, patterns = (entry["split"], entry["path"]) if isinstance(entry, dict) else ("train", entry)
        matched = [path for path in data if any(fnmatch.fnmatchcase(path, each) for each in _listed(patterns))]
        splits[name] = (*splits.get(name, ()), *matched)
    return {name: files for name, files in splits.items() if files}


def _configs_of_names(data: Sequence[str]) -> dict[str, Splits]:
    tops = {path.partition("/")[0] for path in data if "/" in path}
    if len(tops) < 2 or tops & {"data", *_SPLIT_OF_WORD} or any("/" not in path for path in data):
        return {"default": _splits_of_names(data)}
    return {top: _splits_of_names([path for path in data if path.startswith(f"{top}/")]) for top in sorted(tops)}


def _splits_of_names(data: Sequence[str]) -> Splits:
    splits: dict[str, tuple[str, ...]] = {}
    for path in data:
        words = [word for part in reversed(PurePosixPath(path).parts) for word in re.split(r"[^a-z]+", part.lower())]
        name = next((_SPLIT_OF_WORD[word] for word in words if word in _SPLIT_OF_WORD), "train")
        splits[name] = (*splits.get(name, ()), path)
    return splits


def _choose_config(where: str, configs: Mapping[str, Splits], selectors: Sequence[str]) -> tuple[str, Sequence[str]]:
    for place, selector in enumerate(selectors):
        if selector in configs:
            return selector, [*selectors[:place], *selectors[place + 1 :]]
    if len(configs) == 1 or "default" in configs:
        return "default" if "default" in configs else next(iter(configs)), selectors
    named, example = ", ".join(configs), f"{where}:{next(iter(configs))}"
    if selectors:
        raise InputError(f"{where} has no configuration {selectors[0]!r}, only {named}: write {example}.")
    raise InputError(f"{where} has the configurations {named}: say which, for example {example}.")


def _choose_split(where: str, splits: Splits, selectors: Sequence[str]) -> str:
    if len(selectors) > 1:
        raise InputError(f"{where} is asked for {':'.join(selectors)}: name a configuration and a split at most.")
    if selectors and selectors[0] not in splits:
        raise InputError(f"{where} has no split {selectors[0]!r}.{nearest(selectors[0], list(splits))}")
    if selectors:
        return selectors[0]
    if "train" in splits or len(splits) == 1:
        return "train" if "train" in splits else next(iter(splits))
    raise InputError(
        f"{where} has the splits {', '.join(splits)}: say which, for example {where}:{next(iter(splits))}."
    )


def _check_files(where: str, files: Sequence[str]) -> None:
    """Raise InputError for files of several formats, and where a part of a numbered series is missing."""
    suffixes = sorted({suffix_of(path) for path in files})
    if len(suffixes) > 1:
        raise InputError(f"{where} mixes {' and '.join(suffixes)} files: name one of them, for example {files[0]}.")
    matches = (_SHARD.fullmatch(path[: -len(suffix_of(path))]) for path in files)
    for (name, wanted), found in Counter((match[1], int(match[3])) for match in matches if match).items():
        if found < wanted:
            raise InputError(f"{where} has {found} of the {wanted} parts of {name}: fetch the missing ones first.")

"""Which files of a folder or a hub data set are meant by its configuration and split.

What the data set card (`configs` in the README's front matter) says comes first; without one the folders are the
configurations and the file names tell the splits, as the hub itself reads them.
"""

import fnmatch
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from exgrpo_cli.base.errors import InputError, nearest
from exgrpo_cli.questions.sources.formats import FORMATS, suffix_of

_SPLIT_WORDS = {
    "train": "train",
    "training": "train",
    "test": "test",
    "testing": "test",
    "eval": "test",
    "evaluation": "test",
    "validation": "validation",
    "valid": "validation",
    "val": "validation",
    "dev": "validation",
}
_SHARD = re.compile(r"(.*)-(\d{5})-of-(\d{5})")
_SPLITS_NAMED_DATA = ("data", *_SPLIT_WORDS)

Splits = Mapping[str, tuple[str, ...]]
"""Split name to its files, relative to the top of the data set."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Selection:
    """The files of one split of one configuration."""

    config: str
    split: str
    files: tuple[str, ...]
    """Relative to the top of the data set, in order."""


def select_files(where: str, paths: Sequence[str], card: Mapping[str, Any], selectors: Sequence[str]) -> Selection:
    """Choose among `paths` (relative, with forward slashes).

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
        return Selection(config="default", split="file", files=(selectors[0],))
    configs = _configs_of_card(where, data, card) or _configs_of_names(data)
    config, rest = _choose_config(where, configs, list(selectors))
    split = _choose_split(where, configs[config], rest)
    files = configs[config][split]
    _check_formats(where, files)
    _check_shards(where, files)
    return Selection(config=config, split=split, files=files)


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
        splits = _splits_of_entry(inside, entry["data_files"]) if entry.get("data_files") else _splits_of_names(inside)
        if any(splits.values()):
            configs[str(entry.get("config_name", "default"))] = splits
    return configs


def _is_config(entry: Any) -> bool:
    if not isinstance(entry, Mapping):
        return False
    files = entry.get("data_files") or []
    return all(
        isinstance(each, str) or (isinstance(each, Mapping) and {"split", "path"} <= each.keys())
        for each in (files if isinstance(files, list) else [files])
    )


def _splits_of_entry(data: Sequence[str], data_files: Any) -> dict[str, tuple[str, ...]]:
    entries = data_files if isinstance(data_files, list) else [data_files]
    splits: dict[str, tuple[str, ...]] = {}
    for entry in entries:
        name, patterns = (entry["split"], entry["path"]) if isinstance(entry, dict) else ("train", entry)
        patterns = patterns if isinstance(patterns, list) else [patterns]
        matched = [path for path in data if any(fnmatch.fnmatchcase(path, pattern) for pattern in patterns)]
        splits[name] = (*splits.get(name, ()), *matched)
    return {name: files for name, files in splits.items() if files}


def _configs_of_names(data: Sequence[str]) -> dict[str, Splits]:
    tops = {path.partition("/")[0] for path in data if "/" in path}
    if len(tops) < 2 or tops & set(_SPLITS_NAMED_DATA) or any("/" not in path for path in data):
        return {"default": _splits_of_names(data)}
    return {top: _splits_of_names([path for path in data if path.startswith(f"{top}/")]) for top in sorted(tops)}


def _splits_of_names(data: Sequence[str]) -> dict[str, tuple[str, ...]]:
    splits: dict[str, tuple[str, ...]] = {}
    for path in data:
        words = [word for part in reversed(PurePosixPath(path).parts) for word in re.split(r"[^a-z]+", part.lower())]
        name = next((_SPLIT_WORDS[word] for word in words if word in _SPLIT_WORDS), "train")
        splits[name] = (*splits.get(name, ()), path)
    return splits


def _choose_config(where: str, configs: Mapping[str, Splits], selectors: list[str]) -> tuple[str, list[str]]:
    for selector in selectors:
        if selector in configs:
            return selector, [other for other in selectors if other is not selector]
    if len(configs) == 1:
        return next(iter(configs)), selectors
    if "default" in configs:
        return "default", selectors
    named = ", ".join(configs)
    example = f"{where}:{next(iter(configs))}"
    if selectors:
        raise InputError(f"{where} has no configuration {selectors[0]!r}, only {named}: write {example}.")
    raise InputError(f"{where} has the configurations {named}: say which, for example {example}.")


def _choose_split(where: str, splits: Splits, selectors: list[str]) -> str:
    if len(selectors) > 1:
        raise InputError(f"{where} is asked for {':'.join(selectors)}: name a configuration and a split at most.")
    if selectors:
        if selectors[0] not in splits:
            raise InputError(f"{where} has no split {selectors[0]!r}.{nearest(selectors[0], list(splits))}")
        return selectors[0]
    if "train" in splits or len(splits) == 1:
        return "train" if "train" in splits else next(iter(splits))
    raise InputError(
        f"{where} has the splits {', '.join(splits)}: say which, for example {where}:{next(iter(splits))}."
    )


def _check_formats(where: str, files: Sequence[str]) -> None:
    suffixes = sorted({suffix_of(path) for path in files})
    if len(suffixes) > 1:
        raise InputError(f"{where} mixes {' and '.join(suffixes)} files: name one of them, for example {files[0]}.")


def _check_shards(where: str, files: Sequence[str]) -> None:
    shards: dict[tuple[str, int], int] = {}
    for path in files:
        match = _SHARD.fullmatch(path[: -len(suffix_of(path))])
        if match:
            key = (match.group(1), int(match.group(3)))
            shards[key] = shards.get(key, 0) + 1
    for (name, wanted), found in shards.items():
        if found < wanted:
            raise InputError(f"{where} has {found} of the {wanted} parts of {name}: fetch the missing ones first.")

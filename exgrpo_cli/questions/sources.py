"""From what the user typed to local files: a file, a folder, or a data set of the hub, and which files of it are meant.

Of a folder or a data set what its card (`configs` in the README's front matter) says comes first; without one the
folders are the configurations and the file names tell the splits, as the hub itself reads them. Nothing of a data set
is run.

`huggingface_hub` does the transport, so its cache, token, endpoint and offline variables (HF_HOME, HF_TOKEN,
HF_ENDPOINT, HF_HUB_OFFLINE) hold here as anywhere; after a download that broke off, the next one fetches the files that
are not whole. What a data set consists of is noted beside its files in the cache, so that offline a part of it is not
taken for the whole.
"""

import fnmatch
import json
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from exgrpo_cli.base.errors import InputError, RunError, first_line, nearest
from exgrpo_cli.base.files import write_text
from exgrpo_cli.config.names import BUILT_IN, is_made
from exgrpo_cli.questions.files import FORMATS, SUFFIXES, stem_of, suffix_of

_SPLIT_OF_WORD = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("test", "testing", "eval", "evaluation"), "test"),
    **dict.fromkeys(("validation", "valid", "val", "dev"), "validation"),
}
_SHARD = re.compile(r"(.*)-(\d{5})-of-(\d{5})")
_HUB_ID = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(@(?P<revision>[^:@]+))?(?P<rest>(:[^:]+)*)")
_NO_DATA = re.compile(r"(^|/)([._]|dataset_infos\.json$)")
_CARD = "README.md"
_LISTING = ".listings/{}.json"
"""All paths of a data set at a commit, beside its files in the cache."""

Splits = Mapping[str, Sequence[str]]
"""Split name to its files, relative to the top of the data set."""
FetchProgress = Callable[[int, int], None]
"""(bytes fetched, bytes in all)."""


class Source(NamedTuple):
    """Local files that hold the rows of one question set."""

    name: str
    """Source of questions that name none of their own."""
    files: tuple[Path, ...]
    revision: str | None = None
    """Commit on the hub; None for local files."""
    split: str | None = None
    """Configuration and split that were chosen, where there was a choice."""

    def to_json(self) -> dict[str, str | None]:
        """Description in reports and metadata."""
        return {"source": self.name, "revision": self.revision, "split": self.split}


class HubId(NamedTuple):
    """`owner/name@revision:configuration:split`; all but owner/name optional."""

    repo: str
    revision: str
    selectors: tuple[str, ...]


def parse_hub_id(text: str) -> HubId | None:
    """The parts of a hub id; None for a text of another form."""
    match = _HUB_ID.fullmatch(text)
    if match is None:
        return None
    selectors = tuple(part for part in match["rest"].split(":") if part)
    return HubId(repo=match["repo"], revision=match["revision"] or "main", selectors=selectors)


def check_source(text: str) -> None:
    """Raise InputError for a source that is neither made here, nor on disk, nor a hub id; nothing is fetched."""
    if not is_made(text) and not is_local(text):
        _hub_id_of(text)


def is_local(text: str) -> bool:
    """Whether a source is read from this machine's disk."""
    return _split_local(text) is not None


def _hub_id_of(text: str) -> HubId:
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
    if local is None:
        hub = _hub_id_of(text)
        stem, selectors = hub.repo.partition("/")[2], hub.selectors
    else:
        path, selectors = local[0].resolve(), local[1]
        stem = stem_of(path) if path.is_file() else path.name
    return "-".join([stem, *(part.replace("/", "-") for part in selectors)])


def open_source(text: str, progress: FetchProgress) -> Source:
    """Find the files, fetching them where they are on the hub.

    Raises InputError for what does not exist or leaves a choice open, RunError for a download that breaks off.
    """
    local = _split_local(text)
    if local is None:
        return _fetch(_hub_id_of(text), progress)
    path, selectors = local
    if not path.is_dir():
        if not suffix_of(path.name):
            raise InputError(f"{path} has the suffix {path.suffix!r}: questions are read from {FORMATS} files.")
        return Source(name=stem_of(path), files=(path,))
    paths = [each.relative_to(path).as_posix() for each in path.rglob("*") if each.is_file()]
    card = read_card(path / _CARD) if _CARD in paths else {}
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
    where: str, paths: Collection[str], card: Mapping[str, Any], selectors: Sequence[str]
) -> tuple[str, Sequence[str]]:
    """`configuration/split` and its files in order, chosen among `paths` (relative, with forward slashes).

    `selectors` are the parts after the colons of a source: a configuration, a split, both, or one file. Without a split
    `train` is meant, or the only one. Raises InputError, listing what there is, for an unknown name, a choice that is
    still open, a missing shard or files of several formats.
    """
    data = sorted(path for path in paths if suffix_of(path) and not _NO_DATA.search(path))
    if not data:
        scripts = [path for path in paths if path.endswith(".py")]
        hint = f" Its loading script {scripts[0]} is not run; try {where}@refs/convert/parquet." if scripts else ""
        raise InputError(f"{where} has no {FORMATS} files: there are no questions to read.{hint}")
    if len(selectors) == 1 and selectors[0] in data:
        return "default/file", selectors
    try:
        configs = _configs(data, card.get("configs") or []) or _configs(data, _entries_of_names(data))
    except (AttributeError, KeyError, TypeError) as error:
        raise InputError(
            f"{where}: `configs` in the front matter of its README.md is not a list of configurations with "
            f"`data_files`: name one file, for example {where}:{data[0]}."
        ) from error
    rest = list(selectors)
    config = _choose(where, "configuration", configs, rest, "default")
    split = _choose(where, "split", configs[config], rest, "train")
    if rest:
        raise InputError(f"{where} has no split {rest[0]!r}.{nearest(rest[0], [*configs[config], *configs])}")
    _check_files(where, configs[config][split])
    return f"{config}/{split}", configs[config][split]


def _configs(data: Sequence[str], entries: Sequence[Mapping[str, Any]]) -> dict[str, Splits]:
    """Splits by configuration, of those entries of a card's `configs` that have files."""
    found = ((str(entry.get("config_name", "default")), _splits_of(data, entry)) for entry in entries)
    return {name: splits for name, splits in found if splits}


def _splits_of(data: Sequence[str], entry: Mapping[str, Any]) -> Splits:
    folder = str(entry.get("data_dir") or "").strip("/")
    inside = [path for path in data if not folder or path.startswith(f"{folder}/")]
    splits: defaultdict[str, list[str]] = defaultdict(list)
    for listed in _listed(entry.get("data_files")):
        named = listed if isinstance(listed, Mapping) else {"split": "train", "path": listed}
        patterns = _listed(named["path"])
        splits[named["split"]] += [path for path in inside if any(fnmatch.fnmatchcase(path, each) for each in patterns)]
    if not entry.get("data_files"):
        for path in inside:
            splits[_split_of_name(path)].append(path)
    return {split: files for split, files in splits.items() if files}


def _listed(value: Any) -> list[Any]:
    """A value of a card that may be a list or the one element of it."""
    return value if isinstance(value, list) else [value] if value else []


def _entries_of_names(data: Sequence[str]) -> list[Mapping[str, str]]:
    """`configs` of a card for a data set without one: its folders, where they are no splits and hold everything."""
    tops = {path.partition("/")[0] for path in data if "/" in path}
    if len(tops) < 2 or tops & {"data", *_SPLIT_OF_WORD} or any("/" not in path for path in data):
        return [{}]
    return [{"config_name": top, "data_dir": top} for top in sorted(tops)]


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


def _fetch(hub: HubId, progress: FetchProgress) -> Source:
    """List the data set, choose its files and bring them into the cache; offline, choose among what the cache has.

    Raises InputError for what the hub does not have or refuses, RunError for a download that breaks off.
    """
    from huggingface_hub import constants

    with explained(hub.repo, hub.revision):
        offline = constants.HF_HUB_OFFLINE
        commit, sizes = _cached_listing(hub) if offline else _listing(hub)
        card = read_card(_download(hub, _CARD, commit, lambda done, total: None)) if _CARD in sizes else {}
        where = f"the cached {hub.repo}" if offline else hub.repo
        split, paths = select_files(where, sizes, card, hub.selectors)
        total, before, files = sum(sizes[path] for path in paths), 0, []
        for path in paths:
            files.append(_download(hub, path, commit, progress, before, total))
            before += sizes[path]
    progress(total, total)
    return Source(name=hub.repo, revision=commit, split=split, files=tuple(files))


def _listing(hub: HubId) -> tuple[str, dict[str, int]]:
    """The commit that the revision names, and all paths with their sizes in bytes; noted for when we are offline."""
    from huggingface_hub import HfApi

    info = HfApi().dataset_info(hub.repo, revision=hub.revision, files_metadata=True)
    sizes = {sibling.rfilename: sibling.size or 0 for sibling in info.siblings or []}
    # A cache that others keep and that cannot be written to was filled by them.
    with suppress(RunError):
        write_text(_cached(hub) / _LISTING.format(info.sha), json.dumps(list(sizes)))
        write_text(_cached(hub) / "refs" / hub.revision, str(info.sha))
    return str(info.sha), sizes


def _cached_listing(hub: HubId) -> tuple[str, dict[str, int]]:
    """The same as the cache has it, without sizes."""
    cached = _cached(hub)
    named = cached / "refs" / hub.revision
    commit = named.read_text(encoding="utf-8").strip() if named.is_file() else hub.revision
    snapshot, listing = cached / "snapshots" / commit, cached / _LISTING.format(commit)
    if not snapshot.is_dir():
        raise _not_cached(f"{hub.repo}@{hub.revision}")
    # Fetched by another program, the data set is what it left in the cache.
    own = (path.relative_to(snapshot).as_posix() for path in snapshot.rglob("*") if path.is_file())
    return commit, dict.fromkeys(json.loads(listing.read_text(encoding="utf-8")) if listing.is_file() else own, 0)


def _download(hub: HubId, path: str, commit: str, progress: FetchProgress, before: int = 0, total: int = 0) -> Path:
    """Bring one file into the cache, offline find it there.

    `progress` is told how many bytes of `total` are there: `before`, of other files, and those of this one.
    """
    from huggingface_hub import constants, hf_hub_download
    from tqdm import tqdm

    class QuietBar(tqdm):
        """Progress bar that draws nothing and passes on how many bytes are there."""

        def __init__(self, *values: Any, **options: Any) -> None:
            # Only a disabled bar takes the options of the hub's own bars that tqdm does not know.
            super().__init__(*values, **{**options, "disable": True})

        def update(self, n: float | None = 1) -> bool | None:
            self.n += int(n or 0)
            progress(before + self.n, total)
            return None

    local = _cached(hub) / "snapshots" / commit / path
    if constants.HF_HUB_OFFLINE and not local.is_file():
        raise _not_cached(f"{path} of {hub.repo}@{hub.revision}")
    if constants.HF_HUB_OFFLINE:
        return local
    return Path(hf_hub_download(hub.repo, path, repo_type="dataset", revision=commit, tqdm_class=QuietBar))


def _cached(hub: HubId) -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE) / f"datasets--{hub.repo.replace('/', '--')}"


def _not_cached(what: str) -> InputError:
    from huggingface_hub import constants

    remedy = "unset it, or fetch the data set first"
    return InputError(f"{what} is not in the cache {constants.HF_HUB_CACHE} and HF_HUB_OFFLINE is set: {remedy}.")


def read_card(file: Path) -> Mapping[str, Any]:
    """Front matter of a data set card; empty where it has none."""
    import yaml
    from huggingface_hub import metadata_load

    try:
        return metadata_load(file) or {}
    except (yaml.YAMLError, ValueError) as error:
        raise InputError(f"{file}: the front matter is not readable YAML ({str(error).splitlines()[0]}).") from error


@contextmanager
def explained(repo: str, revision: str) -> Iterator[None]:
    """Raise what the hub's client raises while a data set is fetched as the toolkit's own errors of one line."""
    from huggingface_hub import constants, errors

    endpoint, name = constants.ENDPOINT, f"{repo}@{revision}"
    refusals: dict[type[BaseException], str] = {
        errors.GatedRepoError: f"{repo} is gated: accept its terms at {endpoint}/datasets/{repo} and set HF_TOKEN "
        "(or `hf auth login`).",
        errors.RevisionNotFoundError: f"{repo} has no revision {revision!r} on {endpoint}: see what follows @.",
        errors.RepositoryNotFoundError: f"{endpoint} has no data set {repo!r}, or it is private: check the id, and "
        "HF_TOKEN for a private one.",
        errors.HFValidationError: f"{repo!r} is not a valid hub id: correct it.",
        json.JSONDecodeError: f"{endpoint} does not answer as a hub does, its reply is no JSON: check HF_ENDPOINT.",
    }
    try:
        yield
    except tuple(refusals) as error:
        raise InputError(next(refusals[kind] for kind in type(error).__mro__ if kind in refusals)) from error
    except (errors.HTTPError, OSError) as error:
        response = getattr(error, "response", None)
        if response is not None:
            hint = "check HF_TOKEN" if response.status_code in (401, 403) else "try again later, or check HF_ENDPOINT"
            raise InputError(f"{endpoint} refused {name} with status {response.status_code}: {hint}.") from error
        raise RunError(
            f"The download of {name} from {endpoint} broke off ({first_line(error.__cause__ or error)}): run the "
            "command again, files that are whole are kept. Without a network, HF_HUB_OFFLINE=1 uses the cache."
        ) from error

"""Data sets of the Hugging Face hub: which files are meant, fetched into the hub's own cache. Nothing of them is run.

`huggingface_hub` does the transport, so its cache, token, endpoint and offline variables (HF_HOME, HF_TOKEN,
HF_ENDPOINT, HF_HUB_OFFLINE) hold here as anywhere; after a download that broke off, the next one fetches the files that
are not whole. What a data set consists of is noted beside its files in the cache, so that offline a part of it is not
taken for the whole.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from exgrpo_cli.base.errors import InputError, RunError, first_line
from exgrpo_cli.base.files import write_text

_HUB_ID = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(@(?P<revision>[^:@]+))?(?P<rest>(:[^:]+)*)")
_CARD = "README.md"
_LISTING = ".listings/{}.json"
"""All paths of a data set at a commit, beside its files in the cache."""

FetchProgress = Callable[[int, int], None]
"""(bytes fetched, bytes in all)."""
Choose = Callable[[str, Sequence[str], Mapping[str, Any], Sequence[str]], tuple[str, tuple[str, ...]]]
"""From a name for messages, all paths, the card and the selectors to `configuration/split` and its paths."""
Fetched = tuple[str, str, tuple[Path, ...]]
"""Commit that the revision named, `configuration/split`, and the files on this machine."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HubId:
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


def fetch(hub: HubId, choose: Choose, progress: FetchProgress) -> Fetched:
    """List the data set, choose its files and bring them into the cache; offline, choose among what the cache has.

    Raises InputError for what the hub does not have or refuses, RunError for a download that breaks off.
    """
    from huggingface_hub import constants

    with explained(hub.repo, hub.revision):
        offline = constants.HF_HUB_OFFLINE
        commit, sizes = _cached_listing(hub) if offline else _listing(hub)
        card = read_card(_download(hub, _CARD, commit, lambda done: None)) if _CARD in sizes else {}
        split, paths = choose(f"the cached {hub.repo}" if offline else hub.repo, list(sizes), card, hub.selectors)
        total, before, files = sum(sizes[path] for path in paths), 0, []
        for path in paths:

            def arrived(num_bytes: int, before: int = before) -> None:
                progress(before + num_bytes, total)

            files.append(_download(hub, path, commit, arrived))
            before += sizes[path]
    progress(total, total)
    return commit, split, tuple(files)


def _listing(hub: HubId) -> tuple[str, dict[str, int]]:
    """The commit that the revision names, and all paths with their sizes in bytes; noted for when we are offline."""
    from huggingface_hub import HfApi

    info = HfApi().dataset_info(hub.repo, revision=hub.revision, files_metadata=True)
    sizes = {sibling.rfilename: sibling.size or 0 for sibling in info.siblings or []}
    # A cache that others keep and that cannot be written to was filled by them.
    with suppress(RunError):
        write_text(_cached(hub) / _LISTING.format(info.sha), json.dumps(list(sizes)))
    return str(info.sha), sizes


def _cached_listing(hub: HubId) -> tuple[str, dict[str, int]]:
    from huggingface_hub import constants

    cached = _cached(hub)
    named = cached / "refs" / hub.revision
    commit = named.read_text(encoding="utf-8").strip() if named.is_file() else hub.revision
    snapshot, listing = cached / "snapshots" / commit, cached / _LISTING.format(commit)
    if not snapshot.is_dir():
        raise InputError(
            f"{hub.repo}@{hub.revision} is not in the cache {constants.HF_HUB_CACHE} and HF_HUB_OFFLINE is set: "
            f"unset it, or fetch the data set first."
        )
    # Fetched by another program, the data set is what it left in the cache.
    own = (path.relative_to(snapshot).as_posix() for path in snapshot.rglob("*") if path.is_file())
    return commit, dict.fromkeys(json.loads(listing.read_text(encoding="utf-8")) if listing.is_file() else own, 0)


def _download(hub: HubId, path: str, commit: str, progress: Callable[[int], None]) -> Path:
    """Fetch one file into the cache; `progress` is told how many of its bytes are there."""
    from huggingface_hub import constants, errors, hf_hub_download
    from tqdm import tqdm

    class QuietBar(tqdm):
        """Progress bar that draws nothing and passes on how many bytes are there."""

        def __init__(self, *values: Any, **options: Any) -> None:
            self._num_bytes = int(options.get("initial") or 0)
            # An option of the hub's own bars that tqdm does not know.
            options.pop("name", None)
            super().__init__(*values, **{**options, "disable": True})

        def update(self, n: float | None = 1) -> bool | None:
            self._num_bytes += int(n or 0)
            progress(self._num_bytes)
            return None

    try:
        # By the revision's own name, so that the cache remembers what it means when the next run is offline.
        local = Path(hf_hub_download(hub.repo, path, repo_type="dataset", revision=hub.revision, tqdm_class=QuietBar))
    except errors.LocalEntryNotFoundError:
        if not constants.HF_HUB_OFFLINE:
            raise
        raise InputError(
            f"{hub.repo}@{hub.revision} is in the cache {constants.HF_HUB_CACHE} without {path} and HF_HUB_OFFLINE is "
            "set: unset it."
        ) from None
    if commit not in local.parts:
        raise RunError(f"{hub.repo}@{hub.revision} was changed on the hub while it was fetched: run the command again.")
    return local


def _cached(hub: HubId) -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE) / f"datasets--{hub.repo.replace('/', '--')}"


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
        errors.RemoteEntryNotFoundError: f"{name} lists a file that is not there.",
        json.JSONDecodeError: f"{endpoint} does not answer as a hub does, its reply is no JSON: check HF_ENDPOINT.",
    }
    try:
        yield
    except tuple(refusals) as error:
        raise InputError(next(refusals[kind] for kind in type(error).__mro__ if kind in refusals)) from error
    except errors.HFValidationError as error:
        raise InputError(f"{repo!r} is not a valid hub id: {first_line(error)}") from error
    except (errors.HTTPError, OSError) as error:
        response = getattr(error, "response", None)
        if response is not None:
            hint = "check HF_TOKEN" if response.status_code in (401, 403) else "try again later, or check HF_ENDPOINT"
            raise InputError(f"{endpoint} refused {name} with status {response.status_code}: {hint}.") from error
        raise RunError(
            f"The download of {name} from {endpoint} broke off ({first_line(error.__cause__ or error)}): run the "
            "command again, files that are whole are kept. Without a network, HF_HUB_OFFLINE=1 uses the cache."
        ) from error

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
from exgrpo_cli.questions.sources.splits import Selection, select_files

_HUB_ID = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(@(?P<revision>[^:@]+))?(?P<rest>(:[^:]+)*)")
_CARD = "README.md"

FetchProgress = Callable[[int, int], None]
"""(bytes fetched, bytes in all)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HubId:
    """`owner/name@revision:configuration:split`; all but owner/name optional."""

    repo: str
    revision: str
    selectors: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class HubFiles:
    """The files of one selection, on this machine."""

    commit: str
    """The commit that the revision named."""
    selection: Selection
    files: tuple[Path, ...]


def parse_hub_id(text: str) -> HubId | None:
    """The parts of a hub id; None for a text of another form."""
    match = _HUB_ID.fullmatch(text)
    if match is None:
        return None
    selectors = tuple(part for part in match["rest"].split(":") if part)
    return HubId(repo=match["repo"], revision=match["revision"] or "main", selectors=selectors)


def fetch(hub: HubId, progress: FetchProgress) -> HubFiles:
    """List the data set, choose its files and bring them into the cache; offline, choose among what the cache has.

    Raises InputError for what the hub does not have or refuses, RunError for a download that breaks off.
    """
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return _from_cache(hub)
    with explained(hub.repo, hub.revision):
        return _from_hub(hub, progress)


def _from_hub(hub: HubId, progress: FetchProgress) -> HubFiles:
    from huggingface_hub import HfApi

    info = HfApi().dataset_info(hub.repo, revision=hub.revision, files_metadata=True)
    commit = str(info.sha)
    sizes = {sibling.rfilename: sibling.size or 0 for sibling in info.siblings or []}
    _note_listing(_listing_file(hub, commit), list(sizes))
    card = read_card(_download(hub, _CARD, commit, lambda num_bytes: None)) if _CARD in sizes else {}
    selection = select_files(hub.repo, list(sizes), card, hub.selectors)
    total, done = sum(sizes[path] for path in selection.files), 0
    files = []
    for path in selection.files:

        def ahead(num_bytes: int, before: int = done) -> None:
            progress(before + num_bytes, total)

        files.append(_download(hub, path, commit, ahead))
        done += sizes[path]
    progress(total, total)
    return HubFiles(commit=commit, selection=selection, files=tuple(files))


def _download(hub: HubId, path: str, commit: str, progress: Callable[[int], None]) -> Path:
    from huggingface_hub import hf_hub_download

    bar = _quiet_bar(progress)
    # By the revision's own name, so that the cache remembers what it means when the next run is offline.
    local = Path(hf_hub_download(hub.repo, path, repo_type="dataset", revision=hub.revision, tqdm_class=bar))
    if commit not in local.parts:
        raise RunError(f"{hub.repo}@{hub.revision} was changed on the hub while it was fetched: run the command again.")
    return local


def _quiet_bar(progress: Callable[[int], None]) -> Any:
    """A progress bar for the hub's client that draws nothing and tells `progress` the bytes that are there."""
    from tqdm import tqdm

    class QuietBar(tqdm):
        def __init__(self, *values: Any, **options: Any) -> None:
            self._num_bytes = int(options.get("initial") or 0)
            # An option of the hub's own bars that tqdm does not know.
            options.pop("name", None)
            super().__init__(*values, **{**options, "disable": True})

        def update(self, n: float | None = 1) -> bool | None:
            self._num_bytes += int(n or 0)
            progress(self._num_bytes)
            return None

    return QuietBar


def _from_cache(hub: HubId) -> HubFiles:
    from huggingface_hub import constants

    cached = _cache_folder(hub)
    named = cached / "refs" / hub.revision
    commit = named.read_text(encoding="utf-8").strip() if named.is_file() else hub.revision
    snapshot = cached / "snapshots" / commit
    if not snapshot.is_dir():
        raise InputError(
            f"{hub.repo}@{hub.revision} is not in the cache {constants.HF_HUB_CACHE} and HF_HUB_OFFLINE is set: "
            f"unset it, or fetch the data set first."
        )
    paths = [path.relative_to(snapshot).as_posix() for path in snapshot.rglob("*") if path.is_file()]
    card = read_card(snapshot / _CARD) if _CARD in paths else {}
    listing = _listing_file(hub, commit)
    # Fetched by another program, the data set is what it left in the cache.
    all_paths = json.loads(listing.read_text(encoding="utf-8")) if listing.is_file() else paths
    selection = select_files(f"the cached {hub.repo}", all_paths, card, hub.selectors)
    missing = [path for path in selection.files if path not in paths]
    if missing:
        raise InputError(
            f"{hub.repo}@{hub.revision} is in the cache {constants.HF_HUB_CACHE} without {missing[0]} "
            f"({len(missing)} of {len(selection.files)} files) and HF_HUB_OFFLINE is set: unset it."
        )
    files = tuple(snapshot / path for path in selection.files)
    return HubFiles(commit=commit, selection=selection, files=files)


def _cache_folder(hub: HubId) -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE) / f"datasets--{hub.repo.replace('/', '--')}"


def _listing_file(hub: HubId, commit: str) -> Path:
    return _cache_folder(hub) / ".listings" / f"{commit}.json"


def _note_listing(file: Path, paths: Sequence[str]) -> None:
    # A cache that others keep and that cannot be written to was filled by them.
    with suppress(RunError):
        write_text(file, json.dumps(paths))


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
    """What the hub's client raises while a data set is fetched, as the toolkit's own errors of one line."""
    from huggingface_hub import constants, errors

    endpoint, name = constants.ENDPOINT, f"{repo}@{revision}"
    try:
        yield
    except errors.GatedRepoError as error:
        raise InputError(
            f"{repo} is gated: accept its terms at {endpoint}/datasets/{repo} and set HF_TOKEN (or `hf auth login`)."
        ) from error
    except errors.RevisionNotFoundError as error:
        raise InputError(f"{repo} has no revision {revision!r} on {endpoint}: see what follows @.") from error
    except errors.RepositoryNotFoundError as error:
        raise InputError(
            f"{endpoint} has no data set {repo!r}, or it is private: check the id, and HF_TOKEN for a private one."
        ) from error
    except json.JSONDecodeError as error:
        raise InputError(
            f"{endpoint} does not answer as a hub does, its reply is no JSON: check HF_ENDPOINT."
        ) from error
    except errors.LocalEntryNotFoundError as error:
        raise _broke_off(name, error.__cause__ or error) from error
    except errors.EntryNotFoundError as error:
        raise InputError(f"{name} lists a file that is not there: {first_line(error)}") from error
    except errors.HFValidationError as error:
        raise InputError(f"{repo!r} is not a valid hub id: {first_line(error)}") from error
    except errors.HfHubHTTPError as error:
        status = error.response.status_code
        hint = "check HF_TOKEN" if status in (401, 403) else "try again later, or check HF_ENDPOINT"
        raise InputError(f"{endpoint} refused {name} with status {status}: {hint}.") from error
    except (errors.HTTPError, OSError) as error:
        raise _broke_off(name, error) from error


def _broke_off(name: str, reason: BaseException) -> RunError:
    from huggingface_hub import constants

    return RunError(
        f"The download of {name} from {constants.ENDPOINT} broke off ({first_line(reason)}): run the command again, "
        f"files that are whole are kept. Without a network, HF_HUB_OFFLINE=1 uses the cache."
    )

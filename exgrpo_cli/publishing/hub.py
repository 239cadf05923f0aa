"""To the hub and back: uploads in one commit that an interrupted one goes on with, and `hf://OWNER/NAME` as a run.

Large files go first, one by one; the hub keeps those that have arrived, so the same command sends only the rest. The
commit at the end makes all of them visible together.
"""

import json
import logging
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import pyarrow.parquet as pq

from exgrpo_cli.base.cache import cache_root
from exgrpo_cli.base.errors import InputError, Interrupted, RunError, first_line
from exgrpo_cli.base.files import whole_folder
from exgrpo_cli.ledger import reader, writer
from exgrpo_cli.ledger.schemas import BODIES, EVENTS, SCHEMAS
from exgrpo_cli.publishing.package import MARKER, Package
from exgrpo_cli.questions.sources import explained, parse_hub_id
from exgrpo_cli.show.record import LEDGER_FOLDER

SCHEME = "hf://"
ROWS = "trajectories"
"""Folder of the published trajectories, which hold their bodies."""
BATCH = 1024
"""Their rows in memory at once, and of a row group."""
OF_THE_HUB = (".gitattributes", ".gitignore")
"""Files of a repository that the hub itself may have put there."""


def publish(packages: Sequence[Package], repo: str, *, private: bool) -> list[str]:
    """Upload all packages to repositories called `repo`, made where they are missing; returns their addresses.

    Files of an earlier upload that a package no longer has are removed with it. Nothing is uploaded before all packages
    can be. Raises InputError without a token or the right to write, and for a repository that holds something else than
    its package; RunError for an upload that broke off, Interrupted after Ctrl-C.
    """
    from huggingface_hub import get_token

    if get_token() is None:
        raise InputError("no token for the hub: set HF_TOKEN, or log in with `hf auth login`.")
    there = [_check_repository(package, repo) for package in packages]
    return [_upload(package, repo, old=names, private=private) for package, names in zip(packages, there, strict=True)]


def _check_repository(package: Package, repo: str) -> list[str]:
    """Names of our files in the repository; raises InputError where it holds something else than this package."""
    from huggingface_hub import HfApi, errors, hf_hub_download

    marker: Mapping[str, str] = {}
    with _explained(repo, under_way=False):
        try:
            names = sorted(set(HfApi().list_repo_files(repo, repo_type=package.repo_type)) - set(OF_THE_HUB))
        except errors.RepositoryNotFoundError as error:
            if error.response.status_code in (401, 403):
                # The hub says so of a missing repository as of a token that is not valid, which this call raises for.
                HfApi().whoami()
            return []
        if MARKER in names:
            path = hf_hub_download(repo, MARKER, repo_type=package.repo_type)
            marker = json.loads(Path(path).read_text(encoding="utf-8"))
    if names and marker != json.loads(package.files[MARKER].read_text(encoding="utf-8")):
        other = marker.get("run") or marker.get("study") or f"{len(names)} files, first {names[0]}"
        raise InputError(f"{repo} ({package.repo_type}) holds something else ({other}): choose another name for --to.")
    return names


def _upload(package: Package, repo: str, *, old: Sequence[str], private: bool) -> str:
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, constants

    api, files = HfApi(), package.files
    add = [CommitOperationAdd(path_in_repo=name, path_or_fileobj=path) for name, path in sorted(files.items())]
    delete = [CommitOperationDelete(path_in_repo=name) for name in old if name not in files]
    with _explained(repo, under_way=True):
        api.create_repo(repo, repo_type=package.repo_type, private=private, exist_ok=True)
        api.create_commit(repo, [*add, *delete], commit_message="Publish with exgrpo", repo_type=package.repo_type)
    return f"{constants.ENDPOINT}/{'datasets/' if package.repo_type == 'dataset' else ''}{repo}"


@contextmanager
def _explained(repo: str, *, under_way: bool) -> Iterator[None]:
    from huggingface_hub import constants, errors

    endpoint = constants.ENDPOINT
    # What the client has to say of a request that fails is in its exception, too, which becomes one line.
    logger = logging.getLogger("huggingface_hub")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    except KeyboardInterrupt:
        remedy = f"the same command goes on with the upload to {repo}"
        raise Interrupted(f"stopped; {remedy}: what arrived is kept") from None
    except (errors.HTTPError, OSError, RuntimeError, ValueError) as error:
        status = error.response.status_code if isinstance(error, errors.HfHubHTTPError) else None
        if status in (401, 403):
            member = f"of a member of {repo.partition('/')[0]} (HF_TOKEN, or `hf auth login`)"
            refused = f"{endpoint} refuses the token for {repo} (status {status})"
            raise InputError(f"{refused}: use one with write access, {member}.") from error
        # The client wraps what goes wrong with a file in a RuntimeError, a card or an answer it cannot read in a
        # ValueError.
        reason = first_line(error if status else error.__cause__ or error).rstrip(".:")
        if under_way:
            remedy = "run the same command again, what arrived is kept"
            raise RunError(f"the upload to {repo} broke off ({reason}): {remedy}.") from error
        remedy = "check the network and HF_ENDPOINT"
        raise InputError(f"{endpoint} cannot be asked about {repo} ({reason}): {remedy}.") from error
    finally:
        logger.setLevel(level)


def local_run(name: str) -> Path:
    """The run folder that a user names: a path as it is, `hf://OWNER/NAME[@REVISION]` fetched once from the hub.

    Raises InputError for a name that is no hub id, for what the hub does not have, and for a data set that is no
    published ledger; RunError for a download that breaks off.
    """
    if not name.startswith(SCHEME):
        return Path(name)
    hub = parse_hub_id(name.removeprefix(SCHEME))
    if hub is None or hub.selectors:
        raise InputError(f"{name} is not hf://OWNER/NAME, or hf://OWNER/NAME@REVISION.")
    from huggingface_hub import snapshot_download

    with explained(hub.repo, hub.revision):
        snapshot = Path(snapshot_download(hub.repo, repo_type="dataset", revision=hub.revision))
    if not (snapshot / MARKER).is_file() or not (snapshot / LEDGER_FOLDER).is_dir():
        raise InputError(f"{name} is no ledger that exgrpo published: it has no {MARKER} with {LEDGER_FOLDER}/.")
    folder = cache_root() / "published" / f"{hub.repo.replace('/', '--')}-{snapshot.name[:12]}"
    if not folder.is_dir():
        with whole_folder(folder) as partial:
            shutil.copytree(snapshot, partial, dirs_exist_ok=True)
            _restore_bodies(sorted((partial / ROWS).glob("*.parquet")), partial / LEDGER_FOLDER)
    return folder


def _restore_bodies(files: Sequence[Path], ledger: Path) -> None:
    """Write the bodies of published trajectories as the one part of `ledger`, where there are any."""
    # A published ledger has one part of events.
    first_step, last_step = reader.steps_of(*reader.list_parts(ledger, EVENTS))
    path, names = reader.part_path(ledger, BODIES, first_step, last_step), SCHEMAS[BODIES].names
    stored = (rows for file in files for rows in pq.ParquetFile(file).iter_batches(BATCH, columns=names))
    bodies = ((batch, writer.batch_checksums(batch)) for rows in stored for batch in [rows.cast(SCHEMAS[BODIES])])
    if files:
        path.parent.mkdir(exist_ok=True)
        with path.open("wb") as file:
            writer.write_bodies(file, bodies, writer.schema_with_metadata(BODIES, last_step or 0))

"""Uploads: a repository of our own made or brought up to date in one commit, which an interrupted upload goes on with.

Large files go first, one by one; the hub keeps those that have arrived, so the same command sends only the rest. The
commit at the end makes all of them visible together.
"""

import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from exgrpo_cli.base.errors import InputError, Interrupted, RunError, first_line
from exgrpo_cli.publishing.package import MARKER, Package

if TYPE_CHECKING:
    from huggingface_hub import HfApi

OF_THE_HUB = (".gitattributes", ".gitignore")
"""Files of a repository that the hub itself may have put there."""
NO_RIGHT = (401, 403)


def check_name(repo: str) -> None:
    """Raise InputError for what is no OWNER/NAME."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    owner, _, name = repo.partition("/")
    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        raise InputError(f"--to {repo} is no name of a repository: {first_line(error)}") from error
    if not owner or not name:
        raise InputError(f"--to {repo} must be OWNER/NAME, such as your-name/my-run.")


def check_repository(package: Package, repo: str) -> None:
    """Raise InputError without a token, or where the repository exists and holds something else than this package."""
    from huggingface_hub import HfApi, get_token

    if get_token() is None:
        raise InputError("no token for the hub: set HF_TOKEN, or log in with `hf auth login`.")
    with _explained(repo, under_way=False):
        names = _names_there(HfApi(), package, repo)
        theirs = [name for name in names if name not in OF_THE_HUB]
        if not theirs:
            return
        origin = _marker(package, repo) if MARKER in theirs else None
    if origin is None:
        raise InputError(
            f"{repo} ({package.repo_type}) exists with other content ({len(theirs)} files, first {theirs[0]}): choose "
            "another name for --to."
        )
    if origin != dict(package.origin):
        other = origin.get("run") or origin.get("study") or "something else"
        raise InputError(f"{repo} ({package.repo_type}) holds another run or study ({other}): choose another --to.")


def upload(package: Package, repo: str, *, private: bool) -> str:
    """Make the repository where it is missing and commit all files; returns its address.

    Files of an earlier upload that the package no longer has are removed with it. Raises InputError where the token has
    no right to it, RunError for an upload that broke off, Interrupted after Ctrl-C.
    """
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

    api = HfApi()
    with _explained(repo, under_way=False):
        api.create_repo(repo, repo_type=package.repo_type, private=private, exist_ok=True)
        there = _names_there(api, package, repo)
    gone = [name for name in there if name not in package.files and name not in OF_THE_HUB]
    operations: list[CommitOperationAdd | CommitOperationDelete] = [
        CommitOperationAdd(path_in_repo=name, path_or_fileobj=path) for name, path in sorted(package.files.items())
    ]
    operations += [CommitOperationDelete(path_in_repo=name) for name in gone]
    with _explained(repo, under_way=True):
        api.create_commit(repo, operations, commit_message="Publish with exgrpo", repo_type=package.repo_type)
    return address(package, repo)


def address(package: Package, repo: str) -> str:
    """Where the repository can be seen."""
    from huggingface_hub import constants

    return f"{constants.ENDPOINT}/{'datasets/' if package.repo_type == 'dataset' else ''}{repo}"


def _names_there(api: "HfApi", package: Package, repo: str) -> list[str]:
    from huggingface_hub.errors import RepositoryNotFoundError

    try:
        return sorted(api.list_repo_files(repo, repo_type=package.repo_type))
    except RepositoryNotFoundError as error:
        if error.response.status_code in NO_RIGHT:
            # The hub says so of a missing repository as of a token that is not valid, which this call raises for.
            api.whoami()
        return []


def _marker(package: Package, repo: str) -> Mapping[str, str]:
    from huggingface_hub import hf_hub_download

    return dict(
        json.loads(Path(hf_hub_download(repo, MARKER, repo_type=package.repo_type)).read_text(encoding="utf-8"))
    )


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
        raise Interrupted(
            f"stopped; the same command goes on with the upload to {repo}: what arrived is kept"
        ) from None
    except errors.HfHubHTTPError as error:
        status = error.response.status_code
        if status == 401:
            raise InputError(f"{endpoint} does not accept the token: check HF_TOKEN, or `hf auth login`.") from error
        if status in NO_RIGHT:
            raise InputError(
                f"the token has no right to write {repo} on {endpoint}: use a token with write access, of a member of "
                f"{repo.partition('/')[0]}."
            ) from error
        raise _broke_off(repo, endpoint, error, under_way) from error
    except (errors.HTTPError, OSError, RuntimeError, ValueError) as error:
        # The client wraps what goes wrong with a file in a RuntimeError, a card or an answer it cannot read in a
        # ValueError.
        raise _broke_off(repo, endpoint, error.__cause__ or error, under_way) from error
    finally:
        logger.setLevel(level)


def _broke_off(repo: str, endpoint: str, reason: BaseException, under_way: bool) -> Exception:
    text = first_line(reason).rstrip(".:")
    if under_way:
        return RunError(f"the upload to {repo} broke off ({text}): run the same command again, what arrived is kept.")
    return InputError(f"{endpoint} cannot be asked about {repo} ({text}): check the network and HF_ENDPOINT.")

"""`hf://OWNER/NAME`: a published ledger as a run folder on this machine, fetched once for each version of it."""

import shutil
from pathlib import Path

from exgrpo_cli.base.errors import InputError
from exgrpo_cli.base.files import whole_folder
from exgrpo_cli.models.cache import cache_root
from exgrpo_cli.publishing.experience import restore_bodies
from exgrpo_cli.publishing.package import MARKER
from exgrpo_cli.questions.hub import explained, parse_hub_id
from exgrpo_cli.show.record import LEDGER_FOLDER

SCHEME = "hf://"


def local_run(name: str) -> Path:
    """The run folder that a user names: a path as it is, `hf://OWNER/NAME[@REVISION]` fetched from the hub.

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
            restore_bodies(partial, partial / LEDGER_FOLDER)
    return folder

"""`exgrpo publish`: from the folder of a run or a study to repositories of the hub."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from exgrpo_cli.base.errors import InputError
from exgrpo_cli.publishing.hub import check_name, check_repository, upload
from exgrpo_cli.publishing.package import Package
from exgrpo_cli.publishing.private import Private
from exgrpo_cli.publishing.runs import run_packages
from exgrpo_cli.publishing.studies import study_package
from exgrpo_cli.show.run_page import is_run
from exgrpo_cli.show.study_page import is_study


@contextmanager
def packed(folder: Path, repo: str, *, results: Sequence[Path] = (), ledger: bool = True) -> Iterator[list[Package]]:
    """What publishing the run or study would upload, while the body lasts.

    `results` are folders of `exgrpo evaluate` for the card of a run. Raises InputError for a folder that is neither a
    finished run nor a study, for a name that is no OWNER/NAME, and for what is private and cannot be taken out.
    """
    check_name(repo)
    if not folder.is_dir():
        raise InputError(f"{folder} is not a folder. Name the --output folder of a run or of a study.")
    private = Private.of(folder)
    with TemporaryDirectory(prefix="exgrpo-publish-") as staging:
        if is_run(folder):
            yield run_packages(folder, repo, Path(staging), private, results=results, ledger=ledger)
        elif is_study(folder):
            yield [study_package(folder, repo, Path(staging), private)]
        else:
            raise InputError(f"{folder} is neither a run (no config.toml) nor a study (no ARM/seed-N/config.toml).")


def publish(packages: Sequence[Package], repo: str, *, private: bool) -> list[str]:
    """Upload all packages to repositories called `repo`; returns their addresses.

    Nothing is uploaded before all of them can be: raises as `check_repository` and `upload` do.
    """
    for package in packages:
        check_repository(package, repo)
    return [upload(package, repo, private=private) for package in packages]

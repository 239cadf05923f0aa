"""Checksums of what no other manifest of a run covers: settings, journals, newest samples, final figures and model."""

from collections.abc import Collection
from pathlib import Path

from exgrpo_cli.base.errors import InputError
from exgrpo_cli.base.manifest import MANIFEST, Files, find_damage, find_differences, read_manifest, write_manifest

CHECKSUMS_FILE = "checksums.json"
RESUMED_FROM = ("config.toml", "metrics.jsonl", "validations.jsonl", f"data/{MANIFEST}")
"""Files that a resume reads."""
_SAMPLE_FILES = 20
"""The newest, which a report shows; there is one for each step."""
_MODEL = "model/"


def note_checksums(run: Path, *, at_the_end: bool = False) -> None:
    """Write down what the run's files hold now, `at_the_end` with final figures and model.

    Raises RunError where the disk refuses.
    """
    names = [*RESUMED_FROM, "environment.json"]
    names += [f"samples/{path.name}" for path in sorted((run / "samples").glob("step-*.jsonl"))[-_SAMPLE_FILES:]]
    if at_the_end:
        names += ["result.json", "summary.json"]
        names += [path.relative_to(run).as_posix() for path in (run / _MODEL).rglob("*")]
    write_manifest(run, [name for name in names if (run / name).is_file()], file=CHECKSUMS_FILE)


def forget_checksums(run: Path) -> None:
    """Remove the checksums before files are cut back: a process killed under way leaves none that would be wrong."""
    (run / CHECKSUMS_FILE).unlink(missing_ok=True)


def find_changes(run: Path, among: Collection[str] = ()) -> list[str]:
    """One sentence for each file that is not as the run wrote it, of those named or of all but the model's.

    Empty where nothing is noted. Raises InputError where the checksums themselves are damaged.
    """
    noted = _noted(run).items()
    chosen = {name: entry for name, entry in noted if (name in among if among else not name.startswith(_MODEL))}
    return find_differences(run, chosen)


def require_model(folder: Path) -> None:
    """Raise InputError where `folder` is the model of a run, final or of a checkpoint, and not as it was written.

    Its card may have been changed. Hashes the weights.
    """
    owner, damage = folder.absolute().parent, ""
    if folder.name == "model" and (owner / CHECKSUMS_FILE).is_file():
        own = {name: entry for name, entry in _noted(owner).items() if name.startswith(_MODEL)}
        own.pop(f"{_MODEL}README.md", None)
        damage = next(iter(find_differences(owner, own)), "")
    elif folder.name == "model" and owner.parent.name == "checkpoints" and (owner / "state.json").is_file():
        damage = find_damage(owner, below=_MODEL)
    if damage:
        raise InputError(f"{damage}: restore it from a copy; of a model that you changed yourself, name a copy.")


def _noted(run: Path) -> Files:
    path = run / CHECKSUMS_FILE
    try:
        return read_manifest(path) if path.is_file() else {}
    except InputError as error:
        raise InputError(
            f"{error} Without a copy delete it: settings, journals and model are then not checked."
        ) from error

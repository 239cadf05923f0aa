"""The run folder: one writer, journals cut back on resume, checksums, step metrics of `metrics.jsonl` as columns.

Checkpoints, questions and caches have a manifest each; `checksums.json` of a run covers what no other does: settings,
journals, newest samples, final figures and model.
"""

import errno
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from sys import float_info
from typing import Any, NamedTuple

import numpy as np
from filelock import FileLock
from jaxtyping import Float64, Int64
from safetensors import SafetensorError

from exgrpo_cli.base import files
from exgrpo_cli.base.errors import InputError, RunError

POOL_FILE = "pool.toml"
"""Settings that rollouts logged elsewhere were read with: their folder holds a ledger, but is no run to go on with."""
HELDOUT, TRAINED = "heldout", "train"
"""Questions of a validation: held-out ones, or some of those trained on."""


def at_temperature(temperature: float) -> str:
    """Kind of a validation that asks the held-out questions at another temperature than the others do."""
    return f"{HELDOUT} at T = {temperature:g}"


REPORT_FILE = "report.html"
"""The page of a run, or of a study."""
SET_UP_FILE = ".exgrpo-set-up"
"""Written first and removed once the configuration is there: until then the folder holds what a set-up has begun."""
_SET_UP_TEXT = "exgrpo is setting up a run here. Until config.toml is there, what the set-up wrote may be removed.\n"
_SET_UP_WRITES = re.compile(
    r"\.exgrpo-set-up|\.lock|config\.toml|environment\.json|data/(manifest\.json|(train|heldout)\.(parquet|json))"
    r"|replay/(ledger\.json|writer\.lock|\w+/part-\d{8}-\w+\.(parquet|arrow))|stacks/rank-\d+\.txt"
    r"|tensorboard/events\.out\.tfevents\.[^/]+"
    r"|wandb/(run-id|latest-run|debug[^/]*\.log|(offline-)?run-\d{8}_\d{6}-\w+/.+)"
)
"""Names below the folder of all that a set-up leaves, besides what is half-written of them."""
_SET_UP_FOLDERS = re.compile(r"(data|replay|checkpoints|samples|plots|stacks|tensorboard|wandb)(/|$)")
_HALF_WRITTEN = re.compile(r"(^|/)\.([^/]+)\.partial-[^/]+$")
_CHECKPOINT = re.compile(r"step-(\d{6,})")
TORCH_WRITES = ("PytorchStreamWriter", "inline_container", "file write failed", "No space left on device")
"""One of these is in what torch says when it cannot write a file."""


class RunFolder:
    """Paths and files of one run (see `docs/run-folder.md`)."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.toml"
        self.data = path / "data"
        self.metrics = path / "metrics.jsonl"
        self.validations = path / "validations.jsonl"
        self.replay = path / "replay"
        self.checkpoints = path / "checkpoints"
        self.samples = path / "samples"
        self.plots = path / "plots"
        self.model = path / "model"
        self.summary = path / "summary.json"
        self._made: list[Path] = []
        """Folders around it that were made with it, the innermost first."""

    @classmethod
    def create(cls, path: Path) -> "RunFolder":
        """A new folder, also where one was killed while it was set up or an empty one stands.

        Raises InputError when `path` holds anything else, is being set up by another process, or cannot be written.
        """
        folder = cls(path)
        if folder._is_torn():
            with folder.locked():
                folder.remove_set_up()
        cls.check_new(path)
        folder._made = [each for each in path.parents if not each.exists()]
        path.mkdir(parents=True, exist_ok=True)
        files.write_text(path / SET_UP_FILE, _SET_UP_TEXT)
        folder.make_folders()
        return folder

    def make_folders(self) -> None:
        """Make the folders that a run writes to, as far as they are not there."""
        for child in (self.data, self.checkpoints, self.samples, self.plots):
            child.mkdir(exist_ok=True)

    def _is_torn(self) -> bool:
        """Whether all that is here was written by a set-up that has not come to its end, as its marker proves."""
        marker = self.path / SET_UP_FILE
        if self.config.exists() or marker.is_symlink() or not marker.is_file():
            return False
        return marker.read_text(errors="replace") == _SET_UP_TEXT and not self._others()

    def _others(self) -> list[str]:
        """Names below the folder of what no set-up writes; its own folders count by what is in them, links as files."""
        found = {path.relative_to(self.path).as_posix(): path for path in self.path.rglob("*")}
        own = {name for name, path in found.items() if path.is_dir() and not path.is_symlink()}
        names = [name for name in found if name not in own or not _SET_UP_FOLDERS.match(name)]
        return [name for name in names if not _SET_UP_WRITES.fullmatch(_HALF_WRITTEN.sub(r"\1\2", name))]

    def remove_set_up(self) -> None:
        """Remove the folder, the marker last, where a set-up has written all that is in it; else everything stays."""
        if not self._others():
            for path in sorted(self.path.iterdir(), key=lambda each: each.name == SET_UP_FILE):
                files.remove_path(path)
            for folder in (self.path, *self._made):
                # A link stays, and so does what another run is in.
                with suppress(OSError):
                    folder.rmdir()

    @classmethod
    def check_new(cls, path: Path) -> None:
        """Raise InputError when `path` exists or could not be made."""
        half = f".{SET_UP_FILE}.partial-"
        is_empty = path.is_dir() and all(entry.name.startswith(half) for entry in path.iterdir())
        if os.path.lexists(path) and not is_empty and not cls(path)._is_torn():
            is_run = cls(path).config.is_file()
            way_on = f", or `exgrpo train --resume --output {path}`" if is_run else "; it holds no run to go on with"
            raise InputError(f"{path} exists: choose another --output{way_on}.")
        files.require_writable(path)

    @classmethod
    def existing(cls, path: Path) -> "RunFolder":
        """A run folder that is there; raises InputError otherwise."""
        folder = cls(path)
        if not folder.config.is_file():
            raise InputError(f"{path} is not a run folder: it has no config.toml.")
        return folder

    def require_own_folders(self) -> None:
        """Raise InputError where a folder in the run is a link out of it, through which it would write elsewhere, or
        has the name of a file that the run writes."""
        folders = [Path(parent, name) for parent, names, _ in os.walk(self.path) for name in names]
        require_own(self.path, folders)
        for path in folders:
            own = path.parent in (self.path, self.checkpoints, self.samples)
            if own and (path.suffix in (".json", ".jsonl", ".html") or path.name in ("latest", "best")):
                raise InputError(f"{path} is a folder, in the place of a file that the run writes: move it away.")

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the folder for one writer; raises InputError when another has it or the folder cannot be written."""
        in_use = f"{self.path}: another process is training in it; wait for it or stop it."
        with files.take(FileLock(self.path / ".lock"), in_use):
            yield

    def metrics_lines(self) -> Iterator[dict[str, Any]]:
        """The steps of `metrics.jsonl`, first to last; none before the first step."""
        if self.metrics.is_file():
            yield from journal_lines(self.metrics)

    def append_metrics(self, values: Mapping[str, Any]) -> None:
        """One step's line, "step" first, on disk when this returns."""
        files.append_json_lines(self.metrics, [values])

    def append_samples(self, step: int, rows: Iterable[Mapping[str, Any]]) -> None:
        """Some of a step's rollouts in `samples/step-000001.jsonl`."""
        files.append_json_lines(self.samples / f"step-{step:06d}.jsonl", rows)

    def append_validation(self, values: Mapping[str, Any]) -> None:
        """Record how often each question was answered correctly, on disk when this returns."""
        files.append_json_lines(self.validations, [values])

    def cut_back(self, step: int, *, validates_again: bool) -> None:
        """Drop metrics, validations and samples after `step`, so that a resumed run writes them again.

        With `validates_again` the validations of `step` itself go too. Of what is there twice the last line counts.
        """
        for path, last in ((self.metrics, step), (self.validations, step - validates_again)):
            if path.exists():
                lines = {(line.get("step", 0), line.get("asked")): line for line in files.read_json_lines(path)}
                files.write_json_lines(path, [line for (step, _), line in lines.items() if step <= last])
        for path in self.samples.glob("step-*.jsonl"):
            number = path.stem.removeprefix("step-")
            if number.isdecimal() and int(number) > step:
                files.remove_path(path)

    def remove_partials(self) -> None:
        """Remove what killed processes left half-written; the ledger clears up by itself. The caller holds the lock."""
        for folder in (self.path, self.data, self.checkpoints, self.samples, self.plots):
            files.remove_partials(folder)


def require_own(folder: Path, places: Iterable[Path]) -> None:
    """Raise InputError where one of the places, to be written to, is a link out of `folder`, or to nothing."""
    for path in places:
        if path.is_symlink() and not (path.exists() and path.resolve().is_relative_to(folder.resolve())):
            elsewhere = "is a link to a place elsewhere, and a run writes nothing through links"
            raise InputError(f"{path} {elsewhere}: put the folder or file itself there.")


def complete_steps(checkpoints: Path) -> list[int]:
    """Steps with a complete checkpoint, ascending; folders with other names are somebody else's."""
    found = ((path, _CHECKPOINT.fullmatch(path.name)) for path in checkpoints.glob("step-*"))
    return sorted(int(match[1]) for path, match in found if match and path.is_dir())


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Weights are being written to `path`: whatever the disk refuses ends in one RunError.

    torch reports a full disk as a RuntimeError and safetensors as an error of its own. A RuntimeError that is not about
    a file (memory of a GPU, a lost rank) is passed on as it is.
    """
    try:
        yield
    except RunError:
        raise
    except (OSError, RuntimeError, SafetensorError) as error:
        if isinstance(error, RuntimeError) and not any(word in str(error) for word in TORCH_WRITES):
            raise
        full = not isinstance(error, OSError) or error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, None)
        mend = "free some space" if full else "make it writable"
        then = f"Earlier checkpoints are whole: {mend}, then go on with --resume."
        raise files.cannot_write(path, error, then) from error


CHECKSUMS_FILE = "checksums.json"
RESUMED_FROM = ("config.toml", "metrics.jsonl", "validations.jsonl", f"data/{files.MANIFEST}")
"""Files that a resume reads."""
_ENVIRONMENT = "environment.json"
_SAMPLE_FILES = 20
"""The newest, which a report shows; there is one for each step."""
_MODELS = ("model/", "adapter/")


def note_checksums(run: Path, *, at_the_end: bool = False) -> None:
    """Write down what the run's files hold now, `at_the_end` with final figures and model.

    What is written once stays noted as it was then: whatever has become of it since, nobody vouches for that. Raises
    RunError where the disk refuses.
    """
    written = written_once(run)
    samples = {f"samples/{path.name}" for path in (run / "samples").glob("step-*.jsonl")}
    samples |= {name for name in written if name.startswith("samples/")}
    written = {name: written[name] for name in [_ENVIRONMENT, *sorted(samples)[-_SAMPLE_FILES:]] if name in written}
    names = [*RESUMED_FROM, _ENVIRONMENT, *sorted(samples)[-_SAMPLE_FILES:]]
    if at_the_end:
        names += ["result.json", "summary.json"]
        names += [path.relative_to(run).as_posix() for part in _MODELS for path in (run / part).rglob("*")]
    files.write_manifest(run, [name for name in names if (run / name).is_file()], file=CHECKSUMS_FILE, known=written)


def written_once(run: Path, last_step: int | None = None) -> files.Files:
    """Notes on the samples of steps up to `last_step`, or of all, and on the machine: they never change.

    Raises InputError where the checksums are damaged.
    """
    last = "samples/" + (f"step-{last_step:06d}.jsonl" if last_step is not None else "~")
    noted = _noted(run).items()
    return {name: entry for name, entry in noted if name == _ENVIRONMENT or "samples/" < name <= last}


def forget_checksums(run: Path, step: int) -> None:
    """Keep notes of what no step after `step` writes again: what is about to be cut back has none that would be wrong,
    also where the process is killed meanwhile. Raises RunError where the disk refuses."""
    if kept := written_once(run, step):
        files.write_manifest(run, (), file=CHECKSUMS_FILE, known=kept)
    else:
        (run / CHECKSUMS_FILE).unlink(missing_ok=True)


def find_changes(run: Path, among: Collection[str] = ()) -> list[str]:
    """One sentence for each file that is not as the run wrote it, of those named or of all but the model's.

    Empty where nothing is noted. Raises InputError where the checksums themselves are damaged.
    """
    noted = _noted(run).items()
    chosen = {name: entry for name, entry in noted if (name in among if among else not name.startswith(_MODELS))}
    return files.find_differences(run, chosen)


def require_model(folder: Path) -> None:
    """Raise InputError where `folder` is a model or adapter of a run or checkpoint, and not as it was written.

    Its card may have been changed. Hashes the weights.
    """
    owner, part = folder.absolute().parent, f"{folder.name}/"
    if part not in _MODELS:
        damage = ""
    elif (owner / "state.json").is_file():
        damage = files.find_damage(owner, below=part)
    else:
        own = {name: entry for name, entry in _noted(owner).items() if name.startswith(part)}
        own.pop(f"{part}README.md", None)
        damage = next(iter(files.find_differences(owner, own)), "")
    if damage:
        raise InputError(f"{damage}: restore it from a copy; of a model that you changed yourself, name a copy.")


def _noted(run: Path) -> files.Files:
    path = run / CHECKSUMS_FILE
    try:
        return files.read_manifest(path) if path.is_file() else {}
    except InputError as error:
        remedy = "Without a copy delete it: settings, journals and model are then not checked."
        raise InputError(f"{error} {remedy}") from error


METRICS_FILE = "metrics.jsonl"
PHASES = ("rollout", "reward", "replay", "logprobs", "update", "sync")
"""Phases of a step's time; the journal's `time/<phase>` keys."""
TEXTS = ("phase", "optim/skip_reason")
"""Keys whose values are words."""
_LAST_STEP = 2**31 - 1
"""The ledger's steps have 32 bits."""


class RunMetrics(NamedTuple):
    """The steps of a run as columns, one row per step."""

    rows: Sequence[Mapping[str, Any]] = ()
    """Lines of metrics.jsonl in rising order of "step", which is 0 where a run validated before its first step."""

    @property
    def steps(self) -> Int64[np.ndarray, " rows"]:
        """Step numbers."""
        return np.array([row["step"] for row in self.rows], dtype=np.int64)

    def series(self, name: str) -> Float64[np.ndarray, " rows"]:
        """Values of a numeric key; NaN where a step did not log it."""
        return np.array([row.get(name, np.nan) for row in self.rows], dtype=np.float64)

    def names(self, prefix: str) -> list[str]:
        """Logged keys that begin with `prefix`, sorted."""
        return sorted({name for row in self.rows for name in row if name.startswith(prefix)})

    @property
    def first_mixed_step(self) -> int | None:
        """First step of the mixed phase, or None while there is none."""
        return next((row["step"] for row in self.rows if row.get("phase") == "mixed"), None)


def read_metrics(run: Path) -> RunMetrics:
    """Read RUN/metrics.jsonl; of a step logged twice the last line counts, one still being written is left out.

    Raises InputError for a folder without the file and for a broken line that is not the last.
    """
    path = run / METRICS_FILE
    if not path.is_file():
        raise InputError(f"{run} is not a run folder: it has no {METRICS_FILE}. Name the --output folder of a run.")
    found = path.stat()
    return _read_metrics(path, found.st_ino, found.st_mtime_ns, found.st_size)


@lru_cache(maxsize=1)
def _read_metrics(path: Path, *version: int) -> RunMetrics:
    """The journal as it is in this version of the file: each part of a page asks for it."""
    by_step = {row["step"]: row for row in journal_lines(path)}
    return RunMetrics([by_step[step] for step in sorted(by_step)])


def journal_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The steps of a `metrics.jsonl` as they were written; a last line without its end is left out.

    Raises InputError naming the first line that is no step.
    """
    for number, row in enumerate(files.read_json_lines(path), start=1):
        for name, value in {"step": None, **row}.items():
            if name == "step":
                valid = type(value) is int and 0 <= value <= _LAST_STEP
            elif name in TEXTS:
                valid = isinstance(value, str)
            else:
                valid = isinstance(value, files.NUMBER) and abs(value) <= float_info.max
            if not valid:
                raise InputError(f"{path}, line {number}: {name} is {value!r:.40}. Remove the line or restore it.")
        yield row

"""What the run of a study says: all of it in a log beside the run's folder, of damage on the study's terminal too."""

import sys
import warnings
from pathlib import Path

from exgrpo_cli.base.console.own_warnings import tell_warnings
from exgrpo_cli.base.errors import DamageWarning

_DAMAGE = "damaged: "


class RunLog:
    """The log of one run, read while it grows: what stood there before is an earlier process's."""

    def __init__(self, run_folder: Path) -> None:
        self.path = log_path(run_folder)
        self._read = self.path.stat().st_size if self.path.is_file() else 0

    def tell_damage(self, label: str) -> None:
        """Warn (DamageWarning) of what the run of this name has found damaged since the last call."""
        if not self.path.is_file():
            return
        with self.path.open("rb") as file:
            file.seek(self._read)
            new = file.read()
        whole = new[: new.rfind(b"\n") + 1]
        self._read += len(whole)
        for line in whole.decode(errors="replace").splitlines():
            if line.startswith(_DAMAGE):
                warnings.warn(f"{label}: {line.removeprefix(_DAMAGE)}", DamageWarning, stacklevel=2)


def log_path(run_folder: Path) -> Path:
    """The file with all that the run of a study wrote to its terminal."""
    return run_folder.with_name(f"{run_folder.name}.log")


def last_line(path: Path) -> str:
    """The last line of a log, or "no output" where there is none."""
    lines = path.read_text(errors="replace").strip().splitlines() if path.is_file() else []
    return lines[-1] if lines else "no output"


def warn_in_log() -> None:
    """Let this process, whose stderr is a log, write each of the toolkit's warnings as one line there."""

    def write(line: str, is_damage: bool) -> None:
        sys.stderr.write(f"{_DAMAGE if is_damage else ''}{line}\n")

    tell_warnings(write, others=True)

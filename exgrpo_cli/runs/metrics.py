"""The step metrics of a run as columns: metrics.jsonl, finished or still growing."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool, Float64, Int64

from exgrpo_cli.base.errors import InputError
from exgrpo_cli.base.files import read_json_lines
from exgrpo_cli.base.shapes import NUMBER

METRICS_FILE = "metrics.jsonl"
PHASES = ("rollout", "reward", "replay", "logprobs", "update", "sync")
"""What a step's time is divided into; the journal's `time/<phase>` keys."""
TEXTS = ("phase", "optim/skip_reason")
"""Keys whose values are words."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunMetrics:
    """What metrics.jsonl says, one row per step in rising order; of a step logged twice the last line counts."""

    steps: Int64[np.ndarray, " rows"]
    """Step numbers; 0 where a run validated before its first step."""
    mixed: Bool[np.ndarray, " rows"]
    """Whether the step's phase was mixed."""
    columns: Mapping[str, Float64[np.ndarray, " rows"]]
    """Every numeric key; NaN where a step did not log it."""

    @classmethod
    def empty(cls) -> "RunMetrics":
        """Of what took no step."""
        return _columns([])

    def series(self, name: str) -> Float64[np.ndarray, " rows"]:
        """The key's values, all NaN for a key that was never logged."""
        missing = np.full(len(self.steps), np.nan)
        return self.columns.get(name, missing)

    def has(self, name: str) -> bool:
        """Whether any step logged a finite value."""
        return bool(np.isfinite(self.series(name)).any())

    def names(self, prefix: str) -> list[str]:
        """Logged keys that begin with `prefix`, sorted."""
        return sorted(name for name in self.columns if name.startswith(prefix))

    def up_to(self, step: int) -> "RunMetrics":
        """The rows of the steps up to and including `step`."""
        keep = self.steps <= step
        return RunMetrics(
            steps=self.steps[keep],
            mixed=self.mixed[keep],
            columns={name: column[keep] for name, column in self.columns.items()},
        )

    @property
    def first_mixed_step(self) -> int | None:
        """First step of the mixed phase, or None while there is none."""
        return int(self.steps[self.mixed][0]) if self.mixed.any() else None


def read_metrics(run: Path) -> RunMetrics:
    """Read RUN/metrics.jsonl; a last line that is still being written is left out.

    Raises InputError for a folder without the file and for a broken line that is not the last.
    """
    path = run / METRICS_FILE
    if not path.is_file():
        raise InputError(f"{run} is not a run folder: it has no {METRICS_FILE}. Name the --output folder of a run.")
    return _columns(_rows(path))


def _rows(path: Path) -> list[dict[str, Any]]:
    by_step = {row["step"]: row for row in journal_lines(path)}
    return [by_step[step] for step in sorted(by_step)]


def journal_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The steps of a `metrics.jsonl` as they were written; a last line without its end is left out.

    Raises InputError naming the first line that is no step.
    """
    for number, row in enumerate(read_json_lines(path), start=1):
        step = row.get("step")
        if not isinstance(step, int):
            raise InputError(f"{path}, line {number} has no step but {step!r}. Remove the line or restore it.")
        for name, value in row.items():
            if not isinstance(value, str if name in TEXTS else NUMBER):
                raise InputError(f"{path}, line {number}: {name} is {value!r:.40}. Remove the line or restore it.")
        yield row


def _columns(rows: list[dict[str, Any]]) -> RunMetrics:
    columns: dict[str, np.ndarray] = {}
    for index, row in enumerate(rows):
        for name, value in row.items():
            if name == "step" or isinstance(value, bool) or not isinstance(value, int | float):
                continue
            column = columns.get(name)
            if column is None:
                column = columns[name] = np.full(len(rows), np.nan)
            column[index] = value
    return RunMetrics(
        steps=np.array([row["step"] for row in rows], dtype=np.int64),
        mixed=np.array([row.get("phase") == "mixed" for row in rows], dtype=bool),
        columns=columns,
    )

"""Validations of a run (`validations.jsonl`): right samples of each question at a step."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from jaxtyping import Int64

from exgrpo_cli.base import errors, files
from exgrpo_cli.runs.folder import HELDOUT, RunFolder


@dataclass(frozen=True, kw_only=True, slots=True)
class Validation:
    """One line of `validations.jsonl`: the same questions, in the same order, as every other of its run."""

    step: int
    asked: str = HELDOUT
    """Kind of the questions: held-out ones, or of the training set."""
    generated: int
    """Tokens generated until then."""
    trained: int | None = None
    """Tokens trained until then."""
    samples: int
    """Responses to each question."""
    correct: Int64[np.ndarray, " questions"]
    valid: Int64[np.ndarray, " questions"] | None = None
    """Samples that are right in every step, where the task can tell."""
    ids: tuple[str, ...] = ()
    """Question ids, where the questions are not the held-out ones."""

    def __post_init__(self) -> None:
        counts = [self.correct, *([] if self.valid is None else [self.valid])]
        if self.step < 0 or self.samples < 1 or not all(len(own) for own in counts):
            raise ValueError(f"step {self.step}, {self.samples} samples of {len(self.correct)} questions")
        if not all(0 <= own.min() <= own.max() <= self.samples and len(own) == len(counts[0]) for own in counts):
            raise ValueError(f"counts are not from 0 to {self.samples} of {len(self.correct)} questions")

    @property
    def pass_at_1(self) -> float:
        """Share of right samples over all questions."""
        return float(self.correct.mean()) / self.samples


def read_validations(run: Path, kind: str = HELDOUT) -> tuple[Validation, ...]:
    """Validations of a run on its held-out or, with `kind` "train", on its training questions, in order of steps.

    Of a step validated twice the last one counts. Raises InputError for a damaged file; a run without one has none.
    """
    path = RunFolder(run).validations
    lines = enumerate(files.read_json_lines(path) if path.is_file() else (), start=1)
    found = [_validation(line, f"{path}, line {number}") for number, line in lines]
    by_step = {each.step: each for each in found if each.asked == kind}
    if len({(len(each.correct), each.ids) for each in by_step.values()}) > 1:
        raise errors.InputError(f"{path} asks other questions at one step than at another: restore it from a copy.")
    return tuple(by_step[step] for step in sorted(by_step))


def _validation(line: dict[str, Any], where: str) -> Validation:
    try:
        return msgspec.convert(line, Validation, dec_hook=lambda _, text: np.array(text.split(), dtype=np.int64))
    except (ValueError, OverflowError, AttributeError) as error:
        raise errors.InputError(f"{where} is damaged ({error}): restore it from a copy.") from error

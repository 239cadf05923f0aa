"""Verification of answers."""

from dataclasses import dataclass

from exgrpo_cli.config.checks import require, require_known, require_positive
from exgrpo_cli.config.names import GRADERS

LEAST_MEMORY_MB = 256
"""A grading worker holds up to about 150 MiB before any answer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GradingSettings:
    """Verification of answers."""

    grader: str = "math"
    """`math` (math-verify), `choice`, `exact`, `oat`, or `python:module:function`."""
    workers: int = 1
    """Worker processes."""
    deadline_seconds: float = 5.0
    """Processor time one answer may take before its worker is killed and the verdict is timeout; four times that on the
    clock."""
    memory_mb: int = 1024
    """Resident memory that a worker may hold, its imports included, in MiB."""
    max_answer_chars: int = 2000
    """A longer answer is 'no answer' at once."""

    def __post_init__(self) -> None:
        require_positive("grading", self, "workers", "deadline_seconds", "max_answer_chars")
        require_known("grading.grader", self.grader, GRADERS, python=True)
        require(self.memory_mb >= LEAST_MEMORY_MB, "grading.memory_mb", self.memory_mb, f"at least {LEAST_MEMORY_MB}")

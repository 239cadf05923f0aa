"""Evaluation before, during and after training."""

from dataclasses import dataclass

from exgrpo_cli.config.checks import require_non_negative, require_positive


@dataclass(frozen=True, kw_only=True, slots=True)
class ValidationSettings:
    """Evaluation before, during and after training."""

    every: int = 0
    """Steps between validations on the held-out questions; 0 is before and after only."""
    samples: int = 4
    """Rollouts per held-out question."""
    temperature: float = 1.0
    top_p: float = 1.0
    max_questions: int = 0
    """First so many held-out questions only, the same ones every time; 0 is all."""
    train_questions: int = 0
    """Training questions, chosen once by `seed`, that are asked before and after training as held-out ones are:
    `result.json` then tells what was memorised. 0 asks none."""
    seed: int = 0

    def __post_init__(self) -> None:
        require_positive("validation", self, "samples", "temperature", "top_p")
        require_non_negative("validation", self, "every", "max_questions", "train_questions", "seed")

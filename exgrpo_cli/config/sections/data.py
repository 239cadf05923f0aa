"""Questions to train and validate on: the built-in arithmetic ones, or files."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from exgrpo_cli.config.checks import require, require_non_negative, require_positive
from exgrpo_cli.config.names import BUILT_IN


@dataclass(frozen=True, kw_only=True, slots=True)
class DataSettings:
    """Questions to train and validate on."""

    train: str = "arithmetic"
    """`arithmetic`, `word-problems`, any file or folder that `prepare` reads, or a data set id."""
    heldout: str = "auto"
    """Held-out questions: `arithmetic`, a file, a benchmark name, a share such as 0.1 of the training questions, which
    then leave the training set, or `none`. "auto" belongs to `train`: the arithmetic held-out questions, the part that
    `prepare --split` put beside a file, or a tenth of the training questions, 500 at most."""
    template: str = "auto"
    """Prompt template; "auto" is the backbone's own chat template."""
    require_box: Literal["auto", "always", "never"] = "auto"
    """Whether a response without `\\boxed{}` has no answer; "auto" asks where the template's text asks for a box."""
    max_prompt_tokens: int = 1024
    """A longer prompt is refused before the run starts."""

    def __post_init__(self) -> None:
        require_positive("data", self, "max_prompt_tokens")
        share = self.heldout_share
        bound = "a share of the training questions between 0 and 1, a file, a benchmark or none"
        require(share is None or 0 < share < 1, "data.heldout", self.heldout, bound)

    @property
    def has_heldout(self) -> bool:
        """Whether the run validates at all."""
        return self.heldout not in ("", "none")

    @property
    def heldout_share(self) -> float | None:
        """The share of the training questions that `heldout` asks for; None where it names a set."""
        try:
            return float(self.heldout)
        except ValueError:
            return None

    @property
    def heldout_name(self) -> str:
        """What the held-out questions are called wherever a score of theirs is shown."""
        if not self.has_heldout:
            return "none"
        if self.heldout == "auto" and self.train in BUILT_IN:
            return self.train
        if self.heldout == "auto" or self.heldout_share is not None:
            return f"{Path(self.train).stem}-heldout"
        return Path(self.heldout).stem


@dataclass(frozen=True, kw_only=True, slots=True)
class ArithmeticSettings:
    """The built-in arithmetic questions."""

    num_train: int = 2400
    """Training questions; 150 steps see each about once with replay (half of 32 a step), twice without."""
    num_heldout: int = 600
    """Held-out questions, disjoint from the training ones by construction."""
    levels: tuple[int, ...] = (2, 3, 4, 5, 6, 7)
    """Operations per question."""
    shares: tuple[float, ...] = ()
    """How many questions each level has beside the others, level by level; empty is equal shares."""
    seed: int = 0
    """Seed of the question set; independent of run.seed, so that runs of several seeds share their questions."""

    def __post_init__(self) -> None:
        require_positive("arithmetic", self, "num_train", "num_heldout")
        require_non_negative("arithmetic", self, "seed")
        possible = min(self.levels, default=0) >= 1 and len(set(self.levels)) == len(self.levels)
        require(possible, "arithmetic.levels", self.levels, "levels of at least 1, each once")
        possible = len(self.shares) in (0, len(self.levels)) and min(self.shares, default=1) > 0
        bound = f"none, or a share above 0 for each of the {len(self.levels)} levels"
        require(possible, "arithmetic.shares", self.shares, bound)


@dataclass(frozen=True, kw_only=True, slots=True)
class WordProblemSettings:
    """The word problems in plain English that the program makes (`word-problems`)."""

    num_train: int = 4000
    """Training questions."""
    num_heldout: int = 400
    """Held-out questions, disjoint from the training ones by construction."""
    levels: tuple[int, ...] = (1, 2, 3, 4)
    """Operations per question, in equal shares."""
    examples: int = 0
    """Worked examples, as earlier turns of the conversation, before every question: a weak model boxes its answer only
    after it has seen it done."""
    seed: int = 0
    """Seed of the question set; independent of run.seed, so that runs of several seeds share their questions."""

    def __post_init__(self) -> None:
        require_positive("word_problems", self, "num_train", "num_heldout")
        require_non_negative("word_problems", self, "seed", "examples")
        possible = min(self.levels, default=0) >= 1 and len(set(self.levels)) == len(self.levels)
        require(
            possible and max(self.levels) <= 4, "word_problems.levels", self.levels, "levels from 1 to 4, each once"
        )

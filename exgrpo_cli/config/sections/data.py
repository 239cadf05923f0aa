"""Questions to train and validate on: the built-in arithmetic ones, or files."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from exgrpo_cli.config.names import is_made
from exgrpo_cli.config.sections import require, require_non_negative, require_positive


@dataclass(frozen=True, kw_only=True, slots=True)
class DataSettings:
    """Questions to train and validate on."""

    train: str = "arithmetic"
    """A source that is made here (`arithmetic`, `word-problems`, `countdown`, `modular`, `gym:TASK`), any file or
    folder that `prepare` reads, or a data set id."""
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
        """Name of the held-out questions wherever a score of theirs is shown."""
        if not self.has_heldout:
            return "none"
        if self.heldout == "auto" and is_made(self.train):
            return self.train.replace(":", "-")
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
    """Questions of each level beside the others, level by level; empty is equal shares."""
    seed: int = 0
    """Seed of the question set; independent of run.seed, so that runs of several seeds share their questions."""

    def __post_init__(self) -> None:
        _require_question_set("arithmetic", self, 1)
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
        _require_question_set("word_problems", self, 1, 4)
        require_non_negative("word_problems", self, "examples")


@dataclass(frozen=True, kw_only=True, slots=True)
class CountdownSettings:
    """Targets to be made of given numbers (`countdown`)."""

    num_train: int = 1600
    """Training questions; of three numbers there are about 1,200, and a third as many held-out ones."""
    num_heldout: int = 400
    """Held-out questions, disjoint from the training ones by construction."""
    levels: tuple[int, ...] = (3, 4)
    """Numbers of a question, in equal shares."""
    seed: int = 0
    """Seed of the question set; independent of run.seed, so that runs of several seeds share their questions."""

    def __post_init__(self) -> None:
        _require_question_set("countdown", self, 3, 6)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModularSettings:
    """Sums modulo m, in which every line of a trace can be checked (`modular`)."""

    num_train: int = 2400
    """Training questions."""
    num_heldout: int = 600
    """Held-out questions, disjoint from the training ones by construction."""
    levels: tuple[int, ...] = (4, 5, 6, 7)
    """Additions per question, in equal shares."""
    modulus: int = 5
    """m: a guess is right one time in m. The tiny backbone's warm start knows 3, 5 and 7."""
    seed: int = 0
    """Seed of the question set; independent of run.seed, so that runs of several seeds share their questions."""

    def __post_init__(self) -> None:
        _require_question_set("modular", self, 2)
        require(2 <= self.modulus <= 99, "modular.modulus", self.modulus, "a whole number from 2 to 99")


@dataclass(frozen=True, kw_only=True, slots=True)
class GymSettings:
    """Questions of reasoning-gym (`gym:TASK`, extra `gym`)."""

    num_train: int = 2000
    """Training questions."""
    num_heldout: int = 200
    """Held-out questions, disjoint from the training ones by construction."""
    options: str = "{}"
    """The task's own options as a JSON table, such as `{"max_word_len": 5}`."""
    seed: int = 0
    """Seed of the question set; independent of run.seed, so that runs of several seeds share their questions."""

    def __post_init__(self) -> None:
        require_positive("gym", self, "num_train", "num_heldout")
        require_non_negative("gym", self, "seed")
        require(_is_table(self.options), "gym.options", self.options, "a JSON table")


def _is_table(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


QuestionSetSettings = ArithmeticSettings | WordProblemSettings | CountdownSettings | ModularSettings


def _require_question_set(section: str, settings: QuestionSetSettings, lowest: int, highest: int | None = None) -> None:
    """Raise InputError for numbers of questions, seeds and levels that cannot be."""
    require_positive(section, settings, "num_train", "num_heldout")
    require_non_negative(section, settings, "seed")
    levels = settings.levels
    possible = min(levels, default=0) >= lowest and len(set(levels)) == len(levels)
    possible = possible and (highest is None or max(levels) <= highest)
    bound = f"of at least {lowest}" if highest is None else f"from {lowest} to {highest}"
    require(possible, f"{section}.levels", levels, f"levels {bound}, each once")

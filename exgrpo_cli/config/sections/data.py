"""Questions to train and validate on: the built-in arithmetic ones, or files."""

import json
import math
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Literal

from exgrpo_cli.config.names import is_made
from exgrpo_cli.config.sections import FRACTION, NAMED, NON_NEGATIVE, POSITIVE, Bound, between, require, setting

RequireBox = Literal["auto", "always", "never"]


def share_of(heldout: str) -> float | None:
    """The share of the training questions that `data.heldout` asks for; None where it names a set."""
    try:
        return float(heldout)
    except ValueError:
        return None


def _is_table(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


def distinct_levels(least: int, most: float = math.inf) -> Bound:
    """Distinct levels from `least` to `most`, one at least."""
    bound = f"of at least {least}" if most == math.inf else f"from {least} to {most}"
    return Bound(
        lambda chosen: chosen and least <= min(chosen) <= max(chosen) <= most and len(set(chosen)) == len(chosen),
        f"levels {bound}, each once",
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class DataSettings:
    """Questions to train and validate on."""

    train: str = setting("arithmetic", NAMED)
    """A source that is made here (`arithmetic`, `word-problems`, `countdown`, `modular`, `gym:TASK`), any file or
    folder that `prepare` reads, or a data set id."""
    heldout: str = setting(
        "auto",
        Bound(
            lambda heldout: (
                heldout.strip() not in ("", ".") and ((share := share_of(heldout)) is None or 0 < share < 1)
            ),
            "a share of the training questions between 0 and 1, a file, a benchmark or none",
        ),
    )
    """Held-out questions: `arithmetic`, a file, a benchmark name, a share such as 0.1 of the training questions, which
    then leave the training set, or `none`. "auto" belongs to `train`: the arithmetic held-out questions, the part that
    `prepare --split` put beside a file, or a tenth of the training questions, 500 at most."""
    template: str = "auto"
    """Prompt template; "auto" is the backbone's own chat template."""
    require_box: RequireBox = "auto"
    """Whether a response without `\\boxed{}` has no answer; "auto" asks where the template's text asks for a box."""
    max_prompt_tokens: int = setting(1024, POSITIVE)
    """A longer prompt is refused before the run starts."""
    barred: float = setting(0.0, FRACTION)
    """Share of the training questions, chosen by `run.seed`, that are rolled out and never replayed: compared with the
    others they tell what replay itself does to the questions that it replays."""

    def is_barred(self, question_id: str, seed: int) -> bool:
        """Whether a training question is barred from replay in runs of a seed: by a hash of the two, so that ranks and
        resumed runs agree and no generator is asked."""
        digest = blake2b(question_id.encode(), digest_size=8, key=str(seed).encode()).digest()
        return int.from_bytes(digest, "big") < self.barred * 2**64

    @property
    def has_heldout(self) -> bool:
        """Whether the run validates at all."""
        return self.heldout not in ("", "none")

    @property
    def heldout_share(self) -> float | None:
        """The share of the training questions that `heldout` asks for; None where it names a set."""
        return share_of(self.heldout)

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

    num_train: int = setting(2400, POSITIVE)
    """Training questions; 150 steps see each about once with replay (half of 32 a step), twice without."""
    num_heldout: int = setting(600, POSITIVE)
    """Held-out questions, disjoint from the training ones by construction."""
    levels: tuple[int, ...] = setting((2, 3, 4, 5, 6, 7), distinct_levels(1))
    """Operations per question."""
    shares: tuple[float, ...] = ()
    """Questions of each level beside the others, level by level; empty is equal shares."""
    seed: int = setting(0, NON_NEGATIVE)
    """Seed of the question set; independent of run.seed, so that runs of several seeds share their questions."""

    def __post_init__(self) -> None:
        possible = len(self.shares) in (0, len(self.levels)) and min(self.shares, default=1) > 0
        bound = f"none, or a share above 0 for each of the {len(self.levels)} levels"
        require(possible, "arithmetic.shares", self.shares, bound)


@dataclass(frozen=True, kw_only=True, slots=True)
class WordProblemSettings:
    """The word problems in plain English that the program makes (`word-problems`)."""

    num_train: int = setting(4000, POSITIVE)
    """Training questions."""
    num_heldout: int = setting(400, POSITIVE)
    """Held-out questions, disjoint from the training ones by construction."""
    levels: tuple[int, ...] = setting((1, 2, 3, 4), distinct_levels(1, 4))
    """Operations per question, in equal shares."""
    examples: int = setting(0, NON_NEGATIVE)
    """Worked examples, as earlier turns of the conversation, before every question: a weak model boxes its answer only
    after it has seen it done."""
    seed: int = setting(0, NON_NEGATIVE)
    """Seed of the question set; independent of run.seed, so that runs of several seeds share their questions."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CountdownSettings:
    """Targets to be made of given numbers (`countdown`)."""

    num_train: int = setting(1600, POSITIVE)
    """Training questions; of three numbers there are about 1,200, and a third as many held-out ones."""
    num_heldout: int = setting(400, POSITIVE)
    """Held-out questions, disjoint from the training ones by construction."""
    levels: tuple[int, ...] = setting((3, 4), distinct_levels(3, 6))
    """Numbers of a question, in equal shares."""
    largest: int = setting(9, between(9, 50))
    """Largest number of a question. Above 9 each question has one above 9, and held-out questions of eight seeds in a
    row have none in common: new questions for every study. The tiny backbone's start is then that of
    `tiny.task = "countdown-20"`, as in the regime `search-20`."""
    seed: int = setting(0, NON_NEGATIVE)
    """Seed of the question set; independent of run.seed, so that runs of several seeds share their questions."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModularSettings:
    """Sums modulo m, in which every line of a trace can be checked (`modular`)."""

    num_train: int = setting(2400, POSITIVE)
    """Training questions."""
    num_heldout: int = setting(600, POSITIVE)
    """Held-out questions, disjoint from the training ones by construction."""
    levels: tuple[int, ...] = setting((4, 5, 6, 7), distinct_levels(2))
    """Additions per question, in equal shares."""
    modulus: int = setting(5, between(2, 99))
    """m: a guess is right one time in m. The tiny backbone's warm start knows 3, 5 and 7."""
    seed: int = setting(0, NON_NEGATIVE)
    """Seed of the question set; independent of run.seed, so that runs of several seeds share their questions."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GymSettings:
    """Questions of reasoning-gym (`gym:TASK`, extra `gym`)."""

    num_train: int = setting(2000, POSITIVE)
    """Training questions."""
    num_heldout: int = setting(200, POSITIVE)
    """Held-out questions, disjoint from the training ones by construction."""
    options: str = setting("{}", Bound(_is_table, "a JSON table"))
    """The task's own options as a JSON table, such as `{"max_word_len": 5}`."""
    seed: int = setting(0, NON_NEGATIVE)
    """Seed of the question set; independent of run.seed, so that runs of several seeds share their questions."""


QuestionSetSettings = ArithmeticSettings | WordProblemSettings | CountdownSettings | ModularSettings

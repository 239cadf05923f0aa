"""Shared by made tasks: disjoint pools, shares of levels, drawing without repetition."""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np

from exgrpo_cli.base.errors import InputError
from exgrpo_cli.base.types import Message, Question
from exgrpo_cli.config.sections.data import QuestionSetSettings
from exgrpo_cli.questions.question_file import question_id

# Draws in a row without a new question, so that a pool that is used up ends in a message and not in a search without
# end: the last of n equally likely questions is drawn within 5 n with probability 0.993.
_MOST_IDLE = 200
_IDLE_PER_QUESTION = 5


class Pool(Enum):
    """Who may see a question; the value is the range of its sixteen hash residues."""

    TRAIN = range(0, 10)
    HELDOUT = range(10, 13)
    WARM_START = range(13, 16)


@dataclass(frozen=True, kw_only=True, slots=True)
class Split:
    """Questions of the same kind, none of them in both lists."""

    train: list[Question]
    heldout: list[Question]


Draw = Callable[[int, Pool, np.random.Generator], Question]
"""One question of a level and a pool."""
DrawMany = Callable[[int, int, Pool, np.random.Generator], list[Question]]
"""So many different ones of a level and a pool."""


def made_question(
    source: str,
    text: str,
    answer: str,
    *,
    level: int | None = None,
    before: Sequence[Message] = (),
    metadata: object = None,
) -> Question:
    """A question that asks `text` after the messages `before`; `metadata` are kept as JSON."""
    prompt = (*before, Message(role="user", content=text))
    return Question(
        id=question_id(prompt, answer),
        prompt=prompt,
        answer=answer,
        source=source,
        level=None if level is None else str(level),
        metadata=None if metadata is None else json.dumps(metadata, default=str),
    )


def pool_of_key(text: str, key: bytes) -> Pool:
    """The only pool of what `text` says, in the numbering of the task `key`: no seed or size can move it."""
    digest = hashlib.blake2b(text.encode(), digest_size=8, key=key).digest()
    residue = int.from_bytes(digest, "big") % 16
    return next(pool for pool in Pool if residue in pool.value)


def share_out(count: int, shares: Sequence[float]) -> list[int]:
    """`count` in whole parts in proportion to `shares`; what rounding leaves goes to the largest remainders."""
    exact = [count * share / sum(shares) for share in shares]
    parts = [int(part) for part in exact]
    by_remainder = sorted(range(len(exact)), key=lambda index: parts[index] - exact[index])
    for index in by_remainder[: count - sum(parts)]:
        parts[index] += 1
    return parts


def draw_split(settings: QuestionSetSettings, draw: DrawMany, shares: Sequence[float] = ()) -> Split:
    """Different questions, each level as many as its share of them, up to one; empty shares are equal ones."""

    def draw_pool(count: int, pool: Pool, stream: int) -> list[Question]:
        rng = np.random.default_rng([settings.seed, stream])
        parts = share_out(count, shares or [1.0] * len(settings.levels))
        drawn: list[Question] = []
        for level, part in zip(settings.levels, parts, strict=True):
            drawn += draw(part, level, pool, rng)
        return [drawn[index] for index in rng.permutation(len(drawn))]

    return Split(
        train=draw_pool(settings.num_train, Pool.TRAIN, 0), heldout=draw_pool(settings.num_heldout, Pool.HELDOUT, 1)
    )


def distinct(what: str, draw: Draw) -> DrawMany:
    """Draw questions of different prompts; raises InputError, naming `what`, where a level has no more of them."""

    def draw_many(count: int, level: int, pool: Pool, rng: np.random.Generator) -> list[Question]:
        drawn: dict[str, Question] = {}
        idle = 0
        while len(drawn) < count and idle < _MOST_IDLE + _IDLE_PER_QUESTION * len(drawn):
            question = draw(level, pool, rng)
            idle = idle + 1 if question.prompt[-1].content in drawn else 0
            drawn.setdefault(question.prompt[-1].content, question)
        require_enough(what, level, len(drawn), count)
        return list(drawn.values())

    return draw_many


def require_enough(what: str, level: int, supply: int, count: int) -> None:
    """Raise InputError where a level has fewer questions than are asked for."""
    if supply < count:
        raise InputError(
            f"{what} of level {level} run out at {supply} of the {count} asked for: ask for fewer or use higher levels."
        )

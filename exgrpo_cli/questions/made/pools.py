"""Shared by made tasks: disjoint pools, shares of levels, drawing without repetition."""

import hashlib
import json
from collections.abc import Callable, Collection, Iterator, Sequence
from enum import Enum
from typing import NamedTuple

import numpy as np

from exgrpo_cli.base import errors, types
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


class Split(NamedTuple):
    """Questions of the same kind, none of them in both lists."""

    train: list[types.Question]
    heldout: list[types.Question]


Draws = Callable[[int, Pool, np.random.Generator], Iterator[types.Question]]
"""Questions of a level and a pool, drawn one after the other: without an end and with repetitions, or each one once."""


def made_question(
    source: str,
    text: str,
    answer: str,
    *,
    level: int | None = None,
    before: Sequence[types.Message] = (),
    metadata: object = None,
) -> types.Question:
    """A question that asks `text` after the messages `before`; `metadata` are kept as JSON."""
    prompt = (*before, types.Message(role="user", content=text))
    return types.Question(
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


def draw_split(settings: QuestionSetSettings, what: str, draws: Draws, shares: Sequence[float] = ()) -> Split:
    """Different questions, each level as many as its share of them, up to one; empty shares are equal ones.

    Raises InputError, naming `what`, where a level has fewer questions than are asked for.
    """
    parts = []
    for stream, (count, pool) in enumerate(((settings.num_train, Pool.TRAIN), (settings.num_heldout, Pool.HELDOUT))):
        rng = np.random.default_rng([settings.seed, stream])
        drawn: list[types.Question] = []
        for level, part in zip(settings.levels, share_out(count, shares or [1.0] * len(settings.levels)), strict=True):
            drawn += _distinct(f"{what} of level {level}", draws(level, pool, rng), part)
        parts.append([drawn[index] for index in rng.permutation(len(drawn))])
    return Split(*parts)


def _distinct(what: str, questions: Iterator[types.Question], count: int) -> Collection[types.Question]:
    """The first `count` of different text."""
    found: dict[str, types.Question] = {}
    idle = 0
    while len(found) < count:
        question = next(questions, None)
        if question is None or idle == _MOST_IDLE + _IDLE_PER_QUESTION * len(found):
            remedy = "ask for fewer or use higher levels"
            raise errors.InputError(f"{what} run out at {len(found)} of the {count} asked for: {remedy}.")
        idle = idle + 1 if question.prompt[-1].content in found else 0
        found.setdefault(question.prompt[-1].content, question)
    return found.values()

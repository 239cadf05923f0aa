"""A store of twenty questions and one step with replay on it, by the calls that a run makes."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from small_ledger import IDENTITY, QUESTIONS, K
from store_calls import row_of, visit_of

from exgrpo_cli.base.types import TokenScores
from exgrpo_cli.replay import place, replace
from exgrpo_cli.replay.store import Store, Visit


def open_store(folder: Path) -> Store:
    return Store(folder, identity=IDENTITY, rules=replace.Replace(), question_ids=QUESTIONS)


def visit(question_id: str, k: int, step: int) -> Visit:
    return visit_of(question_id, step, [row_of(step, member, int(question_id[1:])) for member in range(k)])


def fill(store: Store) -> None:
    """Step 1: two successes of every question."""
    store.record_visits([visit(question_id, 2, 1) for question_id in QUESTIONS])
    store.flush(1)


def asked_of(store: Store, step: int, score: object, num: int = 4) -> place.Asked:
    """A step of `2 num` questions that asks a place."""
    rngs = {"draw": np.random.default_rng(0), "choice": np.random.default_rng(0)}
    return place.Asked(
        store=store, step=step, weight_version=step, questions_per_step=2 * num, from_old=False, rngs=rngs, score=score
    )


def surer_by_id(rows: Sequence[object]) -> list[TokenScores]:
    """Scores by which, of two rows of a question, the one of the higher id is the surer."""
    entropies = [0.9 if row.trajectory_id % 2 == 0 else 0.1 for row in rows]
    return [
        TokenScores(logprobs=np.full(3, -value, dtype=np.float32), entropies=np.full(3, value, dtype=np.float32))
        for value in entropies
    ]


def replay_step(store: Store, num: int, score: object) -> list[int]:
    """Step 2: `num` questions drawn and scored, one row of each replayed; the first question retires."""
    experience = store.rules.before(asked_of(store, 2, score, num))
    store.record_visits([visit(QUESTIONS[0], K, 2)])
    store.flush(2)
    return [row.trajectory.trajectory_id for rows in experience.by_question.values() for row in rows]

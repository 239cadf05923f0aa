"""Calls to a store as tests make them: one visit, one draw, one choice at a time."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from exgrpo_cli.config.settings import SECTIONS
from exgrpo_cli.replay import place, replace
from exgrpo_cli.replay.by_question import Candidates, RowPlace, Sampler, choose, resolve_metric, resolve_sampler
from exgrpo_cli.replay.store import FreshRow, Store, Visit


def visit_of(question_id: str, step: int, rows: Sequence[FreshRow], **more: object) -> Visit:
    """A group of fresh rollouts sampled by the weights of its step, k of which are right by their rewards."""
    k = sum(row.correct for row in rows)
    usual = {"weight_version": step, "success_count": k, "num_fresh_successes": k, "num_replayed": 0}
    return Visit(question_id=question_id, step=step, rows=rows, **{**usual, "verifier_failed": False, **more})


def row_of(*token_ids: int, logprob: float = -0.5, **more: object) -> FreshRow:
    """A rollout of these tokens, each of one log-prob."""
    return FreshRow(
        token_ids=np.array(token_ids, dtype=np.int32),
        behaviour_logprobs=np.full(len(token_ids), logprob, dtype=np.float32),
        **{"entropy": 0.5, "nll": -float(logprob), "correct": more.get("reward", 1) > 0, **more},
    )


def place_of(**settings: object) -> place.Place:
    """The place that these settings of `replay` name, `Replace` without a composition."""
    named = {kind.__name__.lower(): kind for kind in SECTIONS["replay"]}
    return named[settings.get("composition", "replace")](**settings)


@dataclass(frozen=True)
class Outcome:
    """What a visit changed."""

    retired: bool
    bucket: int | None
    collected: tuple[int, ...]
    num_evicted: int


def record(store: Store, visit: Visit, *, collecting: bool = True) -> Outcome:
    """Record one visit, and see what became of it."""
    before, live = len(store.rows), len(store.rows.live())
    store.record_visits([visit], collecting=collecting)
    collected = tuple(range(before, len(store.rows)))
    key = store.questions.bucket(store.questions.numbers[visit.question_id])
    return Outcome(
        retired=visit.question_id in store.retired,
        bucket=None if key is None else key[0],
        collected=collected,
        num_evicted=live + len(collected) - len(store.rows.live()),
    )


def candidates_of(store: Store, question_id: str) -> Candidates:
    return store.candidates([question_id])[0]


def available(store: Store, step: int) -> int:
    """Questions that may be drawn at a step."""
    return sum(map(len, store.drawable(step)))


def sampler_of(rules: replace.Replace) -> Sampler:
    return resolve_sampler(rules.sampler, rules.mu, rules.sigma)


def draw(store: Store, num: int, step: int, rng: np.random.Generator) -> tuple[str, ...]:
    assert isinstance(store.rules, replace.Replace)
    return store.draw_questions(sampler_of(store.rules), num, step, rng)


def chosen_of(store: Store, candidates: Candidates, rng: np.random.Generator) -> list[int]:
    """Positions that the settings choose, as last measured."""
    rules = store.rules
    assert isinstance(rules, RowPlace)
    return choose(candidates, resolve_metric(rules.metric), rules.direction, rng, num=rules.per_question)


def replay(store: Store, step: int, candidates: Candidates, *positions: int) -> None:
    """Record that these candidates of a question are replayed."""
    store.record_choice(step, [candidates], [candidates.trajectory_ids[list(positions)].tolist()])

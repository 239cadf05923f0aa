"""What another sampler would have drawn: it is asked again over all questions that were drawable at each draw.

It is the function that a run itself would use.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64, Int64

from exgrpo_cli.ledger.columns import EVICTED, NO_BUCKET, READMITTED, RETIRED, SELECTED
from exgrpo_cli.replay.drawing.sampling import Sampler, check_draw, resolve_sampler
from exgrpo_cli.replay.question_states import BucketKey, QuestionStates
from exgrpo_cli.replay_stats.record import RunRecord
from exgrpo_cli.replay_stats.what_if.policy import REPETITIONS, WhatIf, sampler_title


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplerOutcome:
    """The run's own question draws beside those of another sampler; axis `draws` are the steps that drew."""

    name: str
    title: str
    """The name with the parameters that it has."""
    steps: Int64[np.ndarray, " draws"]
    drawn_by_step: Int64[np.ndarray, "draws counts"]
    """Questions the run drew, by step and success count."""
    expected_by_step: Float64[np.ndarray, "draws counts"]
    """Questions the other sampler would have drawn."""
    pass_rate: Float64[np.ndarray, " draws"]
    """Mean pass rate of the questions the run drew."""
    expected_pass_rate: Float64[np.ndarray, " draws"]

    @property
    def drawn(self) -> dict[int, int]:
        """Success count -> questions the run drew, over all steps."""
        return {int(k): int(num) for k, num in enumerate(self.drawn_by_step.sum(axis=0)) if num}

    @property
    def expected(self) -> dict[int, float]:
        """Success count -> questions the other sampler would have drawn, over all steps."""
        return {int(k): float(num) for k, num in enumerate(self.expected_by_step.sum(axis=0)) if num}


def other_sampler(record: RunRecord, what_if: WhatIf, rng: np.random.Generator) -> SamplerOutcome:
    """Ask another sampler at each draw of the run, REPETITIONS times."""
    sampler = resolve_sampler(what_if.sampler, what_if.mu, what_if.sigma)
    draws = record.draws
    steps = np.unique(draws.step)
    num_drawn = np.bincount(draws.step, weights=draws.num_drawn, minlength=1)[steps].astype(np.int64)
    rates = np.bincount(draws.step, weights=draws.num_drawn * draws.bucket / draws.num_members, minlength=1)[steps]
    shape = (len(steps), max(record.config.rollout.group_size, int(draws.bucket.max(initial=0))) + 1)
    drawn, expected = np.zeros(shape, dtype=np.int64), np.zeros(shape)
    np.add.at(drawn, (np.searchsorted(steps, draws.step), draws.bucket), draws.num_drawn)
    expected_rates = np.full(len(steps), np.nan)
    for position, states in enumerate(states_at_draws(record, steps)):
        keys = _drawn_buckets(sampler, states, int(num_drawn[position]), rng, what_if.sampler)
        np.add.at(expected[position], [key.success_count for key in keys], 1 / REPETITIONS)
        if keys:
            expected_rates[position] = np.mean([key.success_count / key.num_members for key in keys])
    return SamplerOutcome(
        name=what_if.sampler,
        title=sampler_title(what_if),
        steps=steps,
        drawn_by_step=drawn,
        expected_by_step=expected,
        pass_rate=np.divide(rates, num_drawn, out=np.full(len(steps), np.nan), where=num_drawn > 0),
        expected_pass_rate=expected_rates,
    )


def _drawn_buckets(
    sampler: Sampler, states: QuestionStates, num: int, rng: np.random.Generator, name: str
) -> list[BucketKey]:
    """Buckets of the questions that REPETITIONS draws give."""
    buckets = [bucket for _, bucket in states.drawable()]
    drawn = [check_draw(sampler(buckets, num, rng), buckets, num, name).question_ids for _ in range(REPETITIONS)]
    keys = [states.bucket(states.number(question_id)) for question_ids in drawn for question_id in question_ids]
    return [key for key in keys if key is not None]


def states_at_draws(record: RunRecord, steps: Int64[np.ndarray, " draws"]) -> Iterator[QuestionStates]:
    """The questions as they stood at the draw of each of `steps`, rebuilt from the events; one object, moved on.

    Of a step's own events, those before its draw count: what was re-admitted and what grew too old.
    """
    ids = record.question_ids.to_pylist()
    states = QuestionStates(ids)
    numbers = [states.number(question_id) for question_id in ids]
    events = record.events
    columns = (events.step, events.kind, events.question, events.bucket, events.num_members)
    rows: list[_Row] = list(zip(*(column.tolist() for column in columns), strict=True))
    position = 0
    for step in steps.tolist():
        while position < len(rows) and _precedes_draw(rows[position], step):
            _apply(states, numbers, rows[position], record.config.replay.cooldown)
            position += 1
        states.wake(step)
        yield states


_Row = tuple[int, int, int, int, int]


def _precedes_draw(row: _Row, step: int) -> bool:
    return row[0] < step or (row[0] == step and row[1] in (READMITTED, EVICTED))


def _apply(states: QuestionStates, numbers: Sequence[int], row: _Row, cooldown: int) -> None:
    step, kind, question, bucket, num_members = row
    number = numbers[question]
    if kind == SELECTED:
        if cooldown:
            states.rest(number, step + cooldown)
        return
    if kind == RETIRED:
        states.retire(number)
        return
    if kind == READMITTED:
        states.unretire(number)
    key = None if bucket == NO_BUCKET else BucketKey(bucket, num_members)
    if key != states.bucket(number):
        states.place(number, key)

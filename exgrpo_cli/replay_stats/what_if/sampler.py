"""What another policy would have drawn from a run's ledger at each step, without training.

A sampler is asked again over all questions that were drawable at each draw; a metric over the candidates of the
questions that were drawn, by the measurements of that step. Both are the functions that a run itself would use. The
buffer stays the recorded one: had the other policy really run, later steps would have found another buffer.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jaxtyping import Float64, Int64

from exgrpo_cli.config.names import DIRECTIONS, DRAWS
from exgrpo_cli.config.sections.replay import ReplaySettings
from exgrpo_cli.errors import InputError, nearest
from exgrpo_cli.ledger.columns import EVICTED, NO_BUCKET, READMITTED, RETIRED, SELECTED
from exgrpo_cli.replay.drawing.sampling import Sampler, check_draw, resolve_sampler
from exgrpo_cli.replay.drawing.selection import Candidates, Metric, choose, resolve_metric
from exgrpo_cli.replay.question_states import BucketKey, QuestionStates
from exgrpo_cli.replay_stats.entropy import draw_numbers
from exgrpo_cli.replay_stats.record import RunRecord

REPETITIONS = 4
"""Draws by the other sampler at each step; their mean is reported."""
_UNIT_KEYS = ("priority", "draw", "exponent", "age_decay", "max_drift")
_KEYS = ("sampler", "metric", "direction", "mu", "sigma", *_UNIT_KEYS)


@dataclass(frozen=True, kw_only=True, slots=True)
class WhatIf:
    """Another policy: what differs from the run's own. Empty names are not asked about."""

    sampler: str = ""
    mu: float
    sigma: float
    metric: str = ""
    direction: str
    units: ReplaySettings | None = None
    """The run's settings with another priority, or another way to draw by it."""
    max_drift: float | None = None
    """Another bound on the drift."""


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


@dataclass(frozen=True, kw_only=True, slots=True)
class MetricOutcome:
    """The run's own trajectory choices beside those of another metric."""

    name: str
    direction: str
    title: str
    """Name and direction, as `--metric` writes them."""
    measured: bool
    """Whether the run measured its candidates; otherwise their values are those of birth."""
    draws: int
    share_with_choice: float
    """Share of draws with more candidates than were taken."""
    share_same: float
    """Share of the draws with a choice in which both take the same trajectories."""
    chosen: Mapping[str, float]
    """Means over all draws of `entropy`, `nll`, `num_tokens` and `age` of what the run took."""
    other: Mapping[str, float]
    """The same of what the other metric would have taken."""
    steps: Int64[np.ndarray, " draws"]
    """Steps that replayed something."""
    chosen_by_step: Mapping[str, Float64[np.ndarray, " draws"]]
    """The means of each of them."""
    other_by_step: Mapping[str, Float64[np.ndarray, " draws"]]


def parse_what_if(text: str, own: ReplaySettings) -> WhatIf:
    """Read `sampler=linear,metric=ppl:max,mu=0.4`; what is not named is as in the run.

    Raises InputError for an unknown key, sampler, metric or number.
    """
    given: dict[str, str] = {}
    for item in text.split(","):
        key, equals, value = (part.strip() for part in item.partition("="))
        key = key.removeprefix("replay.")
        if not equals or not value or key in given:
            raise InputError(f"--what-if {text!r}: {item!r} is not a new key=value; write sampler=linear,metric=ppl.")
        if key not in _KEYS:
            raise InputError(f"--what-if {text!r}: unknown key {key!r}.{nearest(key, _KEYS)}")
        given[key] = value
    metric, direction = _split_direction(given.get("metric", ""), given.get("direction", own.direction))
    if direction != given.get("direction", direction):
        raise InputError(f"--what-if {text!r}: metric says {direction} and direction {given['direction']}; give one.")
    if "direction" in given and not metric:
        metric = own.metric
    sampler = given.get("sampler", own.sampler if {"mu", "sigma"} & set(given) else "")
    if sampler != "normal" and {"mu", "sigma"} & set(given):
        raise InputError(f"--what-if {text!r}: mu and sigma are those of the sampler normal, not of {sampler}.")
    return WhatIf(
        sampler=sampler,
        mu=_number(text, "mu", given.get("mu", str(own.mu))),
        sigma=_number(text, "sigma", given.get("sigma", str(own.sigma))),
        metric=metric,
        direction=direction,
        units=_other_units(text, given, own),
        max_drift=_number(text, "max_drift", given["max_drift"]) if "max_drift" in given else None,
    )


def _other_units(text: str, given: Mapping[str, str], own: ReplaySettings) -> ReplaySettings | None:
    """The run's settings with what is given of the priority; None where nothing is."""
    changed: dict[str, Any] = {key: given[key] for key in ("priority", "draw") if key in given}
    changed |= {key: _number(text, key, given[key]) for key in ("exponent", "age_decay") if key in given}
    if not changed:
        return None
    if changed.get("draw", own.draw) not in DRAWS:
        raise InputError(
            f"--what-if {text!r}: draw = {changed['draw']!r} is not known.{nearest(changed['draw'], DRAWS)}"
        )
    if changed.get("priority") == "latest" and changed.get("draw", "top") == "top":
        # A step number is an order, not a weight.
        changed["draw"] = "top"
    return replace(own, **changed)


def _split_direction(metric: str, direction: str) -> tuple[str, str]:
    """`ent:max` is metric `ent` with direction `max`, as in `exgrpo ablate`."""
    name, colon, last = metric.rpartition(":")
    if colon and last in DIRECTIONS:
        metric, direction = name, last
    if direction not in DIRECTIONS:
        raise InputError(f"--what-if: direction = {direction!r} is not known.{nearest(direction, DIRECTIONS)}")
    return metric, direction


def _number(text: str, key: str, value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        raise InputError(f"--what-if {text!r}: {key} = {value!r} is not a number.") from None
    if not np.isfinite(number) or (key == "sigma" and number <= 0):
        raise InputError(f"--what-if {text!r}: {key} = {value} is out of range: use a finite number, sigma above 0.")
    return number


def require_questions(record: RunRecord, what_if: WhatIf) -> None:
    """Raise InputError where the run has no such draw: of questions by a sampler, of a question's rows by a metric."""
    composition = record.config.replay.composition
    asked = "sampler" if what_if.sampler and composition != "replace" else ""
    asked = "metric" if what_if.metric and record.config.replay.draws_units else asked
    if asked:
        raise InputError(
            f"--what-if: {record.run} draws by no {asked} (replay.composition = {composition!r}): ask for another "
            f"{'priority or max_drift' if record.config.replay.draws_units else 'metric'}."
        )


def sampler_title(policy: WhatIf | ReplaySettings) -> str:
    """The sampler's name, with mean and deviation where it is the normal one."""
    return f"normal({policy.mu:g}, {policy.sigma:g})" if policy.sampler == "normal" else policy.sampler


def metric_title(policy: WhatIf | ReplaySettings) -> str:
    """The metric with its direction, which a random choice has not."""
    return policy.metric if policy.metric == "random" else f"{policy.metric}:{policy.direction}"


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


def other_metric(record: RunRecord, what_if: WhatIf, rng: np.random.Generator) -> MetricOutcome:
    """Let another metric choose among the candidates of every draw that replayed something."""
    metric = resolve_metric(what_if.metric)
    scores, trajectories = record.scores, record.trajectories
    numbers = draw_numbers(scores, trajectories.question[scores.row])
    order = np.lexsort((scores.row, numbers))
    bounds = np.searchsorted(numbers[order], np.arange(numbers.max(initial=-1) + 2))
    taken, others, with_choice, same = [], [], [], []
    for begin, end in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        rows = order[begin:end]
        chosen = np.flatnonzero(scores.chosen[rows])
        if len(chosen):
            taken += rows[chosen].tolist()
            others += rows[_choose(record, rows, metric, what_if.direction, len(chosen), rng)].tolist()
            with_choice.append(len(rows) > len(chosen))
            same.append(set(taken[-len(chosen) :]) == set(others[-len(chosen) :]))
    own, other = np.array(taken, dtype=np.int64), np.array(others, dtype=np.int64)
    choice = np.array(with_choice, dtype=bool)
    return MetricOutcome(
        name=what_if.metric,
        direction=what_if.direction,
        title=metric_title(what_if),
        measured=record.config.replay.needs_scores,
        draws=len(choice),
        share_with_choice=float(choice.mean()) if len(choice) else float("nan"),
        share_same=float(np.array(same)[choice].mean()) if choice.any() else float("nan"),
        chosen=_means(record, own),
        other=_means(record, other),
        steps=np.unique(scores.step[own]),
        chosen_by_step=_means_by_step(record, own),
        other_by_step=_means_by_step(record, other),
    )


def _choose(
    record: RunRecord,
    rows: Int64[np.ndarray, " candidates"],
    metric: Metric,
    direction: str,
    num: int,
    rng: np.random.Generator,
) -> Int64[np.ndarray, " chosen"]:
    """Positions of the `num` candidates that a metric takes."""
    scores, trajectories = record.scores, record.trajectories
    stored = scores.row[rows]
    candidates = Candidates(
        question_id=record.question_ids[int(trajectories.question[stored[0]])].as_py(),
        trajectory_ids=trajectories.trajectory_id[stored],
        num_tokens=trajectories.num_tokens[stored].astype(np.int32),
        step_born=trajectories.step_born[stored].astype(np.int32),
        born_version=trajectories.weight_version[stored].astype(np.int32),
        entropy=scores.entropy[rows],
        nll=scores.nll[rows],
        measured_version=scores.weight_version[rows].astype(np.int32),
        reward=trajectories.reward[stored].astype(np.float32),
        priority=np.full(len(rows), np.nan),
    )
    return np.array(choose(candidates, metric, direction, rng, num=num), dtype=np.int64)


def _values(record: RunRecord, rows: Int64[np.ndarray, " draws"]) -> dict[str, np.ndarray]:
    scores, trajectories = record.scores, record.trajectories
    stored = scores.row[rows]
    return {
        "entropy": scores.entropy[rows],
        "nll": scores.nll[rows],
        "num_tokens": trajectories.num_tokens[stored],
        "age": scores.step[rows] - trajectories.step_born[stored],
    }


def _means(record: RunRecord, rows: Int64[np.ndarray, " draws"]) -> dict[str, float]:
    values = _values(record, rows)
    return {name: float(column.mean()) if len(column) else float("nan") for name, column in values.items()}


def _means_by_step(record: RunRecord, rows: Int64[np.ndarray, " draws"]) -> dict[str, Float64[np.ndarray, " steps"]]:
    _, steps = np.unique(record.scores.step[rows], return_inverse=True)
    counts = np.bincount(steps)
    return {name: np.bincount(steps, weights=column) / counts for name, column in _values(record, rows).items()}

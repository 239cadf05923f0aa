"""One step's replay: what the sampler was offered and promised, what it drew, and what was chosen of each question; or
the units that were scanned, and which of them were taken."""

from dataclasses import dataclass

import numpy as np

from exgrpo_cli.base.errors import InputError
from exgrpo_cli.ledger.columns import NO_BUCKET, SELECTED
from exgrpo_cli.replay_stats.questions import QuestionText, question_texts
from exgrpo_cli.replay_stats.record import RunRecord
from exgrpo_cli.replay_stats.replays import rows_of_units
from exgrpo_cli.replay_stats.responses import response_texts


@dataclass(frozen=True, kw_only=True, slots=True)
class BucketOffer:
    """A bucket of the questions that could be drawn."""

    bucket: int
    """Success count."""
    num_members: int
    """Rollouts that the count is over."""
    questions: int
    probability: float
    """Of this bucket at each single draw."""
    drawn: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoredCandidate:
    """A stored trajectory of a drawn question, as selection saw it."""

    trajectory_id: int
    chosen: bool
    age: int
    """Steps since it was born."""
    num_tokens: int
    entropy: float
    """Mean token entropy in nats: under the policy of the step, or of birth where nothing is measured."""
    nll: float
    text: str | None
    """Decoded response; None where the run has no tokenizer yet."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DrawnQuestion:
    """A question that was drawn for replay."""

    question_id: str
    question: QuestionText
    bucket: int | None
    num_members: int | None
    """Successes at its latest visit, and over how many rollouts; None where the ledger does not say."""
    probability: float | None
    """Of this question at each single draw: that of its bucket over the bucket's questions."""
    candidates: tuple[ScoredCandidate, ...]
    """In order of birth; none is chosen where the draw was given back."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitRow:
    """A row of a scanned unit."""

    trajectory_id: int
    reward: float
    advantage: float
    """Of birth; NaN where it was not recorded."""
    num_tokens: int
    text: str | None
    """Decoded response; None where the run has no tokenizer yet."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepUnit:
    """A stored row or group that was drawn by its priority; what does not apply or was not measured is NaN."""

    unit_id: int
    """A trajectory, or the first of a group."""
    accepted: bool
    """It was replayed."""
    question_id: str
    question: QuestionText
    success_count: int
    """Of the visit that stored it."""
    age: int
    """Steps since it was born."""
    priority: float
    probability: float
    """Of a first draw from the whole store."""
    drift: float
    headroom: float
    """Both under the policy of the step."""
    weight: float
    """By which its advantages were multiplied."""
    rows: tuple[UnitRow, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class StepReplay:
    """The replay of one step."""

    step: int
    offers: tuple[BucketOffer, ...]
    questions: tuple[DrawnQuestion, ...]
    """In the order drawn."""
    units: tuple[StepUnit, ...]
    """In the order scanned, where units are drawn by priority."""
    nothing: str
    """Why nothing was replayed; empty where something was."""


def step_replay(record: RunRecord, step: int) -> StepReplay:
    """What the step drew and replayed. Raises InputError for a step that the run has not finished."""
    if not 1 <= step <= record.last_step:
        reached = f"its steps go from 1 to {record.last_step}" if record.last_step else "it has not finished a step yet"
        raise InputError(f"--step {step} is not in {record.run}: {reached}.")
    rows = np.flatnonzero(record.draws.step == step)
    columns = record.draws
    offers = tuple(
        BucketOffer(
            bucket=int(columns.bucket[row]),
            num_members=int(columns.num_members[row]),
            questions=int(columns.num_questions[row]),
            probability=float(columns.probability[row]),
            drawn=int(columns.num_drawn[row]),
        )
        for row in rows
    )
    questions, units = _drawn_questions(record, step), _scanned_units(record, step)
    return StepReplay(
        step=step,
        offers=offers,
        questions=questions,
        units=units,
        nothing=_why_nothing(record, step, questions, units),
    )


def _drawn_questions(record: RunRecord, step: int) -> tuple[DrawnQuestion, ...]:
    scores, trajectories = record.scores, record.trajectories
    scored = np.flatnonzero(scores.step == step)
    owner = trajectories.question[scores.row[scored]]
    numbers = list(dict.fromkeys(owner.tolist()))
    ids = [record.question_ids[number].as_py() for number in numbers]
    texts = question_texts(record.run, ids)
    responses = response_texts(
        record.run, record.config.backbone.source, trajectories.trajectory_id[scores.row[scored]].tolist()
    )
    questions = []
    for number, question_id in zip(numbers, ids, strict=True):
        place = _bucket_at_draw(record, number, step)
        questions.append(
            DrawnQuestion(
                question_id=question_id,
                question=texts.get(question_id, QuestionText()),
                bucket=place[0] if place else None,
                num_members=place[1] if place else None,
                probability=record.draws.of_question(step, *place) if place else None,
                candidates=tuple(
                    _candidate(record, index, responses) for index in np.sort(scored[owner == number]).tolist()
                ),
            )
        )
    return tuple(questions)


def _bucket_at_draw(record: RunRecord, question: int, step: int) -> tuple[int, int] | None:
    """Success count and members of the bucket that a question was in when the step drew."""
    events = record.events
    known = (events.question == question) & ((events.step < step) | ((events.step == step) & (events.kind == SELECTED)))
    rows = np.flatnonzero(known)
    if not len(rows) or events.bucket[rows[-1]] == NO_BUCKET:
        return None
    return int(events.bucket[rows[-1]]), int(events.num_members[rows[-1]])


def _candidate(record: RunRecord, index: int, responses: dict[int, str]) -> ScoredCandidate:
    scores, trajectories = record.scores, record.trajectories
    row = int(scores.row[index])
    trajectory_id = int(trajectories.trajectory_id[row])
    return ScoredCandidate(
        trajectory_id=trajectory_id,
        chosen=bool(scores.chosen[index]),
        age=int(scores.step[index] - trajectories.step_born[row]),
        num_tokens=int(trajectories.num_tokens[row]),
        entropy=float(scores.entropy[index]),
        nll=float(scores.nll[index]),
        text=responses.get(trajectory_id),
    )


def _scanned_units(record: RunRecord, step: int) -> tuple[StepUnit, ...]:
    columns, trajectories = record.units, record.trajectories
    scanned = np.flatnonzero(columns.step == step)
    which, rows = rows_of_units(record, columns.unit[scanned])
    responses = response_texts(record.run, record.config.backbone.source, trajectories.trajectory_id[rows].tolist())
    ids = [record.question_ids[number].as_py() for number in trajectories.question[rows].tolist()]
    texts = question_texts(record.run, list(dict.fromkeys(ids)))
    begins = np.searchsorted(which, np.arange(len(scanned) + 1)).tolist()
    units = []
    for index, first, end in zip(scanned.tolist(), begins, begins[1:], strict=False):
        units.append(
            StepUnit(
                unit_id=int(columns.unit[index]),
                accepted=bool(columns.accepted[index]),
                question_id=ids[first],
                question=texts.get(ids[first], QuestionText()),
                success_count=int(trajectories.success_count[rows[first]]),
                age=step - int(trajectories.step_born[rows[first]]),
                priority=float(columns.priority[index]),
                probability=float(columns.probability[index]),
                drift=float(columns.drift[index]),
                headroom=float(columns.headroom[index]),
                weight=float(columns.weight[index]),
                rows=tuple(_unit_row(record, row, responses) for row in rows[first:end].tolist()),
            )
        )
    return tuple(units)


def _unit_row(record: RunRecord, row: int, responses: dict[int, str]) -> UnitRow:
    trajectories = record.trajectories
    trajectory_id = int(trajectories.trajectory_id[row])
    return UnitRow(
        trajectory_id=trajectory_id,
        reward=float(trajectories.reward[row]),
        advantage=float(trajectories.advantage[row]),
        num_tokens=int(trajectories.num_tokens[row]),
        text=responses.get(trajectory_id),
    )


def _why_nothing(
    record: RunRecord, step: int, questions: tuple[DrawnQuestion, ...], units: tuple[StepUnit, ...]
) -> str:
    chosen = [candidate.chosen for question in questions for candidate in question.candidates]
    if any(chosen) or any(unit.accepted for unit in units):
        return ""
    replay = record.config.replay
    if units:
        return f"every unit scanned had drifted by more than replay.max_drift = {replay.max_drift:g}"
    if questions:
        return "the draw was given back: its effective sample size was below replay.ess_bound"
    first = record.metrics.first_mixed_step
    if first is None or step < first:
        begins = "has not begun yet" if first is None else f"begins with step {first}"
        return f"on-policy phase: replay {begins}"
    return _NOTHING_DRAWN[replay.composition]


_NOTHING_DRAWN = {
    "replace": "no buffered question could be drawn",
    "join": "no question of the step held replay.min_stored rows that could be replayed",
    "append": "nothing could be drawn, or no fresh group was mixed",
    "refill": "nothing could be drawn, or every fresh group was mixed",
}
"""By `replay.composition`, of a step that could have replayed."""

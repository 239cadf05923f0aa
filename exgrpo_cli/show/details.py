"""One step's replay and one question's history: parts of the object that `--json` prints, with the words."""

import itertools
from collections.abc import Iterator

import numpy as np
import pyarrow.compute as pc
from jaxtyping import Int64

from exgrpo_cli.base.errors import InputError, nearest
from exgrpo_cli.ledger.columns import KINDS, MISSING, NO_BUCKET, SELECTED
from exgrpo_cli.ledger.schemas import Event
from exgrpo_cli.show.queries import Numbers, rows_of_units, state_of
from exgrpo_cli.show.record import QuestionText, RunRecord, question_texts, response_texts, table_rows, take

IDS_SHOWN = 2000
"""Ids that an unknown one is compared with for the nearest: the comparison is quadratic in the id's length."""
NOTHING_DRAWN = {
    "replace": "no buffered question could be drawn",
    "join": "no question of the step held replay.min_stored rows that could be replayed",
    "append": "nothing could be drawn, or no fresh group was mixed",
    "refill": "nothing could be drawn, or every fresh group was mixed",
}
"""By `replay.composition`: why a step that could have replayed did not."""


MOMENTS = {"scored": 0, "refused": 1, "selected": 1}
"""Events of a draw, in the order in which a history has those of a step."""


def step_replay(record: RunRecord, step: int) -> Numbers:
    """Offers and draws of one step: `buckets` that could be drawn from, the drawn `questions` with their candidates as
    selection saw them, or the `units` scanned in the order drawn; `nothing` is why nothing was replayed, else empty.

    Raises InputError for a step that the run has not finished.
    """
    if not 1 <= step <= record.last_step:
        reached = f"its steps go from 1 to {record.last_step}" if record.last_step else "it has not finished a step yet"
        raise InputError(f"--step {step} is not in {record.run}: {reached}.")
    draws, rows = record.draws, record.draws.step == step
    questions, units = _drawn_questions(record, step), _scanned_units(record, step)
    offers = take(draws, rows, "bucket", "num_members", "probability")
    return {
        "step": step,
        "nothing": _why_nothing(record, step, questions, units),
        "buckets": table_rows(questions=draws.num_questions[rows], drawn=draws.num_drawn[rows], **offers),
        "questions": questions,
        "units": units,
    }


def _drawn_questions(record: RunRecord, step: int) -> list[Numbers]:
    """In the order drawn, each with its candidates in order of birth; none is chosen where the draw was given back."""
    scores, born = record.scores, record.trajectories
    scored = np.flatnonzero(scores.step == step)
    owner = born.question[scores.row[scored]]
    responses = _responses(record, scores.row[scored])
    questions = []
    for number, question_id, text in _questions(record, owner):
        own = np.sort(scored[owner == number])
        rows = scores.row[own]
        candidates = table_rows(
            age=step - born.step_born[rows],
            text=[responses.get(each) for each in born.trajectory_id[rows].tolist()],
            **take(born, rows, "trajectory_id", "num_tokens"),
            **take(scores, own, "chosen", "entropy", "nll"),
        )
        bucket, num_members = _bucket_at_draw(record, number, step)
        chance = record.chance(step, bucket, num_members)
        place = {"bucket": bucket, "num_members": num_members, "probability": chance}
        questions.append({"question_id": question_id, "question": text, "candidates": candidates, **place})
    return questions


def _questions(record: RunRecord, owners: Int64[np.ndarray, " rows"]) -> list[tuple[int, str, QuestionText]]:
    """Number, id and text of the distinct questions among `owners`, in the order in which they first come up."""
    ids = {number: record.question_ids[number].as_py() for number in dict.fromkeys(owners.tolist())}
    texts = question_texts(record.run, list(ids.values()))
    return [(number, name, texts.get(name, QuestionText())) for number, name in ids.items()]


def _responses(record: RunRecord, rows: Int64[np.ndarray, " rows"]) -> dict[int, str]:
    ids = record.trajectories.trajectory_id[rows].tolist()
    return response_texts(record.run, record.config.backbone.source, ids)


def _bucket_at_draw(record: RunRecord, question: int, step: int) -> tuple[int | None, int | None]:
    """Success count and members of the bucket that a question was in when the step drew; None where it was in none."""
    events = record.events
    known = (events.question == question) & ((events.step < step) | ((events.step == step) & (events.kind == SELECTED)))
    rows = np.flatnonzero(known)
    if not len(rows) or events.bucket[rows[-1]] == NO_BUCKET:
        return None, None
    return int(events.bucket[rows[-1]]), int(events.num_members[rows[-1]])


def _scanned_units(record: RunRecord, step: int) -> list[Numbers]:
    columns, born = record.units, record.trajectories
    scanned = np.flatnonzero(columns.step == step)
    which, rows = rows_of_units(record, columns.unit[scanned])
    responses = _responses(record, rows)
    texts = [responses.get(each) for each in born.trajectory_id[rows].tolist()]
    members = table_rows(text=texts, **take(born, rows, "trajectory_id", "reward", "advantage", "num_tokens"))
    ends = np.searchsorted(which, np.arange(len(scanned) + 1)).tolist()
    first = rows[ends[:-1]]
    asked = {number: (name, text) for number, name, text in _questions(record, born.question[first])}
    owners = [asked[number] for number in born.question[first].tolist()]
    return table_rows(
        unit_id=columns.unit[scanned],
        question_id=[name for name, _ in owners],
        question=[text for _, text in owners],
        success_count=born.success_count[first],
        age=step - born.step_born[first],
        rows=[members[begin:end] for begin, end in itertools.pairwise(ends)],
        **take(columns, scanned, "accepted", "priority", "probability", "drift", "headroom", "weight"),
    )


def _why_nothing(record: RunRecord, step: int, questions: list[Numbers], units: list[Numbers]) -> str:
    chosen = [candidate["chosen"] for question in questions for candidate in question["candidates"]]
    if any(chosen) or any(unit["accepted"] for unit in units):
        return ""
    replay = record.config.replay
    if units:
        return f"every unit scanned had drifted by more than replay.max_drift = {getattr(replay, 'max_drift', 0.0):g}"
    if questions:
        return "the draw was given back: its effective sample size was below replay.ess_bound"
    first = record.metrics.first_mixed_step
    if first is None or step < first:
        begins = "has not begun yet" if first is None else f"begins with step {first}"
        return f"on-policy phase: replay {begins}"
    return NOTHING_DRAWN[replay.composition]


def question_history(record: RunRecord, question_id: str) -> Numbers:
    """All that the ledger says about one question, named by its id or by an unambiguous beginning of it.

    `events` are its events, "scored" for a candidate that was measured and not chosen, and of units "selected" or
    "refused", one a row. Entropy and nll are those of birth for a collected trajectory, else as measured. `responses`
    are decoded, by trajectory id. Raises InputError for an id that neither the training set nor the ledger knows.
    """
    question = _find(record, question_id)
    [(_, full_id, text)] = _questions(record, np.array([question]))
    rows = [*_event_rows(record, question), *_score_rows(record, question), *_unit_rows(record, question)]
    return {
        "question_id": full_id,
        "text": text.text,
        "answer": text.answer,
        "level": text.level,
        "state": state_of(record, question),
        # In a step what was replayed comes before what the rollouts caused.
        "events": sorted(rows, key=lambda row: (row["step"], MOMENTS.get(row["event"], len(MOMENTS)))),
        "responses": _responses(record, np.flatnonzero(record.trajectories.question == question)),
    }


def _find(record: RunRecord, question_id: str) -> int:
    exact = pc.index(record.question_ids, question_id).as_py()
    if exact >= 0:
        return exact
    matches = np.flatnonzero(pc.starts_with(record.question_ids, pattern=question_id).to_numpy(zero_copy_only=False))
    if len(matches) == 1 and question_id:
        return int(matches[0])
    if len(matches) > 1:
        raise InputError(f"question {question_id!r} is the beginning of {len(matches)} ids. Give more characters.")
    hint = nearest(question_id, record.question_ids[:IDS_SHOWN].to_pylist())
    hint = hint if hint.startswith(" Did") else " Ids are in the column `id` of the run's data/train.parquet."
    raise InputError(f"question {question_id!r} is not in {record.run}.{hint}")


def _history_row(record: RunRecord, step: int, event: str, at: int | None, **known: float | None) -> Numbers:
    """A row of a history; of the trajectory in row `at` where one is given, and with its age where it was drawn."""
    born = record.trajectories
    names = ("trajectory_id", "bucket", "probability", "age", "num_tokens", "entropy", "nll")
    row: Numbers = {"step": step, "event": event, **dict.fromkeys(names)}
    if at is not None:
        row |= {name: int(getattr(born, name)[at]) for name in ("trajectory_id", "num_tokens")}
        row["age"] = step - int(born.step_born[at]) if event in MOMENTS else None
    return row | known


def _event_rows(record: RunRecord, question: int) -> Iterator[Numbers]:
    """All but the draws, which are told by the scores of their candidates."""
    events, born = record.events, record.trajectories
    for index in np.flatnonzero((events.question == question) & (events.kind != SELECTED)).tolist():
        event, bucket, own = KINDS[events.kind[index]], int(events.bucket[index]), events.trajectory_id[index]
        at = None if own == MISSING else int(record.rows_of(np.array([own]))[0])
        known: Numbers = {"bucket": None if bucket == NO_BUCKET else bucket}
        if at is not None and event == Event.COLLECTED:
            known |= {"entropy": float(born.entropy[at]), "nll": float(born.nll[at])}
        yield _history_row(record, int(events.step[index]), str(event), at, **known)


def _score_rows(record: RunRecord, question: int) -> Iterator[Numbers]:
    scores = record.scores
    for index in np.flatnonzero(record.trajectories.question[scores.row] == question).tolist():
        step, known = int(scores.step[index]), {"entropy": scores.entropy[index], "nll": scores.nll[index]}
        if scores.chosen[index]:
            bucket, num_members = _bucket_at_draw(record, question, step)
            chance = record.chance(step, bucket, num_members)
            known |= {"bucket": bucket, "probability": chance}
        event = "selected" if scores.chosen[index] else "scored"
        yield _history_row(record, step, event, int(scores.row[index]), **known)


def _unit_rows(record: RunRecord, question: int) -> Iterator[Numbers]:
    units = record.units
    which, rows = rows_of_units(record, units.unit)
    for member in np.flatnonzero(record.trajectories.question[rows] == question).tolist():
        unit = which[member]
        event, chance = "selected" if units.accepted[unit] else "refused", float(units.probability[unit])
        known = {"probability": None if np.isnan(chance) else chance}
        yield _history_row(record, int(units.step[unit]), event, int(rows[member]), **known)

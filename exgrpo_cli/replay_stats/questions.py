"""Single questions: the most replayed ones with their text, and the whole history of one."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from exgrpo_cli.base.errors import InputError, nearest
from exgrpo_cli.ledger.columns import KINDS, NO_BUCKET, READMITTED, RETIRED
from exgrpo_cli.replay_stats.record import RunRecord, read_question_columns
from exgrpo_cli.replay_stats.replays import Replays, rows_of_units
from exgrpo_cli.replay_stats.responses import response_texts

IDS_SHOWN = 2000
"""Ids that an unknown one is compared with for the nearest: the comparison is quadratic in the id's length."""


@dataclass(frozen=True, kw_only=True, slots=True)
class QuestionText:
    """What the run's own question file says about a question; empty where the file is gone."""

    text: str = ""
    """Content of the last user message."""
    answer: str = ""
    level: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayedQuestion:
    """A question and how much it was replayed."""

    question_id: str
    replays: int
    trajectories: int
    """Trajectories of it ever stored."""
    distinct: int
    """Different ones among the replayed."""
    state: str
    """"bucket <k>", "retired" or "not buffered", after the last step."""
    question: QuestionText


@dataclass(frozen=True, kw_only=True, slots=True)
class HistoryRow:
    """One thing that happened to a question or to one of its trajectories."""

    step: int
    event: str
    """A name from KINDS, "scored" for a candidate that was measured and not chosen, or "refused" for a row of a unit
    that had drifted too far; "selected" for one of a unit that was taken, too."""
    trajectory_id: int | None
    bucket: int | None
    """The question's bucket afterwards; None when it is in none, and for a score."""
    probability: float | None = None
    """Of this question at each single draw of the step, or of the unit at the first one, where it was selected."""
    age: int | None = None
    """Steps since the trajectory was born, where it was measured or selected."""
    num_tokens: int | None
    entropy: float | None
    """In nats, at birth for a collected trajectory, as measured for a selected or scored one."""
    nll: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class QuestionHistory:
    """Everything the ledger says about one question, in order."""

    question_id: str
    question: QuestionText
    state: str
    rows: tuple[HistoryRow, ...]
    texts: dict[int, str]
    """Decoded responses by trajectory id; empty where the run has no tokenizer yet."""


def most_replayed(record: RunRecord, drawn: Replays, num: int) -> tuple[ReplayedQuestion, ...]:
    """The `num` questions replayed most often; of equal ones the first in the training set."""
    num_questions = len(record.question_ids)
    counts = np.bincount(drawn.question, minlength=num_questions)
    top = np.argsort(-counts, kind="stable")[:num]
    top = top[counts[top] > 0]
    stored = np.bincount(record.trajectories.question, minlength=num_questions)
    ids = [record.question_ids[int(question)].as_py() for question in top]
    texts = question_texts(record.run, ids)
    return tuple(
        ReplayedQuestion(
            question_id=question_id,
            replays=int(counts[question]),
            trajectories=int(stored[question]),
            distinct=len(np.unique(drawn.row[drawn.question == question])),
            state=_state(record, int(question)),
            question=texts.get(question_id, QuestionText()),
        )
        for question_id, question in zip(ids, top, strict=True)
    )


def question_history(record: RunRecord, question_id: str) -> QuestionHistory:
    """The history of one question, named by its id or by an unambiguous beginning of it.

    Raises InputError for an id that neither the training set nor the ledger knows, naming the nearest.
    """
    question = _find(record, question_id)
    full_id = record.question_ids[question].as_py()
    rows = [*_event_rows(record, question), *_score_rows(record, question), *_unit_rows(record, question)]
    own = record.trajectories.trajectory_id[record.trajectories.question == question]
    return QuestionHistory(
        question_id=full_id,
        question=question_texts(record.run, [full_id]).get(full_id, QuestionText()),
        state=_state(record, question),
        rows=tuple(row for _, row in sorted(rows, key=lambda placed: placed[0])),
        texts=response_texts(record.run, record.config.backbone.source, own.tolist()),
    )


def question_texts(run: Path, question_ids: Sequence[str]) -> dict[str, QuestionText]:
    """Text, answer and level of the named questions, from the run's own question file."""
    chosen = pc.field("id").isin(pa.array(question_ids, pa.string()))
    table = read_question_columns(run, ("id", "prompt", "answer", "level"), chosen) if question_ids else None
    return {
        row["id"]: QuestionText(
            text=_last_user_message(row.get("prompt") or []),
            answer=row.get("answer") or "",
            level=row.get("level") or "",
        )
        for row in (() if table is None else table.to_pylist())
    }


def _last_user_message(prompt: Sequence[dict[str, str]]) -> str:
    return next((turn["content"] for turn in reversed(prompt) if turn["role"] == "user"), "")


def _find(record: RunRecord, question_id: str) -> int:
    exact = pc.index(record.question_ids, question_id).as_py()
    if exact >= 0:
        return exact
    matches = np.flatnonzero(pc.starts_with(record.question_ids, pattern=question_id).to_numpy(zero_copy_only=False))
    if len(matches) == 1 and question_id:
        return int(matches[0])
    if len(matches) > 1:
        raise InputError(f"question {question_id!r} is the beginning of {len(matches)} ids. Give more characters.")
    known = record.question_ids[:IDS_SHOWN].to_pylist()
    hint = nearest(question_id, known)
    hint = hint if hint.startswith(" Did") else " Ids are in the column `id` of the run's data/train.parquet."
    raise InputError(f"question {question_id!r} is not in {record.run}.{hint}")


def _state(record: RunRecord, question: int) -> str:
    own = record.events.question == question
    kinds, buckets = record.events.kind[own], record.events.bucket[own]
    if not len(kinds):
        return "not buffered"
    leaving = kinds[(kinds == RETIRED) | (kinds == READMITTED)]
    if len(leaving) and leaving[-1] == RETIRED:
        return "retired"
    return "not buffered" if buckets[-1] == NO_BUCKET else f"bucket {buckets[-1]}"


def _event_rows(record: RunRecord, question: int) -> list[tuple[tuple[int, int], HistoryRow]]:
    """Placed rows: those of a step that were drawn come before those that its rollouts caused."""
    events, trajectories = record.events, record.trajectories
    scores = record.scores
    measured = {
        (int(scores.step[i]), int(scores.row[i])): (float(scores.entropy[i]), float(scores.nll[i]))
        for i in np.flatnonzero(trajectories.question[scores.row] == question)
    }
    rows = []
    for index in np.flatnonzero(events.question == question):
        step, event = int(events.step[index]), str(KINDS[events.kind[index]])
        trajectory_id = int(events.trajectory_id[index]) if events.trajectory_id[index] >= 0 else None
        tokens = entropy = nll = age = probability = None
        bucket = int(events.bucket[index])
        if trajectory_id is not None:
            row = int(trajectories.rows_of(np.array([trajectory_id]))[0])
            tokens = int(trajectories.num_tokens[row])
            if event == "collected":
                entropy, nll = float(trajectories.entropy[row]), float(trajectories.nll[row])
            elif event == "selected":
                entropy, nll = measured.get((step, row), (None, None))
                age = step - int(trajectories.step_born[row])
                probability = record.draws.of_question(step, bucket, int(events.num_members[index]))
        placed = HistoryRow(
            step=step,
            event=event,
            trajectory_id=trajectory_id,
            bucket=None if bucket == NO_BUCKET else bucket,
            probability=probability,
            age=age,
            num_tokens=tokens,
            entropy=entropy,
            nll=nll,
        )
        rows.append(((step, 2 + int(index)), placed))
    return rows


def _score_rows(record: RunRecord, question: int) -> list[tuple[tuple[int, int], HistoryRow]]:
    scores, trajectories = record.scores, record.trajectories
    own = np.flatnonzero((trajectories.question[scores.row] == question) & ~scores.chosen)
    rows = []
    for index in own:
        row = int(scores.row[index])
        placed = HistoryRow(
            step=int(scores.step[index]),
            event="scored",
            trajectory_id=int(trajectories.trajectory_id[row]),
            bucket=None,
            age=int(scores.step[index] - trajectories.step_born[row]),
            num_tokens=int(trajectories.num_tokens[row]),
            entropy=float(scores.entropy[index]),
            nll=float(scores.nll[index]),
        )
        rows.append(((int(scores.step[index]), 1), placed))
    return rows


def _unit_rows(record: RunRecord, question: int) -> list[tuple[tuple[int, int], HistoryRow]]:
    """The rows of scanned units of a question."""
    units, trajectories = record.units, record.trajectories
    which, rows = rows_of_units(record, units.unit)
    found = []
    for at in np.flatnonzero(trajectories.question[rows] == question).tolist():
        unit, row = which[at], int(rows[at])
        step, chance = int(units.step[unit]), float(units.probability[unit])
        placed = HistoryRow(
            step=step,
            event="selected" if units.accepted[unit] else "refused",
            trajectory_id=int(trajectories.trajectory_id[row]),
            bucket=None,
            probability=None if np.isnan(chance) else chance,
            age=step - int(trajectories.step_born[row]),
            num_tokens=int(trajectories.num_tokens[row]),
            entropy=None,
            nll=None,
        )
        found.append(((step, 1), placed))
    return found

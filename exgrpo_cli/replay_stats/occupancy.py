"""Where the questions of a run are after every step: in which bucket, retired, tried without success, unseen.

Rebuilt from the event table, in which each event names the bucket its question is in afterwards. Axes: `steps` runs
from 0 (before step 1, after a warm start) to the last step; `buckets` are success counts from 0.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Int64

from exgrpo_cli.ledger.columns import COLLECTED, EVICTED, NO_BUCKET, READMITTED, RETIRED, SELECTED, EventColumns
from exgrpo_cli.ledger.schemas import WARM_START_STEP
from exgrpo_cli.replay_stats.record import RunRecord


@dataclass(frozen=True, kw_only=True, slots=True)
class OccupancyHistory:
    """Questions per state after each step."""

    in_bucket: Int64[np.ndarray, "steps buckets"]
    retired: Int64[np.ndarray, " steps"]
    tried: Int64[np.ndarray, " steps"]
    """Visited, neither stored nor retired: not solved within the bounds, or visited before collecting began."""
    unseen: Int64[np.ndarray, " steps"]
    """Never drawn from the stream."""
    visits_known: bool
    """Whether tried and unseen can be told; otherwise both are 0. They cannot without the training set, nor where
    questions came from another run or back from retirement: which of those the stream gave out since is unknown."""
    trajectories: Int64[np.ndarray, " steps"]
    """Stored trajectories of the buffered questions."""

    @property
    def buffered(self) -> Int64[np.ndarray, " steps"]:
        """Questions with stored trajectories that are not retired: those a replay can be drawn from."""
        return self.in_bucket.sum(axis=1)


def occupancy(record: RunRecord) -> OccupancyHistory:
    """Rebuild the state of all questions after every step of `record`."""
    num_steps = record.last_step + 1
    in_bucket, trajectories = _buffer_contents(record.events, num_steps, record.config.rollout.group_size)
    retired = _running_total(record.events, RETIRED, READMITTED, num_steps)
    total = record.num_training_questions
    known = in_bucket.sum(axis=1) + retired
    foreign = (record.events.step == WARM_START_STEP) | (record.events.kind == READMITTED)
    visits_known = total > 0 and not foreign.any()
    tried = np.clip(_seen(record, num_steps) - known, 0, None) if visits_known else np.zeros_like(known)
    unseen = np.clip(total - known - tried, 0, None) if visits_known else np.zeros_like(known)
    return OccupancyHistory(
        in_bucket=in_bucket,
        retired=retired,
        tried=tried,
        unseen=unseen,
        visits_known=visits_known,
        trajectories=trajectories,
    )


def _buffer_contents(
    events: EventColumns, num_steps: int, group_size: int
) -> tuple[Int64[np.ndarray, "steps buckets"], Int64[np.ndarray, " steps"]]:
    """Questions per bucket and trajectories of buffered questions, after every step.

    With the events grouped by question, each one takes its question out of the bucket that the previous one left it in,
    and the trajectories it has come and go with the question.
    """
    order = np.argsort(events.question, kind="stable")
    step, after, kind = events.step[order], events.bucket[order], events.kind[order]
    question = events.question[order]
    follows = np.zeros(len(question), dtype=bool)
    follows[1:] = question[1:] == question[:-1]
    before = np.where(follows, np.roll(after, 1), NO_BUCKET)
    stored = _running_within((kind == COLLECTED).astype(np.int64) - (kind == EVICTED), follows)
    held_after = np.where(after == NO_BUCKET, 0, stored)
    held_before = np.where(follows, np.roll(held_after, 1), 0)

    questions = np.zeros((num_steps, max(group_size, int(after.max(initial=0)) + 1)), dtype=np.int64)
    for buckets, sign in ((after, 1), (before, -1)):
        inside = buckets != NO_BUCKET
        np.add.at(questions, (step[inside], buckets[inside]), sign)
    trajectories = np.zeros(num_steps, dtype=np.int64)
    np.add.at(trajectories, step, held_after - held_before)
    return questions.cumsum(axis=0), trajectories.cumsum()


def _running_within(
    change: Int64[np.ndarray, " events"], follows: Bool[np.ndarray, " events"]
) -> Int64[np.ndarray, " events"]:
    """Running total of `change` that starts anew at every row that does not follow one of its own question."""
    total = np.cumsum(change)
    starts = np.flatnonzero(~follows)
    lengths = np.diff(np.append(starts, len(change)))
    return total - np.repeat(total[starts] - change[starts], lengths)


def _running_total(events: EventColumns, plus: int, minus: int, num_steps: int) -> Int64[np.ndarray, " steps"]:
    added = np.bincount(events.step[events.kind == plus], minlength=num_steps)
    removed = np.bincount(events.step[events.kind == minus], minlength=num_steps)
    return (added - removed).cumsum()


def _seen(record: RunRecord, num_steps: int) -> Int64[np.ndarray, " steps"]:
    """Distinct questions the stream has given out after each step.

    The stream is a permutation of the training set, so that up to its end every fresh draw is a question not seen
    before. A step's fresh draws are in its metrics; before these are written, B less those that were replayed.
    """
    replayed = np.bincount(record.events.step[record.events.kind == SELECTED], minlength=num_steps)
    fresh = (record.config.rollout.questions_per_step - replayed).astype(np.float64)
    fresh[0] = 0
    logged = record.metrics.series("batch/questions")
    known = np.isfinite(logged)
    fresh[record.metrics.steps[known]] = logged[known]
    return np.minimum(fresh.cumsum(), record.num_training_questions).astype(np.int64)

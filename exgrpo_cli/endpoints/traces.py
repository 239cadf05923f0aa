"""Whether the stored correct responses are right in every step, on tasks where a step can be checked exactly.

A right answer may be a lucky hit. Where entropy tells the two apart, replaying the trajectory of lowest entropy avoids
the hits: the area under the ROC curve says how well.
"""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from jaxtyping import Bool, Float64, Int64

from exgrpo_cli.base.types import Question
from exgrpo_cli.grading.valid_traces import sum_asked, valid_trace
from exgrpo_cli.questions.question_file import read_questions
from exgrpo_cli.runs.result import ValidTraces
from exgrpo_cli.show.record import QUESTIONS_FILE, RunRecord, keeps_experience, read_run, response_texts

MOST = 4000
"""Trajectories that are read; of more, so many spread over the run."""


def valid_traces(run: Path) -> ValidTraces | None:
    """Valid shares of what a run stored; None where the task cannot tell or the run stores nothing correct."""
    questions = {question.id: question for question in read_questions(run / QUESTIONS_FILE).questions}
    # Of one task either every question can be checked or none.
    if sum_asked(next(iter(questions.values()))) is None or not keeps_experience(run):
        return None
    record = read_run(run)
    rows = np.flatnonzero(record.trajectories.reward > 0)
    rows = rows[np.unique(np.linspace(0, len(rows) - 1, min(len(rows), MOST)).astype(np.int64))] if len(rows) else rows
    valid = check_rows(record, rows.tolist(), questions)
    if not len(valid):
        return None
    entropy, question = record.trajectories.entropy[rows], record.trajectories.question[rows]
    order, third = np.argsort(entropy, kind="stable"), max(1, len(rows) // 3)
    return ValidTraces(
        trajectories=len(rows),
        valid=float(valid.mean()),
        auc=auc(entropy, valid, np.zeros(len(rows), dtype=np.int64)),
        auc_within=auc(entropy, valid, question),
        low_entropy=float(valid[order[:third]].mean()),
        high_entropy=float(valid[order[-third:]].mean()),
    )


def check_rows(record: RunRecord, rows: list[int], questions: Mapping[str, Question]) -> Bool[np.ndarray, " rows"]:
    """Whether each of these trajectories is valid; none where the run has no tokenizer."""
    ids = record.trajectories.trajectory_id[rows].tolist()
    texts = response_texts(record.run, record.config.backbone.source, ids)
    asked = [questions[record.question_ids[int(number)].as_py()] for number in record.trajectories.question[rows]]
    pairs = zip(asked, ids, strict=True) if texts else ()
    return np.array([bool(valid_trace(question, texts[each])) for question, each in pairs], dtype=bool)


def auc(
    entropy: Float64[np.ndarray, " rows"], valid: Bool[np.ndarray, " rows"], group: Int64[np.ndarray, " rows"]
) -> float | None:
    """Chance that of a valid and an invalid one of a group, drawn at random, the valid one has the lower entropy.

    Mann and Whitney's U, summed over groups, over the number of pairs; ties count half. None without a pair.
    """
    wins = pairs = 0.0
    for each in np.unique(group):
        here = group == each
        low, high = np.sort(entropy[here & valid]), entropy[here & ~valid]
        below, upto = np.searchsorted(low, high, side="left"), np.searchsorted(low, high, side="right")
        wins += float((below + upto).sum()) / 2
        pairs += len(low) * len(high)
    return wins / pairs if pairs else None

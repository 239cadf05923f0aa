"""Whether the stored correct responses are right in every step, on tasks where a step can be checked exactly.

A right answer may be a lucky hit. Where entropy tells the two apart, replaying the trajectory of lowest entropy avoids
the hits: the area under the ROC curve says how well.
"""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
from jaxtyping import Bool, Float64

from exgrpo_cli.grading.valid_traces import valid_trace
from exgrpo_cli.replay_stats.record import LEDGER_FOLDER, QUESTIONS_FILE, RunRecord, read_run
from exgrpo_cli.replay_stats.responses import response_texts
from exgrpo_cli.runs.result import ValidTraces

MOST = 4000
"""Trajectories that are read; of more, so many spread over the run."""


def valid_traces(run: Path) -> ValidTraces | None:
    """Valid shares of what a run stored; None where the task cannot tell or the run stores nothing correct."""
    metadata = metadata_of(run / QUESTIONS_FILE)
    # Of one task either every question can be checked or none.
    if not metadata or valid_trace(next(iter(metadata.values())), "") is None or not (run / LEDGER_FOLDER).is_dir():
        return None
    record = read_run(run)
    rows = np.flatnonzero(record.trajectories.reward > 0)
    rows = rows[np.unique(np.linspace(0, len(rows) - 1, min(len(rows), MOST)).astype(np.int64))] if len(rows) else rows
    valid = check_rows(record, rows.tolist(), metadata)
    if not len(valid):
        return None
    entropy = record.trajectories.entropy[rows]
    order, third = np.argsort(entropy, kind="stable"), max(1, len(rows) // 3)
    return ValidTraces(
        trajectories=len(rows),
        valid=float(valid.mean()),
        auc=auc(entropy, valid),
        low_entropy=float(valid[order[:third]].mean()),
        high_entropy=float(valid[order[-third:]].mean()),
    )


def metadata_of(path: Path) -> dict[str, str]:
    """Metadata of the questions that have any, by id; none in files of older versions."""
    if "metadata" not in pq.read_schema(path).names:
        return {}
    table = pq.read_table(path, columns=["id", "metadata"])
    pairs = zip(table.column("id").to_pylist(), table.column("metadata").to_pylist(), strict=True)
    return {question: text for question, text in pairs if text is not None}


def check_rows(record: RunRecord, rows: list[int], metadata: Mapping[str, str]) -> Bool[np.ndarray, " rows"]:
    """Whether each of these trajectories is valid; none where the run has no tokenizer."""
    ids = record.trajectories.trajectory_id[rows].tolist()
    texts = response_texts(record.run, record.config.backbone.source, ids)
    questions = [record.question_ids[int(number)].as_py() for number in record.trajectories.question[rows]]
    pairs = zip(questions, ids, strict=True) if texts else ()
    return np.array([bool(valid_trace(metadata.get(question), texts[each])) for question, each in pairs], dtype=bool)


def auc(entropy: Float64[np.ndarray, " rows"], valid: Bool[np.ndarray, " rows"]) -> float | None:
    """Chance that of a valid and an invalid one, drawn at random, the valid one has the lower entropy; ties count half.

    Mann and Whitney's U over the number of pairs; None without both kinds.
    """
    low, high = np.sort(entropy[valid]), entropy[~valid]
    if not len(low) or not len(high):
        return None
    below, upto = np.searchsorted(low, high, side="left"), np.searchsorted(low, high, side="right")
    return float((below + upto).sum() / (2 * len(low) * len(high)))

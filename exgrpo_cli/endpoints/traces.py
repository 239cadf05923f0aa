"""Whether the stored correct responses are right in every step, on tasks where a step can be checked exactly.

A right answer may be a lucky hit. Where entropy tells the two apart, replaying the trajectory of lowest entropy avoids
the hits: the area under the ROC curve says how well.
"""

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
from jaxtyping import Bool, Float64

from exgrpo_cli.replay_stats.questions import question_texts
from exgrpo_cli.replay_stats.record import LEDGER_FOLDER, RunRecord, read_run
from exgrpo_cli.replay_stats.responses import response_texts
from exgrpo_cli.runs.result import ValidTraces

MOST = 4000
"""Trajectories that are read; of more, so many spread over the run."""
TraceCheck = Callable[[str, str], bool]
"""From a question's text and a correct response to it to whether every step holds."""
CHECKS: Mapping[str, TraceCheck] = {}
"""By training source."""


def valid_traces(run: Path, source: str) -> ValidTraces | None:
    """Valid shares of what a run stored; None where the task cannot tell or the run stores nothing correct."""
    check = CHECKS.get(source)
    if check is None or not (run / LEDGER_FOLDER).is_dir():
        return None
    record = read_run(run)
    rows = np.flatnonzero(record.trajectories.reward > 0)
    rows = rows[np.unique(np.linspace(0, len(rows) - 1, min(len(rows), MOST)).astype(np.int64))] if len(rows) else rows
    valid = check_rows(record, rows.tolist(), check)
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


def check_rows(record: RunRecord, rows: list[int], check: TraceCheck) -> Bool[np.ndarray, " rows"]:
    """Whether each of these trajectories is valid; none where the run has no tokenizer."""
    ids = record.trajectories.trajectory_id[rows].tolist()
    texts = response_texts(record.run, record.config.backbone.source, ids)
    names = [record.question_ids[int(number)].as_py() for number in record.trajectories.question[rows]]
    questions = question_texts(record.run, sorted(set(names)))
    return np.array(
        [check(questions[name].text, texts[each]) for name, each in zip(names, ids, strict=True)] if texts else [],
        dtype=bool,
    )


def auc(entropy: Float64[np.ndarray, " rows"], valid: Bool[np.ndarray, " rows"]) -> float | None:
    """Chance that of a valid and an invalid one, drawn at random, the valid one has the lower entropy; ties count half.

    Mann and Whitney's U over the number of pairs; None without both kinds.
    """
    low, high = np.sort(entropy[valid]), entropy[~valid]
    if not len(low) or not len(high):
        return None
    below, upto = np.searchsorted(low, high, side="left"), np.searchsorted(low, high, side="right")
    return float((below + upto).sum() / (2 * len(low) * len(high)))

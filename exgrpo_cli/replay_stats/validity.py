"""Do right answers come from right working? Valid traces among the stored trajectories, and whether entropy tells.

For runs on questions whose traces can be checked (`modular`). The paper judged this with a model; here it is exact.
Axis `trajectories`: those of the ledger whose question lets its traces be checked.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Bool, Float64, Int64

from exgrpo_cli.data.question_file.questions import read_questions
from exgrpo_cli.grading.valid_traces import valid_trace
from exgrpo_cli.replay_stats.record import QUESTIONS_FILE, RunRecord, read_run
from exgrpo_cli.replay_stats.responses import response_texts


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceValidity:
    """The stored successes of one run, each with its entropy at birth and whether its trace holds."""

    row: Int64[np.ndarray, " trajectories"]
    """Row in the run's trajectory columns."""
    entropy: Float64[np.ndarray, " trajectories"]
    """Mean token entropy under the policy that sampled it, in nats."""
    valid: Bool[np.ndarray, " trajectories"]

    @property
    def share(self) -> float:
        """Valid ones among all; the others hit the answer by luck. NaN without any."""
        return float(self.valid.mean()) if len(self.valid) else float("nan")

    @property
    def auc(self) -> float:
        """Probability that an invalid trajectory has a higher entropy than a valid one; NaN without either kind."""
        return higher_probability(self.entropy[~self.valid], self.entropy[self.valid])


def trace_validity(run: Path) -> TraceValidity:
    """The stored trajectories of a run folder whose traces can be checked: none on other questions.

    Raises InputError for a folder that is no run, has no ledger, or is damaged.
    """
    return validity_of(read_run(run))


def validity_of(record: RunRecord) -> TraceValidity:
    """The same of a run that is already read."""
    questions = read_questions(record.run / QUESTIONS_FILE).questions
    metadata = {question.id: question.metadata for question in questions if question.metadata is not None}
    asked = [str(each) for each in record.question_ids.to_pylist()]
    table = record.trajectories
    rows = [row for row, question in enumerate(table.question) if metadata.get(asked[question]) is not None]
    ids = table.trajectory_id[rows].tolist() if rows else []
    texts = response_texts(record.run, record.config.backbone.source, ids)
    checked = [
        (row, valid)
        for row, trajectory in zip(rows, ids, strict=True)
        if trajectory in texts
        and (valid := valid_trace(metadata[asked[table.question[row]]], texts[trajectory])) is not None
    ]
    kept = np.array([row for row, _ in checked], dtype=np.int64)
    return TraceValidity(
        row=kept, entropy=table.entropy[kept], valid=np.array([valid for _, valid in checked], dtype=bool)
    )


def higher_probability(first: Float64[np.ndarray, " first"], second: Float64[np.ndarray, " second"]) -> float:
    """P(a > b) + P(a = b) / 2 for a of `first` and b of `second`, the area under the ROC curve; NaN without either."""
    if not len(first) or not len(second):
        return float("nan")
    ordered = np.sort(second)
    below, not_above = (np.searchsorted(ordered, first, side=side) for side in ("left", "right"))
    return float((below + not_above).mean() / (2 * len(second)))

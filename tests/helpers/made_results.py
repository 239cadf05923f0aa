"""Results of runs that never were: what a study compares, made from the counts of correct answers."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from exgrpo_cli.runs.result import CurvePoint, RunResult, Totals

TOTALS = Totals(steps=3, updates=6, generated=1000, trained=2000, scored=1500, seconds=60.0, training_seconds=50.0)


def result_of(
    after: Sequence[int],
    *,
    before: Sequence[int] | None = None,
    samples: int = 4,
    seed: int = 0,
    curve: Sequence[tuple[int, float]] = ((0, 0.1), (1000, 0.2)),
    **totals: Any,
) -> RunResult:
    """A run whose held-out questions had so many of `samples` answers right after training; `curve` has tokens."""
    counts = np.array(after, dtype=np.int64)
    return RunResult(
        config_hash="0" * 16,
        method="exgrpo",
        regime="",
        seed=seed,
        budget_amount=0.0,
        finished="steps reached",
        samples=samples,
        before=counts * 0 if before is None else np.array(before, dtype=np.int64),
        after=counts,
        curve=tuple(
            CurvePoint(step=n, generated=g, trained=2 * g, pass_at_1=rate) for n, (g, rate) in enumerate(curve)
        ),
        area=None,
        newly_solved=None,
        collapsed=None,
        memorising=None,
        valid_traces=None,
        totals=replace(TOTALS, **totals),
    )

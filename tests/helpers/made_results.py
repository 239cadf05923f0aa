"""Results of runs that never were: what a study compares, made from the counts of correct answers."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from exgrpo_cli.runs.result import CurvePoint, RunResult, Totals, config_hash, write_result
from exgrpo_cli.studies import claims, planning

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


def write_claim_results(folder: Path, claim: str, *, method: str) -> Path:
    """Results of another machine for all runs of a claim: `method` has 6 of 8 answers right, others 2 of 8."""
    for planned in planning.plan_claims(claims.chosen_claims(claim), folder / "c").runs:
        right = 0.75 if planned.config.run.method == method else 0.25
        correct = np.random.default_rng(planned.seed).binomial(4, right, size=40)
        result = replace(
            result_of(correct, seed=planned.seed),
            config_hash=config_hash(planned.config),
            budget_amount=planned.config.run.budget_amount,
        )
        write_result(folder / f"{planned.arm.folder_name}-{planned.seed}.result.json", result)
    return folder

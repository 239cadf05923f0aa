"""From a run folder to its result: endpoints and totals, computed once when the run ends."""

from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np

from exgrpo_cli.config.settings import Config
from exgrpo_cli.endpoints.heldout import area, collapsed, curve_of, newly_solved, read_validations
from exgrpo_cli.endpoints.memorising import memorising
from exgrpo_cli.endpoints.traces import valid_traces
from exgrpo_cli.runs.folder import PHASES, TRAINED, read_metrics
from exgrpo_cli.runs.result import RunResult, Totals, config_hash


def measure(run: Path, config: Config, summary: dict[str, Any], visited: Collection[str]) -> RunResult:
    """The result of a finished run; `summary` is its `summary.json`, `visited` the questions it rolled out."""
    heldout, asked = read_validations(run), read_validations(run, TRAINED)
    curve = curve_of(heldout)
    none = np.array([], dtype=np.int64)
    after = summary["heldout"]["after"] or {}
    return RunResult(
        config_hash=config_hash(config),
        method=config.run.method,
        regime=config.run.regime,
        seed=config.run.seed,
        budget_amount=config.run.budget_amount,
        finished=summary["finished"],
        samples=heldout[0].samples if heldout else 0,
        before=heldout[0].correct if heldout else none,
        after=heldout[-1].correct if heldout else none,
        curve=curve,
        area=area(curve),
        newly_solved=newly_solved(heldout),
        collapsed=collapsed(heldout),
        memorising=memorising(run, visited, asked, heldout),
        valid_traces=valid_traces(run),
        totals=totals(run, summary),
        after_valid=heldout[-1].valid if heldout else None,
        second_graders={name: found["pass_at_1"] for name, found in after.get("second_graders", {}).items()},
    )


def totals(run: Path, summary: dict[str, Any]) -> Totals:
    """What the run spent, by its summary and its journal."""
    metrics = read_metrics(run)
    return Totals(
        steps=summary["steps"],
        updates=summary["updates"]["applied"],
        generated=summary["tokens"]["generated"],
        trained=summary["tokens"]["trained"],
        scored=int(np.nansum(metrics.series("tokens/scored"))),
        seconds=summary["wall_seconds"]["total"],
        training_seconds=sum(summary["wall_seconds"].get(phase, 0.0) for phase in PHASES),
    )

"""A study's result: held-out pass@1 per arm with intervals over seeds, and each arm against the baseline.

Seeds are the unit: every interval is Student's t over seeds, so it speaks of training again, not of the held-out
questions. The difference to the baseline is paired by seed, whose question order both share.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from exgrpo_cli.ablation.study import Study, StudyRun
from exgrpo_cli.files import read_json_lines, write_json, write_text
from exgrpo_cli.plots.ablation import ArmCurve, ArmResult, arm_comparison, arm_curves
from exgrpo_cli.plots.style import save
from exgrpo_cli.statistics import Interval, t_interval, t_test

MEASURE = "held-out pass@1"
RATE = (0.0, 1.0)
"""Where a rate can be."""
CURVE_POINTS = 30
"""Points of a learning curve."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ArmReport:
    """One arm over its finished seeds."""

    name: str
    seeds: dict[int, float]
    """Held-out pass@1 after training, by seed."""
    before: float
    """Held-out pass@1 before training, mean over seeds."""
    score: Interval
    difference: Interval | None
    """To the baseline, paired by seed; None for the baseline itself and where no seed is common."""
    p_value: float | None
    """Two-sided t-test of the paired difference; None with fewer than two common seeds."""
    wall_seconds: float
    tokens_generated: float
    tokens_trained: float
    """Means over seeds: arms of equal steps differ in what they cost."""

    def to_json(self) -> dict[str, Any]:
        """The arm as `results.json` has it."""
        return {
            "mean": self.score.mean,
            "low": self.score.low,
            "high": self.score.high,
            "seeds": {str(seed): value for seed, value in self.seeds.items()},
            "before": self.before,
            "difference": asdict(self.difference) if self.difference else None,
            "p_value": self.p_value,
            "wall_seconds": self.wall_seconds,
            "tokens": {"generated": self.tokens_generated, "trained": self.tokens_trained},
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class StudyReport:
    """All arms with at least one finished seed, in the study's order."""

    name: str
    baseline: str
    arms: tuple[ArmReport, ...]

    def to_json(self) -> dict[str, Any]:
        """The study as `results.json` has it."""
        return {"arms": {arm.name: arm.to_json() for arm in self.arms}, "baseline": self.baseline}

    def table(self) -> Table:
        """The arms as a rich table."""
        table = Table(title=f"{self.name}: {MEASURE}, mean and 95 % interval over seeds")
        for name in ("arm", "seeds", "before", "after", "95 %", f"minus {self.baseline}", "p", "s/run"):
            table.add_column(name, justify="left" if name == "arm" else "right")
        for arm in self.arms:
            table.add_row(*cells(arm))
        return table

    def markdown(self) -> str:
        """The arms as a Markdown table."""
        header = ["arm", "seeds", "before", "after", "95 %", f"minus {self.baseline}", "p", "s/run"]
        rows = [header, ["---"] * len(header), *(cells(arm) for arm in self.arms)]
        return "\n".join("| " + " | ".join(row) + " |" for row in rows) + "\n"


def cells(arm: ArmReport) -> list[str]:
    """One arm as the cells of a table row."""
    several = len(arm.seeds) > 1
    difference = ""
    if arm.difference is not None:
        difference = f"{arm.difference.mean:+.3f}" + (f" {span(arm.difference)}" if several else "")
    return [
        arm.name,
        str(len(arm.seeds)),
        f"{arm.before:.3f}",
        f"{arm.score.mean:.3f}",
        span(arm.score) if several else "one seed",
        difference,
        "" if arm.p_value is None else f"{arm.p_value:.3f}",
        f"{arm.wall_seconds:.0f}",
    ]


def span(interval: Interval) -> str:
    """The interval in brackets, three decimals."""
    return f"[{interval.low:.3f}, {interval.high:.3f}]"


def report_study(study: Study) -> StudyReport:
    """Compare the finished runs and write `results.json`, `report.md` and the plots into the study's folder."""
    summaries = {
        (run.arm.name, run.seed): json.loads((run.folder / "summary.json").read_text())
        for run in study.runs
        if run.state == "finished"
    }
    baseline = after_by_seed(summaries, study.baseline)
    arms = tuple(
        report_arm(arm.name, summaries, baseline, is_baseline=arm.name == study.baseline)
        for arm in study.arms
        if after_by_seed(summaries, arm.name)
    )
    report = StudyReport(name=study.name, baseline=study.baseline, arms=arms)
    write_json(study.folder / "results.json", report.to_json())
    write_text(study.folder / "report.md", f"# {study.name}: {MEASURE}\n\n{report.markdown()}")
    plot_study(study, report)
    return report


def after_by_seed(summaries: dict[tuple[str, int], Any], arm: str) -> dict[int, float]:
    """Held-out pass@1 after training of one arm, by seed; `summaries` are summary.json files by (arm, seed)."""
    return {
        seed: figures["heldout"]["after"]["pass_at_1"] for (name, seed), figures in summaries.items() if name == arm
    }


def report_arm(
    name: str, summaries: dict[tuple[str, int], Any], baseline: dict[int, float], *, is_baseline: bool
) -> ArmReport:
    """One arm's figures over its seeds, and its paired difference from `baseline` (held-out pass@1 by seed)."""
    own = [figures for (arm, _), figures in summaries.items() if arm == name]
    after = after_by_seed(summaries, name)
    common = [] if is_baseline else sorted(after.keys() & baseline.keys())
    differences = [after[seed] - baseline[seed] for seed in common]
    return ArmReport(
        name=name,
        seeds=dict(sorted(after.items())),
        before=float(np.mean([figures["heldout"]["before"]["pass_at_1"] for figures in own])),
        score=t_interval(list(after.values()), bounds=RATE),
        difference=t_interval(differences, bounds=(-1.0, 1.0)) if differences else None,
        p_value=t_test(differences),
        wall_seconds=float(np.mean([figures["wall_seconds"]["total"] for figures in own])),
        tokens_generated=float(np.mean([figures["tokens"]["generated"] for figures in own])),
        tokens_trained=float(np.mean([figures["tokens"]["trained"] for figures in own])),
    )


def plot_study(study: Study, report: StudyReport) -> list[Path]:
    """`ablation` (arms with intervals) and `curves` (batch pass@1 by step), as PNG and SVG."""
    results = [
        ArmResult(
            name=arm.name,
            mean=arm.score.mean,
            low=arm.score.low,
            high=arm.score.high,
            seeds=list(arm.seeds.values()),
        )
        for arm in report.arms
    ]
    curves = [
        arm_curve(arm.name, [run for run in study.runs if run.arm.name == arm.name and run.seed in arm.seeds])
        for arm in report.arms
    ]
    return [
        *save(arm_comparison(results, baseline=study.baseline, measure=MEASURE), study.folder, "ablation"),
        *save(arm_curves(curves, baseline=study.baseline, measure="batch pass@1"), study.folder, "curves"),
    ]


def arm_curve(name: str, runs: Sequence[StudyRun]) -> ArmCurve:
    """Batch pass@1 by step, mean over seeds with the t interval cut to 0..1.

    Each seed is averaged over CURVE_POINTS stretches of steps first: single batches are noisier than seeds differ.
    """
    by_stretch: dict[int, list[float]] = {}
    for run in runs:
        lines = [line for line in read_json_lines(run.folder / "metrics.jsonl") if "batch/pass_at_1" in line]
        width = max(1, run.config.run.steps // CURVE_POINTS)
        own: dict[int, list[float]] = {}
        for line in lines:
            own.setdefault((line["step"] - 1) // width * width + (width + 1) // 2, []).append(line["batch/pass_at_1"])
        for step, values in own.items():
            by_stretch.setdefault(step, []).append(float(np.mean(values)))
    steps = sorted(by_stretch)
    intervals = [t_interval(by_stretch[step], bounds=RATE) for step in steps]
    return ArmCurve(
        name=name,
        steps=steps,
        mean=[interval.mean for interval in intervals],
        low=[interval.low for interval in intervals],
        high=[interval.high for interval in intervals],
    )

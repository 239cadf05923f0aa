"""A study's result: held-out pass@1 per arm with intervals over seeds, and each arm against the baseline.

Seeds are the unit: every interval is Student's t over seeds, so it speaks of training again, not of the held-out
questions. The difference to the baseline is paired by seed, whose question order both share.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.table import Table

from exgrpo_cli.ablation.study import Study, StudyRun
from exgrpo_cli.files import write_json, write_text
from exgrpo_cli.plots.ablation import (
    ArmCurve,
    ArmDifference,
    ArmResult,
    arm_comparison,
    arm_curves,
    arm_curves_by_tokens,
    paired_differences,
)
from exgrpo_cli.plots.learning import generated_by, heldout_scores
from exgrpo_cli.plots.style import save
from exgrpo_cli.runs.metrics import read_metrics
from exgrpo_cli.statistics import Interval, t_interval, t_test

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MEASURE = "held-out pass@1"
RATE = (0.0, 1.0)
"""Where a rate can be."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Coverage:
    """Held-out pass@k of one arm after training, at one k above 1, over its finished seeds."""

    seeds: dict[int, float]
    """Value by seed."""
    score: Interval
    difference: Interval | None
    """To the baseline, paired by seed; None for the baseline itself and where no seed is common."""
    p_value: float | None
    """Two-sided t-test of the paired difference; None with fewer than two common seeds."""

    def to_json(self) -> dict[str, Any]:
        """The figure as `results.json` has it."""
        return {
            "mean": self.score.mean,
            "low": self.score.low,
            "high": self.score.high,
            "seeds": {str(seed): value for seed, value in self.seeds.items()},
            "difference": asdict(self.difference) if self.difference else None,
            "p_value": self.p_value,
        }


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
    pass_at_k: dict[int, Coverage]
    """By k, from 2 up; empty where validation took one sample a question."""
    wall_seconds: float
    tokens_generated: float
    tokens_trained: float
    steps: float
    updates: float
    """Means over seeds: arms that are equal in one of these differ in the others. Updates are the applied ones."""

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
            "pass_at_k": {str(k): found.to_json() for k, found in self.pass_at_k.items()},
            "wall_seconds": self.wall_seconds,
            "tokens": {"generated": self.tokens_generated, "trained": self.tokens_trained},
            "steps": self.steps,
            "updates": self.updates,
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
        for name in self.heads():
            table.add_column(name, justify="left" if name == "arm" else "right")
        for arm in self.arms:
            table.add_row(*cells(arm))
        return table

    def heads(self) -> list[str]:
        """Heads of the columns of `cells`: pass@k at the largest k stands last, where there is one above 1."""
        minus = f"minus {self.baseline}"
        largest = {max(arm.pass_at_k) for arm in self.arms if arm.pass_at_k}
        coverage = [text for k in largest for text in (f"pass@{k}", minus, "p")]
        return ["arm", "seeds", "before", "after", "95 %", minus, "p", "s/run", *coverage]

    def markdown(self) -> str:
        """The arms as a Markdown table."""
        rows = [self.heads(), ["---"] * len(self.heads()), *(cells(arm) for arm in self.arms)]
        return markdown_table(rows)

    def spending(self) -> str:
        """What the arms spent, means over seeds, as a Markdown table."""
        header = ["arm", "steps", "tokens generated", "tokens trained", "updates", "seconds"]
        rows = []
        for arm in self.arms:
            totals = (arm.steps, arm.tokens_generated, arm.tokens_trained, arm.updates, arm.wall_seconds)
            rows.append([arm.name, *(f"{total:,.0f}" for total in totals)])
        return markdown_table([header, ["---"] * len(header), *rows])


def markdown_table(rows: Sequence[Sequence[str]]) -> str:
    """Rows of cells, header and rule included, as Markdown."""
    return "\n".join("| " + " | ".join(row) + " |" for row in rows) + "\n"


def cells(arm: ArmReport) -> list[str]:
    """One arm as the cells of a table row."""
    several = len(arm.seeds) > 1
    coverage = arm.pass_at_k[max(arm.pass_at_k)] if arm.pass_at_k else None
    return [
        arm.name,
        str(len(arm.seeds)),
        f"{arm.before:.3f}",
        f"{arm.score.mean:.3f}",
        span(arm.score) if several else "one seed",
        *_difference(arm.difference, arm.p_value, several=several),
        f"{arm.wall_seconds:.0f}",
        *([] if coverage is None else [f"{coverage.score.mean:.3f}"]),
        *([] if coverage is None else _difference(coverage.difference, coverage.p_value, several=several)),
    ]


def _difference(difference: Interval | None, p_value: float | None, *, several: bool) -> list[str]:
    if difference is None:
        return ["", ""]
    interval = f" {span(difference)}" if several else ""
    return [f"{difference.mean:+.3f}{interval}", "" if p_value is None else f"{p_value:.3f}"]


def span(interval: Interval) -> str:
    """The interval in brackets, three decimals."""
    return f"[{interval.low:.3f}, {interval.high:.3f}]"


def report_study(study: Study) -> StudyReport:
    """Compare the finished runs and write `results.json`, `report.md` and the plots into the study's folder."""
    report = compare_runs(study)
    write_json(study.folder / "results.json", report.to_json())
    text = f"# {study.name}: {MEASURE}\n\n{report.markdown()}\nEqual in {study.equal}.\n\n{report.spending()}"
    write_text(study.folder / "report.md", text)
    for name, figure in study_figures(study, report).items():
        save(figure, study.folder, name)
    return report


def compare_runs(study: Study) -> StudyReport:
    """Compare the finished runs of a study; nothing is written."""
    summaries = {
        (run.arm.name, run.seed): json.loads((run.folder / "summary.json").read_text())
        for run in study.runs
        if run.state == "finished"
    }
    arms = tuple(
        report_arm(arm.name, summaries, study.baseline) for arm in study.arms if after_by_seed(summaries, arm.name)
    )
    return StudyReport(name=study.name, baseline=study.baseline, arms=arms)


def after_by_seed(summaries: dict[tuple[str, int], Any], arm: str) -> dict[int, float]:
    """Held-out pass@1 after training of one arm, by seed; `summaries` are summary.json files by (arm, seed)."""
    return {
        seed: figures["heldout"]["after"]["pass_at_1"] for (name, seed), figures in summaries.items() if name == arm
    }


def report_arm(name: str, summaries: dict[tuple[str, int], Any], baseline_arm: str) -> ArmReport:
    """One arm's figures over its seeds, and its paired difference from the arm `baseline_arm`."""
    baseline = after_by_seed(summaries, baseline_arm)
    own = [figures for (arm, _), figures in summaries.items() if arm == name]
    after = after_by_seed(summaries, name)
    common = [] if name == baseline_arm else sorted(after.keys() & baseline.keys())
    differences = [after[seed] - baseline[seed] for seed in common]
    return ArmReport(
        name=name,
        seeds=dict(sorted(after.items())),
        before=float(np.mean([figures["heldout"]["before"]["pass_at_1"] for figures in own])),
        score=t_interval(list(after.values()), bounds=RATE),
        difference=t_interval(differences, bounds=(-1.0, 1.0)) if differences else None,
        p_value=t_test(differences),
        pass_at_k=coverage_of(name, summaries, baseline_arm),
        wall_seconds=float(np.mean([figures["wall_seconds"]["total"] for figures in own])),
        tokens_generated=float(np.mean([figures["tokens"]["generated"] for figures in own])),
        tokens_trained=float(np.mean([figures["tokens"]["trained"] for figures in own])),
        steps=float(np.mean([figures["steps"] for figures in own])),
        updates=float(np.mean([figures["updates"]["applied"] for figures in own])),
    )


def coverage_of(name: str, summaries: dict[tuple[str, int], Any], baseline_arm: str) -> dict[int, Coverage]:
    """Held-out pass@k after training at each k above 1 that every finished run of the study has."""
    curves = {key: figures["heldout"]["after"].get("pass_at_k", {}) for key, figures in summaries.items()}
    found: dict[int, Coverage] = {}
    for k in sorted(int(k) for k in set.intersection(*map(set, curves.values())) - {"1"}):
        values = {key: curve[str(k)]["value"] for key, curve in curves.items()}
        own = {seed: value for (arm, seed), value in sorted(values.items()) if arm == name}
        pairs = (
            []
            if name == baseline_arm
            else [(own[s], values[baseline_arm, s]) for s in own if (baseline_arm, s) in values]
        )
        differences = [mine - other for mine, other in pairs]
        found[k] = Coverage(
            seeds=own,
            score=t_interval(list(own.values()), bounds=RATE),
            difference=t_interval(differences, bounds=(-1.0, 1.0)) if differences else None,
            p_value=t_test(differences),
        )
    return found


def study_figures(study: Study, report: StudyReport) -> "dict[str, Figure]":
    """Arms with intervals, paired differences, and held-out curves by steps and by tokens, by name."""
    baseline = next((arm.seeds for arm in report.arms if arm.name == study.baseline), {})
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
    differences = [
        ArmDifference(
            name=arm.name,
            mean=arm.difference.mean,
            low=arm.difference.low,
            high=arm.difference.high,
            seeds=[arm.seeds[seed] - baseline[seed] for seed in arm.seeds if seed in baseline],
        )
        for arm in report.arms
        if arm.difference is not None
    ]
    curves = [
        arm_curve(arm.name, [run for run in study.runs if run.arm.name == arm.name and run.seed in arm.seeds])
        for arm in report.arms
    ]
    return {
        "ablation": arm_comparison(results, baseline=study.baseline, measure=MEASURE),
        "differences": paired_differences(differences, baseline=study.baseline, measure=MEASURE),
        "curves": arm_curves(curves, baseline=study.baseline, measure=MEASURE),
        "curves-tokens": arm_curves_by_tokens(curves, baseline=study.baseline, measure=MEASURE),
    }


def arm_curve(name: str, runs: Sequence[StudyRun]) -> ArmCurve:
    """Held-out pass@1 by step, mean over the seeds that were scored there, with the t interval cut to 0..1."""
    by_step: dict[int, list[float]] = {}
    tokens: dict[int, list[float]] = {}
    for run in runs:
        metrics = read_metrics(run.folder)
        scores = next(iter(heldout_scores(run.folder, metrics).values()), [])
        for score, generated in zip(scores, generated_by(metrics, [score.step for score in scores]), strict=True):
            by_step.setdefault(score.step, []).append(score.value)
            tokens.setdefault(score.step, []).append(generated)
    steps = sorted(by_step)
    intervals = [t_interval(by_step[step], bounds=RATE) for step in steps]
    return ArmCurve(
        name=name,
        steps=steps,
        tokens=[float(np.mean(tokens[step])) for step in steps],
        mean=[interval.mean for interval in intervals],
        low=[interval.low for interval in intervals],
        high=[interval.high for interval in intervals],
    )

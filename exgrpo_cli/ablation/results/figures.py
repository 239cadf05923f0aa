"""A study's figures: arms with intervals, paired differences, held-out curves, and memorised against learnt."""

from typing import TYPE_CHECKING

import numpy as np

from exgrpo_cli.ablation.results.endpoints import Results
from exgrpo_cli.ablation.results.report import ArmReport, StudyReport
from exgrpo_cli.ablation.results.tables import TITLE
from exgrpo_cli.ablation.study import Study
from exgrpo_cli.plots.ablation import (
    ArmCurve,
    ArmScore,
    arm_comparison,
    arm_curves,
    arm_curves_by_tokens,
    paired_differences,
)
from exgrpo_cli.plots.memorising import memorising_figure
from exgrpo_cli.statistics import t_interval

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def study_figures(study: Study, report: StudyReport) -> "dict[str, Figure]":
    """The figures by name; all of held-out questions, since arms do not share the questions that they train on."""
    results = study.results()
    baseline = ", ".join(report.baselines)
    curves = [arm_curve(arm.name, results[arm.name]) for arm in report.arms]
    figures = {
        "ablation": arm_comparison([_score(arm) for arm in report.arms], baseline=baseline, measure=TITLE),
        "differences": paired_differences(_differences(report), baseline=baseline, measure=TITLE),
        "curves": arm_curves(curves, baseline=baseline, measure=TITLE),
        "curves-tokens": arm_curves_by_tokens(curves, baseline=baseline, measure=TITLE),
    }
    memorised = {
        arm.name: [found for each in results[arm.name].values() if (found := each.memorising)] for arm in report.arms
    }
    drawn = memorising_figure(memorised)
    return figures if drawn is None else {**figures, "memorising": drawn}


def _score(arm: ArmReport) -> ArmScore:
    score = arm.main.score
    return ArmScore(name=arm.name, mean=score.mean, low=score.low, high=score.high, seeds=list(arm.main.seeds.values()))


def _differences(report: StudyReport) -> list[ArmScore]:
    by_name = {arm.name: arm.main.seeds for arm in report.arms}
    return [
        ArmScore(
            name=arm.name,
            mean=found.mean,
            low=found.low,
            high=found.high,
            seeds=[
                value - by_name[arm.baseline][seed]
                for seed, value in arm.main.seeds.items()
                if seed in by_name.get(arm.baseline, {})
            ],
        )
        for arm in report.arms
        if (found := arm.main.difference) is not None
    ]


def arm_curve(name: str, results: Results) -> ArmCurve:
    """Held-out pass@1 by step, mean over the seeds that were scored there, with the t interval cut to 0..1."""
    by_step: dict[int, list[tuple[float, float]]] = {}
    for result in results.values():
        for point in result.curve:
            by_step.setdefault(point.step, []).append((point.pass_at_1, point.generated))
    steps = sorted(by_step)
    intervals = [t_interval([score for score, _ in by_step[step]], bounds=(0.0, 1.0)) for step in steps]
    return ArmCurve(
        name=name,
        steps=steps,
        tokens=[float(np.mean([generated for _, generated in by_step[step]])) for step in steps],
        mean=[interval.mean for interval in intervals],
        low=[interval.low for interval in intervals],
        high=[interval.high for interval in intervals],
    )

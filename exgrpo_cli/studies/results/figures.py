"""A study's figures: arms with intervals, paired differences, held-out curves, memorised against learnt, claims."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from exgrpo_cli.base.statistics import t_interval
from exgrpo_cli.runs.result import CurvePoint
from exgrpo_cli.show.figures.comparisons import (
    ArmCurve,
    ArmScore,
    ClaimEffect,
    arm_comparison,
    arm_curves,
    arm_curves_by_tokens,
    by_regime,
    claims_figure,
    paired_differences,
)
from exgrpo_cli.show.figures.training import memorising_figure
from exgrpo_cli.studies.claims.outcome import claim_outcomes, described
from exgrpo_cli.studies.results.endpoints import Results
from exgrpo_cli.studies.results.inference import Verdict
from exgrpo_cli.studies.results.report import ArmReport, StudyReport
from exgrpo_cli.studies.results.tables import TITLE
from exgrpo_cli.studies.study import Study

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def study_figures(study: Study, report: StudyReport) -> "dict[str, Figure]":
    """The figures by name; all of held-out questions, since arms do not share the questions that they train on."""
    results = study.results()
    baselines = report.baselines
    regimes = _regimes(study)
    curves = [arm_curve(arm.name, results[arm.name], regimes[arm.name]) for arm in report.arms]
    scores = [_score(arm, regimes[arm.name]) for arm in report.arms]
    figures = {
        "ablation": arm_comparison(scores, baselines=baselines, measure=TITLE),
        "differences": paired_differences(_differences(report, regimes), baselines=baselines, measure=TITLE),
        "curves": arm_curves(curves, baselines=baselines, measure=TITLE),
        "curves-tokens": arm_curves_by_tokens(curves, baselines=baselines, measure=TITLE),
    }
    memorised = {
        arm.name: [found for each in results[arm.name].values() if (found := each.memorising)]
        for arms in by_regime(scores).values()
        for arm in arms
    }
    optional = {"memorising": memorising_figure(memorised), "claims": claims_figure(_claim_effects(study))}
    return figures | {name: drawn for name, drawn in optional.items() if drawn is not None}


def _regimes(study: Study) -> dict[str, str]:
    """The regime of each arm by its name; empty where all arms are of one."""
    several = len({arm.regime for arm in study.arms}) > 1
    return {arm.name: (arm.regime or "no regime") if several else "" for arm in study.arms}


def _claim_effects(study: Study) -> list[ClaimEffect]:
    """The contrasts of each claim that has been run."""
    return [
        ClaimEffect(
            title=found.claim.title if contrast is found.claim.contrasts[0] else "",
            contrast=", ".join(filter(None, (described(contrast), found.claim.regime, f"{found.seeds} seeds"))),
            mean=effect.mean,
            low=effect.low,
            high=effect.high,
            threshold=contrast.threshold,
            verdict=found.verdict.value,
        )
        for found in claim_outcomes(study)
        if found.verdict is not Verdict.NOT_RUN
        for contrast, effect in zip(found.claim.contrasts, found.effects, strict=True)
        if effect is not None
    ]


def _score(arm: ArmReport, regime: str) -> ArmScore:
    score, seeds = arm.main.score, list(arm.main.seeds.values())
    return ArmScore(name=arm.name, regime=regime, mean=score.mean, low=score.low, high=score.high, seeds=seeds)


def _differences(report: StudyReport, regimes: Mapping[str, str]) -> list[ArmScore]:
    by_name = {arm.name: arm.main.seeds for arm in report.arms}
    return [
        ArmScore(
            name=arm.name,
            regime=regimes[arm.name],
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


def arm_curve(name: str, results: Results, regime: str = "") -> ArmCurve:
    """Held-out pass@1 by step, mean over seeds, with the t interval cut to 0..1.

    At the steps where all seeds were scored, and at the ends of the runs taken together: a budget of tokens ends each
    at a step of its own.
    """
    curves = [result.curve for result in results.values() if result.curve]
    by_step: dict[int, list[CurvePoint]] = {}
    for point in (point for curve in curves for point in curve[:-1]):
        by_step.setdefault(point.step, []).append(point)
    columns = [by_step[step] for step in sorted(by_step) if len(by_step[step]) == len(curves)]
    columns += [[curve[-1] for curve in curves]] if curves else []
    intervals = [t_interval([point.pass_at_1 for point in column], bounds=(0.0, 1.0)) for column in columns]
    return ArmCurve(
        name=name,
        regime=regime,
        steps=[round(float(np.mean([point.step for point in column]))) for column in columns],
        tokens=[float(np.mean([point.generated for point in column])) for column in columns],
        mean=[interval.mean for interval in intervals],
        low=[interval.low for interval in intervals],
        high=[interval.high for interval in intervals],
    )

"""A study's report as tables, figures and files: `results.json`, `report.md` and the figures."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.table import Column, Table

from exgrpo_cli.base.files import write_json, write_text
from exgrpo_cli.base.statistics import Interval, t_interval
from exgrpo_cli.runs.result import CurvePoint
from exgrpo_cli.show.figures.comparisons import (
    ArmCurve,
    ArmScore,
    ClaimEffect,
    arm_comparison,
    arm_curves,
    claims_figure,
)
from exgrpo_cli.show.figures.run import memorising_figure
from exgrpo_cli.show.figures.style import save
from exgrpo_cli.studies.claims import Outcome, claim_outcomes
from exgrpo_cli.studies.endpoints import AT_EQUAL, ENDPOINTS, Verdict
from exgrpo_cli.studies.report import MAIN, ArmReport, Compared, StudyReport, compare_runs
from exgrpo_cli.studies.study import Results, Study

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TITLE = "held-out pass@1"
OTHERS = {
    **{name: each.title for name, each in ENDPOINTS.items() if name not in (MAIN, "pass_at_n", "beyond_pass_at_1")},
    **AT_EQUAL,
}
"""Endpoints of the second table with their titles."""
SPENT = {
    "steps": "steps",
    **{f"tokens {kind}": kind for kind in ("generated", "trained", "scored")},
    **{name: name for name in ("updates", "seconds")},
}
"""Columns of the third table, each a total."""
Rows = list[list[str]]
"""Cells; the first row is the header."""


def report_study(study: Study) -> StudyReport:
    """Compare the finished runs and write the comparison into the study's folder."""
    study.keep_results()
    report = compare_runs(study)
    write_json(study.folder / "results.json", study_json(study, report))
    parts = [
        *([f"# {study.name}: claims", markdown(claim_rows(claim_outcomes(study)))] if study.claims else []),
        f"# {study.name}: {TITLE}",
        *(f"**{warning}**" for warning in report.warnings),
        markdown(score_rows(report)),
        markdown(endpoint_rows(report)),
        "Budgets are those that the claims state." if study.claims else f"Equal in {study.equal}.",
        markdown(spending_rows(report)),
    ]
    write_text(study.folder / "report.md", "\n\n".join(part.strip() for part in parts) + "\n")
    for name, figure in study_figures(study, report).items():
        save(figure, study.folder, name)
    return report


def study_json(study: Study, report: StudyReport) -> dict[str, Any]:
    """The comparison as `results.json` has it and `--json` prints it."""
    outcomes = {found.claim.name: found.to_json() for found in claim_outcomes(study)}
    return {**report.to_json(), **({"claims": outcomes} if outcomes else {})}


def report_tables(study: Study, report: StudyReport) -> list[Table]:
    """The tables of a terminal: scores, other endpoints, and verdicts where the study is of claims."""
    tables = [
        rich_table(score_rows(report), f"{report.name}: {TITLE}"),
        rich_table(endpoint_rows(report), "other endpoints, difference from the baseline in brackets"),
    ]
    return [*tables, *([rich_table(claim_rows(claim_outcomes(study)), "claims")] if study.claims else [])]


def score_rows(report: StudyReport) -> Rows:
    """Held-out pass@1 of every arm and its difference from the baseline; pass@k at the largest k stands last."""
    against = f"minus {report.baselines[0]}" if len(report.baselines) == 1 else "minus its baseline"
    header = ["arm", "seeds", "before", "after", "95 %", against, "p (Holm)", "s/run"]
    rows = []
    for arm in report.arms:
        after, *compared = _cells(arm.main)
        within = span(arm.main) if len(arm.seeds) > 1 else "one seed"
        seconds = f"{arm.totals['seconds']:.0f}"
        rows.append([arm.name, str(len(arm.seeds)), f"{arm.before:.3f}", after, within, *compared, seconds])
    if ks := [arm.coverage[0] for arm in report.arms if arm.coverage]:
        header += [ks[0], against, "p (Holm)"]
        for row, arm in zip(rows, report.arms, strict=True):
            row += _cells(arm.coverage[1] if arm.coverage else None)
    return [header, *rows]


def endpoint_rows(report: StudyReport) -> Rows:
    """The other endpoints that the runs tell, one column each, with the difference from the baseline."""
    names = [name for name in OTHERS if any(name in arm.endpoints for arm in report.arms)]
    rows = [["arm", *(OTHERS[name] for name in names)]]
    for arm in report.arms:
        cells = [_cells(arm.endpoints.get(name)) for name in names]
        rows.append([arm.name, *(f"{mean} ({by})" if by else mean for mean, by, _ in cells)])
    return rows


def spending_rows(report: StudyReport) -> Rows:
    """Means over seeds of what the arms spent, and the steps at which their fresh questions leave the baseline's."""
    rows = [["arm", *SPENT]]
    rows += [[arm.name, *(f"{arm.totals[name]:,.0f}" for name in SPENT.values())] for arm in report.arms]
    if any(arm.divergence for arm in report.arms):
        cells = ["fresh questions part at step", *(_divergence(arm.divergence) for arm in report.arms)]
        rows = [[*row, cell] for row, cell in zip(rows, cells, strict=True)]
    return rows


def claim_rows(outcomes: Sequence[Outcome]) -> Rows:
    """The table of claims: the effect is that of the contrast furthest from holding."""
    rows = [["claim", "regime", "contrast", "effect", "95 %", "verdict", "seeds", "tokens", "time"]]
    for found in outcomes:
        contrast, effect = found.weakest
        rows.append(
            [
                found.claim.about.title,
                found.claim.terms.regime,
                str(contrast),
                f"{effect.mean:+.3f}" if effect else "",
                span(effect) if effect and effect.seeds > 1 else "",
                found.verdict.value,
                f"{found.seeds} of {len(found.claim.seeds)}",
                f"{found.generated / 1e6:.1f} M",
                duration(found.seconds),
            ]
        )
    return rows


def _cells(found: Compared | None) -> list[str]:
    """Mean, difference from the baseline with its interval, and p-value; empty where there is none."""
    if found is None:
        return ["", "", ""]
    effect, mean = found.difference, f"{found.mean:.3f}"
    if effect is None:
        return [mean, "", ""]
    difference = f"{effect.mean:+.3f}" + (f" {span(effect)}" if effect.seeds > 1 else "")
    return [mean, difference, "" if found.p_holm is None else f"{found.p_holm:.3f}"]


def _divergence(by_seed: Mapping[int, int | None]) -> str:
    """First and last of the seeds' steps, and `never` where some do not part."""
    steps = sorted(step for step in by_seed.values() if step is not None)
    parts = [str(steps[0]) if steps[0] == steps[-1] else f"{steps[0]} to {steps[-1]}"] if steps else []
    return ", ".join([*parts, *(["never"] if None in by_seed.values() else [])])


def span(interval: Interval) -> str:
    """The interval in brackets, three decimals."""
    return f"[{interval.low:.3f}, {interval.high:.3f}]"


def duration(seconds: float) -> str:
    """Hours and minutes for people: 45 s, 12 min, 3 h 05 min."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def rich_table(rows: Rows, title: str) -> Table:
    """Rows as a table of a terminal."""
    columns = [Column(name, justify="right" if place else "left") for place, name in enumerate(rows[0])]
    table = Table(*columns, title=title)
    for row in rows[1:]:
        table.add_row(*row)
    return table


def markdown(rows: Rows) -> str:
    """Rows as a Markdown table."""
    ruled = [rows[0], ["---"] * len(rows[0]), *rows[1:]]
    return "\n".join("| " + " | ".join(row) + " |" for row in ruled) + "\n"


def study_figures(study: Study, report: StudyReport) -> "dict[str, Figure]":
    """The figures by name; all of held-out questions, since arms do not share the questions that they train on."""
    results, several = study.results(), len({arm.regime for arm in study.arms}) > 1
    regimes = {arm.name: (arm.regime or "no regime") if several else "" for arm in study.arms}
    by_seed = {arm.name: arm.main.seeds for arm in report.arms}

    def score(arm: ArmReport, found: Interval, seeds: Sequence[float]) -> ArmScore:
        name, regime = arm.name, regimes[arm.name]
        return ArmScore(name=name, regime=regime, mean=found.mean, low=found.low, high=found.high, seeds=seeds)

    def differences_of(arm: ArmReport) -> list[float]:
        other = by_seed.get(arm.baseline, {})
        return [value - other[seed] for seed, value in by_seed[arm.name].items() if seed in other]

    scores = [score(arm, arm.main, list(by_seed[arm.name].values())) for arm in report.arms]
    differences = [score(arm, effect, differences_of(arm)) for arm in report.arms if (effect := arm.main.difference)]
    curves = [arm_curve(arm.name, results[arm.name], regimes[arm.name]) for arm in report.arms]
    memorised = {name: [found for each in results[name].values() if (found := each.memorising)] for name in by_seed}
    said: dict[str, Any] = {"baselines": report.baselines, "measure": TITLE}
    figures = {
        "ablation": arm_comparison(scores, **said),
        "differences": arm_comparison(differences, **said, differences=True),
        "curves": arm_curves(curves, **said),
        "curves-tokens": arm_curves(curves, **said, tokens=True),
        "memorising": memorising_figure(memorised),
        "claims": claims_figure(_claim_effects(study)),
    }
    return {name: drawn for name, drawn in figures.items() if drawn is not None}


def _claim_effects(study: Study) -> list[ClaimEffect]:
    """The contrasts of each claim that has been run."""
    return [
        ClaimEffect(
            title=found.claim.about.title if contrast is found.claim.contrasts[0] else "",
            contrast=", ".join(filter(None, (str(contrast), found.claim.terms.regime, f"{found.seeds} seeds"))),
            mean=effect.mean,
            low=effect.low,
            high=effect.high,
            threshold=contrast.threshold,
            verdict=found.verdict.value,
        )
        for found in claim_outcomes(study)
        if found.verdict is not Verdict.NOT_RUN
        for contrast, effect in found.effects
        if effect is not None
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

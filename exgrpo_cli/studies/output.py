"""A study's report as tables, figures and files: `results.json`, `report.md` and the figures."""

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.table import Column, Table

from exgrpo_cli.base import files, output, statistics
from exgrpo_cli.runs.result import CurvePoint, verdict_of
from exgrpo_cli.show.figures.comparisons import ArmScore, arm_comparison, arm_curves, claims_figure
from exgrpo_cli.show.figures.run import memorising_figure
from exgrpo_cli.show.figures.style import WORDS
from exgrpo_cli.show.figures.written import save
from exgrpo_cli.show.tables import TABLES, declared
from exgrpo_cli.studies.endpoints import AT_EQUAL, endpoint_named
from exgrpo_cli.studies.report import MAIN, Numbers, compare_runs
from exgrpo_cli.studies.study import Results, Study

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TITLE = "held-out pass@1"
ELSEWHERE = (MAIN, "pass_at_n", "beyond_pass_at_1")
"""Endpoints that the first table has, or that follow from it; all others are in the second."""
SPENT = declared("spent", {})
"""Columns of the third table."""
READ_CLAIMS: str = WORDS["sections"]["Claims"]
"""Words beside the table of claims."""
Rows = list[list[str]]
"""Cells; the first row is the header."""


def report_study(study: Study) -> Numbers:
    """Compare the finished runs and write the comparison into the study's folder."""
    study.keep_results()
    report = compare_runs(study)
    files.write_json(study.folder / "results.json", report)
    name = output.in_markdown(study.name)
    checked = [(run, told) for run in study.runs if (told := verdict_of(run.folder))]
    parts = [
        *([f"# {name}: claims", markdown(claim_rows(report["claims"].values())), READ_CLAIMS] if study.claims else []),
        f"# {name}: {TITLE}",
        *(f"**{output.in_markdown(warning)}**" for warning in report["warnings"]),
        markdown(score_rows(report)),
        markdown(endpoint_rows(report)),
        f"Spent: {budgets(study)}.",
        markdown(spending_rows(report)),
        *(f"`exgrpo verify`, {run.arm.name}, seed {run.seed}: {told}." for run, told in checked),
    ]
    files.write_text(study.folder / "report.md", "\n\n".join(part.strip() for part in parts) + "\n")
    for name, figure in study_figures(study, report).items():
        save(figure, study.folder, name)
    return report


def budgets(study: Study) -> str:
    """The budget of each run, for people."""
    if study.claims:
        return "budgets are those that the claims state"
    return f"a run of an arm ends once it has {TABLES['spends'][study.equal]} as that of the baseline"


def report_tables(study: Study, report: Numbers) -> list[Table]:
    """The tables of a terminal: scores, and verdicts where the study is of claims."""
    # Differences of pass@k, times and other endpoints are in the report.
    scores = [[*row[:7], *row[8:9]] for row in score_rows(report)]
    holm = "p (Holm): chance of a difference as large where there is none, adjusted for the number of arms"
    tables = [rich_table(scores, f"{study.name}: {TITLE}", holm)]
    if study.claims:
        tables.append(rich_table(claim_rows(report["claims"].values()), "claims", READ_CLAIMS))
    return tables


def score_rows(report: Numbers) -> Rows:
    """Held-out pass@1 of every arm and its difference from the baseline; pass@k at the largest k stands last."""
    arms, baseline = report["arms"], report["baseline"]
    against = f"minus {baseline}" if baseline in arms else "minus its baseline"
    header = ["arm", "seeds", "before", "after", "95 %", against, "p (Holm)", "s/run"]
    rows = []
    for name, arm in arms.items():
        after, *compared = _cells(arm)
        within = span(arm) if len(arm["seeds"]) > 1 else "one seed"
        seconds = f"{arm['wall_seconds']:.0f}"
        rows.append([name, str(len(arm["seeds"])), f"{arm['before']:.3f}", after, within, *compared, seconds])
    coverage = [list(arm["pass_at_k"].items())[-1:] for arm in arms.values()]
    if ks := [k for found in coverage for k, _ in found]:
        header += [f"pass@{ks[0]}", f"pass@{ks[0]} {against}", "p (Holm)"]
        for row, found in zip(rows, coverage, strict=True):
            row += _cells(found[0][1] if found else None)
    return [header, *rows]


def endpoint_rows(report: Numbers) -> Rows:
    """The other endpoints that the runs tell, one column each, with the difference from the baseline."""
    arms = report["arms"]
    names = [name for name in {name: 0 for arm in arms.values() for name in arm["endpoints"]} if name not in ELSEWHERE]
    rows = [["arm", *(AT_EQUAL.get(name) or endpoint_named(name).title for name in names)]]
    for name, arm in arms.items():
        cells = [_cells(arm["endpoints"].get(each)) for each in names]
        rows.append([name, *(f"{mean} ({by})" if by else mean for mean, by, _ in cells)])
    return rows


def chance_remark(report: Numbers) -> str:
    """The number of other endpoints' differences that leave out 0, beside the number that do so by chance."""
    arms = report["arms"].values()
    found = [each["difference"] for arm in arms for name, each in arm["endpoints"].items() if name not in ELSEWHERE]
    varied = [each for each in found if each and each["spread"] > 0]
    clear = sum(each["low"] > 0 or each["high"] < 0 for each in varied)
    return (
        f"In the next table the interval leaves out 0 in {clear} of {len(varied)} differences; by chance each does in "
        "one study of twenty. Most are of the same answers, and agree or err together: they say where to look."
    )


def spending_rows(report: Numbers) -> Rows:
    """Means over seeds of what the arms spent."""
    arms = report["arms"].items()
    return [["arm", *SPENT], *([name, *(cell(arm) for cell in SPENT.values())] for name, arm in arms)]


def claim_rows(outcomes: Iterable[Numbers]) -> Rows:
    """The table of claims."""
    header = ["claim", "regime", "contrast", "effect", "95 %", "median, above 0 (sign test)"]
    rows = [[*header, "asked, of the control's gain", "verdict", "seeds", "tokens", "time"]]
    for found in outcomes:
        contrast = min(found["contrasts"], key=_distance)
        effect, gains = contrast["effect"], contrast["control_gains"]
        rows.append(
            [
                found["title"],
                found["regime"],
                contrast["contrast"] + " *" * bool(contrast.get("shared_arms")),
                f"{effect['mean']:+.3f}" if effect else "",
                span(effect) if effect and effect["seeds"] > 1 else "",
                "{median:+.3f}, {positive} of {seeds} ({sign_p:.3f})".format_map(effect) if effect else "",
                f"{abs(contrast['threshold']):g}" + (f" of {gains:.3f}" if gains is not None else ""),
                found["verdict"],
                f"{found['seeds']} of {found['seeds_needed']}{_order(found)}",
                f"{found['tokens'] / 1e6:.1f} M",
                duration(found["seconds"]),
            ]
        )
    return rows


def _order(found: Numbers) -> str:
    """Doubts about the order of a claim and its runs."""
    undated = f", {found['undated']} runs undated" if found["undated"] else ""
    return undated + ", exploratory" * found["exploratory"] + ", not fixed" * (found["fixed"] is None)


def _distance(contrast: Numbers) -> float:
    """Distance of a contrast beyond its threshold, in units of its smallest effect; without a run, the furthest."""
    effect, threshold = contrast["effect"], contrast["threshold"]
    return float((effect["mean"] - threshold) / abs(threshold)) if effect else math.inf


def _cells(found: Numbers | None) -> list[str]:
    """Mean, difference from the baseline with its interval, and p-value; empty where there is none."""
    if found is None:
        return ["", "", ""]
    effect, mean = found["difference"], f"{found['mean']:.3f}"
    if effect is None:
        return [mean, "", ""]
    alike = effect["mean"] == effect["spread"] == 0
    within = " (in every seed)" if alike else f" {span(effect)}"
    difference = f"{effect['mean']:+.3f}" + within * (effect["seeds"] > 1)
    return [mean, difference, "" if found["p_holm"] is None else f"{found['p_holm']:.3f}"]


def span(interval: Numbers) -> str:
    """The interval in brackets, three decimals."""
    return f"[{interval['low']:.3f}, {interval['high']:.3f}]"


def duration(seconds: float) -> str:
    """Hours and minutes for people: 45 s, 12 min, 3 h 05 min."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def rich_table(rows: Rows, title: str, caption: str | None = None) -> Table:
    """Rows as a table of a terminal."""
    columns = [Column(name, justify="right" if place else "left") for place, name in enumerate(rows[0])]
    table = Table(*columns, title=title, caption=caption)
    for row in rows[1:]:
        table.add_row(*row)
    return table


def markdown(rows: Rows) -> str:
    """Rows as a Markdown table."""
    ruled = [rows[0], ["---"] * len(rows[0]), *rows[1:]]
    return "\n".join("| " + " | ".join(map(output.in_markdown, row)) + " |" for row in ruled) + "\n"


def study_figures(study: Study, report: Numbers) -> "dict[str, Figure]":
    """The figures by name; all of held-out questions, since arms do not share the questions that they train on."""
    results, arms, several = study.results(), report["arms"], len({arm.regime for arm in study.arms}) > 1
    regimes = {arm.name: (arm.regime or "no regime") if several else "" for arm in study.arms}

    def score(name: str, found: Numbers, seeds: Sequence[float]) -> ArmScore:
        interval = {end: found[end] for end in ("mean", "low", "high")}
        return ArmScore(name=name, regime=regimes[name], seeds=seeds, **interval)

    scores = [score(name, arm, list(arm["seeds"].values())) for name, arm in arms.items()]
    differences = []
    for name, arm in arms.items():
        if effect := arm["difference"]:
            other = arms[arm["baseline"]]["seeds"]
            by_seed = [value - other[seed] for seed, value in arm["seeds"].items() if seed in other]
            differences.append(score(name, effect, by_seed))
    curves = [arm_curve(name, results[name], regimes[name]) for name in arms]
    memorised = {name: [found for each in results[name].values() if (found := each.memorising)] for name in arms}
    said: dict[str, Any] = {"baselines": study.baselines, "measure": TITLE}
    figures = {
        "ablation": arm_comparison(scores, **said),
        "differences": arm_comparison(differences, **said, differences=True),
        "curves": arm_curves(curves, **said),
        "curves-tokens": arm_curves(curves, **said, tokens=True),
        "memorising": memorising_figure(memorised),
        "claims": claims_figure(report.get("claims", {}).values()),
    }
    return {name: drawn for name, drawn in figures.items() if drawn is not None}


def arm_curve(name: str, results: Results, regime: str = "") -> ArmScore:
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
    intervals = [statistics.t_interval([point.pass_at_1 for point in column], bounds=(0.0, 1.0)) for column in columns]
    return ArmScore(
        name=name,
        regime=regime,
        steps=[round(float(np.mean([point.step for point in column]))) for column in columns],
        tokens=[float(np.mean([point.generated for point in column])) for column in columns],
        mean=[interval.mean for interval in intervals],
        low=[interval.low for interval in intervals],
        high=[interval.high for interval in intervals],
    )

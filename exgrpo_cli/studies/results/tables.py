"""A study's report as tables, for a terminal and in Markdown."""

from collections.abc import Mapping

from rich.table import Table

from exgrpo_cli.base.statistics import Interval
from exgrpo_cli.evaluation.tables import escape, latex_row
from exgrpo_cli.studies.results.endpoints import AT_EQUAL, ENDPOINTS
from exgrpo_cli.studies.results.report import MAIN, ArmReport, Compared, StudyReport

TITLE = "held-out pass@1"
OTHERS = [name for name in ENDPOINTS if name not in (MAIN, "pass_at_n", "beyond_pass_at_1")]
"""Endpoints of the second table."""
Rows = list[list[str]]
"""Cells; the first row is the header."""


def score_rows(report: StudyReport) -> Rows:
    """Held-out pass@1 of every arm and its difference from the baseline; pass@k at the largest k stands last."""
    ks = [arm.coverage[0] for arm in report.arms if arm.coverage]
    against = f"minus {report.baselines[0]}" if len(report.baselines) == 1 else "minus its baseline"
    coverage = [text for k in ks[:1] for text in (k, against, "p (Holm)")]
    rows = [["arm", "seeds", "before", "after", "95 %", against, "p (Holm)", "s/run", *coverage]]
    for arm in report.arms:
        last = [] if not ks else ["", "", ""]
        if arm.coverage:
            last = [f"{arm.coverage[1].score.mean:.3f}", *_difference(arm.coverage[1])]
        rows.append(
            [
                arm.name,
                str(len(arm.seeds)),
                "" if arm.before is None else f"{arm.before:.3f}",
                f"{arm.main.score.mean:.3f}",
                span(arm.main.score) if len(arm.seeds) > 1 else "one seed",
                *_difference(arm.main),
                f"{arm.totals['seconds']:.0f}",
                *last,
            ]
        )
    return rows


def endpoint_rows(report: StudyReport) -> Rows:
    """The other endpoints that the runs tell, one column each, with the difference from the baseline."""
    titles = {name: ENDPOINTS[name].title for name in OTHERS} | {
        name: f"pass@1 at equal tokens {spent}" for name, spent in AT_EQUAL.items()
    }
    names = [name for name in titles if any(name in arm.endpoints for arm in report.arms)]
    rows = [["arm", *(titles[name] for name in names), "tokens to the baseline's score"]]
    for arm in report.arms:
        rows.append([arm.name, *(_value(arm.endpoints.get(name)) for name in names), _match(arm)])
    return rows


def spending_rows(report: StudyReport) -> Rows:
    """What the arms spent, means over seeds, and the steps at which their fresh questions leave the baseline's."""
    columns = {
        "steps": "steps",
        "tokens generated": "generated",
        "tokens trained": "trained",
        "tokens scored": "scored",
        "updates": "updates",
        "seconds": "seconds",
    }
    parts = ["fresh questions part at step"] if report.parting else []
    rows = [["arm", *columns, *parts]]
    for arm in report.arms:
        steps = [] if not parts else [_parting(report.parting.get(arm.name, {}))]
        rows.append([arm.name, *(f"{arm.totals[name]:,.0f}" for name in columns.values()), *steps])
    return rows


def rich_table(rows: Rows, title: str) -> Table:
    """Rows as a table of a terminal."""
    table = Table(title=title)
    for place, name in enumerate(rows[0]):
        table.add_column(name, justify="right" if place else "left")
    for row in rows[1:]:
        table.add_row(*row)
    return table


def markdown(rows: Rows) -> str:
    """Rows as a Markdown table."""
    ruled = [rows[0], ["---"] * len(rows[0]), *rows[1:]]
    return "\n".join("| " + " | ".join(row) + " |" for row in ruled) + "\n"


def latex(rows: Rows) -> str:
    """Rows as a complete LaTeX tabular (booktabs)."""
    lines = [latex_row([escape(cell) for cell in row]) for row in rows]
    layout = "l" + "r" * (len(rows[0]) - 1)
    parts = [rf"\begin{{tabular}}{{{layout}}}", r"\toprule", lines[0], r"\midrule", *lines[1:], r"\bottomrule"]
    return "\n".join([*parts, r"\end{tabular}"]) + "\n"


def _value(found: Compared | None) -> str:
    if found is None:
        return ""
    difference = _difference(found)[0]
    return f"{found.score.mean:.3f}" + (f" ({difference})" if difference else "")


def _difference(found: Compared) -> list[str]:
    effect = found.difference
    if effect is None:
        return ["", ""]
    interval = f" {span(effect.interval)}" if effect.seeds > 1 else ""
    return [f"{effect.mean:+.3f}{interval}", "" if found.p_holm is None else f"{found.p_holm:.3f}"]


def _parting(by_seed: Mapping[int, int | None]) -> str:
    """First and last of the seeds' steps, and `never` where some do not part."""
    steps = sorted(step for step in by_seed.values() if step is not None)
    parts = [str(steps[0]) if steps[0] == steps[-1] else f"{steps[0]} to {steps[-1]}"] if steps else []
    return ", ".join([*parts, *(["never"] if None in by_seed.values() else [])])


def _match(arm: ArmReport) -> str:
    reached, seeds = arm.matched
    if not seeds:
        return ""
    return (
        f"{0 if arm.match is None else arm.match:.0%} ({reached} of {seeds} seeds)" if reached else f"never ({seeds})"
    )


def span(interval: Interval) -> str:
    """The interval in brackets, three decimals."""
    return f"[{interval.low:.3f}, {interval.high:.3f}]"

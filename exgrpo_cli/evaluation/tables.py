"""Scores as rows of a paper's table: Markdown, LaTeX, and a table for the terminal."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table


@dataclass(frozen=True, kw_only=True, slots=True)
class Column:
    """A column of the table: a benchmark, or an average over those before it."""

    head: str
    value: float | None
    """None where nothing has been evaluated yet."""
    low: float | None
    high: float | None
    closes_group: bool
    """An average, the last column of its group."""


def table_columns(
    results: Mapping[str, Mapping[str, Any]], titles: Mapping[str, str], averages: Mapping[str, Sequence[str]]
) -> list[Column]:
    """Benchmarks in their order; with averages, each group's members and then "Avg.", as in the paper's tables.

    An average is over benchmarks, each weighing the same, and is left out until all its members are there.
    """
    if not averages:
        return [_benchmark_column(titles[name], result) for name, result in results.items()]
    columns = []
    for members in averages.values():
        columns += [_benchmark_column(titles[name], results.get(name, {})) for name in members]
        value = average(results, members)
        columns.append(Column(head="Avg.", value=value, low=None, high=None, closes_group=True))
    return columns


def average(results: Mapping[str, Mapping[str, Any]], members: Sequence[str]) -> float | None:
    """Mean of avg@k over `members`; None unless every one is there."""
    if any(name not in results for name in members):
        return None
    return sum(float(results[name]["avg_at_k"]) for name in members) / len(members)


def markdown(model: str, columns: Sequence[Column]) -> str:
    """Head, rule, the model's row, and a row with the intervals; percentages with one decimal."""
    heads = ["Model", *(column.head for column in columns)]
    rows = [
        heads,
        ["---", *("---:" for _ in columns)],
        [model.replace("|", "\\|"), *(_percent(column.value, bold=column.closes_group) for column in columns)],
        ["95 % interval", *(_interval(column) for column in columns)],
    ]
    return "".join("| " + " | ".join(row) + " |\n" for row in rows)


def latex(model: str, columns: Sequence[Column]) -> str:
    """A complete tabular (booktabs) with the model's row and its intervals."""
    # A rule between the groups, as between the in- and out-of-distribution halves of the paper's tables.
    layout = "".join("r|" if column.closes_group else "r" for column in columns).rstrip("|")
    head = " & ".join(["Model", *(_escape(column.head) for column in columns)])
    row = " & ".join([_escape(model), *(_latex_percent(column) for column in columns)])
    interval = " & ".join(["\\scriptsize 95\\,\\% interval", *(_latex_interval(column) for column in columns)])
    lines = [f"\\begin{{tabular}}{{l{layout}}}", "\\toprule", head, "\\midrule", row, interval, "\\bottomrule"]
    body = [line + " \\\\" if "&" in line else line for line in lines]
    return "\n".join([*body, "\\end{tabular}"]) + "\n"


def terminal_table(model: str, results: Mapping[str, Mapping[str, Any]], titles: Mapping[str, str]) -> Table:
    """One row per benchmark with everything a reader needs to judge the score."""
    table = Table(title=model, title_justify="left", box=None, padding=(0, 2, 0, 0))
    heads = ("benchmark", "score", "95 % interval", "shows from", "pass@k", "maj@k", "tokens", "cut off", "questions")
    for head in heads:
        table.add_column(head, justify="left" if head == "benchmark" else "right")
    for name, result in results.items():
        k = result["k"]
        table.add_row(
            f"{titles[name]} avg@{k}" if k > 1 else f"{titles[name]} pass@1",
            _percent(result["avg_at_k"]),
            f"{100 * result['low']:.1f} to {100 * result['high']:.1f}",
            f"±{100 * result['smallest_detectable_difference']:.1f}",
            _percent(result["pass_at"][str(k)]) if k > 1 else "",
            _percent(result["maj_at_k"]) if k > 1 else "",
            f"{result['mean_tokens']:.0f}",
            _percent(result["share_clipped"]),
            str(result["questions"]),
        )
    return table


def _benchmark_column(head: str, result: Mapping[str, Any]) -> Column:
    return Column(
        head=head,
        value=result.get("avg_at_k"),
        low=result.get("low"),
        high=result.get("high"),
        closes_group=False,
    )


def _percent(value: float | None, *, bold: bool = False) -> str:
    if value is None:
        return "-"
    return f"**{100 * value:.1f}**" if bold else f"{100 * value:.1f}"


def _interval(column: Column) -> str:
    return "" if column.low is None or column.high is None else f"{100 * column.low:.1f} to {100 * column.high:.1f}"


def _latex_percent(column: Column) -> str:
    text = _percent(column.value)
    return f"\\textbf{{{text}}}" if column.closes_group and column.value is not None else text


def _latex_interval(column: Column) -> str:
    if column.low is None or column.high is None:
        return ""
    return f"\\scriptsize {100 * column.low:.1f}--{100 * column.high:.1f}"


def _escape(text: str) -> str:
    for char in "&%$#_{}":
        text = text.replace(char, f"\\{char}")
    return text

"""Scores as rows of a paper's table, in Markdown and LaTeX."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from exgrpo_cli.base.statistics import mean_of_scores


@dataclass(frozen=True, kw_only=True, slots=True)
class Column:
    """A column of the table: a benchmark, or an average over those before it."""

    head: str
    benchmark: str | None
    """None for an average."""
    value: float | None
    """None where nothing has been evaluated yet."""
    low: float | None
    high: float | None
    mark: str = ""
    """Sign behind the value, explained below the table."""

    @property
    def closes_group(self) -> bool:
        """An average is the last column of its group."""
        return self.benchmark is None


def table_columns(
    results: Mapping[str, Mapping[str, Any]], titles: Mapping[str, str], averages: Mapping[str, Sequence[str]]
) -> list[Column]:
    """Benchmarks in the titles' order; with averages, each group's members and then "Avg.", as in the paper's tables.

    An average is over benchmarks, each weighing the same, and is left out until all its members are there.
    """
    if not averages:
        return [_benchmark_column(name, title, results.get(name, {})) for name, title in titles.items()]
    columns: list[Column] = []
    for members in averages.values():
        columns += [_benchmark_column(name, titles[name], results.get(name, {})) for name in members]
        found = average(results, members) or dict.fromkeys(("value", "low", "high"))
        columns.append(Column(head="Avg.", benchmark=None, **found))
    return columns


def average(results: Mapping[str, Mapping[str, Any]], members: Sequence[str]) -> dict[str, float] | None:
    """Mean of avg@k over `members`, as `value`, `low` and `high`; None unless every one is there."""
    if any(name not in results for name in members):
        return None
    return _mean([(results[name]["avg_at_k"], results[name]["low"], results[name]["high"]) for name in members])


def averages_of(
    results: Mapping[str, Mapping[str, Any]], averages: Mapping[str, Sequence[str]]
) -> dict[str, dict[str, Any]]:
    """Every average whose members are all there: `value`, `low`, `high`, and the `benchmarks` it is over.

    With `pass_at_k`, the same of pass@k at each k that all members have, and `second_graders`, the same of avg@k by
    each second grader that all members have.
    """
    values = {name: (average(results, members), members) for name, members in averages.items()}
    return {
        name: {
            **found,
            "benchmarks": list(members),
            "pass_at_k": _pass_at_k([results[member].get("pass_at_k", {}) for member in members]),
            "second_graders": {
                grader: by_second
                for grader, seconds in by_second_grader(results).items()
                if (by_second := average(seconds, members))
            },
        }
        for name, (found, members) in values.items()
        if found
    }


def by_second_grader(results: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Mapping[str, Any]]]:
    """Second grader to its results by benchmark, of those benchmarks that it graded too."""
    found: dict[str, dict[str, Mapping[str, Any]]] = {}
    for name, result in results.items():
        for grader, second in result.get("second_graders", {}).items():
            found.setdefault(grader, {})[name] = second
    return found


def _pass_at_k(curves: Sequence[Mapping[str, Mapping[str, float]]]) -> dict[str, dict[str, float]]:
    """Mean of curves {k: score} at each k that all of them have."""
    shared = [k for k in curves[0] if all(k in curve for curve in curves)]
    return {k: _mean([(curve[k]["value"], curve[k]["low"], curve[k]["high"]) for curve in curves]) for k in shared}


def _mean(scores: Sequence[tuple[float, float, float]]) -> dict[str, float]:
    return dict(zip(("value", "low", "high"), mean_of_scores(scores), strict=True))


Rows = Sequence[tuple[str, Sequence[Column]]]
"""A model's name and its columns; the same columns in every row."""


def markdown(rows: Rows, footnote: str = "") -> str:
    """Head, rule, and for each model a row with percentages (one decimal) and a row with their intervals."""
    columns = rows[0][1]
    lines = [["Model", *(column.head for column in columns)], ["---", *("---:" for _ in columns)]]
    for model, own in rows:
        lines.append([model.replace("|", "\\|"), *(_percent(c.value, bold=c.closes_group) + c.mark for c in own)])
        lines.append(["95 % interval", *(_interval(column) for column in own)])
    table = "".join("| " + " | ".join(line) + " |\n" for line in lines)
    return f"{table}\n{footnote}\n" if footnote else table


def latex(rows: Rows, footnote: str = "") -> str:
    """A complete tabular (booktabs): for each model a row and its intervals; the footnote as a comment above."""
    columns = rows[0][1]
    # A rule between the groups, as between the in- and out-of-distribution halves of the paper's tables.
    layout = "".join("r|" if column.closes_group else "r" for column in columns).rstrip("|")
    lines = [latex_row(["Model", *(escape(column.head) for column in columns)]), "\\midrule"]
    for model, own in rows:
        lines.append(latex_row([escape(model), *(_latex_percent(column) for column in own)]))
        lines.append(latex_row(["\\scriptsize 95\\,\\% interval", *(_latex_interval(column) for column in own)]))
    parts = [f"\\begin{{tabular}}{{l{layout}}}", "\\toprule", *lines, "\\bottomrule", "\\end{tabular}"]
    return "\n".join([f"% {footnote}", *parts] if footnote else parts) + "\n"


def _benchmark_column(name: str, head: str, result: Mapping[str, Any]) -> Column:
    return Column(
        head=head, benchmark=name, value=result.get("avg_at_k"), low=result.get("low"), high=result.get("high")
    )


def _percent(value: float | None, *, bold: bool = False) -> str:
    if value is None:
        return "-"
    return f"**{100 * value:.1f}**" if bold else f"{100 * value:.1f}"


def _interval(column: Column) -> str:
    return "" if column.low is None or column.high is None else f"{100 * column.low:.1f} to {100 * column.high:.1f}"


def _latex_percent(column: Column) -> str:
    text = _percent(column.value)
    marked = f"{text}\\textsuperscript{{{escape(column.mark)}}}" if column.mark else text
    return f"\\textbf{{{text}}}" if column.closes_group and column.value is not None else marked


def _latex_interval(column: Column) -> str:
    if column.low is None or column.high is None:
        return ""
    return f"\\scriptsize {100 * column.low:.1f}--{100 * column.high:.1f}"


_LATEX = str.maketrans(
    {
        **{char: f"\\{char}" for char in "&%$#_{}"},
        "\\": "\\textbackslash{}",
        "~": "\\textasciitilde{}",
        "^": "\\textasciicircum{}",
        "<": "\\textless{}",
        ">": "\\textgreater{}",
        "|": "\\textbar{}",
        "†": "\\dag{}",
    }
)


def latex_row(cells: Sequence[str]) -> str:
    """Escaped cells as one row; one that begins with [ or * would be read as an argument of the row before."""
    line = " & ".join(cells)
    return ("{}" if line.startswith(("[", "*")) else "") + line + " \\\\"


def escape(text: str) -> str:
    """Text as LaTeX sets it, its special characters spelled out."""
    return text.translate(_LATEX)

"""One table of results, models as rows and benchmarks as columns, and how it is read: terminal, Markdown, LaTeX."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from rich.table import Table

from exgrpo_cli.base.files import write_text
from exgrpo_cli.base.statistics import mean_of_scores
from exgrpo_cli.evaluation.benchmarks import averages_over

SCORE_HEADS = ("benchmark", "score", "95 %", "shows from", "pass@k", "95 %", "maj@k", "tokens", "cut off", "questions")
COMPARISON_HEADS = ("benchmark", "model", "score", "95 %", "difference", "95 %", "p", "Holm", "won/lost", "n")
LEVEL = 0.05
MARK = "†"

Figures = Mapping[str, Any]
"""Of a model on a benchmark, as `results.json` holds them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ResultTable:
    """What an evaluation or a comparison found."""

    titles: Mapping[str, str]
    """Benchmark to its column head, in the order of the columns."""
    models: Mapping[str, Mapping[str, Figures]]
    """Model to benchmark to its figures; the first model is the one that others are compared with."""
    comparisons: Mapping[tuple[str, str], Mapping[str, Any]] = field(default_factory=dict)
    """Paired difference from the first model by model and benchmark, as `comparison.json` holds it."""

    def averages(self, model: str) -> dict[str, dict[str, Any]]:
        """Every average whose benchmarks all are there: `value`, `low`, `high`, and the `benchmarks` it is over.

        With `pass_at_k`, the same of pass@k at each k that all of them have, and `second_graders`, the same of avg@k by
        each second grader of all.
        """
        results, found = self.models[model], {}
        for name, members in averages_over(self.titles).items():
            mean = average(results, members)
            if mean is not None:
                seconds = {g: average(own, members) for g, own in by_second_grader(results).items()}
                found[name] = {
                    **mean,
                    "benchmarks": list(members),
                    "pass_at_k": _mean_curve([results[member].get("pass_at_k", {}) for member in members]),
                    "second_graders": {grader: second for grader, second in seconds.items() if second},
                }
        return found

    @property
    def footnote(self) -> str:
        """What the mark in the tables says; empty where nothing is compared."""
        if not self.comparisons:
            return ""
        return (
            f"{MARK} differs from {next(iter(self.models))}: p < {LEVEL}, paired sign-flip test by question, "
            f"Holm-adjusted over {len(self.comparisons)} comparisons."
        )

    def rows(self) -> "list[tuple[str, list[Cell]]]":
        """A model's name and its cells, then the same by each of its second graders."""
        rows = []
        for model, results in self.models.items():
            marked = [name for (other, name), made in self.comparisons.items() if other == model]
            marked = [name for name in marked if self.comparisons[model, name]["p_holm"] < LEVEL]
            rows.append((model, self._cells(results, marked)))
            for grader, seconds in by_second_grader(results).items():
                rows.append((f"{model}, by {grader}", self._cells(seconds, ())))
        return rows

    def _cells(self, results: Mapping[str, Figures], marked: Collection[str]) -> "list[Cell]":
        def cell(name: str) -> Cell:
            score = _score(results[name]) if name in results else None
            return Cell(self.titles[name], score, mark=MARK if name in marked else "")

        averages = averages_over(self.titles)
        if not averages:
            return [cell(name) for name in self.titles]
        groups = ([*map(cell, members), Cell("Avg.", average(results, members), True)] for members in averages.values())
        return [each for group in groups for each in group]


class Cell(NamedTuple):
    """A benchmark's score, or an average over the benchmarks before it."""

    head: str
    score: Mapping[str, float] | None
    """`value`, `low` and `high`; None where nothing has been evaluated yet."""
    average: bool = False
    """Averages close the group of their benchmarks."""
    mark: str = ""
    """Sign behind the value, explained below the table."""


def average(results: Mapping[str, Figures], members: Sequence[str]) -> dict[str, float] | None:
    """Mean of avg@k over `members`, each weighing the same, with its interval; None unless every one is there."""
    return _mean([_score(results[name]) for name in members]) if all(name in results for name in members) else None


def by_second_grader(results: Mapping[str, Figures]) -> dict[str, dict[str, Figures]]:
    """Second grader to its results by benchmark, of those benchmarks that it graded too."""
    found: dict[str, dict[str, Figures]] = {}
    for name, result in results.items():
        for grader, second in result.get("second_graders", {}).items():
            found.setdefault(grader, {})[name] = second
    return found


def _score(figures: Figures) -> dict[str, float]:
    return {"value": figures["avg_at_k"], "low": figures["low"], "high": figures["high"]}


def _mean_curve(curves: Sequence[Mapping[str, Mapping[str, float]]]) -> dict[str, dict[str, float]]:
    """Mean of curves {k: score} at each k that all of them have."""
    return {k: _mean([curve[k] for curve in curves]) for k in curves[0] if all(k in curve for curve in curves)}


def _mean(scores: Sequence[Mapping[str, float]]) -> dict[str, float]:
    mean = mean_of_scores([(score["value"], score["low"], score["high"]) for score in scores])
    return dict(zip(("value", "low", "high"), mean, strict=True))


def write_tables(folder: Path, table: ResultTable) -> None:
    """`table.md` and `table.tex` beside the results."""
    write_text(folder / "table.md", markdown(table))
    write_text(folder / "table.tex", latex(table))


def markdown(table: ResultTable) -> str:
    """Head, rule, and for each model a row with percentages (one decimal) and a row with their intervals."""
    rows = table.rows()
    lines = [["Model", *(cell.head for cell in rows[0][1])], ["---", *("---:" for _ in rows[0][1])]]
    for model, cells in rows:
        bold = ["**" if cell.average and cell.score else "" for cell in cells]
        values = [f"{stars}{_value(cell)}{stars}{cell.mark}" for stars, cell in zip(bold, cells, strict=True)]
        lines += [[model.replace("|", "\\|"), *values]]
        lines += [["95 % interval", *(_interval(cell.score) if cell.score else "" for cell in cells)]]
    text = "".join("| " + " | ".join(line) + " |\n" for line in lines)
    return f"{text}\n{table.footnote}\n" if table.footnote else text


def latex(table: ResultTable) -> str:
    """A complete tabular (booktabs): for each model a row and its intervals; the footnote as a comment above."""
    rows = table.rows()
    # A rule between the groups, as between the in- and out-of-distribution halves of the paper's tables.
    layout = "".join("r|" if cell.average else "r" for cell in rows[0][1]).rstrip("|")
    lines = [latex_row(["Model", *(escape(cell.head) for cell in rows[0][1])]), "\\midrule"]
    for model, cells in rows:
        lines.append(latex_row([escape(model), *map(_latex_value, cells)]))
        ends = [f"{100 * c.score['low']:.1f}--{100 * c.score['high']:.1f}" if c.score else "" for c in cells]
        lines.append(
            latex_row(["\\scriptsize 95\\,\\% interval", *(f"\\scriptsize {end}" if end else "" for end in ends)])
        )
    parts = [f"\\begin{{tabular}}{{l{layout}}}", "\\toprule", *lines, "\\bottomrule", "\\end{tabular}"]
    return "\n".join([f"% {table.footnote}", *parts] if table.footnote else parts) + "\n"


def _latex_value(cell: Cell) -> str:
    if cell.average and cell.score:
        return f"\\textbf{{{_value(cell)}}}"
    return _value(cell) + (f"\\textsuperscript{{{escape(cell.mark)}}}" if cell.mark else "")


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


def score_table(table: ResultTable) -> Table:
    """Scores of one model: a row per benchmark with what a reader needs to judge the score, then the averages."""
    ((model, results),) = table.models.items()
    shown = _empty(model, SCORE_HEADS, ("benchmark",), space=2)
    for name, result in results.items():
        several = result["k"] > 1
        shown.add_row(
            f"{table.titles[name]} {measure(result)}",
            *_scored(_score(result)),
            f"±{100 * result['smallest_detectable_difference']:.1f}",
            *(_scored(result["pass_at_k"][str(result["k"])]) if several else ["", ""]),
            _percent(result["maj_at_k"]) if several else "",
            f"{result['mean_tokens']:.0f}",
            _percent(result["share_clipped"]),
            str(result["questions"]),
        )
        for grader, second in result.get("second_graders", {}).items():
            shown.add_row(f"  by {grader}", *_scored(_score(second)))
    for name, found in table.averages(model).items():
        # One head stands for one k, so an average of pass@k is shown where its benchmarks have the same k above 1.
        ks = {results[member]["k"] for member in found["benchmarks"]}
        coverage = _scored(found["pass_at_k"][str(max(ks))]) if len(ks) == 1 and ks != {1} else []
        shown.add_row(f"Avg. {name}", *_scored(found), "", *coverage)
        for grader, second in found["second_graders"].items():
            shown.add_row(f"  by {grader}", *_scored(second))
    return shown


def measure(result: Figures) -> str:
    """Name of the score: avg@k over several samples per question, pass@1 over one."""
    return f"avg@{result['k']}" if result["k"] > 1 else "pass@1"


def comparison_table(table: ResultTable) -> Table:
    """A row per benchmark and model, for avg@k and then for pass@k; "won/lost" counts the questions that flipped."""
    shown = _empty(f"compared with {next(iter(table.models))}", COMPARISON_HEADS, ("benchmark", "model"), space=1)
    for column in shown.columns:
        column.overflow = "fold"
    for name in table.titles:
        own = {model: results[name] for model, results in table.models.items() if name in results}
        for rows in (_mean_rows(table, name, own), _coverage_rows(table, name, own)):
            for number, (head, *row) in enumerate(rows):
                shown.add_row("" if number else head, *row)
    for model in table.models:
        for name, found in table.averages(model).items():
            shown.add_row(f"Avg. {name}", model, *_scored(found))
            for grader, second in found["second_graders"].items():
                shown.add_row("", f"  by {grader}", *_scored(second))
            if len(found["pass_at_k"]) > 1:
                k, coverage = list(found["pass_at_k"].items())[-1]
                shown.add_row(f"Avg. {name} pass@{k}", model, *_scored(coverage))
    return shown


def _mean_rows(table: ResultTable, name: str, own: Mapping[str, Figures]) -> list[list[str]]:
    rows = []
    for model, result in own.items():
        made = table.comparisons.get((model, name))
        change = [*_change(made, made["p_holm"]), f"{len(made['gained'])}/{len(made['lost'])}"] if made else [""] * 5
        head = f"{table.titles[name]} {measure(result)}"
        rows.append([head, model, *_scored(_score(result)), *change, str(result["questions"])])
        for grader, second in result.get("second_graders", {}).items():
            found = made["second_graders"].get(grader) if made else None
            rows.append(["", f"  by {grader}", *_scored(_score(second)), *_change(found, None), "", ""])
    return rows


def _coverage_rows(table: ResultTable, name: str, own: Mapping[str, Figures]) -> list[list[str]]:
    """pass@k at the largest k; none where there is one sample."""
    rows = []
    for model, result in own.items():
        if result["k"] > 1:
            k, made = str(result["k"]), table.comparisons.get((model, name))
            change = _change(made["pass_at_k"][k], made["pass_p_holm"]) if made else [""] * 4
            head = f"{table.titles[name]} pass@{k}"
            rows.append([head, model, *_scored(result["pass_at_k"][k]), *change, "", str(result["questions"])])
    return rows


def _change(found: Mapping[str, Any] | None, p_holm: float | None) -> list[str]:
    if found is None:
        return [""] * 4
    ends = f"{100 * found['low']:+.1f} to {100 * found['high']:+.1f}"
    adjusted = "" if p_holm is None else f"{p_holm:.4f}"
    return [f"{100 * found['difference']:+.1f}", ends, f"{found['p_value']:.4f}", adjusted]


def _empty(title: str, heads: Sequence[str], words: Sequence[str], *, space: int) -> Table:
    table = Table(title=title, title_justify="left", box=None, padding=(0, space, 0, 0))
    for head in heads:
        table.add_column(head, justify="left" if head in words else "right")
    return table


def _scored(score: Mapping[str, float]) -> list[str]:
    return [_percent(score["value"]), _interval(score)]


def _value(cell: Cell) -> str:
    return "-" if cell.score is None else _percent(cell.score["value"])


def _percent(value: float) -> str:
    return f"{100 * value:.1f}"


def _interval(score: Mapping[str, float]) -> str:
    return f"{_percent(score['low'])} to {_percent(score['high'])}"

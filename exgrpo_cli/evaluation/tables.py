"""One table of results, models as rows and benchmarks as columns, and how it is read: terminal, Markdown, LaTeX."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from rich.table import Table

from exgrpo_cli.base.statistics import mean_of_scores
from exgrpo_cli.evaluation.benchmarks import averages_over

SCORE_HEADS = ("benchmark", "score", "95 %", "shows from", "pass@k", "95 %", "maj@k", "tokens", "cut off", "questions")
LEVEL = 0.05
MARK = "†"

Figures = Mapping[str, Any]
"""Figures of a model on a benchmark, as `results.json` holds them."""


class Flip(NamedTuple):
    """A question that one model mostly solves and the other mostly does not."""

    question_id: str
    text: str
    first: float
    """Pass rate."""
    second: float


class Cell(NamedTuple):
    """A benchmark's score, or an average over the benchmarks before it."""

    head: str
    score: Mapping[str, float] | None
    """`value`, `low` and `high`; None where nothing has been evaluated yet."""
    average: bool = False
    """Averages close the group of their benchmarks."""
    mark: str = ""
    """Sign behind the value, explained below the table."""

    @property
    def value(self) -> str:
        """Percentage with one decimal."""
        return _percent(self.score["value"]) if self.score else "-"

    def interval(self, between: str) -> str:
        """Both ends of the score's interval."""
        return _interval(self.score, between) if self.score else ""


@dataclass(frozen=True, kw_only=True, slots=True)
class ResultTable:
    """Results of an evaluation or a comparison."""

    titles: Mapping[str, str]
    """Benchmark to its column head, in the order of the columns."""
    models: Mapping[str, Mapping[str, Figures]]
    """Model to benchmark to its figures; the first model is the one that others are compared with."""
    comparisons: Mapping[tuple[str, str], Mapping[str, Any]] = field(default_factory=dict)
    """Paired difference from the first model by model and benchmark, as `comparison.json` holds it."""
    flips: Mapping[tuple[str, str], Sequence[Flip]] = field(default_factory=dict)
    """Questions whose pass rates by the two lie on different sides of one half, the largest changes first."""

    @property
    def notes(self) -> list[str]:
        """Differences of the evaluations that do not forbid a comparison, each once per model."""
        made = self.comparisons.items()
        return list(dict.fromkeys(f"{model}: {note}" for (model, _), found in made for note in found["notes"]))

    def averages(self, model: str) -> dict[str, dict[str, Any]]:
        """Every average whose benchmarks all are there: `value`, `low`, `high`, and the `benchmarks` it is over.

        With `pass_at_k`, the same of pass@k at each k that all of them have, and `second_graders`, the same of avg@k by
        each second grader of all.
        """
        results, found = self.models[model], {}
        for name, members in averages_over(self.titles).items():
            mean = average(results, members)
            if mean is not None:
                curves = [results[member].get("pass_at_k", {}) for member in members]
                shared = [k for k in curves[0] if all(k in curve for curve in curves)]
                seconds = {g: average(own, members) for g, own in by_second_grader(results).items()}
                found[name] = {
                    **mean,
                    "benchmarks": list(members),
                    "pass_at_k": {k: _mean([curve[k] for curve in curves]) for k in shared},
                    "second_graders": {grader: second for grader, second in seconds.items() if second},
                }
        return found

    @property
    def footnote(self) -> str:
        """Meaning of the mark in the tables; empty where nothing is compared."""
        if not self.comparisons:
            return ""
        return (
            f"{MARK} differs from {next(iter(self.models))}: p < {LEVEL}, paired sign-flip test by question, "
            f"Holm-adjusted over {len(self.comparisons)} comparisons."
        )

    def rows(self) -> list[tuple[str, list[Cell]]]:
        """A model's name and its cells, then the same by each of its second graders."""
        rows = []
        for model, results in self.models.items():
            made = {name: found for (other, name), found in self.comparisons.items() if other == model}
            marked = [name for name, found in made.items() if found["p_holm"] < LEVEL]
            rows.append((model, self._cells(results, marked)))
            for grader, seconds in by_second_grader(results).items():
                rows.append((f"{model}, by {grader}", self._cells(seconds, ())))
        return rows

    def _cells(self, results: Mapping[str, Figures], marked: Sequence[str]) -> list[Cell]:
        cells = {
            name: Cell(title, _score(results[name]) if name in results else None, mark=MARK if name in marked else "")
            for name, title in self.titles.items()
        }
        found = []
        for members in averages_over(self.titles).values():
            found += [*(cells[name] for name in members), Cell("Avg.", average(results, members), True)]
        return found or list(cells.values())


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


def _mean(scores: Sequence[Mapping[str, float]]) -> dict[str, float]:
    mean = mean_of_scores([(score["value"], score["low"], score["high"]) for score in scores])
    return dict(zip(("value", "low", "high"), mean, strict=True))


def markdown(table: ResultTable) -> str:
    """Head, rule, and for each model a row with percentages (one decimal) and a row with their intervals."""
    rows = table.rows()
    lines = [["Model", *(cell.head for cell in rows[0][1])], ["---", *("---:" for _ in rows[0][1])]]
    for model, cells in rows:
        values = [f"**{cell.value}**" if cell.average and cell.score else cell.value + cell.mark for cell in cells]
        lines += [[model.replace("|", "\\|"), *values], ["95 % interval", *(cell.interval(" to ") for cell in cells)]]
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
        ends = [f"\\scriptsize {cell.interval('--')}" if cell.score else "" for cell in cells]
        lines.append(latex_row(["\\scriptsize 95\\,\\% interval", *ends]))
    parts = [f"\\begin{{tabular}}{{l{layout}}}", "\\toprule", *lines, "\\bottomrule", "\\end{tabular}"]
    return "\n".join([f"% {table.footnote}", *parts] if table.footnote else parts) + "\n"


def _latex_value(cell: Cell) -> str:
    if cell.average and cell.score:
        return f"\\textbf{{{cell.value}}}"
    return cell.value + (f"\\textsuperscript{{{escape(cell.mark)}}}" if cell.mark else "")


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
    rows: list[list[str]] = []
    for name, result in results.items():
        k = result["k"]
        coverage = [*_scored(result["pass_at_k"][str(k)]), _percent(result["maj_at_k"])] if k > 1 else [""] * 3
        least = f"±{100 * result['smallest_detectable_difference']:.1f}"
        rest = [f"{result['mean_tokens']:.0f}", _percent(result["share_clipped"]), str(result["questions"])]
        rows.append([f"{table.titles[name]} {measure(result)}", *_scored(_score(result)), least, *coverage, *rest])
        rows += [[f"  by {g}", *_scored(_score(each))] for g, each in result.get("second_graders", {}).items()]
    for name, found in table.averages(model).items():
        # One head stands for one k, so an average of pass@k is shown where its benchmarks have the same k above 1.
        ks = {results[member]["k"] for member in found["benchmarks"]}
        coverage = _scored(found["pass_at_k"][str(max(ks))]) if len(ks) == 1 and ks != {1} else []
        rows.append([f"Avg. {name}", *_scored(found), "", *coverage])
        rows += [[f"  by {grader}", *_scored(second)] for grader, second in found["second_graders"].items()]
    shown = Table(title=model, title_justify="left", box=None, padding=(0, 2, 0, 0))
    for head in SCORE_HEADS:
        shown.add_column(head, justify="left" if head == "benchmark" else "right")
    for row in rows:
        shown.add_row(*row)
    return shown


def measure(result: Figures) -> str:
    """Name of the score: avg@k over several samples per question, pass@1 over one."""
    return f"avg@{result['k']}" if result["k"] > 1 else "pass@1"


def _scored(score: Mapping[str, float]) -> list[str]:
    return [_percent(score["value"]), _interval(score, " to ")]


def _percent(value: float) -> str:
    return f"{100 * value:.1f}"


def _interval(score: Mapping[str, float], between: str) -> str:
    return f"{_percent(score['low'])}{between}{_percent(score['high'])}"

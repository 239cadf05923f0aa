"""Tables for the terminal: the scores of one model, and several models side by side."""

from collections.abc import Mapping
from typing import Any

from rich.table import Table

from exgrpo_cli.base.statistics import PairedDifference, Score
from exgrpo_cli.evaluation.compare.side_by_side import AdjustedComparison, SideBySide

SCORE_HEADS = ("benchmark", "score", "95 %", "shows from", "pass@k", "95 %", "maj@k", "tokens", "cut off", "questions")
COMPARISON_HEADS = ("benchmark", "model", "score", "95 %", "difference", "95 %", "p", "Holm", "won/lost", "n")


def score_table(
    model: str,
    results: Mapping[str, Mapping[str, Any]],
    titles: Mapping[str, str],
    averages: Mapping[str, Mapping[str, Any]],
) -> Table:
    """One row per benchmark with everything a reader needs to judge the score, then the averages."""
    table = Table(title=model, title_justify="left", box=None, padding=(0, 2, 0, 0))
    for head in SCORE_HEADS:
        table.add_column(head, justify="left" if head == "benchmark" else "right")
    for name, result in results.items():
        k = result["k"]
        coverage = result["pass_at_k"][str(k)]
        table.add_row(
            f"{titles[name]} {measure(k)}",
            _percent(result["avg_at_k"]),
            _interval(result),
            f"±{100 * result['smallest_detectable_difference']:.1f}",
            *([_percent(coverage["value"]), _interval(coverage)] if k > 1 else ["", ""]),
            _percent(result["maj_at_k"]) if k > 1 else "",
            f"{result['mean_tokens']:.0f}",
            _percent(result["share_clipped"]),
            str(result["questions"]),
        )
        for grader, second in result.get("second_graders", {}).items():
            table.add_row(f"  by {grader}", _percent(second["avg_at_k"]), _interval(second))
    for name, found in averages.items():
        table.add_row(f"Avg. {name}", _percent(found["value"]), _interval(found), "", *_shared_coverage(found, results))
        for grader, second in found["second_graders"].items():
            table.add_row(f"  by {grader}", _percent(second["value"]), _interval(second))
    return table


def _shared_coverage(found: Mapping[str, Any], results: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Average pass@k with its interval, where the benchmarks have the same k above 1: one head stands for one k."""
    ks = {results[name]["k"] for name in found["benchmarks"]}
    coverage = found["pass_at_k"].get(str(max(ks)))
    return [_percent(coverage["value"]), _interval(coverage)] if len(ks) == 1 and ks != {1} else []


def measure(samples: int) -> str:
    """What a score over `samples` samples per question is called."""
    return f"avg@{samples}" if samples > 1 else "pass@1"


def comparison_table(compared: SideBySide) -> Table:
    """A row per benchmark and model, for avg@k and then for pass@k; "won/lost" counts the questions that flipped."""
    table = Table(title=f"compared with {compared.models[0]}", title_justify="left", box=None, padding=(0, 1, 0, 0))
    for head in COMPARISON_HEADS:
        table.add_column(head, justify="left" if head in ("benchmark", "model") else "right", overflow="fold")
    for name, title in compared.titles.items():
        for row in [*_mean_rows(compared, name, title), *_coverage_rows(compared, name, title)]:
            table.add_row(*row)
    for model, averages in compared.average_scores().items():
        for name, found in averages.items():
            table.add_row(f"Avg. {name}", model, _percent(found["value"]), _interval(found))
            for grader, second in found["second_graders"].items():
                table.add_row("", f"  by {grader}", _percent(second["value"]), _interval(second))
            if len(found["pass_at_k"]) > 1:
                k, coverage = list(found["pass_at_k"].items())[-1]
                table.add_row(f"Avg. {name} pass@{k}", model, _percent(coverage["value"]), _interval(coverage))
    return table


def _mean_rows(compared: SideBySide, name: str, title: str) -> list[list[str]]:
    rows: list[list[str]] = []
    for model in compared.models:
        if (model, name) in compared.scores:
            score, made = compared.scores[model, name], compared.comparisons.get((model, name))
            head = "" if rows else f"{title} {measure(score.samples)}"
            rows.append([head, model, *_score(score), *_mean_difference(made), str(score.questions)])
            for grader, second in compared.second_graders[model, name].items():
                found = made.comparison.by_second_grader.get(grader) if made else None
                change = _difference(found[-1], None) if found else [""] * 4
                rows.append(["", f"  by {grader}", _percent(second["avg_at_k"]), _interval(second), *change, "", ""])
    return rows


def _coverage_rows(compared: SideBySide, name: str, title: str) -> list[list[str]]:
    """pass@k at the largest k; none where there is one sample."""
    rows: list[list[str]] = []
    for model in compared.models:
        curve, made = compared.curves.get((model, name), {}), compared.comparisons.get((model, name))
        k = max(curve, default=1)
        if k > 1:
            found = _difference(made.comparison.pass_at_k[k], made.pass_p_holm) if made else [""] * 4
            head = "" if rows else f"{title} pass@{k}"
            rows.append([head, model, *_score(curve[k]), *found, "", str(curve[k].questions)])
    return rows


def _score(score: Score) -> list[str]:
    return [_percent(score.value), f"{_percent(score.low)} to {_percent(score.high)}"]


def _mean_difference(made: AdjustedComparison | None) -> list[str]:
    if made is None:
        return [""] * 5
    flips = made.comparison.flips
    won = sum(flip.second > flip.first for flip in flips)
    return [*_difference(made.comparison.difference, made.p_holm), f"{won}/{len(flips) - won}"]


def _difference(difference: PairedDifference, p_holm: float | None) -> list[str]:
    return [
        f"{100 * difference.value:+.1f}",
        f"{100 * difference.low:+.1f} to {100 * difference.high:+.1f}",
        f"{difference.p_value:.4f}",
        "" if p_holm is None else f"{p_holm:.4f}",
    ]


def _percent(value: float) -> str:
    return f"{100 * value:.1f}"


def _interval(found: Mapping[str, Any]) -> str:
    return f"{_percent(found['low'])} to {_percent(found['high'])}"

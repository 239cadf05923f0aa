"""Results as tables, models as rows and benchmarks as columns, and each model's paired difference from the first.

Many comparisons find differences by chance: p-values are also given adjusted by Holm's method, those of avg@k over all
comparisons of the table, and those of pass@k, at the largest k of each benchmark, over all of theirs.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Column, Table

from exgrpo_cli.base import errors, output, statistics
from exgrpo_cli.evaluation.benchmarks import averages_over, in_suite_order, title_of
from exgrpo_cli.evaluation.results import MAY_DIFFER_IN_COMPARISON, ResultsFolder, differences
from exgrpo_cli.evaluation.sampling import BOOTSTRAP_SEED, Evaluation

SCORE_HEADS = ("score", "95 %", "shows from", "pass@k", "95 %", "tokens", "cut off", "questions")
LEVEL = 0.05
MARK = "†"
AVERAGE = "Avg."

Figures = Mapping[str, Any]
"""Figures of a model on a benchmark, as `results.json` holds them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ResultTable:
    """Results of an evaluation or a comparison."""

    titles: Mapping[str, str]
    """Benchmark to its column head, in the order of the columns."""
    models: Mapping[str, Mapping[str, Figures]]
    """Model to benchmark to its figures; the first model is the one that others are compared with."""
    comparisons: Mapping[tuple[str, str], Mapping[str, Any]] = field(default_factory=dict)
    """Paired difference from the first model by model and benchmark, as `comparison.json` holds it."""

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
                seconds = {g: average(graded, members) for g, graded in by_second_grader(results).items()}
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
            f"{MARK} differs from {output.in_markdown(next(iter(self.models)))}: p < {LEVEL}, paired sign-flip test by "
            f"question, Holm-adjusted over {len(self.comparisons)} comparisons."
        )

    def to_json(self) -> dict[str, Any]:
        """Scores, pass@k, second graders and comparisons by benchmark, and the averages by model."""
        benchmarks = {}
        for name in self.titles:
            found = {model: results[name] for model, results in self.models.items() if name in results}
            benchmarks[name] = {
                "scores": {model: score_json(figures) for model, figures in found.items()},
                "pass_at_k": {model: figures["pass_at_k"] for model, figures in found.items()},
                "second_graders": {model: figures["second_graders"] for model, figures in found.items()},
                "comparisons": [self.comparisons[model, name] for model in found if (model, name) in self.comparisons],
            }
        averages = {model: means for model in self.models if (means := self.averages(model))}
        return {"models": list(self.models), "benchmarks": benchmarks, "averages": averages}


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


def score_json(figures: Figures) -> dict[str, Any]:
    """The figures' avg@k with everything that a `Score` has."""
    return _score(figures) | {"samples": figures["k"], "questions": figures["questions"]}


def _score(figures: Figures) -> dict[str, float]:
    return {"value": figures["avg_at_k"], "low": figures["low"], "high": figures["high"]}


def _mean(scores: Sequence[Mapping[str, float]]) -> dict[str, float]:
    mean = statistics.mean_of_scores([(score["value"], score["low"], score["high"]) for score in scores])
    return dict(zip(("value", "low", "high"), mean, strict=True))


def markdown(table: ResultTable) -> str:
    """Head, rule, and for each model and its second graders shares (three decimals) and their intervals."""
    titles = table.titles
    columns: list[tuple[str, tuple[str, ...]]] = [(title, (name,)) for name, title in titles.items()]
    if groups := averages_over(titles).values():
        # An average closes the group of its benchmarks.
        closed = [[*((titles[name], (name,)) for name in members), (AVERAGE, members)] for members in groups]
        columns = [column for group in closed for column in group]
    lines = [["Model", *(output.in_markdown(head) for head, _ in columns)], ["---", *("---:" for _ in columns)]]
    for model, results in table.models.items():
        made = {name: found["p_holm"] for (other, name), found in table.comparisons.items() if other == model}
        differs = [(name,) for name, p_holm in made.items() if p_holm < LEVEL]
        rows = {model: results}
        rows |= {f"{model}, by {grader}": seconds for grader, seconds in by_second_grader(results).items()}
        for label, figures in rows.items():
            scores = [average(figures, members) for _, members in columns]
            values = [f"{score['value']:.3f}" if score else "-" for score in scores]
            for place, (head, members) in enumerate(columns):
                if head == AVERAGE and scores[place]:
                    values[place] = f"**{values[place]}**"
                elif figures is results and members in differs:
                    values[place] += MARK
            lines.append([output.in_markdown(label), *values])
            lines.append(["95 % interval", *(_interval(score) if score else "" for score in scores)])
    text = "".join("| " + " | ".join(line) + " |\n" for line in lines)
    return f"{text}\n{table.footnote}\n" if table.footnote else text


def score_table(table: ResultTable) -> Table:
    """Scores of one model: a row per benchmark with what a reader needs to judge the score, then the averages."""
    ((model, results),) = table.models.items()
    heads = (Column(head, justify="right") for head in SCORE_HEADS)
    shown = Table("benchmark", *heads, title=model, title_justify="left", box=None, padding=(0, 2, 0, 0))
    for name, result in results.items():
        k = result["k"]
        coverage = _scored(result["pass_at_k"][str(k)]) if k > 1 else ["", ""]
        least = f"±{result['smallest_detectable_difference']:.3f}"
        rest = [f"{result['mean_tokens']:.0f}", f"{result['share_clipped']:.3f}", str(result["questions"])]
        measured = f"{table.titles[name]} {measure(result)}{_sampled(result)}"
        shown.add_row(measured, *_scored(_score(result)), least, *coverage, *rest)
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


def _sampled(result: Figures) -> str:
    """Temperature beside the name of the score: one model has another score at another."""
    sampling = result.get("protocol", {}).get("sampling", {})
    return f", T {sampling['temperature']:g}" if "temperature" in sampling else ""


def _scored(score: Mapping[str, float]) -> list[str]:
    return [f"{score['value']:.3f}", _interval(score)]


def _interval(score: Mapping[str, float]) -> str:
    return f"{score['low']:.3f} to {score['high']:.3f}"


def compare(paths: Sequence[Path]) -> ResultTable:
    """Read finished results and compare every model with the first on the benchmarks they share.

    Raises InputError for fewer than two models, where none shares a benchmark with the first, for unfinished results,
    and naming every difference of protocols that makes two scores of one benchmark incomparable.
    """
    models = models_in(paths)
    first, *others = models
    if not others:
        raise errors.InputError(f"there are results of {first} alone: name those of a second model to compare.")
    if not any(models[first].keys() & models[other].keys() for other in others):
        theirs = ", ".join(dict.fromkeys(name for other in others for name in models[other]))
        own = ", ".join(models[first])
        raise errors.InputError(f"{first} ({own}) shares no benchmark with the other models ({theirs}).")
    names = in_suite_order(dict.fromkeys(name for folders in models.values() for name in folders))
    for name in names:
        one, *rest = (folders[name] for folders in models.values() if name in folders)
        for other in rest:
            if unlike := differences(one.stamp, other.stamp, may_differ=MAY_DIFFER_IN_COMPARISON):
                reason = f"their protocols differ: {'; '.join(unlike)}. Evaluate one of them again as the other was"
                raise errors.InputError(f"{one.path} and {other.path} cannot be compared, {reason}.")
    results: dict[str, dict[str, Any]] = {model: {} for model in models}
    made: dict[tuple[str, str], dict[str, Any]] = {}
    for name in names:
        baseline: Evaluation | None = None
        for model, folder in ((model, folders[name]) for model, folders in models.items() if name in folders):
            # Samples are read here and dropped again: no more than two results are in memory.
            evaluation = folder.evaluation()
            results[model][name] = evaluation.figures() | {"second_graders": folder.second_graders()}
            if model == first:
                baseline = evaluation
            elif baseline is not None:
                notes = differences(models[first][name].stamp, folder.stamp, may_differ=("environment.", "model."))
                made[model, name] = {
                    "benchmark": name,
                    "first": first,
                    "second": model,
                    "scores": [score_json(results[each][name]) for each in (first, model)],
                    **_compared(baseline, evaluation),
                    "notes": notes,
                }
    _adjust(list(made.values()))
    return ResultTable(titles={name: title_of(name) for name in names}, models=results, comparisons=made)


def _compared(one: Evaluation, other: Evaluation) -> dict[str, Any]:
    """The other less the one as JSON, paired by question: in avg@k, in pass@k, and the questions that flipped.

    A question flips where one of the two solves it more often than not and the other does not; the largest changes
    stand first.
    """
    counts = {record.question.id: record.num_correct for record in other.records}
    correct = (one.correct, np.array([counts[record.question.id] for record in one.records], dtype=np.int64))

    def difference(k: int) -> dict[str, float]:
        mine, theirs = (statistics.pass_at_k_by_question(each, one.samples, k) for each in correct)
        found = statistics.compare_paired(mine, theirs, np.random.default_rng(BOOTSTRAP_SEED))
        return {"difference": found.value, "low": found.low, "high": found.high, "p_value": found.p_value}

    first, second = ((each / one.samples).tolist() for each in correct)
    flips = [
        {"question_id": question.id, "question": question.prompt[-1].content, "first": before, "second": after}
        for question, before, after in zip([record.question for record in one.records], first, second, strict=True)
        if (before - 0.5) * (after - 0.5) < 0
    ]
    return {
        **difference(1),
        "questions": len(one.records),
        "pass_at_k": {str(k): difference(k) for k in statistics.pass_at_ks(one.samples)[1:]},
        "flips": sorted(flips, key=lambda flip: -abs(flip["second"] - flip["first"])),
    }


def _adjust(comparisons: Sequence[dict[str, Any]]) -> None:
    """Add p-values adjusted for all comparisons; `pass_p_holm` is that of pass@k at the largest k, None at k = 1."""
    for made, p_holm in zip(comparisons, statistics.holm([made["p_value"] for made in comparisons]), strict=True):
        made |= {"p_holm": p_holm, "pass_p_holm": None}
    several = [made for made in comparisons if made["pass_at_k"]]
    at_most = [list(made["pass_at_k"].values())[-1]["p_value"] for made in several]
    for made, p_holm in zip(several, statistics.holm(at_most), strict=True):
        made["pass_p_holm"] = p_holm


def models_in(paths: Sequence[Path]) -> dict[str, dict[str, ResultsFolder]]:
    """The models whose results lie in `paths`, by label in the order in which they come up: benchmark to its folder.

    A path is a benchmark's results folder or a folder of several; the folder with their common table, which a shell
    pattern names too, adds nothing. Results of one model on different benchmarks belong together, wherever they are; a
    second result of the same model on the same benchmark (another seed or engine, say) counts as another model. Models
    of one name get the name of their folder behind it, those of one folder a number. Raises InputError where nothing
    is found.
    """
    found: dict[Path, tuple[Path, ResultsFolder]] = {}
    for path in paths:
        for result in results_in(path):
            found.setdefault(result.path.resolve(), (path, result))
    models: list[tuple[str, dict[str, ResultsFolder]]] = []
    labels, behind = [], []
    for source, result in found.values():
        stamp, benchmark = result.stamp, result.benchmark
        # A server's weights are unknown, so its address stands for them.
        where = stamp["model"].get("path") if stamp.get("engine", {}).get("name") == "endpoint" else None
        key = json.dumps([stamp["model"]["name"], stamp["model"].get("hash"), where])
        folders = next((each for known, each in models if known == key and benchmark not in each), None)
        if folders is None:
            folders = {}
            models.append((key, folders))
            labels.append(str(stamp["model"]["name"]))
            behind.append(f"({source.name})")
        folders[benchmark] = result
    for more in (behind, [f"[{number}]" for number in range(1, len(models) + 1)]):
        labels = [f"{name} {each}" if labels.count(name) > 1 else name for name, each in zip(labels, more, strict=True)]
    return {label: folders for label, (_, folders) in zip(labels, models, strict=True)}


def results_in(path: Path) -> list[ResultsFolder]:
    """Results of a benchmark's folder or of all folders in a folder; none of the folder with the table of several.

    Raises InputError where nothing of an evaluation is there.
    """
    if not path.is_dir():
        raise errors.InputError(f"{path} is no folder: name results folders, as `exgrpo evaluate` writes them.")
    places = [path] if (path / "protocol.json").is_file() else sorted(path.iterdir())
    found = [ResultsFolder(each) for each in places if (each / "protocol.json").is_file()]
    if not found and not (path / "table.md").is_file():
        raise errors.InputError(f"{path} holds no results: neither it nor a folder in it has a protocol.json.")
    return found

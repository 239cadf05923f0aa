"""Several models on several benchmarks: every score, and each model's paired difference from the first.

Asking many questions at once finds differences by chance: p-values are also given adjusted by Holm's method, those of
avg@k over all comparisons of the table, and those of pass@k, at the largest k of each benchmark, over all of theirs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from exgrpo_cli.base.errors import InputError
from exgrpo_cli.base.statistics import Score, holm
from exgrpo_cli.evaluation.benchmarks.presets import averages_over, benchmark_title, in_suite_order
from exgrpo_cli.evaluation.compare.comparison import Comparison, compare_loaded, unlike_protocols
from exgrpo_cli.evaluation.compare.paper_table import Column, Rows, averages_of, by_second_grader, table_columns
from exgrpo_cli.evaluation.results.metrics import BOOTSTRAP_SEED
from exgrpo_cli.evaluation.results.records import Evaluation
from exgrpo_cli.evaluation.results.stamp import MAY_DIFFER_IN_COMPARISON, differences
from exgrpo_cli.evaluation.results.stored import ModelResults, models_in

LEVEL = 0.05
MARK = "†"


@dataclass(frozen=True, kw_only=True, slots=True)
class AdjustedComparison:
    """A model against the first one on one benchmark."""

    comparison: Comparison
    p_holm: float
    """p-value adjusted for all comparisons made together."""
    pass_p_holm: float | None
    """The same of pass@k at the largest k; None where k is 1."""

    def to_json(self) -> dict[str, Any]:
        """The comparison with its adjusted p-values."""
        return {**self.comparison.to_json(), "p_holm": self.p_holm, "pass_p_holm": self.pass_p_holm}


@dataclass(frozen=True, kw_only=True, slots=True)
class SideBySide:
    """Models as rows, benchmarks as columns."""

    models: tuple[str, ...]
    """The first is the one the others are compared with."""
    titles: Mapping[str, str]
    """Benchmark to its column head, in the order of the columns."""
    scores: Mapping[tuple[str, str], Score]
    """By model and benchmark; absent where a model was not evaluated."""
    curves: Mapping[tuple[str, str], Mapping[int, Score]]
    """pass@k by k, for the same models and benchmarks."""
    second_graders: Mapping[tuple[str, str], Mapping[str, Any]]
    """Second grader to its score, for the same models and benchmarks."""
    comparisons: Mapping[tuple[str, str], AdjustedComparison]
    """By model and benchmark, where both it and the first model were evaluated."""

    @property
    def averages(self) -> Mapping[str, tuple[str, ...]]:
        """Over the benchmarks that were evaluated, by name of the set."""
        return averages_over(self.titles)

    @property
    def footnote(self) -> str:
        """What the mark in the tables says."""
        return (
            f"{MARK} differs from {self.models[0]}: p < {LEVEL}, paired sign-flip test by question, Holm-adjusted over "
            f"{len(self.comparisons)} comparisons."
        )

    @property
    def notes(self) -> list[str]:
        """Differences of the evaluations that do not forbid a comparison, each once per model."""
        found = [f"{model}: {note}" for (model, _), made in self.comparisons.items() for note in made.comparison.notes]
        return list(dict.fromkeys(found))

    def rows(self) -> Rows:
        """For the tables in the layout of the paper."""
        rows = []
        for model in self.models:
            rows.append((model, self._columns(model)))
            for grader, seconds in by_second_grader(self._results(model)).items():
                rows.append((f"{model}, by {grader}", table_columns(seconds, self.titles, self.averages)))
        return rows

    def _columns(self, model: str) -> list[Column]:
        columns = table_columns(self._results(model), self.titles, self.averages)
        different = {
            name for (other, name), found in self.comparisons.items() if other == model and found.p_holm < LEVEL
        }
        return [replace(column, mark=MARK) if column.benchmark in different else column for column in columns]

    def _results(self, model: str) -> dict[str, dict[str, Any]]:
        own = {name: self.scores[model, name] for name in self.titles if (model, name) in self.scores}
        return {
            name: {
                "avg_at_k": score.value,
                "low": score.low,
                "high": score.high,
                "pass_at_k": {str(k): asdict(at_k) for k, at_k in self.curves[model, name].items()},
                "second_graders": self.second_graders[model, name],
            }
            for name, score in own.items()
        }

    def to_json(self) -> dict[str, Any]:
        """Scores, pass@k, second graders and comparisons by benchmark, and the averages by model."""
        benchmarks = {
            name: {
                "scores": {m: asdict(self.scores[m, name]) for m in self.models if (m, name) in self.scores},
                "pass_at_k": {
                    m: {str(k): asdict(score) for k, score in self.curves[m, name].items()}
                    for m in self.models
                    if (m, name) in self.curves
                },
                "second_graders": {
                    m: dict(self.second_graders[m, name]) for m in self.models if (m, name) in self.second_graders
                },
                "comparisons": [
                    self.comparisons[m, name].to_json() for m in self.models if (m, name) in self.comparisons
                ],
            }
            for name in self.titles
        }
        return {"models": list(self.models), "benchmarks": benchmarks, "averages": self.average_scores()}

    def average_scores(self) -> dict[str, dict[str, dict[str, Any]]]:
        """What `averages_of` says of every model that has an average."""
        values: dict[str, dict[str, dict[str, Any]]] = {}
        for model in self.models:
            values[model] = averages_of(self._results(model), self.averages)
        return {model: found for model, found in values.items() if found}


def side_by_side(paths: Sequence[Path]) -> SideBySide:
    """Read finished results and compare every model with the first on the benchmarks they share.

    Raises InputError for fewer than two models, where none shares a benchmark with the first, for unfinished results,
    and naming every difference of protocols that makes two scores of one benchmark incomparable.
    """
    models = models_in(paths)
    if len(models) < 2:
        raise InputError(f"there are results of {models[0].label} alone: name those of a second model to compare.")
    first, others = models[0], models[1:]
    if not any(first.by_benchmark.keys() & other.by_benchmark.keys() for other in others):
        raise InputError(
            f"{first.label} ({', '.join(first.by_benchmark)}) shares no benchmark with the other models "
            f"({', '.join(dict.fromkeys(name for other in others for name in other.by_benchmark))})."
        )
    names = in_suite_order(dict.fromkeys(name for model in models for name in model.by_benchmark))
    for name in names:
        _require_like_protocols([model for model in models if name in model.by_benchmark], name)
    scores: dict[tuple[str, str], Score] = {}
    curves: dict[tuple[str, str], Mapping[int, Score]] = {}
    second_graders: dict[tuple[str, str], Mapping[str, Any]] = {}
    comparisons: dict[tuple[str, str], Comparison] = {}
    for name in names:
        _compare_on(name, models, scores, curves, second_graders, comparisons)
    return SideBySide(
        models=tuple(model.label for model in models),
        titles={name: benchmark_title(name) for name in names},
        scores=scores,
        curves=curves,
        second_graders=second_graders,
        comparisons=_adjusted(comparisons),
    )


def _adjusted(comparisons: Mapping[tuple[str, str], Comparison]) -> dict[tuple[str, str], AdjustedComparison]:
    means = holm([comparison.difference.p_value for comparison in comparisons.values()])
    at_most = {key: max(made.pass_at_k) for key, made in comparisons.items() if made.pass_at_k}
    coverage = holm([comparisons[key].pass_at_k[k].p_value for key, k in at_most.items()])
    by_key = dict(zip(at_most, coverage, strict=True))
    return {
        key: AdjustedComparison(comparison=comparison, p_holm=p, pass_p_holm=by_key.get(key))
        for (key, comparison), p in zip(comparisons.items(), means, strict=True)
    }


def _compare_on(
    name: str,
    models: Sequence[ModelResults],
    scores: dict[tuple[str, str], Score],
    curves: dict[tuple[str, str], Mapping[int, Score]],
    second_graders: dict[tuple[str, str], Mapping[str, Any]],
    comparisons: dict[tuple[str, str], Comparison],
) -> None:
    """Add one benchmark's scores and differences; its samples are read here and let go again."""
    first, baseline = models[0], None
    for model in models:
        result = model.by_benchmark.get(name)
        if result is None:
            continue
        loaded = result.load()
        evaluation = Evaluation(records=tuple(loaded.records.values()), samples=loaded.stamp["sampling"]["samples"])
        scores[model.label, name] = evaluation.score(BOOTSTRAP_SEED)
        curves[model.label, name] = evaluation.pass_at_k(BOOTSTRAP_SEED)
        second_graders[model.label, name] = loaded.second_graders
        if model is first:
            baseline = loaded
        elif baseline is not None:
            made = compare_loaded(baseline, loaded)
            comparisons[model.label, name] = replace(made, first=first.label, second=model.label)


def _require_like_protocols(models: Sequence[ModelResults], name: str) -> None:
    one = models[0].by_benchmark[name]
    for model in models[1:]:
        other = model.by_benchmark[name]
        unlike = differences(one.stamp, other.stamp, may_differ=MAY_DIFFER_IN_COMPARISON)
        if unlike:
            raise unlike_protocols(one.path, other.path, unlike)

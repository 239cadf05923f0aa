"""Stored results compared: several models on several benchmarks, each model's paired difference from the first.

Many comparisons find differences by chance: p-values are also given adjusted by Holm's method, those of avg@k over all
comparisons of the table, and those of pass@k, at the largest k of each benchmark, over all of theirs.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from exgrpo_cli.base.errors import InputError
from exgrpo_cli.base.files import read_json_lines
from exgrpo_cli.base.statistics import compare_paired, holm, pass_at_k_by_question, pass_at_ks
from exgrpo_cli.base.types import Verdict
from exgrpo_cli.evaluation.benchmarks import benchmark_title, in_suite_order
from exgrpo_cli.evaluation.folder import ResultsFolder
from exgrpo_cli.evaluation.records import BOOTSTRAP_SEED, Evaluation
from exgrpo_cli.evaluation.scoring import DISAGREEMENTS_FILE
from exgrpo_cli.evaluation.stamp import MAY_DIFFER_IN_COMPARISON, Stamp, differences
from exgrpo_cli.evaluation.tables import Flip, ResultTable


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedResult:
    """One benchmark's results, in memory."""

    stamp: Stamp
    evaluation: Evaluation
    second_graders: Mapping[str, Mapping[str, Any]]
    """Second grader to its score, as `results.json` holds it."""
    correct: Mapping[str, Mapping[str, int]]
    """Grader, the protocol's first, to the correct samples of each question by its id."""

    @classmethod
    def load(cls, folder: ResultsFolder) -> "LoadedResult":
        """Whatever a comparison needs of a folder; raises InputError while questions are missing."""
        stamp, evaluation = folder.stamp, folder.evaluation()
        try:
            second_graders = json.loads((folder.path / "results.json").read_text(encoding="utf-8"))["second_graders"]
            apart = list(read_json_lines(folder.path / DISAGREEMENTS_FILE))
        except (OSError, ValueError, KeyError):
            # Graded by one grader alone, or its samples are whole and its figures were not written to the end.
            second_graders, apart = {}, []
        own = {record.question.id: record.num_correct for record in evaluation.records}
        by_second = {grader: dict(own) for grader in second_graders}
        for row in apart:
            for grader in by_second.keys() & row["verdicts"].keys():
                by_second[grader][row["question_id"]] += 1 if row["verdicts"][grader] == Verdict.CORRECT else -1
        correct = {stamp["grader"]["name"]: own, **by_second}
        return cls(stamp=stamp, evaluation=evaluation, second_graders=second_graders, correct=correct)

    def figures(self) -> dict[str, Any]:
        """Figures for the table; points of pass@k with everything that a `Score` has."""
        curve = {k: asdict(score) for k, score in self.evaluation.curve().items()}
        return {**self.evaluation.figures(), "pass_at_k": curve, "second_graders": self.second_graders}

    def difference_to(self, other: "LoadedResult", grader: str, k: int = 1) -> dict[str, Any]:
        """The other minus this in pass@k by one grader, paired by question; k = 1 is the difference in avg@k."""
        counts = [[result.correct[grader][name] for name in self.correct[grader]] for result in (self, other)]
        one, two = (
            pass_at_k_by_question(np.array(each, dtype=np.int64), self.evaluation.samples, k) for each in counts
        )
        found = compare_paired(one, two, np.random.default_rng(BOOTSTRAP_SEED))
        return {"difference": found.value, "low": found.low, "high": found.high, "p_value": found.p_value}


@dataclass(kw_only=True, slots=True)
class ModelResults:
    """The stored results of one model."""

    label: str
    """Its name, with the folder's behind it where two models are called the same."""
    source: Path
    """The first of its folders as the user named it."""
    by_benchmark: dict[str, ResultsFolder] = field(default_factory=dict)


def comparison_json(table: ResultTable) -> dict[str, Any]:
    """Scores, pass@k, second graders and comparisons by benchmark, and the averages by model."""
    benchmarks = {}
    for name in table.titles:
        own = {model: results[name] for model, results in table.models.items() if name in results}
        benchmarks[name] = {
            "scores": {model: score_json(found) for model, found in own.items()},
            "pass_at_k": {model: found["pass_at_k"] for model, found in own.items()},
            "second_graders": {model: found["second_graders"] for model, found in own.items()},
            "comparisons": [table.comparisons[model, name] for model in own if (model, name) in table.comparisons],
        }
    averages = {model: found for model in table.models if (found := table.averages(model))}
    return {"models": list(table.models), "benchmarks": benchmarks, "averages": averages}


def score_json(figures: Mapping[str, Any]) -> dict[str, Any]:
    """The figures' avg@k with everything that a `Score` has."""
    names = {"value": "avg_at_k", "low": "low", "high": "high", "samples": "k", "questions": "questions"}
    return {name: figures[key] for name, key in names.items()}


def compare(paths: Sequence[Path]) -> ResultTable:
    """Read finished results and compare every model with the first on the benchmarks they share.

    Raises InputError for fewer than two models, where none shares a benchmark with the first, for unfinished results,
    and naming every difference of protocols that makes two scores of one benchmark incomparable.
    """
    first, *others = models = models_in(paths)
    if not others:
        raise InputError(f"there are results of {first.label} alone: name those of a second model to compare.")
    if not any(first.by_benchmark.keys() & other.by_benchmark.keys() for other in others):
        theirs = dict.fromkeys(name for other in others for name in other.by_benchmark)
        raise InputError(
            f"{first.label} ({', '.join(first.by_benchmark)}) shares no benchmark with the other models "
            f"({', '.join(theirs)})."
        )
    names = in_suite_order(dict.fromkeys(name for model in models for name in model.by_benchmark))
    for name in names:
        _require_like_protocols([model.by_benchmark[name] for model in models if name in model.by_benchmark])
    results: dict[str, dict[str, Any]] = {model.label: {} for model in models}
    made: dict[tuple[str, str], dict[str, Any]] = {}
    flips: dict[tuple[str, str], list[Flip]] = {}
    for name in names:
        baseline = None
        for model in (model for model in models if name in model.by_benchmark):
            # Samples are read here and dropped again: no more than two results are in memory.
            loaded = LoadedResult.load(model.by_benchmark[name])
            results[model.label][name] = loaded.figures()
            if model is first:
                baseline = loaded
            elif baseline is not None:
                key = model.label, name
                flips[key] = _flips(baseline, loaded)
                scores = [score_json(results[label][name]) for label in (first.label, model.label)]
                named = {"benchmark": name, "first": first.label, "second": model.label, "scores": scores}
                made[key] = named | _compared(baseline, loaded, flips[key])
    _adjust(list(made.values()))
    titles = {name: benchmark_title(name) for name in names}
    return ResultTable(titles=titles, models=results, comparisons=made, flips=flips)


def _flips(one: LoadedResult, other: LoadedResult) -> list[Flip]:
    rates = {record.question.id: record.pass_rate for record in other.evaluation.records}
    flips = [
        Flip(asked.question.id, asked.question.prompt[-1].content, asked.pass_rate, rates[asked.question.id])
        for asked in one.evaluation.records
        if (asked.pass_rate - 0.5) * (rates[asked.question.id] - 0.5) < 0
    ]
    return sorted(flips, key=lambda flip: -abs(flip.second - flip.first))


def _compared(one: LoadedResult, other: LoadedResult, flips: Sequence[Flip]) -> dict[str, Any]:
    """Other minus one as JSON; questions that flipped by id."""
    own, *seconds = one.correct
    samples, questions = one.evaluation.samples, len(one.correct[own])
    by_second = {}
    for grader in (grader for grader in seconds if grader in other.correct):
        scores = [sum(each.correct[grader].values()) / questions / samples for each in (one, other)]
        by_second[grader] = {"scores": scores, **one.difference_to(other, grader)}
    return {
        **one.difference_to(other, own),
        "questions": questions,
        "pass_at_k": {str(k): one.difference_to(other, own, k) for k in pass_at_ks(samples)[1:]},
        "second_graders": by_second,
        "gained": [flip.question_id for flip in flips if flip.second > flip.first],
        "lost": [flip.question_id for flip in flips if flip.second < flip.first],
        "notes": differences(one.stamp, other.stamp, may_differ=("environment.", "model.")),
    }


def _adjust(comparisons: Sequence[dict[str, Any]]) -> None:
    """Add p-values adjusted for all comparisons; `pass_p_holm` is that of pass@k at the largest k, None at k = 1."""
    for made, p_holm in zip(comparisons, holm([made["p_value"] for made in comparisons]), strict=True):
        made |= {"p_holm": p_holm, "pass_p_holm": None}
    several = [made for made in comparisons if made["pass_at_k"]]
    at_most = [list(made["pass_at_k"].values())[-1]["p_value"] for made in several]
    for made, p_holm in zip(several, holm(at_most), strict=True):
        made["pass_p_holm"] = p_holm


def _require_like_protocols(results: Sequence[ResultsFolder]) -> None:
    one, *others = results
    for other in others:
        unlike = differences(one.stamp, other.stamp, may_differ=MAY_DIFFER_IN_COMPARISON)
        if unlike:
            raise InputError(
                f"{one.path} and {other.path} cannot be compared, their protocols differ: {'; '.join(unlike)}. "
                "Evaluate one of them again as the other was."
            )


def models_in(paths: Sequence[Path]) -> list[ModelResults]:
    """The models whose results lie in `paths`, in the order in which they come up.

    A path is a benchmark's results folder or a folder of several; the folder with their common table, which a shell
    pattern names too, adds nothing. Results of one model on different benchmarks belong together, wherever they are; a
    second result of the same model on the same benchmark (another seed or engine, say) counts as another model. Raises
    InputError where nothing is found.
    """
    models: list[tuple[str, ModelResults]] = []
    found: dict[Path, tuple[Path, ResultsFolder]] = {}
    for path in paths:
        for result in results_in(path):
            found.setdefault(result.path.resolve(), (path, result))
    for source, result in found.values():
        stamp, benchmark = result.stamp, result.benchmark
        # A server's weights are unknown, so its address stands for them.
        where = stamp["model"].get("path") if stamp["engine"]["name"] == "endpoint" else None
        key = json.dumps([stamp["model"]["name"], stamp["model"]["hash"], where])
        own = (model for known, model in models if known == key and benchmark not in model.by_benchmark)
        model = next(own, None)
        if model is None:
            model = ModelResults(label=str(stamp["model"]["name"]), source=source)
            models.append((key, model))
        model.by_benchmark[benchmark] = result
    return _told_apart([model for _, model in models])


def _told_apart(models: list[ModelResults]) -> list[ModelResults]:
    """Models of one name get the name of their folder behind it, those of one folder a number."""
    for behind in (lambda model, _: f"({model.source.name})", lambda _, number: f"[{number}]"):
        labels = [model.label for model in models]
        for number, model in enumerate(models, start=1):
            if labels.count(model.label) > 1:
                model.label = f"{model.label} {behind(model, number)}"
    return models


def results_in(path: Path) -> list[ResultsFolder]:
    """Results of a benchmark's folder or of all folders in a folder; none of the folder with the table of several.

    Raises InputError where nothing of an evaluation is there.
    """
    if not path.is_dir():
        raise InputError(f"{path} is no folder: name results folders, as `exgrpo evaluate` writes them.")
    found = _results_among([path]) or _results_among(path.iterdir())
    if not found and not (path / "table.md").is_file():
        raise InputError(f"{path} holds no results: neither it nor a folder in it has a protocol.json.")
    return found


def _results_among(paths: Iterable[Path]) -> list[ResultsFolder]:
    return [ResultsFolder.read(path) for path in sorted(paths) if (path / "protocol.json").is_file()]

"""Stored results: from the folders that a user names to each model's results, one per benchmark."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from exgrpo_cli.base.errors import InputError
from exgrpo_cli.base.files import read_json_lines
from exgrpo_cli.base.types import Verdict
from exgrpo_cli.evaluation.results.folder import ResultsFolder
from exgrpo_cli.evaluation.results.records import QuestionRecord
from exgrpo_cli.evaluation.results.regrade import DISAGREEMENTS_FILE
from exgrpo_cli.evaluation.results.stamp import Stamp, differences


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredResult:
    """One benchmark's results folder."""

    path: Path
    stamp: Stamp

    @property
    def benchmark(self) -> str:
        """Name of the benchmark."""
        return str(self.stamp["benchmark"]["name"])

    def load(self) -> "LoadedResult":
        """Everything that a comparison needs; raises InputError while questions are missing."""
        folder = ResultsFolder.read(self.path)
        asked, records = folder.asked(), folder.records()
        if len(records) < len(asked):
            raise InputError(
                f"{self.path} holds {len(records)} of {len(asked)} questions: finish it before it is compared."
            )
        ordered = {item.question.id: records[item.question.id] for item in asked}
        try:
            found = json.loads((self.path / "results.json").read_text(encoding="utf-8")).get("second_graders", {})
            apart = list(read_json_lines(self.path / DISAGREEMENTS_FILE)) if found else []
        except (OSError, ValueError):
            # Its samples are whole, its figures were not written to the end.
            found, apart = {}, []
        return LoadedResult(
            stamp=self.stamp,
            records=ordered,
            second_graders=found,
            by_second_grader=self._by_second_grader(ordered, found, apart),
        )

    @staticmethod
    def _by_second_grader(
        records: Mapping[str, QuestionRecord], found: Iterable[str], apart: Sequence[Mapping[str, Any]]
    ) -> dict[str, dict[str, int]]:
        by_grader = {}
        for grader in found:
            correct = {question_id: record.num_correct for question_id, record in records.items()}
            for sample in apart:
                if grader in sample["verdicts"]:
                    correct[sample["question_id"]] += 1 if sample["verdicts"][grader] == Verdict.CORRECT else -1
            by_grader[grader] = correct
        return by_grader


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedResult:
    """One benchmark's results, in memory."""

    stamp: Stamp
    records: dict[str, QuestionRecord]
    """All questions by id, in the order they were asked."""
    second_graders: dict[str, dict[str, Any]]
    """Second grader to its score, as `results.json` holds it; empty where there is none."""
    by_second_grader: dict[str, dict[str, int]]
    """Second grader to the correct samples of each question, by id; empty where there is none."""


@dataclass(kw_only=True, slots=True)
class ModelResults:
    """What is stored of one model."""

    label: str
    """Its name, with the folder's behind it where two models are called the same."""
    source: Path
    """The first of its folders as the user named it."""
    by_benchmark: dict[str, StoredResult] = field(default_factory=dict)


def stored_result(path: Path) -> StoredResult:
    """The results folder of one benchmark. Raises InputError where it is none."""
    return StoredResult(path=path, stamp=ResultsFolder.read(path).stamp)


def models_in(paths: Sequence[Path]) -> list[ModelResults]:
    """The models whose results lie in `paths`, in the order in which they come up.

    A path is a benchmark's results folder, a folder of several, or the folder with their common table. Results of one
    model on different benchmarks belong together, wherever they are; a second result of the same model on the same
    benchmark (another seed or engine, say) counts as another model. Raises InputError where nothing is found.
    """
    models: list[tuple[str, ModelResults]] = []
    seen = set()
    for path in paths:
        for result in results_in(path):
            if result.path.resolve() in seen:
                continue
            seen.add(result.path.resolve())
            key = _identity(result.stamp)
            own = (model for known, model in models if known == key and result.benchmark not in model.by_benchmark)
            model = next(own, None)
            if model is None:
                model = ModelResults(label=str(result.stamp["model"]["name"]), source=path)
                models.append((key, model))
            model.by_benchmark[result.benchmark] = result
    found = [model for _, model in models]
    _tell_apart(found)
    return found


def results_in(path: Path) -> list[StoredResult]:
    """Results of a benchmark's folder, of all folders in a folder, or of those that a common table counts."""
    if not path.is_dir():
        raise InputError(f"{path} is no folder: name results folders, as `exgrpo evaluate` writes them.")
    if (path / "protocol.json").is_file():
        return [stored_result(path)]
    children = _results_among(path.iterdir())
    if not children and (path / "results.json").is_file():
        children = _of_common_table(path)
    if not children:
        raise InputError(f"{path} holds no results: neither it nor a folder in it has a protocol.json.")
    return children


def _of_common_table(path: Path) -> list[StoredResult]:
    """The folders whose figures a common `results.json` holds; they lie beside it."""
    try:
        entries = json.loads((path / "results.json").read_text(encoding="utf-8"))
        stamps = [entry["protocol"] for entry in entries.values() if isinstance(entry, dict) and "protocol" in entry]
    except (ValueError, AttributeError) as error:
        raise InputError(
            f"{path}/results.json is no table of results ({error}): name the folders beside it."
        ) from error
    beside = _results_among(path.parent.iterdir())
    return [_matching(path, stamp, beside) for stamp in stamps]


def _matching(path: Path, stamp: Stamp, beside: Sequence[StoredResult]) -> StoredResult:
    # Scoring again may have been done by a newer grader.
    may_differ = ("environment.", "grader.version")
    for result in beside:
        if not differences(stamp, result.stamp, may_differ=may_differ):
            return result
    raise InputError(f"{path} counts {stamp['benchmark']['name']}, which is no longer beside it: name the folders.")


def _results_among(paths: Iterable[Path]) -> list[StoredResult]:
    return [stored_result(path) for path in sorted(paths) if (path / "protocol.json").is_file()]


def _identity(stamp: Stamp) -> str:
    """Equal for results of one model; a server's weights are unknown, so its address stands for them."""
    model = stamp["model"]
    where = model.get("path") if stamp["engine"]["name"] == "endpoint" else None
    return json.dumps([model["name"], model["hash"], where])


def _tell_apart(models: Sequence[ModelResults]) -> None:
    """Models of one name get the name of their folder behind it."""
    names = [model.label for model in models]
    for model in models:
        if names.count(model.label) > 1:
            model.label = f"{model.label} ({model.source.name})"
    labels = [model.label for model in models]
    for number, model in enumerate(models, start=1):
        if labels.count(model.label) > 1:
            model.label = f"{model.label} [{number}]"

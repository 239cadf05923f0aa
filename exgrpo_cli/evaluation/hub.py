"""Questions of a benchmark on the Hugging Face hub, read from the very files its preset names."""

import csv
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from exgrpo_cli.data.questions import question_id
from exgrpo_cli.errors import InputError
from exgrpo_cli.evaluation.benchmarks import Benchmark, Source
from exgrpo_cli.evaluation.choices import choice_question, column
from exgrpo_cli.types import Message, Question


@dataclass(frozen=True, kw_only=True, slots=True)
class HubQuestions:
    """All rows of a benchmark, repeated ones included."""

    questions: tuple[Question, ...]
    options: Mapping[str, tuple[str, ...]]
    commit: str


def read_hub(benchmark: Benchmark) -> HubQuestions:
    """Download the benchmark's files, or take them from the local cache, and read their rows.

    Raises InputError where the hub cannot be reached and nothing is cached, where access is refused, where no file
    matches, and for a row without the preset's columns.
    """
    folder = _download(benchmark.source)
    files = sorted({path for pattern in benchmark.source.files for path in folder.glob(pattern)})
    if not files:
        raise InputError(
            f"{benchmark.source.dataset} at revision {benchmark.source.revision!r} has no file like "
            f"{', '.join(benchmark.source.files)}: give the questions as a file with --data."
        )
    return read_files(benchmark, files, commit=folder.name)


def read_files(benchmark: Benchmark, files: list[Path], *, commit: str) -> HubQuestions:
    """The rows of local copies of a benchmark's files."""
    questions: list[Question] = []
    options: dict[str, tuple[str, ...]] = {}
    for path in files:
        for number, row in enumerate(_rows(path), start=1):
            where = f"{benchmark.source.dataset}/{path.name}: row {number}"
            if benchmark.source.options:
                choice = choice_question(benchmark, row, where)
                options[choice.question.id] = choice.options
                questions.append(choice.question)
            else:
                questions.append(_question(benchmark.source, row, where))
    if not questions:
        raise InputError(f"{benchmark.source.dataset} has no rows in {', '.join(path.name for path in files)}.")
    return HubQuestions(questions=tuple(questions), options=options, commit=commit)


def _question(source: Source, row: Mapping[str, Any], where: str) -> Question:
    prompt = (Message(role="user", content=str(column(row, source.question, where)).strip()),)
    answer = _answer(column(row, source.answer, where))
    level = str(column(row, source.level, where)) if source.level else None
    return Question(id=question_id(prompt, answer), prompt=prompt, answer=answer, source=source.dataset, level=level)


def _answer(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value))
    # AMC's answers are floats in the source: 142.0 is the integer 142.
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value).strip()


def _rows(path: Path) -> Iterator[Mapping[str, Any]]:
    if path.suffix == ".parquet":
        import pyarrow.parquet as pq

        for batch in pq.ParquetFile(path).iter_batches():
            yield from batch.to_pylist()
    elif path.suffix == ".jsonl":
        with path.open(encoding="utf-8") as lines:
            yield from (json.loads(line) for line in lines if line.strip())
    else:
        with path.open(encoding="utf-8", newline="") as lines:
            yield from csv.DictReader(lines)


def _download(source: Source) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(
            snapshot_download(
                source.dataset, repo_type="dataset", revision=source.revision, allow_patterns=list(source.files)
            )
        )
    except LocalEntryNotFoundError as error:
        raise InputError(
            f"{source.dataset} is not in the local cache and the hub cannot be reached: go online, or give the "
            "questions as a file with --data."
        ) from error
    except HfHubHTTPError as error:
        raise InputError(
            f"the hub refused the data set {source.dataset!r} ({error.response.status_code}): accept its terms on the "
            "hub and set HF_TOKEN if it is gated, or give the questions as a file with --data."
        ) from error

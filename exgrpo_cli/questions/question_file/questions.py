"""The question file: one identity per question, one canonical parquet layout, read and written here alone.

The verl layout (`data_source`, `prompt`, `reward_model.ground_truth`, `extra_info`) is read wherever the canonical one
is. Rows are counted from 1 in messages. The content hash is over the canonical rows in their order, so that a file
keeps it through either layout and any compression.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from exgrpo_cli.base.errors import InputError
from exgrpo_cli.base.files import write_whole
from exgrpo_cli.base.types import Question
from exgrpo_cli.questions.question_file.identity import content_hash, question_id, same_content
from exgrpo_cli.questions.question_file.rows import SCHEMAS, FileLayout, check_types, layout_of, to_question, to_row

__all__ = [
    "MADE_BY_PREPARE",
    "FileLayout",
    "QuestionSet",
    "content_hash",
    "is_prepared",
    "is_question_file",
    "question_id",
    "read_metadata",
    "read_questions",
    "write_questions",
]

METADATA_KEY = b"exgrpo"
MADE_BY_PREPARE = "prepare"
# Rows decoded at once: a whole row group of long prompts need not fit in memory as Python objects.
_BATCH_ROWS = 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class QuestionSet:
    """The questions of one file."""

    questions: tuple[Question, ...]
    """In the order of the file."""
    metadata: dict[str, Any]
    """How the file was made; empty for a file `prepare` did not write."""
    content_hash: str
    """sha256 over the canonical rows in their order."""
    num_folded: int
    """Exact duplicates left out while reading."""


def read_questions(path: Path | str) -> QuestionSet:
    """Read a question file in the canonical or the verl layout; exact duplicates are folded.

    Raises InputError, naming the file and where it applies the row, field and value: no such file, not parquet, missing
    or mistyped columns, null or empty fields, no rows, one id with different content.
    """
    path = Path(path)
    kept: dict[str, Question] = {}
    first_row: dict[str, int] = {}
    num_rows = 0
    with _open(path) as file:
        schema = file.schema_arrow
        layout = layout_of(path, schema)
        check_types(path, schema, layout)
        for question in _iter_questions(path, file, layout):
            num_rows += 1
            earlier = kept.setdefault(question.id, question)
            row_of_earlier = first_row.setdefault(question.id, num_rows)
            if earlier is not question and not same_content(earlier, question):
                raise InputError(
                    f"{path}: rows {row_of_earlier} and {num_rows} have the id {question.id!r} but different content: "
                    f"an id names one question; give each its own."
                )
    if not kept:
        raise InputError(f"{path} has no questions: the file has the right columns but no rows.")
    questions = tuple(kept.values())
    return QuestionSet(
        questions=questions,
        metadata=_own_metadata(schema),
        content_hash=content_hash(questions),
        num_folded=num_rows - len(questions),
    )


def write_questions(
    path: Path, questions: Sequence[Question], metadata: Mapping[str, Any], layout: FileLayout = "canonical"
) -> None:
    """Write a question file under a temporary name, then rename it: `path` is whole or untouched.

    `metadata` is stored as JSON with the content hash added. Raises RunError where the file cannot be written.
    """
    own = {**metadata, "content_hash": content_hash(questions)}
    schema = SCHEMAS[layout].with_metadata({METADATA_KEY: json.dumps(own, ensure_ascii=False).encode()})

    def write(file: BinaryIO) -> None:
        with pq.ParquetWriter(file, schema) as writer:
            for start in range(0, len(questions), _BATCH_ROWS):
                rows = [to_row(index, questions[index], layout) for index in range(start, len(questions))[:_BATCH_ROWS]]
                writer.write_batch(pa.RecordBatch.from_pylist(rows, schema=schema))

    write_whole(path, write)


def _open(path: Path) -> pq.ParquetFile:
    if path.is_dir():
        raise InputError(f"{path} is a folder, not a question file: run `exgrpo prepare {path}` first.")
    try:
        return pq.ParquetFile(path)
    except FileNotFoundError:
        raise InputError(f"{path} does not exist: make it with `exgrpo prepare`, or correct the path.") from None
    except (pa.ArrowInvalid, OSError) as error:
        raise InputError(f"{path} cannot be read as parquet ({error}): make it with `exgrpo prepare`.") from error


def _own_metadata(schema: pa.Schema) -> dict[str, Any]:
    text = (schema.metadata or {}).get(METADATA_KEY)
    return json.loads(text) if text else {}


def read_metadata(path: Path) -> dict[str, Any]:
    """What `write_questions` stored in a file beside its rows; empty for any other file."""
    try:
        return _own_metadata(pq.read_schema(path))
    except (pa.ArrowInvalid, OSError):
        return {}


def is_prepared(metadata: Mapping[str, Any]) -> bool:
    """Whether a file of this metadata was made by `prepare`, and so audited."""
    return metadata.get("made_by") == MADE_BY_PREPARE


def is_question_file(path: Path) -> bool:
    """Whether `path` is a parquet file in the canonical or the verl layout, by its columns."""
    try:
        layout_of(path, pq.read_schema(path))
    except (pa.ArrowInvalid, OSError, InputError):
        return False
    return True


def _iter_questions(path: Path, file: pq.ParquetFile, layout: FileLayout) -> Iterator[Question]:
    wanted = ["id", "prompt", "answer", "source", "level", "metadata"]
    if layout == "verl":
        wanted = ["data_source", "prompt", "reward_model", "extra_info"]
    columns = [name for name in wanted if name in file.schema_arrow.names]
    row = 0
    for batch in file.iter_batches(batch_size=_BATCH_ROWS, columns=columns):
        for values in batch.to_pylist():
            row += 1
            yield to_question(values, layout, f"{path}: row {row}")

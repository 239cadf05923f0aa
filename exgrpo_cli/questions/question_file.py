"""The question file: what makes two questions the same, the canonical parquet layout and verl's, read and written.

The verl layout (`data_source`, `prompt`, `reward_model.ground_truth`, `extra_info`) is read wherever the canonical one
is. Rows are counted from 1 in messages. The content hash is over the canonical rows in their order, so that a file
keeps it through either layout and any compression.
"""

import hashlib
import json
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal, NamedTuple

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from exgrpo_cli.base import files, types
from exgrpo_cli.base.errors import InputError
from exgrpo_cli.questions.files import iter_parquet, parquet_schema

_Size = Annotated[int, msgspec.Meta(ge=-(10**15), le=10**15)]


_TABLES = {
    "countdown": files.type_of({"numbers": list[_Size], "target": _Size}),
    "gym": files.type_of({"entry": dict[str, Any]}),
    "sum": files.type_of({"terms": list[_Size], "modulus": _Size | None}),
}
"""Shape of the metadata of a question, by the verifier that they name or the check of its traces."""

FileLayout = Literal["canonical", "verl"]
METADATA_KEY = b"exgrpo"
MADE_BY_PREPARE = "prepare"
# Rows decoded at once: a whole row group of long prompts need not fit in memory as Python objects.
_BATCH_ROWS = 1024
_MESSAGES = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
_REQUIRED = ("id", "prompt", "answer", "source")
_SCHEMAS = {
    "canonical": pa.schema(
        [pa.field(name, _MESSAGES if name == "prompt" else pa.string(), nullable=False) for name in _REQUIRED]
        + [pa.field(name, pa.string()) for name in ("level", "metadata")]
    ),
    "verl": pa.schema(
        [
            ("data_source", pa.string()),
            ("prompt", _MESSAGES),
            ("ability", pa.string()),
            ("reward_model", pa.struct([("ground_truth", pa.string()), ("style", pa.string())])),
            ("extra_info", pa.struct([("index", pa.int64()), ("level", pa.string()), ("metadata", pa.string())])),
        ]
    ),
}
_COLUMNS = {
    "canonical": {name: name for name in (*_REQUIRED, "level", "metadata")},
    "verl": {
        "source": "data_source",
        "prompt": "prompt",
        "answer": "reward_model.ground_truth",
        "level": "extra_info.level",
        "metadata": "extra_info.metadata",
    },
}
"""Dotted column of each field of a question."""


def question_id(prompt: Sequence[types.Message], answer: str) -> str:
    """Hash of the last user message (NFKC, runs of white space as one blank) and the stripped answer.

    Raises InputError for a prompt without a user message.
    """
    asked = [message.content for message in prompt if message.role == "user"]
    if not asked:
        roles = [message.role for message in prompt]
        raise InputError(f"A prompt with the roles {roles} has no user message: a question needs one.")
    return hashlib.sha256(f"{normalised(asked[-1])}\x1f{answer.strip()}".encode()).hexdigest()[:16]


def question_text(question: types.Question) -> str:
    """The last user message."""
    return next(message.content for message in reversed(question.prompt) if message.role == "user")


def normalised(text: str) -> str:
    """NFKC, with every run of white space as one blank."""
    return " ".join(unicodedata.normalize("NFKC", text).split())


def content_hash(questions: Sequence[types.Question]) -> str:
    """sha256 over the rows (id, messages, answer, source, level, metadata if any), one JSON line each, in order."""
    digest = hashlib.sha256()
    for question in questions:
        turns = [[message.role, message.content] for message in question.prompt]
        row: list[object] = [question.id, turns, question.answer, question.source, question.level]
        row += [] if question.metadata is None else [question.metadata]
        digest.update(json.dumps(row, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass"))
        digest.update(b"\n")
    return digest.hexdigest()


def fold(placed: Iterable[tuple[str, types.Question]]) -> tuple[list[types.Question], int]:
    """Distinct questions in their order and the number of exact duplicates left out, white space aside.

    `placed` pairs each question with its place for messages. Raises InputError for one id with different content.
    """
    kept: dict[str, tuple[str, types.Question]] = {}
    num_folded = 0
    for place, question in placed:
        first, earlier = kept.setdefault(question.id, (place, question))
        if earlier is question:
            continue
        if _content(earlier) != _content(question):
            raise InputError(
                f"{first} and {place} have the id {question.id!r} but different content (messages, answer or "
                f"metadata): an id names one question; keep one of them, or give each its own id."
            )
        num_folded += 1
    return [question for _, question in kept.values()], num_folded


def _content(question: types.Question) -> list[tuple[str, str]]:
    turns = [(message.role, normalised(message.content)) for message in question.prompt]
    return [*turns, ("answer", question.answer.strip()), ("metadata", question.metadata or "")]


class QuestionSet(NamedTuple):
    """The questions of one file."""

    questions: tuple[types.Question, ...]
    """In the order of the file."""
    metadata: dict[str, Any]
    """Record of how the file was made; empty for a file `prepare` did not write."""
    content_hash: str
    """sha256 over the canonical rows in their order."""
    num_folded: int
    """Exact duplicates left out while reading."""


def read_questions(path: Path | str) -> QuestionSet:
    """Read a question file in the canonical or the verl layout; exact duplicates are folded.

    Raises InputError, naming the file and where it applies the row, field and value: no such file, not parquet, missing
    columns, null, empty or mistyped fields, no rows, one id with different content.
    """
    path = Path(path)
    if path.is_dir():
        raise InputError(f"{path} is a folder, not a question file: run `exgrpo prepare {path}` first.")
    schema = parquet_schema(path)
    layout, metadata = _layout_of(path, schema), _own_metadata(path, schema)
    questions, num_folded = fold(_iter_questions(path, layout))
    if not questions:
        raise InputError(f"{path} has no questions: the file has the right columns but no rows.")
    digest = content_hash(questions)
    if metadata.get("content_hash", digest) != digest:
        raise InputError(
            f"{path} is damaged or was edited: its questions are not those it was written with (content hash "
            f"{digest[:16]}, not {str(metadata['content_hash'])[:16]}). Restore it from a copy, or make a file of it "
            f"as it is with `exgrpo prepare {path}`."
        )
    return QuestionSet(questions=tuple(questions), metadata=metadata, content_hash=digest, num_folded=num_folded)


def require_content(path: Path) -> None:
    """Raise InputError as `read_questions` does for a file that names its content hash; others are not looked at."""
    if "content_hash" in read_metadata(path):
        read_questions(path)


def write_questions(
    path: Path, questions: Sequence[types.Question], metadata: Mapping[str, Any], layout: FileLayout = "canonical"
) -> None:
    """Write a question file under a temporary name, then rename it: `path` is whole or untouched.

    `metadata` is stored as JSON with the content hash added. Raises RunError where the file cannot be written.
    """
    own = {**metadata, "content_hash": content_hash(questions)}
    schema = _SCHEMAS[layout].with_metadata({METADATA_KEY: json.dumps(own, ensure_ascii=False).encode()})

    def write(file: BinaryIO) -> None:
        with pq.ParquetWriter(file, schema) as writer:
            for start in range(0, len(questions), _BATCH_ROWS):
                part = enumerate(questions[start : start + _BATCH_ROWS], start)
                rows = [_to_row(index, question, layout) for index, question in part]
                writer.write_batch(pa.RecordBatch.from_pylist(rows, schema=schema))

    files.write_whole(path, write)


def read_metadata(path: Path) -> dict[str, Any]:
    """Metadata that `write_questions` stored in a file; empty for any other file."""
    try:
        return _own_metadata(path, parquet_schema(path))
    except InputError:
        return {}


def is_prepared(metadata: Mapping[str, Any]) -> bool:
    """Whether a file of this metadata was made by `prepare`, and so audited."""
    return metadata.get("made_by") == MADE_BY_PREPARE


def is_question_file(path: Path) -> bool:
    """Whether `path` is a parquet file in the canonical or the verl layout, by its columns."""
    try:
        return bool(_layout_of(path, parquet_schema(path)))
    except InputError:
        return False


def _own_metadata(path: Path, schema: pa.Schema) -> dict[str, Any]:
    text = (schema.metadata or {}).get(METADATA_KEY)
    try:
        metadata = json.loads(text) if text else {}
    except (ValueError, RecursionError):
        metadata = None
    if not isinstance(metadata, dict):
        remedy = f"Restore it from a copy, or make a file of it as it is with `exgrpo prepare {path}`"
        raise InputError(f"{path} is damaged: the metadata that `prepare` wrote are no JSON table. {remedy}.")
    return metadata


def _layout_of(path: Path, schema: pa.Schema) -> FileLayout:
    if {"reward_model", "prompt"} <= set(schema.names):
        return "verl"
    missing = [name for name in _REQUIRED if name not in schema.names]
    if missing:
        columns = f"it lacks the columns {missing} and has {schema.names}"
        raise InputError(f"{path} is not a question file: {columns}. Turn it into one with `exgrpo prepare {path}`.")
    return "canonical"


def _iter_questions(path: Path, layout: FileLayout) -> Iterator[tuple[str, types.Question]]:
    names = _COLUMNS[layout]
    for number, row in iter_parquet(path, {name.partition(".")[0] for name in names.values()}):
        where = f"{path}: row {number}"
        values = {field: reach(row, name) for field, name in names.items()}
        for field in (field for field in _REQUIRED if field in names and field != "prompt"):
            if not isinstance(values[field], str) or not values[field].strip():
                remedy = "every question needs a text there. Remove or correct the row"
                raise InputError(f"{where}, field {names[field]!r} is {values[field]!r}: {remedy}.")
        level, metadata = values["level"], own_metadata(values["metadata"])
        if layout == "canonical" and values["metadata"] is not None and metadata is None:
            raise InputError(
                f"{where}, field 'metadata' is {values['metadata']!r:.60}: it must be a JSON table, or null; one with "
                "a verifier has what that needs (countdown: numbers and a target, gym: an entry)."
            )
        prompt = prompt_of(values["prompt"], where)
        question = types.Question(
            id=values.get("id") or question_id(prompt, values["answer"]),
            prompt=prompt,
            answer=values["answer"],
            source=values["source"],
            level=None if level is None else str(level),
            metadata=metadata,
        )
        yield where, question


def prompt_of(turns: Sequence[Mapping[str, Any]] | None, where: str) -> tuple[types.Message, ...]:
    """The messages of one row; raises InputError for an empty prompt, a null field or one without a user message."""
    if not turns or not isinstance(turns, list):
        raise InputError(f"{where}, field 'prompt' is {turns!r:.60}: a question needs a list of messages.")
    for number, turn in enumerate(turns, start=1):
        for name in ("role", "content"):
            value = turn.get(name) if isinstance(turn, Mapping) else None
            if not isinstance(value, str) or not is_unicode(value):
                shown = ascii(value)[:60]
                raise InputError(f"{where}, field 'prompt', message {number}: {name!r} is {shown}, it must be text.")
    prompt = tuple(types.Message(role=turn["role"], content=turn["content"]) for turn in turns)
    if not any(message.role == "user" and message.content.strip() for message in prompt):
        roles = [message.role for message in prompt]
        raise InputError(f"{where}, field 'prompt' has the roles {roles} and no user message with text.")
    return prompt


def reach(row: Mapping[str, Any], dotted: str) -> Any:
    """The value at a dotted path through nested columns; None where the path ends early."""
    value: Any = row
    for part in dotted.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def is_unicode(text: str) -> bool:
    """Whether a text can be encoded: JSON escapes can spell halves of surrogate pairs, which cannot."""
    return text.encode(errors="ignore").decode() == text


def own_metadata(value: Any) -> str | None:
    """Metadata that are the text of a JSON table and have what the verifier that they name needs.

    None for all others, such as what others keep under that name.
    """
    try:
        table = json.loads(value) if isinstance(value, str) else None
        if not isinstance(table, dict) or not is_unicode(value):
            return None
        name = str(table.get("verifier", "sum" if table.get("trace") == "sum" else "")).partition(":")[0]
        msgspec.convert(table, _TABLES.get(name, dict))
    except (ValueError, RecursionError):
        return None
    return str(value)


def _to_row(index: int, question: types.Question, layout: FileLayout) -> dict[str, Any]:
    prompt = [{"role": message.role, "content": message.content} for message in question.prompt]
    if layout == "canonical":
        return {**{name: getattr(question, name) for name in _COLUMNS["canonical"]}, "prompt": prompt}
    return {
        "data_source": question.source,
        "prompt": prompt,
        "ability": "math",
        "reward_model": {"ground_truth": question.answer, "style": "rule"},
        "extra_info": {"index": index, "level": question.level, "metadata": question.metadata},
    }

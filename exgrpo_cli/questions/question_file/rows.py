"""A question as a parquet row, in the canonical and in the verl layout: schemas, type checks, conversion both ways."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa

from exgrpo_cli.base.errors import InputError
from exgrpo_cli.base.types import Message, Question
from exgrpo_cli.questions.question_file.identity import question_id

FileLayout = Literal["canonical", "verl"]


_MESSAGES = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
_CANONICAL_SCHEMA = pa.schema(
    [
        pa.field("id", pa.string(), nullable=False),
        pa.field("prompt", _MESSAGES, nullable=False),
        pa.field("answer", pa.string(), nullable=False),
        pa.field("source", pa.string(), nullable=False),
        pa.field("level", pa.string()),
        pa.field("metadata", pa.string()),
    ]
)
_VERL_SCHEMA = pa.schema(
    [
        ("data_source", pa.string()),
        ("prompt", _MESSAGES),
        ("ability", pa.string()),
        ("reward_model", pa.struct([("ground_truth", pa.string()), ("style", pa.string())])),
        ("extra_info", pa.struct([("index", pa.int64()), ("level", pa.string()), ("metadata", pa.string())])),
    ]
)
SCHEMAS = {"canonical": _CANONICAL_SCHEMA, "verl": _VERL_SCHEMA}
_REQUIRED = {
    "canonical": {"id": "text", "prompt": "messages", "answer": "text", "source": "text"},
    "verl": {"data_source": "text", "prompt": "messages", "reward_model.ground_truth": "text"},
}
_MEANING = {"text": "text", "messages": "a list of {role, content} messages"}


def layout_of(path: Path, schema: pa.Schema) -> FileLayout:
    """Which of the two layouts a file has; raises InputError listing its columns where it has neither."""
    columns = schema.names
    if "reward_model" in columns and "prompt" in columns:
        return "verl"
    missing = [name for name in _REQUIRED["canonical"] if name not in columns]
    if missing:
        raise InputError(
            f"{path} is not a question file: it lacks the columns {missing} and has {columns}. "
            f"Turn it into one with `exgrpo prepare {path}`."
        )
    return "canonical"


def check_types(path: Path, schema: pa.Schema, layout: FileLayout) -> None:
    """Raises InputError naming the first column that is missing or mistyped."""
    wanted = dict(_REQUIRED[layout])
    for name in ("level", "metadata"):
        if layout == "canonical" and name in schema.names and not pa.types.is_null(schema.field(name).type):
            wanted[name] = "text"
    for name, kind in wanted.items():
        found = _nested_type(schema, name)
        if found is None:
            raise InputError(f"{path} ({layout} layout) lacks the column {name!r}: found {schema.names}.")
        if not (_is_text(found) if kind == "text" else _is_messages(found)):
            raise InputError(f"{path}: column {name!r} has the type {found}, it must be {_MEANING[kind]}.")


def _nested_type(schema: pa.Schema, dotted: str) -> pa.DataType | None:
    column, _, inner = dotted.partition(".")
    if column not in schema.names:
        return None
    found = schema.field(column).type
    if not inner:
        return found
    return found.field(inner).type if pa.types.is_struct(found) and found.get_field_index(inner) >= 0 else None


def _is_text(found: pa.DataType) -> bool:
    if pa.types.is_dictionary(found):
        found = found.value_type
    return pa.types.is_string(found) or pa.types.is_large_string(found) or pa.types.is_string_view(found)


def _is_messages(found: pa.DataType) -> bool:
    if not (pa.types.is_list(found) or pa.types.is_large_list(found)) or not pa.types.is_struct(found.value_type):
        return False
    turn = found.value_type
    return all(turn.get_field_index(name) >= 0 and _is_text(turn.field(name).type) for name in ("role", "content"))


def to_question(values: Mapping[str, Any], layout: FileLayout, where: str) -> Question:
    """The question of one row; raises InputError, opening with `where`, for a null or empty field."""
    prompt = prompt_of(values["prompt"], where)
    if layout == "canonical":
        answer = _filled(values["answer"], "answer", where)
        return Question(
            id=_filled(values["id"], "id", where),
            prompt=prompt,
            answer=answer,
            source=_filled(values["source"], "source", where),
            level=values.get("level"),
            metadata=_table(values.get("metadata"), where),
        )
    answer = _filled((values["reward_model"] or {}).get("ground_truth"), "reward_model.ground_truth", where)
    extra = values.get("extra_info") or {}
    level = extra.get("level")
    return Question(
        id=question_id(prompt, answer),
        prompt=prompt,
        answer=answer,
        source=_filled(values["data_source"], "data_source", where),
        level=None if level is None else str(level),
        metadata=own_metadata(extra.get("metadata")),
    )


def prompt_of(turns: Sequence[Mapping[str, Any]] | None, where: str) -> tuple[Message, ...]:
    """The messages of one row; raises InputError for an empty prompt, a null field or one without a user message."""
    if not turns:
        raise InputError(f"{where}, field 'prompt' is {turns!r}: a question needs at least a user message.")
    for number, turn in enumerate(turns, start=1):
        for name in ("role", "content"):
            if turn is None or not isinstance(turn.get(name), str):
                value = None if turn is None else turn.get(name)
                raise InputError(f"{where}, field 'prompt', message {number}: {name!r} is {value!r}, it must be text.")
            if not is_unicode(turn[name]):
                shown = ascii(turn[name])[:60]
                raise InputError(f"{where}, field 'prompt', message {number}: {name!r} {shown} is not valid Unicode.")
    prompt = tuple(Message(role=turn["role"], content=turn["content"]) for turn in turns)
    if not any(message.role == "user" and message.content.strip() for message in prompt):
        roles = [message.role for message in prompt]
        raise InputError(f"{where}, field 'prompt' has the roles {roles} and no user message with text.")
    return prompt


def is_unicode(text: str) -> bool:
    """Whether a text can be encoded: JSON escapes can spell halves of surrogate pairs, which cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _filled(value: str | None, field: str, where: str) -> str:
    if value is None or not value.strip():
        raise InputError(f"{where}, field {field!r} is {value!r}: every question needs one. Remove or correct the row.")
    return value


def _table(value: Any, where: str) -> str | None:
    """Metadata as they are, where they are the text of a JSON table."""
    if value is None or own_metadata(value) is not None:
        return own_metadata(value)
    raise InputError(f"{where}, field 'metadata' is {str(value)[:60]!r}: it must be a JSON table, or null.")


def own_metadata(value: Any) -> str | None:
    """Metadata that are the text of a JSON table; None for what others keep under that name."""
    try:
        return value if isinstance(value, str) and isinstance(json.loads(value), dict) else None
    except ValueError:
        return None


def to_row(index: int, question: Question, layout: FileLayout) -> dict[str, Any]:
    """The question as the `index`-th row of a file in this layout."""
    turns = [{"role": message.role, "content": message.content} for message in question.prompt]
    if layout == "canonical":
        return {
            "id": question.id,
            "prompt": turns,
            "answer": question.answer,
            "source": question.source,
            "level": question.level,
            "metadata": question.metadata,
        }
    return {
        "data_source": question.source,
        "prompt": turns,
        "ability": "math",
        "reward_model": {"ground_truth": question.answer, "style": "rule"},
        "extra_info": {"index": index, "level": question.level, "metadata": question.metadata},
    }

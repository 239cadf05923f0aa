"""Small sources of questions: written in any format, read as `prepare` reads them; and a tokenizer of characters."""

import csv
import gzip
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from exgrpo_cli.base.types import Message, Question
from exgrpo_cli.config.requests import PrepareRequest
from exgrpo_cli.questions.prepare import PrepareReport, read_source
from exgrpo_cli.questions.question_file import question_id

PACK = {"": bytes, ".gz": gzip.compress, ".zst": lambda data: pa.compress(data, "zstd", asbytes=True)}


def text_of(suffix: str, *rows: Any) -> str:
    """Rows in a text format."""
    if suffix == ".json":
        return json.dumps(rows, indent=1)
    if suffix == ".jsonl":
        return "".join(json.dumps(row) + "\n" for row in rows)
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), delimiter="\t" if suffix == ".tsv" else ",")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def write(path: Path, *rows: Any) -> Path:
    """Rows in the format of the suffix, packed where `.gz` or `.zst` stands behind it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    packed = path.suffix if path.suffix in PACK else ""
    suffix = path.with_name(path.name.removesuffix(packed)).suffix
    if suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_bytes(PACK[packed](text_of(suffix, *rows).encode()))
    return path


def read(source: Path | str, **fields: str) -> PrepareReport:
    return read_source(str(source), PrepareRequest(**fields), lambda *_: None)


def question(*turns: tuple[str, str] | str, answer: str = "4", **fields: Any) -> Question:
    """A question of these turns, (role, content) or the user's content alone."""
    pairs = (turn if isinstance(turn, tuple) else ("user", turn) for turn in turns or ("2+2=?",))
    prompt = tuple(Message(role=role, content=content) for role, content in pairs)
    return Question(id=question_id(prompt, answer), prompt=prompt, answer=answer, **({"source": "here"} | fields))


def pairs(reading: PrepareReport) -> Sequence[tuple[str, str]]:
    """Last message and answer of each question."""
    return [(question.prompt[-1].content, question.answer) for question in reading.questions]


CHAT = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def tokenizer(chat_template: str | None = CHAT) -> Any:
    """One token per character of a small alphabet, `<s>` (id 0) put in front by the tokenizer itself."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    alphabet = ["<s>", *map(chr, range(32, 127)), "\n"]
    backend = Tokenizer(models.WordLevel({token: number for number, token in enumerate(alphabet)}, unk_token=" "))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", chat_template=chat_template)

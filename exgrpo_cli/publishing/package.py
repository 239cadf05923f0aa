"""Files of one repository of the hub, all of them looked at before they leave this machine.

Every text passes `Private` on its way into a package: paths and host names are taken out, and a secret stops it all.
What is not changed (rows, vocabularies, weights) is looked at where it lies.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from markupsafe import Markup

from exgrpo_cli.base.errors import InputError, first_line
from exgrpo_cli.base.output import in_markdown, printable, unmarked
from exgrpo_cli.publishing.private import QUOTED, Private

MARKER = "exgrpo.json"
"""File of a repository that says what was published into it."""
ROWS_LOOKED_AT = 1024
AS_IT_IS = re.compile(
    r"model(-\d{5}(-of-\d{5})?)?\.safetensors|(tokenizer|vocab|added_tokens)\.json|(merges|vocab)\.txt"
    r"|(tokenizer|spiece|sentencepiece\.bpe)\.model"
)
"""Weights and words of a model, which nothing is taken out of."""
MODEL_TEXTS = re.compile(
    r"((generation_|tokenizer_)?config|model\.safetensors\.index|special_tokens_map)\.json|chat_template\.(jinja|json)"
)
"""Other files that transformers writes into a model's folder."""


def _texts(value: Any) -> Iterator[str]:
    """All texts in a value of a column."""
    if isinstance(value, str | bytes):
        yield value if isinstance(value, str) else value.decode(errors="replace")
    elif isinstance(value, Mapping | list | tuple):
        for own in value.items() if isinstance(value, Mapping) else value:
            yield from _texts(own)


def _check_table(private: Private, path: Path, where: str) -> None:
    """Look at every text of a Parquet file: those of all rows, and what the file says of itself."""
    file = pq.ParquetFile(path)
    private.check(" ".join([*file.schema_arrow.names, *_texts(dict(file.metadata.metadata or {}))]), where)
    names = [field.name for field in file.schema_arrow if re.search("string|binary|utf8", str(field.type))]
    first = 0
    for batch in file.iter_batches(ROWS_LOOKED_AT, columns=names):
        for name, column in zip(batch.schema.names, batch.columns, strict=True):
            rows = ("\n".join(_texts(value)) for value in column.to_pylist())
            private.check_rows(rows, f"{where}, column {name}", first)
        first += len(batch)


def _check_weights(private: Private, path: Path) -> None:
    """Look at the header of a safetensors file, whose tensors must fill the rest of it."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "numpy"):
            pass
    except SafetensorError as error:
        reason = first_line(error)
        raise InputError(f"{path} is no whole safetensors file ({reason}): restore it from a copy.") from error
    with path.open("rb") as file:
        header = file.read(int.from_bytes(file.read(8), "little"))
    private.check(header.decode(errors="replace"), f"the header of {path}", quoted=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class Package:
    """The content of one repository, its own files under `folder`."""

    repo_type: str
    """"model" or "dataset"."""
    origin: Mapping[str, str]
    """Identity of the run or study: a repository with another origin is not overwritten."""
    folder: Path
    private: Private
    files: dict[str, Path] = field(default_factory=dict)
    """All that goes, by name in the repository: files under `folder`, and those uploaded from where they lie."""

    def place(self, name: str) -> Path:
        """Path of a file of the package's own, which the caller writes."""
        path = self.files[name] = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def write(self, name: str, text: str, where: str) -> None:
        """Add a text without what is private; messages name `where` it is from. Raises InputError for a secret."""
        public = self.private.redact(text, where, quoted=Path(name).suffix in QUOTED)
        self.place(name).write_text(public, encoding="utf-8")

    def copy(self, source: Path, name: str = "") -> None:
        """Add a text file, under its own name where no other is given, as `write` does."""
        try:
            text = source.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise InputError(f"{source} is no text in UTF-8 ({first_line(error)}): restore it from a copy.") from error
        self.write(name or source.name, text, str(source))

    def look(self) -> None:
        """Look at all that goes and was not written as a text: rows, vocabularies, headers of weights.

        Raises InputError for what is private there.
        """
        for name, path in self.files.items():
            if path.suffix == ".parquet":
                _check_table(self.private, path, name)
            elif path.suffix == ".safetensors":
                _check_weights(self.private, path)
            elif not path.is_relative_to(self.folder):
                text = path.read_text(encoding="utf-8", errors="replace")
                self.private.check(text, str(path), quoted=path.suffix in QUOTED)

    def finish(self, template: str, front: Mapping[str, Any], tables: Mapping[str, str], **values: Any) -> "Package":
        """Add the marker, and the card: a template of this folder with its `front` matter and `values`.

        `tables` are the configurations of a data set with the pattern of their files; the first is the default one.
        """
        from huggingface_hub import CardData
        from jinja2 import Environment

        first = next(iter(tables), "")
        configs = [{"config_name": name, "data_files": path, "default": name == first} for name, path in tables.items()]
        data = CardData(**front, configs=configs or None)
        named = data.to_dict() | values | {"card_data": Markup(printable(data.to_yaml()))}
        source = Path(__file__).with_name(template).read_text(encoding="utf-8")
        card = Environment(finalize=unmarked(in_markdown)).from_string(source).render(**named)
        self.write("README.md", card, "the card")
        self.write(MARKER, json.dumps(self.origin, indent=2) + "\n", "the name of the run or study")
        return self

    def describe(self, repo: str) -> dict[str, Any]:
        """The repository, its files and their sizes in bytes, as `--dry-run` shows them."""
        sizes = {name: path.stat().st_size for name, path in sorted(self.files.items())}
        return {"repository": repo, "type": self.repo_type, "bytes": sum(sizes.values()), "files": sizes}

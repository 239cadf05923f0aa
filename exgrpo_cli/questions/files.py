"""Rows of one local file: parquet, jsonl, json, csv and tsv, each row a mapping of column names to values.

All but json are streamed, and only the columns asked for are decoded where the format allows it, so that reasoning
traces beside the questions cost neither time nor memory. Rows and lines are counted from 1 in messages.
"""

import csv
import io
import json
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from exgrpo_cli.base.bounds import MB, MEGABYTES, ROWS, Meter, bounded_lines
from exgrpo_cli.base.errors import InputError, first_line

_TEXT_FORMATS = (".jsonl", ".ndjson", ".json", ".csv", ".tsv")
_PACKED = (".gz", ".zst")
SUFFIXES = (".parquet", *(name + packed for name in _TEXT_FORMATS for packed in ("", *_PACKED)))
"""Every ending of a question file, lower case."""
FORMATS = f".parquet, {', '.join(_TEXT_FORMATS)} (text also as {' and '.join(_PACKED)})"
"""The same for messages."""

Row = Mapping[str, Any]
PlacedRow = tuple[int, Row]
"""Row or line number, counted from 1, and the row."""

_BATCH_ROWS = 256
_BATCH_BYTES = 1 << 26
_CHUNK_BYTES = 1 << 20
_NAMES_OF_ROWS = ("data", "examples", "questions", "rows")
"""Members of a JSON object that may hold its rows."""


def suffix_of(name: str) -> str:
    """`.jsonl.gz` of `train.JSONL.gz`: the ending of a question file in lower case; empty for any other file."""
    return max((suffix for suffix in SUFFIXES if name.lower().endswith(suffix)), key=len, default="")


def stem_of(path: Path) -> str:
    """`train` of `folder/train.jsonl.gz`; of a file with another ending what `Path.stem` says."""
    suffix = suffix_of(path.name)
    return path.name[: -len(suffix)] if suffix else path.stem


def iter_rows(file: Path, columns: Collection[str] | None = None) -> Iterator[PlacedRow]:
    """Rows of a file in its order; `columns` are those wanted, None all.

    Raises InputError naming the file, and the row where it applies: unreadable, malformed, a row that is no object.
    """
    kind = _format_of(file)
    with _explained(file):
        if kind == ".parquet":
            yield from iter_parquet(file, columns)
        elif kind in (".csv", ".tsv"):
            yield from _iter_csv(file, "," if kind == ".csv" else "\t")
        else:
            yield from _iter_json(file) if kind == ".json" else _iter_jsonl(file)


def iter_parquet(file: Path, columns: Collection[str] | None) -> Iterator[PlacedRow]:
    """Rows of a parquet file whatever its suffix, as `iter_rows`."""
    # Without pre-buffering, column chunks are read as they are decoded.
    with _explained(file), pq.ParquetFile(file, pre_buffer=False, buffer_size=_CHUNK_BYTES) as parquet:
        names = parquet.schema_arrow.names
        _refuse_repeated(file, names)
        wanted = names if columns is None else [name for name in names if name in columns]
        size = _rows_at_once(file, parquet.metadata, wanted)
        batches = parquet.iter_batches(batch_size=size, columns=wanted, use_threads=False)
        yield from enumerate((row for batch in _metered(file, batches) for row in batch.to_pylist()), start=1)


def _metered(file: Path, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The batches, each counted before its rows become Python's. Raises InputError for one that is too large."""
    meter, most, number = Meter(file), MEGABYTES.value * MB, 0
    for batch in batches:
        # A dictionary of a text and a thousand rows that name it are a thousand texts to Python.
        plain = pa.schema([(field.name, _without_dictionaries(field.type)) for field in batch.schema])
        batch = batch if batch.schema.equals(plain) else batch.cast(plain)
        meter.take(batch.nbytes, len(batch))
        # A batch that a single row could fill is looked at row by row.
        sizes = (batch.slice(place, 1).nbytes for place in range(len(batch)) if batch.nbytes > most)
        for place, size in enumerate(sizes, start=number + 1):
            if size > most:
                MEGABYTES.require(f"{file}: row {place}", size / MB)
        number += len(batch)
        yield batch


def _without_dictionaries(kind: pa.DataType) -> pa.DataType:
    """The type with the values of a dictionary in place of their numbers, in lists and structs too."""
    if pa.types.is_dictionary(kind):
        return kind.value_type
    if pa.types.is_list(kind):
        return pa.list_(kind.value_field.with_type(_without_dictionaries(kind.value_type)))
    if pa.types.is_struct(kind):
        return pa.struct([own.with_type(_without_dictionaries(own.type)) for own in kind])
    return kind


def _rows_at_once(file: Path, metadata: pq.FileMetaData, wanted: Collection[str]) -> int:
    """Rows whose values take no more than _BATCH_BYTES together, however often one of a dictionary is repeated.

    Raises InputError for more rows, or more values in one part of a column, than a file may have.
    """
    ROWS.require(str(file), metadata.num_rows)
    largest = 0
    for group in map(metadata.row_group, range(metadata.num_row_groups)):
        chunks = [group.column(place) for place in range(group.num_columns)]
        chunks = [chunk for chunk in chunks if chunk.path_in_schema.partition(".")[0] in wanted]
        for chunk in chunks:
            ROWS.require(f"{file}: column {chunk.path_in_schema}", chunk.num_values)
        repeated = sum(map(partial(_dictionary_bytes, file), chunks)) * min(_BATCH_ROWS, group.num_rows)
        largest = max(largest, repeated, sum(chunk.total_uncompressed_size for chunk in chunks))
    return max(1, int(_BATCH_ROWS * min(1, _BATCH_BYTES / max(1, largest))))


def _dictionary_bytes(file: Path, chunk: pq.ColumnChunkMetaData) -> int:
    """Bytes of the dictionary page that a column chunk begins with, unpacked; 0 without one."""
    start = chunk.dictionary_page_offset if chunk.has_dictionary_page else chunk.data_page_offset
    with file.open("rb") as content:
        content.seek(start)
        head = content.read(8)
    # The page header in Thrift's compact form: field 1, the kind, 2 for a dictionary; field 2, the bytes, zigzag.
    if head[:3] != b"\x15\x04\x15":
        return 0
    number = 0
    for place, byte in enumerate(head[3:]):
        number |= (byte & 127) << (7 * place)
        if byte < 128:
            break
    return number >> 1


def parquet_schema(file: Path) -> pa.Schema:
    """Columns and metadata of a parquet file. Raises InputError for a file that is none."""
    with _explained(file):
        return pq.read_schema(file)


def _format_of(file: Path) -> str:
    """`.jsonl` of `train.jsonl.gz`; empty for a file that is no question file."""
    return suffix_of(file.name).removesuffix(".gz").removesuffix(".zst")


@contextmanager
def _explained(file: Path) -> Iterator[None]:
    """Raise what reading raises as an InputError that names the file, and one for what might never end."""
    if file.exists() and not file.is_file():
        raise InputError(f"{file} is a device, a pipe or a folder: name a file of questions.")
    try:
        yield
    except FileNotFoundError:
        raise InputError(f"{file} does not exist: correct the path.") from None
    except (OSError, UnicodeDecodeError, pa.ArrowException) as error:
        remedy = "correct its rights or encoding (UTF-8), or fetch it again"
        raise InputError(f"{file} cannot be read ({first_line(error)}): {remedy}.") from error


def _open_bytes(file: Path) -> io.BufferedReader:
    """The file's content, unpacked while it is read."""
    packing = {".gz": "gzip", ".zst": "zstd"}.get(file.suffix.lower())
    return io.BufferedReader(pa.input_stream(str(file), compression=packing))


def _iter_jsonl(file: Path) -> Iterator[PlacedRow]:
    with _open_bytes(file) as lines:
        for number, line in enumerate(bounded_lines(lines.readline, file), start=1):
            if line.strip():
                where = f"{file}: line {number}"
                try:
                    row = json.loads(line)
                except (ValueError, RecursionError) as error:
                    raise _no_json(where, error) from error
                yield number, _object(row, where)


def _iter_json(file: Path) -> Iterator[PlacedRow]:
    """An array of rows, an object with such an array (`{"data": [...]}`), or objects one a line (JSON lines)."""
    # A packed file says nothing of its size; any other has shown it.
    most = max(int(MEGABYTES.value * MB), file.stat().st_size)
    with _open_bytes(file) as packed:
        text = packed.read(most + 1)
    if len(text) > most:
        MEGABYTES.require(f"{file}: its one JSON value", len(text) / MB)
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        if isinstance(error, json.JSONDecodeError) and error.msg == "Extra data":
            yield from _iter_jsonl(file)
            return
        raise _no_json(str(file), error) from error
    inner = [content[name] for name in _NAMES_OF_ROWS if isinstance(content, dict) and name in content]
    found = (value for value in inner if isinstance(value, list) and value and isinstance(value[0], dict | list))
    rows = content if isinstance(content, list) else next(found, [content])
    for number, row in enumerate(rows, start=1):
        yield number, _object(row, f"{file}: row {number}")


def _iter_csv(file: Path, delimiter: str) -> Iterator[PlacedRow]:
    longest, number, taken = int(MEGABYTES.value * MB), 0, 0
    csv.field_size_limit(longest)

    def lines(text: io.TextIOWrapper) -> Iterator[str]:
        # A row may run over many lines.
        nonlocal taken
        for line in bounded_lines(text.readline, file):
            taken += len(line)
            if taken > longest:
                MEGABYTES.require(f"{file}: row {number + 1}", taken / MB)
            yield line

    # Without a byte order mark, line ends as they are.
    with io.TextIOWrapper(_open_bytes(file), encoding="utf-8-sig", newline="") as text:
        # Spaces after a comma are no part of the field, and quotes after them are quotes.
        reader = csv.DictReader(lines(text), strict=True, skipinitialspace=delimiter == ",", delimiter=delimiter)
        try:
            _refuse_repeated(file, reader.fieldnames or ())
            for number, row in enumerate(reader, start=1):
                if None in row:
                    raise InputError(f"{file}: row {number} has more fields than the header {reader.fieldnames}.")
                taken = 0
                yield number, row
        except csv.Error as error:
            raise InputError(f"{file}: row {number + 1} is not {_format_of(file)[1:].upper()}: {error}.") from error


def _refuse_repeated(file: Path, names: Collection[str]) -> None:
    # Spreadsheets end their rows with columns without a name, which are not read.
    repeated = [name for name, count in Counter(names).items() if name and count > 1]
    if repeated:
        raise InputError(f"{file} has several columns named {repeated[0]!r}: rename all but one of them.")


def _no_json(where: str, error: Exception) -> InputError:
    return InputError(f"{where} is not JSON that can be read ({first_line(error)}): remove or correct it.")


def _object(row: Any, where: str) -> Row:
    if isinstance(row, list) and row and all(isinstance(turn, dict) for turn in row):
        # A row that is a list of turns has their places as column names, as it has in parquet.
        return {str(place): turn for place, turn in enumerate(row)}
    if not isinstance(row, dict):
        raise InputError(f"{where} is {str(row)[:60]!r}, it must be an object of named fields.")
    return row

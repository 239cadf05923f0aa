"""Names of question files: their format, whether they are packed, and how their text is opened."""

import gzip
import io
from pathlib import Path
from typing import cast

import pyarrow as pa

_TEXT_FORMATS = (".jsonl", ".ndjson", ".json", ".csv", ".tsv")
_PACKED = (".gz", ".zst")

SUFFIXES = (".parquet", *(name + packed for name in _TEXT_FORMATS for packed in ("", *_PACKED)))
"""Every ending of a question file, lower case."""
FORMATS = f".parquet, {', '.join(_TEXT_FORMATS)} (text also as {' and '.join(_PACKED)})"
"""The same for messages."""


def suffix_of(name: str) -> str:
    """`.jsonl.gz` of `train.JSONL.gz`: the ending of a question file in lower case; empty for any other file."""
    return max((suffix for suffix in SUFFIXES if name.lower().endswith(suffix)), key=len, default="")


def format_of(name: str) -> str:
    """`.jsonl` of `train.jsonl.gz`; empty for a file that is no question file."""
    suffix = suffix_of(name)
    return suffix.removesuffix(next((packed for packed in _PACKED if suffix.endswith(packed)), ""))


def stem_of(path: Path) -> str:
    """`train` of `folder/train.jsonl.gz`; of a file with another ending what `Path.stem` says."""
    suffix = suffix_of(path.name)
    return path.name[: -len(suffix)] if suffix else path.stem


def open_bytes(file: Path) -> io.BufferedReader:
    """The file's content, unpacked while it is read.

    Raises OSError where it cannot be opened; reading raises OSError or EOFError where packed content is damaged.
    """
    if file.suffix.lower() == ".gz":
        return io.BufferedReader(cast(io.RawIOBase, gzip.open(file, "rb")))
    if file.suffix.lower() == ".zst":
        return io.BufferedReader(pa.CompressedInputStream(pa.OSFile(str(file)), "zstd"))
    return file.open("rb")


def open_text(file: Path) -> io.TextIOWrapper:
    """The same as UTF-8 text, without a byte order mark, line ends as they are."""
    return io.TextIOWrapper(open_bytes(file), encoding="utf-8-sig", newline="")

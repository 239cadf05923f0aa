"""Parts: the files a table consists of, each holding the rows of a range of steps.

A part is written under a temporary name, synced, then renamed, so a part that can be seen is complete. Its name carries
its steps, `part-00000012-00000012.parquet`; a merged part covers the range of those it replaces, and whoever finds both
uses the merged one.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from exgrpo_cli.base.errors import first_line
from exgrpo_cli.ledger.schemas import BODIES, LEDGER_FORMAT, METADATA_KEY, LedgerIdentity, schema_of, tables_of

_NAME = re.compile(r"part-(\d{8})-(\d{8})\.(?:parquet|arrow)")
_DICTIONARY_BYTES = 16 << 20
"""46,000 question ids must fit one Parquet dictionary, or the column falls back to plain strings and opens slowly."""


class UnreadablePart(Exception):
    """A part that is truncated, damaged or has the columns of something else; the message says which."""


class DamagedBytes(Exception):
    """What was read is truncated or overwritten; the message is Arrow's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PartName:
    """Where a part is and which steps it covers, as its name says."""

    path: Path
    first_step: int
    last_step: int

    def covers(self, other: "PartName") -> bool:
        """Whether all steps of `other` are among this one's."""
        return self.first_step <= other.first_step and other.last_step <= self.last_step


@dataclass(frozen=True, kw_only=True, slots=True)
class Commit:
    """Proof that a step is complete."""

    step: int
    totals: Mapping[str, int]
    """Rows of every table up to and including this step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PartInfo:
    """What the footer of a part says."""

    name: PartName
    num_rows: int
    commits: tuple[Commit, ...]
    """In parts of `events` only: one, or those of all the parts that a merged one has replaced; in order of steps."""
    batch_first_ids: tuple[int, ...]
    """First trajectory id of each record batch; in parts of `bodies` only."""


def part_path(folder: Path, table: str, first_step: int, last_step: int) -> Path:
    """Where the part of a table with these steps is, or goes."""
    suffix = "arrow" if table == BODIES else "parquet"
    return folder / table / f"part-{first_step:08d}-{last_step:08d}.{suffix}"


def list_parts(folder: Path, table: str) -> tuple[list[PartName], list[PartName]]:
    """Parts of a table in order of steps, and apart from them those that a merged part has replaced."""
    names = []
    for path in (folder / table).glob("part-*"):
        match = _NAME.fullmatch(path.name)
        if match:
            names.append(PartName(path=path, first_step=int(match[1]), last_step=int(match[2])))
    names.sort(key=lambda name: (name.first_step, -name.last_step))
    current: list[PartName] = []
    replaced: list[PartName] = []
    for name in names:
        (replaced if current and current[-1].covers(name) else current).append(name)
    return current, replaced


def list_unfinished(folder: Path, table: str) -> list[Path]:
    """Files whose writer died, or is still writing."""
    return sorted((folder / table).glob(".part-*"))


def schema_with_metadata(table: str, identity: LedgerIdentity, commits: Sequence[Commit]) -> pa.Schema:
    """The table's schema with who wrote it and, in parts of `events`, the commit records; merged ones keep them all."""
    content = {
        "identity": json.loads(identity.to_json()),
        "totals": dict(commits[-1].totals) if commits else {},
        "earlier": {
            commit.step: [commit.totals[name] for name in tables_of(identity.format)] for commit in commits[:-1]
        },
    }
    return schema_of(table, identity.format).with_metadata({METADATA_KEY: json.dumps(content).encode()})


def write_parquet(file: BinaryIO, table: pa.Table) -> None:
    """Write a table with a CRC-32 per page, which every reader of Parquet can check, and ours does.

    Only words get a dictionary, and Snappy packs them: bodies outweigh these tables a hundred times, so what counts is
    the time to write and to read them, about 0.4 times that with dictionaries for all columns and Zstandard.
    """
    words = [field.name for field in table.schema if field.type == pa.string()]
    pq.write_table(
        table,
        file,
        compression="snappy",
        use_dictionary=words,
        dictionary_pagesize_limit=_DICTIONARY_BYTES,
        write_page_checksum=True,
    )


def inspect_part(table: str, name: PartName) -> PartInfo:
    """Open a part's footer and compare its schema.

    Raises UnreadablePart, FileNotFoundError where a compaction has removed the part since it was listed, and any other
    OSError of a file system that refuses it.
    """
    try:
        with reading():
            return _inspect_bodies(name) if table == BODIES else _inspect_parquet(table, name)
    except DamagedBytes as error:
        raise UnreadablePart(f"{table}/{name.path.name} is truncated or damaged ({error})") from error


def _inspect_parquet(table: str, name: PartName) -> PartInfo:
    with pq.ParquetFile(name.path) as file:
        commits = _commits(name, _require_schema(table, name, file.schema_arrow))
        return PartInfo(name=name, num_rows=file.metadata.num_rows, commits=commits, batch_first_ids=())


def _inspect_bodies(name: PartName) -> PartInfo:
    with pa.memory_map(str(name.path)) as source:
        file = pa.ipc.open_file(source)
        _require_schema(BODIES, name, file.schema)
        first_ids, num_rows = [], 0
        for position in range(file.num_record_batches):
            ids = file.get_batch(position).column(0).to_numpy()
            if len(ids) == 0 or not np.array_equal(ids[[0, -1]], [ids[0], ids[0] + len(ids) - 1]):
                raise UnreadablePart(f"bodies/{name.path.name}: trajectory ids of batch {position} are not consecutive")
            first_ids.append(int(ids[0]))
            num_rows += len(ids)
        return PartInfo(name=name, num_rows=num_rows, commits=(), batch_first_ids=tuple(first_ids))


def _require_schema(table: str, name: PartName, schema: pa.Schema) -> dict[str, Any]:
    """What the schema's metadata says of the part, whose columns are those of the table."""
    content: dict[str, Any] = json.loads((schema.metadata or {}).get(METADATA_KEY, b"{}"))
    expected = schema_of(table, _format(content))
    if schema.equals(expected):
        return content
    for field in expected:
        position = schema.get_field_index(field.name)
        found = "missing" if position < 0 else str(schema.field(position).type)
        if found != str(field.type):
            raise UnreadablePart(f"{table}/{name.path.name}: column {field.name} is {found} instead of {field.type}")
    for field in expected:
        if schema.field(field.name).nullable != field.nullable:
            wrong = "may hold nulls" if schema.field(field.name).nullable else "may hold no nulls"
            raise UnreadablePart(f"{table}/{name.path.name}: column {field.name} {wrong}; another program wrote it")
    extra = sorted(set(schema.names) - set(expected.names))
    raise UnreadablePart(f"{table}/{name.path.name}: columns {extra or schema.names} do not belong to this table")


def _commits(name: PartName, content: dict[str, Any]) -> tuple[Commit, ...]:
    if not content.get("totals"):
        return ()
    earlier = [
        Commit(step=int(step), totals=dict(zip(tables_of(_format(content)), counts, strict=True)))
        for step, counts in content.get("earlier", {}).items()
    ]
    return (*earlier, Commit(step=name.last_step, totals=content["totals"]))


def _format(content: dict[str, Any]) -> int:
    """Of the ledger that a part was written for."""
    return int(content.get("identity", {}).get("format", LEDGER_FORMAT))


@contextmanager
def reading(name: str = "") -> Iterator[None]:
    """Raises DamagedBytes, beginning with `name`, where what is read inside is no file of Arrow's or Parquet's.

    To Arrow damaged bytes are invalid (a ValueError, like metadata that is no JSON), of an encoding it does not know,
    or end too soon: an OSError of its own, without a number. One with a number is the operating system's (no
    permission, a disk that does not answer, a file that is gone): it goes on as it is, for the bytes may be whole.
    """
    try:
        yield
    # Each of the three is what Arrow raises for damaged bytes, as above; nothing else is caught.
    except (ValueError, pa.ArrowNotImplementedError, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise DamagedBytes(f"{name}: {first_line(error)}" if name else first_line(error)) from error

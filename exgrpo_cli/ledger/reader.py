"""Reading a ledger, also one that a run is writing: its parts, tables as Arrow, bodies by id, memory-mapped.

Parts are the files a table consists of, each holding the rows of a range of steps. A closed part,
`part-00000001-00000025.parquet`, is on the disk and never changes. The steps since the last one are in the live part,
`part-00000026-live.parquet`: written anew under a temporary name and renamed, step by step, and given its final name
when a checkpoint is taken, or when it has become large. Rows only grow behind those already there.

A step is complete once a part of `events` reaches it, for that one is renamed last and carries the number of rows that
every table has by then. Whatever is damaged, missing or beyond the last complete step is left out and counted, never
half-read.
"""

import re
import warnings
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partialmethod
from itertools import accumulate
from pathlib import Path
from typing import Annotated, TypeVar
from zlib import crc32

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from jaxtyping import Float32, Int32

from exgrpo_cli.base.errors import DamageWarning, InputError, first_line
from exgrpo_cli.ledger import schemas

CHECKSUMS = b"crc32"
"""Key of a record batch's metadata: the CRC-32 of every body in it, eight hexadecimal digits each."""
_LIVE = "live"
_NAME = re.compile(rf"part-(\d{{8}})-(\d{{8}}|{_LIVE})\.(?:parquet|arrow)")
COMMIT_FIRST = (schemas.EVENTS, *(table for table in schemas.TABLES if table != schemas.EVENTS))
"""Reading: the rows a commit record promises were there before it, so a table listed later has them. Deleting: without
its record a step was never finished, whatever comes between."""
_AFTER_FOOTER = 8
"""Bytes of its length and of PAR1, with which a Parquet file ends."""
_ATTEMPTS = 20
"""A live part may get its final name after it was listed, which happens once a checkpoint."""
Body = tuple[Int32[np.ndarray, "..."], Float32[np.ndarray, "..."]]
"""Token ids and behaviour log-probs of one trajectory, as many of one as of the other."""
Columns = tuple[Int32[np.ndarray, " offsets"], Int32[np.ndarray, " values"], Float32[np.ndarray, " values"]]
"""Offsets, token ids and log-probs of the bodies of a record batch."""
_REPETITIVE = ("question_id", "event", "logprob_source")

_Result = TypeVar("_Result")


class DamagedBytes(Exception):
    """A file that is truncated, overwritten or has the columns of something else; the message says which."""


Count = Annotated[int, msgspec.Meta(ge=0, le=2**62)]


class PartContent(msgspec.Struct, kw_only=True):
    """Metadata that a part's schema carries."""

    last_step: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)] | None = None
    totals: dict[str, Count] = {}


@dataclass(frozen=True, kw_only=True, slots=True)
class PartInfo:
    """Name and footer of a part."""

    path: Path
    first_step: int
    last_step: int
    num_rows: int
    totals: Mapping[str, int]
    """The commit record, in parts of `events` only: rows of every table up to and including `last_step`."""
    batch_first_ids: tuple[int, ...]
    """First trajectory id of each record batch; in parts of `bodies` only."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Catalogue:
    """The valid prefix of a ledger."""

    parts: Mapping[str, tuple[PartInfo, ...]]
    """Per table, in order of steps; the last one may hold more rows than `totals` counts."""
    totals: Mapping[str, int]
    """Rows per table."""
    last_step: int
    dropped: str
    """Note of what was left out and why; empty where nothing was."""


def part_path(folder: Path, table: str, first_step: int, last_step: int | None = None) -> Path:
    """Path of the part of a table with these steps; the live one without `last_step`."""
    suffix = "arrow" if table == schemas.BODIES else "parquet"
    return folder / table / f"part-{first_step:08d}-{_LIVE if last_step is None else f'{last_step:08d}'}.{suffix}"


def steps_of(path: Path) -> tuple[int, int | None]:
    """First and last step of a part by its name; no last one where it is live."""
    _, first, last = path.stem.split("-")
    return int(first), None if last == _LIVE else int(last)


def list_parts(folder: Path, table: str) -> list[Path]:
    """Parts of a table in order of steps, the live one last."""
    return sorted(path for path in (folder / table).glob("part-*") if _NAME.fullmatch(path.name))


def checksum(token_ids: Int32[np.ndarray, " tokens"], logprobs: Float32[np.ndarray, " tokens"]) -> bytes:
    """The CRC-32 of a body's token ids and then log-probs as they are stored, in hexadecimal digits."""
    return b"%08x" % crc32(logprobs.data, crc32(token_ids.data))


def body_columns(batch: pa.RecordBatch) -> Columns:
    """Views of the memory of a record batch of bodies."""
    token_ids, logprobs = batch.column("token_ids"), batch.column("behaviour_logprobs")
    return token_ids.offsets.to_numpy(), token_ids.values.to_numpy(), logprobs.values.to_numpy()


def inspect_part(table: str, path: Path) -> PartInfo:
    """Open a part's footer and compare its schema.

    Raises DamagedBytes, FileNotFoundError where the part has got its final name since it was listed, and any other
    OSError of a file system that refuses it.
    """
    name, first_ids = f"{table}/{path.name}", []
    if path.exists() and not path.is_file():
        # A pipe would be waited for without end.
        raise DamagedBytes(f"{name} is no file")
    with reading(f"{name} is truncated or damaged"):
        if table == schemas.BODIES:
            with pa.memory_map(str(path)) as source:
                file = pa.ipc.open_file(source)
                schema, num_rows = file.schema, 0
                for position in range(file.num_record_batches):
                    ids = file.get_batch(position).column(0).to_numpy()
                    if len(ids) == 0 or ids[-1] != ids[0] + len(ids) - 1:
                        raise DamagedBytes(f"{name}: trajectory ids of batch {position} are not consecutive")
                    first_ids.append(int(ids[0]))
                    num_rows += len(ids)
        else:
            with pa.OSFile(str(path)) as source, pq.ParquetFile(source) as file:
                schema, num_rows, size = file.schema_arrow, file.metadata.num_rows, source.size()
                footer = file.metadata.serialized_size
                rows_end = (file.metadata.metadata or {}).get(schemas.ROWS_END, b"")
        if not schema.equals(schemas.SCHEMAS[table]):
            wrong = [str(column) for column in schema if column not in set(schemas.SCHEMAS[table])]
            missing = [str(column) for column in schemas.SCHEMAS[table] if column not in set(schema)]
            raise DamagedBytes(f"{name}: columns {wrong} instead of {missing}")
        content = msgspec.json.decode((schema.metadata or {}).get(schemas.METADATA_KEY, b"{}"), type=PartContent)
        if table != schemas.BODIES and rows_end != b"%d" % (size - footer - _AFTER_FOOTER):
            raise DamagedBytes(f"{name}: another program has written its rows anew")
    first_step, last_step = steps_of(path)
    return PartInfo(
        path=path,
        first_step=first_step,
        last_step=(content.last_step or first_step) if last_step is None else last_step,
        num_rows=num_rows,
        totals={name: content.totals.get(name, 0) for name in schemas.TABLES},
        batch_first_ids=tuple(first_ids),
    )


@contextmanager
def reading(name: str = "") -> Iterator[None]:
    """Raises DamagedBytes, beginning with `name`, where what is read inside is no file of Arrow's or Parquet's.

    To Arrow damaged bytes are invalid (a ValueError, like metadata that is no JSON), of an encoding it does not know,
    or end too soon: an OSError of its own, without a number. One with a number is the operating system's (no
    permission, a disk that does not answer, a file that is gone): it goes on as it is, for the bytes may be whole.
    """
    try:
        yield
    # Each is what Arrow raises for damaged bytes, as above, or JSON that is nested too deeply; nothing else is caught.
    except (ValueError, RecursionError, pa.ArrowNotImplementedError, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise DamagedBytes(f"{name}: {first_line(error)}" if name else first_line(error)) from error


def read_catalogue(folder: Path) -> Catalogue:
    """List and check the parts of the ledger in `folder`, also while a run writes it."""
    for _ in range(_ATTEMPTS - 1):
        with suppress(FileNotFoundError):
            return _read_once(folder)
    return _read_once(folder)


def _read_once(folder: Path) -> Catalogue:
    listed: dict[str, list[PartInfo]] = {table: [] for table in COMMIT_FIRST}
    problems = []
    for table, readable in listed.items():
        paths = list_parts(folder, table)
        try:
            for path in paths:
                readable.append(inspect_part(table, path))
        except DamagedBytes as error:
            left, step = len(paths) - len(readable), steps_of(paths[len(readable)])[0]
            problems.append(f"{error}; {left} parts of {table} from step {step} left out")
    commit, mismatch = _last_whole_commit(listed)
    last_step, totals = (commit.last_step, commit.totals) if commit else (0, dict.fromkeys(schemas.TABLES, 0))
    kept = {
        table: tuple(part for part in listed[table] if commit and part.first_step <= last_step)
        for table in schemas.TABLES
    }
    if later := [part for parts in listed.values() for part in parts if commit is None or part.last_step > last_step]:
        rows = sum(part.num_rows for parts in listed.values() for part in parts) - sum(totals.values())
        reason = mismatch or "not complete (still being written, or cut short)"
        reason = reason if listed[schemas.EVENTS] or problems else f"{schemas.EVENTS} has no parts"
        problems.append(f"{rows} rows up to step {max(part.last_step for part in later)} left out: {reason}")
    return Catalogue(parts=kept, totals=totals, last_step=last_step, dropped="; ".join(problems))


def _last_whole_commit(listed: Mapping[str, Sequence[PartInfo]]) -> tuple[PartInfo | None, str]:
    """The last part of events by whose end every table has the rows it promises, and what is wrong after it."""
    firsts = {table: [part.first_step for part in parts] for table, parts in listed.items()}
    sums = {table: [*accumulate((part.num_rows for part in parts), initial=0)] for table, parts in listed.items()}
    last, reached = None, 0
    for commit in listed[schemas.EVENTS]:
        if commit.first_step > reached + 1:
            return last, f"events of steps {reached + 1}-{commit.first_step - 1} are missing"
        for table, parts in listed.items():
            begun = bisect_right(firsts[table], commit.last_step)
            rows, promised = sums[table][begun], commit.totals.get(table, 0)
            # A live part may have gone on after this record was read.
            goes_on = begun and parts[begun - 1].last_step > commit.last_step
            if rows < promised or (rows > promised and not goes_on):
                return last, f"{table} has {rows} rows by step {commit.last_step} instead of {promised}"
        last, reached = commit, commit.last_step
    return last, ""


class LedgerWarning(DamageWarning):
    """Something in a ledger was left out."""


class LedgerReader:
    """The steps that were complete when it was made; later ones need a new reader.

    Warns (LedgerWarning) with the count of what is damaged or unfinished and therefore left out.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.identity = schemas.LedgerIdentity.read(folder)
        self._catalogue = read_catalogue(folder)
        self.last_step = self._catalogue.last_step
        self.dropped = self._catalogue.dropped
        if self.dropped:
            warnings.warn(f"{folder}: read up to step {self.last_step}; {self.dropped}", LedgerWarning, stacklevel=2)

    def table(self, table: str, columns: Sequence[str] | None = None, *, dictionary: bool = False) -> pa.Table:
        """Rows in the order they were written, all columns or those named.

        With `dictionary` the columns that repeat few words come dictionary-encoded, each over one dictionary.
        """
        names = list(columns) if columns is not None else schemas.SCHEMAS[table].names
        rows = self._retrying(lambda catalogue: read_rows(table, catalogue.parts[table], names, dictionary=dictionary))
        # A live part may have grown since.
        return rows.slice(0, self._catalogue.totals[table])

    trajectories = partialmethod(table, schemas.TRAJECTORIES)
    """One row per stored trajectory (`table`)."""
    scores = partialmethod(table, schemas.SCORES)
    """One row per candidate that a step scored."""
    draws = partialmethod(table, schemas.DRAWS)
    """One row per question that a step drew."""
    visits = partialmethod(table, schemas.VISITS)
    """One row per group of a question that a step graded."""
    replays = partialmethod(table, schemas.REPLAYS)
    """One row per trajectory that a step trained on again."""
    events = partialmethod(table, schemas.EVENTS)
    """One row per change of the buffer."""

    def bodies(self, trajectory_ids: Sequence[int]) -> list[Body]:
        """Token ids and behaviour log-probs, bit for bit as stored, in the order of the ids.

        Raises InputError for an unknown id, and naming the file where one of them is damaged.
        """
        known = self._catalogue.totals[schemas.BODIES]
        if unknown := [each for each in trajectory_ids if not 0 <= each < known]:
            raise InputError(f"{self.folder}: no trajectory {unknown[0]}; ids go from 0 to {known - 1}")
        try:
            return self._retrying(lambda catalogue: BodyStore(catalogue.parts[schemas.BODIES]).read(trajectory_ids))
        except DamagedBytes as error:
            raise InputError(f"{error}; restore the file from a copy") from error

    def _retrying(self, read: Callable[[Catalogue], _Result]) -> _Result:
        """Read by the catalogue; where the live part has got its final name since, by a new one."""
        try:
            return read(self._catalogue)
        except FileNotFoundError:
            fresh = read_catalogue(self.folder)
            if fresh.last_step < self.last_step:
                raise
            return read(fresh)


def read_rows(table: str, parts: Sequence[PartInfo], columns: Sequence[str], *, dictionary: bool = False) -> pa.Table:
    """Rows of some parts of a Parquet table.

    Raises InputError where a footer is whole but the pages are not, and FileNotFoundError where a part has got its
    final name.
    """
    encoded = [name for name in _REPETITIVE if name in columns] if dictionary else []
    words = pa.dictionary(pa.int32(), pa.string())
    fields = [schemas.SCHEMAS[table].field(name) for name in columns]
    schema = pa.schema([field.with_type(words) if field.name in encoded else field for field in fields])
    pieces = [schema.empty_table()]
    for part in parts:
        try:
            with reading(), pq.ParquetFile(part.path, read_dictionary=encoded, page_checksum_verification=True) as file:
                piece = file.read(columns=list(columns))
        except DamagedBytes as error:
            raise InputError(
                f"{part.path}: the rows of {table} in it are damaged ({error}); restore the file from a copy, or "
                f"delete it to use the steps before step {part.first_step}"
            ) from error
        pieces.append(piece.select(list(columns)).replace_schema_metadata(None).cast(schema))
    rows = pa.concat_tables(pieces)
    return rows.unify_dictionaries() if encoded else rows


def whole_until(folder: Path) -> tuple[int, str]:
    """The last step up to which all tables can be read with their checksums right, and what is wrong after it.

    Reads every table whole, bodies apart: those are checked one by one, as they are replayed.
    """
    catalogue = read_catalogue(folder)
    last_step, problem = catalogue.last_step, catalogue.dropped
    others = [name for name in schemas.TABLES if name != schemas.BODIES]
    for table, part in ((name, part) for name in others for part in catalogue.parts[name]):
        if part.first_step <= last_step:
            try:
                read_rows(table, [part], schemas.SCHEMAS[table].names)
            except InputError as error:
                last_step, problem = part.first_step - 1, str(error)
    return last_step, problem


class BodyStore:
    """Random access to bodies by trajectory id.

    Ids are consecutive over a ledger, so the place of a trajectory follows from the first id of each record batch and
    needs no memory of its own. What is read are pages of mapped files: the page cache's, not the process's.
    """

    def __init__(self, parts: Iterable[PartInfo]) -> None:
        self._first_ids: list[int] = []
        self._places: list[tuple[Path, int]] = []
        self._mapped: dict[Path, list[tuple[Columns, bytes]]] = {}
        for part in parts:
            self.add(part)

    def add(self, part: PartInfo) -> None:
        """Find the bodies of a part whose ids follow those already here."""
        self._first_ids += part.batch_first_ids
        self._places += [(part.path, position) for position in range(len(part.batch_first_ids))]

    def read(self, trajectory_ids: Sequence[int]) -> list[Body]:
        """Copies of the stored arrays, in the order of the ids, which must exist.

        Raises DamagedBytes naming the file and the trajectory whose checksum differs.
        """
        return [self._read_one(int(trajectory_id)) for trajectory_id in trajectory_ids]

    def _read_one(self, trajectory_id: int) -> Body:
        place = bisect_right(self._first_ids, trajectory_id) - 1
        path, batch = self._places[place]
        if path not in self._mapped:
            # Views keep the mapping alive; closing the file gives its descriptor back, of which a process has few.
            with reading(str(path)), pa.memory_map(str(path)) as source:
                file = pa.ipc.open_file(source)
                batches = [file.get_batch_with_custom_metadata(number) for number in range(file.num_record_batches)]
                for each, _ in batches:
                    each.validate()
            self._mapped[path] = [(body_columns(each), (own or {}).get(CHECKSUMS, b"")) for each, own in batches]
        (offsets, token_ids, logprobs), checksums = self._mapped[path][batch]
        row = trajectory_id - self._first_ids[place]
        begin, end = offsets[row], offsets[row + 1]
        body = token_ids[begin:end].copy(), logprobs[begin:end].copy()
        if checksums[8 * row : 8 * row + 8] != checksum(*body):
            raise DamagedBytes(f"{path}: trajectory {trajectory_id} is damaged (its checksum differs)")
        return body

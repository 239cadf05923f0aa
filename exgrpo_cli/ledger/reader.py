"""Reading a ledger, also one that a run is writing: tables as Arrow, bodies by id, memory-mapped."""

import warnings
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from functools import partialmethod
from pathlib import Path
from typing import TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from exgrpo_cli.base.errors import DamageWarning, InputError
from exgrpo_cli.ledger.parts import (
    CHECKSUMS,
    Body,
    Catalogue,
    Columns,
    DamagedBytes,
    PartInfo,
    body_columns,
    checksum,
    read_catalogue,
    reading,
)
from exgrpo_cli.ledger.schemas import (
    BODIES,
    DRAWS,
    EVENTS,
    REPLAYS,
    SCHEMAS,
    SCORES,
    TABLES,
    TRAJECTORIES,
    VISITS,
    LedgerIdentity,
)

_REPETITIVE = ("question_id", "event", "logprob_source")

_Result = TypeVar("_Result")


class LedgerWarning(DamageWarning):
    """Something in a ledger was left out."""


class LedgerReader:
    """The steps that were complete when it was made; later ones need a new reader.

    Warns (LedgerWarning) with the count of what is damaged or unfinished and therefore left out.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.identity = LedgerIdentity.read(folder)
        self._catalogue = read_catalogue(folder)
        self.last_step = self._catalogue.last_step
        self.dropped = self._catalogue.dropped
        if self.dropped:
            warnings.warn(f"{folder}: read up to step {self.last_step}; {self.dropped}", LedgerWarning, stacklevel=2)

    def table(self, table: str, columns: Sequence[str] | None = None, *, dictionary: bool = False) -> pa.Table:
        """Rows in the order they were written, all columns or those named.

        With `dictionary` the columns that repeat few words come dictionary-encoded, each over one dictionary.
        """
        names = list(columns) if columns is not None else SCHEMAS[table].names

        def read(catalogue: Catalogue) -> pa.Table:
            rows = read_rows(table, catalogue.parts[table], names, dictionary=dictionary)
            # A live part may have grown since.
            return rows.slice(0, self._catalogue.totals[table])

        return self._retrying(read)

    trajectories = partialmethod(table, TRAJECTORIES)
    """One row per stored trajectory (`table`)."""
    scores = partialmethod(table, SCORES)
    """One row per candidate that a step scored."""
    draws = partialmethod(table, DRAWS)
    """One row per question that a step drew."""
    visits = partialmethod(table, VISITS)
    """One row per group of a question that a step graded."""
    replays = partialmethod(table, REPLAYS)
    """One row per trajectory that a step trained on again."""
    events = partialmethod(table, EVENTS)
    """One row per change of the buffer."""

    def bodies(self, trajectory_ids: Sequence[int]) -> list[Body]:
        """Token ids and behaviour log-probs, bit for bit as stored, in the order of the ids.

        Raises InputError for an unknown id, and naming the file where one of them is damaged.
        """
        known = self._catalogue.totals[BODIES]
        for trajectory_id in trajectory_ids:
            if not 0 <= trajectory_id < known:
                raise InputError(f"{self.folder}: no trajectory {trajectory_id}; ids go from 0 to {known - 1}")
        try:
            return self._retrying(lambda catalogue: BodyStore(catalogue.parts[BODIES]).read(trajectory_ids))
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
    fields = [SCHEMAS[table].field(name) for name in columns]
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
    for table in TABLES:
        for part in catalogue.parts[table] if table != BODIES else ():
            if part.first_step > last_step:
                break
            try:
                read_rows(table, [part], SCHEMAS[table].names)
            except InputError as error:
                last_step, problem = part.first_step - 1, str(error)
                break
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
        self._checked = bytearray()
        """Whether this process, for each trajectory, has found its checksum right: what is read again is in memory."""
        for part in parts:
            self.add(part)

    def add(self, part: PartInfo) -> None:
        """Find the bodies of a part whose ids follow those already here."""
        for position, first_id in enumerate(part.batch_first_ids):
            self._first_ids.append(first_id)
            self._places.append((part.path, position))

    def read(self, trajectory_ids: Sequence[int]) -> list[Body]:
        """Copies of the stored arrays, in the order of the ids, which must exist.

        Raises DamagedBytes naming the file and the trajectory whose checksum differs, looked at when it is first read.
        """
        most = max(trajectory_ids, default=-1)
        self._checked.extend(bytes(max(0, int(most) + 1 - len(self._checked))))
        return [self._read_one(int(trajectory_id)) for trajectory_id in trajectory_ids]

    def _read_one(self, trajectory_id: int) -> Body:
        place = bisect_right(self._first_ids, trajectory_id) - 1
        path, batch = self._places[place]
        if path not in self._mapped:
            self._mapped[path] = _map_columns(path)
        (offsets, token_ids, logprobs), checksums = self._mapped[path][batch]
        row = trajectory_id - self._first_ids[place]
        begin, end = offsets[row], offsets[row + 1]
        body = token_ids[begin:end].copy(), logprobs[begin:end].copy()
        if not self._checked[trajectory_id]:
            if checksums[8 * row : 8 * row + 8] != checksum(*body):
                raise DamagedBytes(f"{path}: trajectory {trajectory_id} is damaged (its checksum differs)")
            self._checked[trajectory_id] = 1
        return body


def _map_columns(path: Path) -> list[tuple[Columns, bytes]]:
    """Columns of every record batch of a part, as views of the mapped file, and its checksums.

    Raises DamagedBytes naming the file.
    """
    views = []
    # The views keep the mapping alive; closing the file gives its descriptor back, of which a process has few.
    with reading(str(path)), pa.memory_map(str(path)) as source:
        file = pa.ipc.open_file(source)
        for position in range(file.num_record_batches):
            batch, metadata = file.get_batch_with_custom_metadata(position)
            batch.validate()
            views.append((body_columns(batch), (metadata or {}).get(CHECKSUMS, b"")))
    return views

"""Reading a ledger, also one that a run is writing: tables as Arrow, bodies by id."""

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from exgrpo_cli.base.errors import DamageWarning, InputError
from exgrpo_cli.ledger.bodies import Body, BodyStore
from exgrpo_cli.ledger.catalogue import Catalogue, read_catalogue
from exgrpo_cli.ledger.parts import DamagedBytes, PartInfo, reading
from exgrpo_cli.ledger.schemas import (
    BODIES,
    DRAWS,
    EVENTS,
    REPLAYS,
    SCHEMAS,
    SCORES,
    TRAJECTORIES,
    VISITS,
    LedgerIdentity,
)
from exgrpo_cli.ledger.writer import IDENTITY_FILE

_STEP_COLUMN = {TRAJECTORIES: "step_born"}
"""Of the tables that do not call it `step`."""
_REPETITIVE = ("question_id", "event", "logprob_source")

_Result = TypeVar("_Result")


class LedgerWarning(DamageWarning):
    """Something in a ledger was left out."""


def read_identity(folder: Path) -> LedgerIdentity:
    """Raises InputError where the folder holds no ledger."""
    path = folder / IDENTITY_FILE
    if not path.is_file():
        raise InputError(f"{folder} holds no ledger (no {IDENTITY_FILE}); name a run that keeps experience")
    return LedgerIdentity.from_json(path.read_text(), str(path))


class LedgerReader:
    """The steps that were complete when it was made; later ones need a new reader.

    Warns (LedgerWarning) with the count of what is damaged or unfinished and therefore left out.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.identity = read_identity(folder)
        self._catalogue = read_catalogue(folder)
        self.last_step = self._catalogue.last_step
        self.dropped = self._catalogue.dropped
        if self.dropped:
            warnings.warn(f"{folder}: read up to step {self.last_step}; {self.dropped}", LedgerWarning, stacklevel=2)

    def trajectories(self, columns: Sequence[str] | None = None) -> pa.Table:
        """One row per stored trajectory (`table`)."""
        return self.table(TRAJECTORIES, columns)

    def scores(self, columns: Sequence[str] | None = None) -> pa.Table:
        """One row per candidate that a step scored (`table`)."""
        return self.table(SCORES, columns)

    def draws(self, columns: Sequence[str] | None = None) -> pa.Table:
        """One row per question that a step drew (`table`)."""
        return self.table(DRAWS, columns)

    def visits(self, columns: Sequence[str] | None = None) -> pa.Table:
        """One row per group of a question that a step graded (`table`)."""
        return self.table(VISITS, columns)

    def replays(self, columns: Sequence[str] | None = None) -> pa.Table:
        """One row per trajectory that a step trained on again (`table`)."""
        return self.table(REPLAYS, columns)

    def events(self, columns: Sequence[str] | None = None) -> pa.Table:
        """One row per change of the buffer (`table`)."""
        return self.table(EVENTS, columns)

    def table(self, table: str, columns: Sequence[str] | None = None, *, dictionary: bool = False) -> pa.Table:
        """Rows in the order they were written, all columns or those named.

        With `dictionary` the columns that repeat few words come dictionary-encoded, each over one dictionary.
        """
        names = list(columns) if columns is not None else SCHEMAS[table].names
        step = _STEP_COLUMN.get(table, "step")
        wanted = [*names, step] if step not in names else names

        def read(catalogue: Catalogue) -> pa.Table:
            parts = catalogue.parts[table]
            rows = read_rows(table, parts, wanted, dictionary=dictionary)
            if any(part.name.last_step > self.last_step for part in parts):
                rows = rows.filter(pc.less_equal(rows.column(step), self.last_step))
            return rows.select(names)

        return self._retrying(read)

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
        """Read by the catalogue; where a compaction has replaced parts since, by a new one."""
        try:
            return read(self._catalogue)
        except FileNotFoundError:
            fresh = read_catalogue(self.folder)
            if fresh.last_step < self.last_step:
                raise
            return read(fresh)


def read_rows(table: str, parts: Sequence[PartInfo], columns: Sequence[str], *, dictionary: bool = False) -> pa.Table:
    """Rows of some parts of a Parquet table."""
    encoded = [name for name in _REPETITIVE if name in columns] if dictionary else []
    words = pa.dictionary(pa.int32(), pa.string())
    fields = [SCHEMAS[table].field(name) for name in columns]
    schema = pa.schema([field.with_type(words) if field.name in encoded else field for field in fields])
    pieces = []
    for part in parts:
        piece = _read_part(table, part, columns, encoded)
        pieces.append(piece.select(list(columns)).replace_schema_metadata(None))
    rows = pa.concat_tables([schema.empty_table(), *(piece.cast(schema) for piece in pieces)])
    return rows.unify_dictionaries() if encoded else rows


def _read_part(table: str, part: PartInfo, columns: Sequence[str], encoded: Sequence[str]) -> pa.Table:
    """Raises InputError where the footer is whole but the pages are not, FileNotFoundError after a compaction."""
    try:
        path, checked = part.name.path, True  # parts of older versions have no checksums, which passes as well
        with reading(), pq.ParquetFile(path, read_dictionary=list(encoded), page_checksum_verification=checked) as file:
            stored = set(file.schema_arrow.names)
            if stored.issuperset(columns):
                return file.read(columns=list(columns))
            return with_later_columns(file.read(columns=[*_BIRTH]), file.read(columns=[*stored & set(columns)]))
    except DamagedBytes as error:
        raise InputError(
            f"{part.name.path}: the rows of {table} in it are damaged ({error}); restore the file from a copy, or "
            f"delete it to use the steps before step {part.name.first_step}"
        ) from error


_BIRTH = ("trajectory_id", "question_id", "step_born")


def with_later_columns(births: pa.Table, rows: pa.Table) -> pa.Table:
    """Trajectories of format 1 with the columns of format 2: all of them successes, their advantages not recorded.

    The rows of one visit stand together, so the first of a run of equal question and step is the group's.
    """
    ids = births.column("trajectory_id").to_numpy()
    question = births.column("question_id").combine_chunks().dictionary_encode()
    question = question.combine_chunks() if isinstance(question, pa.ChunkedArray) else question
    codes, steps = question.indices.to_numpy(), births.column("step_born").to_numpy()
    begins = np.ones(len(ids), dtype=bool)
    begins[1:] = (codes[1:] != codes[:-1]) | (steps[1:] != steps[:-1])
    nulls = pa.nulls(len(ids), pa.float64())
    later = {
        "reward": pa.array(np.ones(len(ids))),
        "advantage": nulls,
        "priority": nulls,
        "group_id": pa.array(ids[begins][np.cumsum(begins) - 1] if len(ids) else ids),
    }
    for name, values in later.items():
        rows = rows.append_column(name, values)
    return rows

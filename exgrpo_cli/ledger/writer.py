"""The ledger's one writer: gathers the rows of a step, shows them to readers, and makes them durable by checkpoints.

`reader.py` tells live and closed parts of a table apart. A body is the tokens of a trajectory and their log-probs.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from filelock import FileLock

from exgrpo_cli.base import errors, files
from exgrpo_cli.ledger import reader, schemas

_LOCK_FILE = "writer.lock"
_STEPS_BEFORE = "Everything before is complete: free some space, then go on with --resume."
_DICTIONARY_BYTES = 16 << 20
"""46,000 question ids must fit one Parquet dictionary, or the column falls back to plain strings and opens slowly."""
_LIVE_ROWS, _LIVE_BYTES = 1 << 15, 8 << 20
"""Rows in all live parts, or bytes of live bodies, above which these are closed without a checkpoint: they are kept in
memory and written anew at every step, in some milliseconds at half of that."""

Batch = tuple[pa.RecordBatch, bytes]
"""Bodies and their checksums."""


def schema_with_metadata(table: str, last_step: int, totals: Mapping[str, int] | None = None) -> pa.Schema:
    """The table's schema with its last step and, in parts of `events`, the commit record."""
    content = {"last_step": last_step, "totals": dict(totals or {})}
    return schemas.SCHEMAS[table].with_metadata({schemas.METADATA_KEY: json.dumps(content).encode()})


def write_parquet(file: BinaryIO, table: pa.Table, schema: pa.Schema) -> None:
    """Write a table, under the metadata of `schema`, with a CRC-32 per page, which every reader of Parquet can check,
    and with ROWS_END, by which rows that another program has written in their place are told.

    Only words get a dictionary, and Snappy packs them: bodies outweigh these tables a hundred times, so what counts is
    the time to write and to read them, about 0.4 times that with dictionaries for all columns and Zstandard.
    """
    with pq.ParquetWriter(
        file,
        schema,
        compression="snappy",
        use_dictionary=[field.name for field in schema if field.type == pa.string()],
        dictionary_pagesize_limit=_DICTIONARY_BYTES,
        write_page_checksum=True,
    ) as sink:
        sink.write_table(table.replace_schema_metadata(schema.metadata))
        sink.add_key_value_metadata({schemas.ROWS_END.decode(): str(file.tell())})


def batch_checksums(batch: pa.RecordBatch) -> bytes:
    """The checksums of all bodies of a record batch."""
    offsets, token_ids, logprobs = reader.body_columns(batch)
    spans = pairwise(offsets.tolist())
    return b"".join(reader.checksum(token_ids[begin:end], logprobs[begin:end]) for begin, end in spans)


def bodies_batch(first_id: int, bodies: Sequence[reader.Body]) -> pa.RecordBatch:
    """Bodies as one record batch, numbered from `first_id`."""
    ids, schema = range(first_id, first_id + len(bodies)), schemas.SCHEMAS[schemas.BODIES]
    columns = [ids, [token_ids for token_ids, _ in bodies], [logprobs for _, logprobs in bodies]]
    arrays = [pa.array(own, field.type) for own, field in zip(columns, schema, strict=True)]
    return pa.record_batch(arrays, schema=schema)


def write_bodies(file: BinaryIO, batches: Iterable[Batch], schema: pa.Schema) -> None:
    """Write record batches of bodies, each with its checksums."""
    with pa.ipc.new_file(file, schema) as sink:
        for batch, checksums in batches:
            sink.write_batch(batch, custom_metadata={reader.CHECKSUMS: checksums})


def check_cut(folder: Path, step: int) -> reader.Catalogue:
    """Rows that a cut after `step` would leave of the ledger; deletes nothing.

    Raises InputError where the ledger is not whole up to `step`, or no part ends there as after a checkpoint.
    """
    catalogue = reader.read_catalogue(folder)
    # Step 0 has a part after a warm start alone.
    if step and step not in [reader.steps_of(part.path)[1] for part in catalogue.parts[schemas.EVENTS]]:
        raise errors.InputError(
            f"{folder} is whole only up to step {catalogue.last_step} and has no closed part that ends at step {step}, "
            f"of which the checkpoint is{': ' + catalogue.dropped if catalogue.dropped else ''}; to resume from an "
            "earlier checkpoint, remove this one"
        )
    parts = {table: tuple(part for part in own if part.last_step <= step) for table, own in catalogue.parts.items()}
    totals = parts[schemas.EVENTS][-1].totals if parts[schemas.EVENTS] else dict.fromkeys(schemas.TABLES, 0)
    return reader.Catalogue(parts=parts, totals=totals, last_step=step, dropped="")


def cut_after(folder: Path, step: int) -> None:
    """Delete what the ledger holds of later steps; the caller holds the writer lock and has called `check_cut`."""
    for table in reader.COMMIT_FIRST:
        files.remove_partials(folder / table)
        later = [path for path in reader.list_parts(folder, table) if reader.steps_of(path)[0] > step]
        for path in reversed(later):
            path.unlink()
        if later:
            files.sync_folder(folder / table)


class LedgerWriter:
    """Appends steps to the live part of each table, the commit record last. Holds the writer lock until `close`."""

    def __init__(self, folder: Path, identity: schemas.LedgerIdentity, at_step: int | None = None) -> None:
        """A new ledger, or with `at_step` one that goes on from there; rows on disk stay as they are until `begin`.

        Raises InputError where the folder holds a ledger, or another run's, or one that is being written (the lock of a
        dead process is free), or one that is not whole up to that step.
        """
        if at_step is not None:
            identity.require_match(schemas.LedgerIdentity.read(folder), str(folder), schemas.RESUME_FIELDS)
        elif (folder / schemas.IDENTITY_FILE).exists():
            raise errors.InputError(f"{folder} holds a ledger already; resume that run, or give another --output")
        for table in schemas.TABLES:
            (folder / table).mkdir(parents=True, exist_ok=True)
        self._lock = FileLock(folder / _LOCK_FILE)
        files.take(
            self._lock,
            f"{folder}: another process is writing this ledger; wait for it or stop it, "
            "or give this run another --output (reading needs no lock)",
        )
        try:
            self.catalogue = reader.read_catalogue(folder) if at_step is None else check_cut(folder, at_step)
        except BaseException:
            self._lock.release()
            raise
        self.folder, self.identity, self._is_new, self.last_step = folder, identity, at_step is None, at_step or 0
        self.totals = dict(self.catalogue.totals)
        """Rows of every table, of the steps flushed."""
        self._stored = reader.BodyStore(self.catalogue.parts[schemas.BODIES])
        # Of the live part of each table: its first step, the rows before it, and what it holds.
        self._closed, self._first_steps = dict(self.totals), dict.fromkeys(schemas.TABLES, self.last_step + 1)
        own = (table for table in schemas.TABLES if table != schemas.BODIES)
        self._tables = {table: schemas.SCHEMAS[table].empty_table() for table in own}
        self._rows: dict[str, list[dict[str, Any]]] = {table: [] for table in self._tables}
        self._batches: list[Batch] = []
        self._bodies: list[reader.Body] = []

    def begin(self) -> None:
        """Make the folder this run's ledger, without what it holds of later steps."""
        if self._is_new:
            files.write_json(self.folder / schemas.IDENTITY_FILE, asdict(self.identity))
        else:
            cut_after(self.folder, self.last_step)

    def append(self, table: str, **row: Any) -> None:
        """Add a row, all columns given, to what the next flush writes."""
        self._rows[table].append(row)

    def extend(self, table: str, num: int, **columns: Any) -> None:
        """Add `num` rows; what is neither an array nor a list is the same in all of them."""
        lists = [own.tolist() if isinstance(own, np.ndarray) else own for own in columns.values()]
        many = [own if isinstance(own, list) else [own] * num for own in lists]
        self._rows[table] += [dict(zip(columns, row, strict=True)) for row in zip(*many, strict=True)]

    def append_trajectory(self, body: reader.Body, **row: Any) -> None:
        """Add a row of `trajectories` and its body; its id must be the next one."""
        token_ids, logprobs = body
        assert row["trajectory_id"] == self._closed[schemas.BODIES] + len(self._bodies)
        assert len(token_ids) == len(logprobs)
        self.append(schemas.TRAJECTORIES, **row)
        self._bodies.append((token_ids.copy(), logprobs.copy()))

    def bodies(self, trajectory_ids: Sequence[int]) -> list[reader.Body]:
        """Copies of bodies, flushed or not. Raises RunError naming the file where one is damaged."""
        closed = self._closed[schemas.BODIES]
        try:
            stored = iter(self._stored.read([i for i in trajectory_ids if i < closed]))
        except reader.DamagedBytes as error:
            raise errors.RunError(f"{error}; restore the file from a copy, then go on with --resume") from error
        return [
            next(stored) if i < closed else (self._bodies[i - closed][0].copy(), self._bodies[i - closed][1].copy())
            for i in trajectory_ids
        ]

    def flush(self, step: int) -> None:
        """Let readers see the pending rows as those of the steps up to `step`.

        Raises RunError where the disk refuses; earlier steps stay complete, and the pending rows stay pending.
        """
        tables, batches = {}, self._batches
        for table, rows in self._rows.items():
            # What may be null is where it is NaN.
            columns = {own: [row[own.name] for row in rows] for own in schemas.SCHEMAS[table]}
            new = [pa.array(values, own.type, from_pandas=own.nullable) for own, values in columns.items()]
            tables[table] = pa.concat_tables([self._tables[table], pa.table(new, schema=schemas.SCHEMAS[table])])
        if bodies := self._bodies[self.totals[schemas.BODIES] - self._closed[schemas.BODIES] :]:
            batch = bodies_batch(self.totals[schemas.BODIES], bodies)
            batches = [*batches, (batch, batch_checksums(batch))]
        self._write_live(step, tables, batches, len(self._bodies))
        self._tables, self._batches = tables, batches
        for rows in self._rows.values():
            rows.clear()
        if sum(map(len, tables.values())) > _LIVE_ROWS:
            self._close_parts(schemas.TABLES)
        elif sum(batch.nbytes for batch, _ in batches) > _LIVE_BYTES:
            self._close_parts((schemas.BODIES,))

    def write(
        self, step: int, tables: Mapping[str, pa.Table], bodies: Iterable[pa.RecordBatch], num_bodies: int
    ) -> None:
        """Write the tables and bodies of a warm start as one step in closed parts, numbered on from what is there."""
        assert self.totals == self._closed and (step > self.last_step or not any(self.totals.values()))
        self._first_steps = {table: min(first, step) for table, first in self._first_steps.items()}
        self._write_live(step, tables, ((batch, batch_checksums(batch)) for batch in bodies), num_bodies)
        self.seal()

    def seal(self) -> None:
        """Close the live parts, so that the ledger is on the disk and can be cut here.

        Every row must have been flushed. Raises RunError where the disk refuses.
        """
        self._close_parts(schemas.TABLES)

    def close(self) -> None:
        """Let another process write; rows that were not flushed are lost."""
        self._lock.release()

    def _close_parts(self, tables: Sequence[str]) -> None:
        """Give live parts, that of `bodies` among them, their final names; all is on the disk when this returns."""
        assert not any(self._rows.values())
        try:
            newest = [path for table in tables for path in reader.list_parts(self.folder, table)[-1:]]
            live = [path for path in newest if reader.steps_of(path)[1] is None]
            # At once, for a disk syncs several files in little more time than one.
            with ThreadPoolExecutor() as pool:
                list(pool.map(files.sync_folder, live))
            for path in live:
                first_step, _ = reader.steps_of(path)
                files.publish(path, reader.part_path(self.folder, path.parent.name, first_step, self.last_step))
            path = reader.part_path(self.folder, schemas.BODIES, self._first_steps[schemas.BODIES], self.last_step)
            if self.totals[schemas.BODIES] > self._closed[schemas.BODIES]:
                self._stored.add(reader.inspect_part(schemas.BODIES, path))
        except OSError as error:
            raise files.cannot_write(f"step {self.last_step} of {self.folder}", error, _STEPS_BEFORE) from error
        for table in tables:
            self._first_steps[table], self._closed[table] = self.last_step + 1, self.totals[table]
            if table == schemas.BODIES:
                self._batches, self._bodies = [], []
            else:
                self._tables[table] = schemas.SCHEMAS[table].empty_table()

    def _write_live(self, step: int, tables: Mapping[str, pa.Table], batches: Iterable[Batch], num_bodies: int) -> None:
        """Replace the live parts that have new rows, and that of events, which commits, by ones up to `step`."""
        counts = {schemas.BODIES: num_bodies} | {table: len(rows) for table, rows in tables.items()}
        totals = {table: self._closed[table] + counts.get(table, 0) for table in schemas.TABLES}
        jobs: dict[Path, Callable[[BinaryIO], None]] = {}
        for table in schemas.TABLES:
            if totals[table] == self.totals[table] and table != schemas.EVENTS:
                continue
            schema = schema_with_metadata(table, step, totals if table == schemas.EVENTS else None)
            path = reader.part_path(self.folder, table, self._first_steps[table])
            if table == schemas.BODIES:
                jobs[path] = partial(write_bodies, batches=batches, schema=schema)
            else:
                jobs[path] = partial(write_parquet, table=tables[table], schema=schema)
        try:
            for path, staged in {path: files.stage(path, job, sync=False) for path, job in jobs.items()}.items():
                staged.replace(path)
        except OSError as error:
            raise files.cannot_write(f"step {step} of {self.folder}", error, _STEPS_BEFORE) from error
        finally:
            for path in jobs:
                files.partial_path(path).unlink(missing_ok=True)
        self.last_step, self.totals = step, totals

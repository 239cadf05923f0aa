"""The ledger's one writer: gathers the rows of a step and makes them durable together."""

import errno
import shutil
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
from filelock import FileLock, Timeout

from exgrpo_cli.base.errors import InputError, RunError
from exgrpo_cli.base.files import partial_path, publish, stage
from exgrpo_cli.ledger.bodies import Body, BodyBuffer, write_bodies
from exgrpo_cli.ledger.parts import (
    Commit,
    PartInfo,
    PartName,
    part_path,
    schema_with_metadata,
    write_parquet,
)
from exgrpo_cli.ledger.schemas import BODIES, EVENTS, TABLES, TRAJECTORIES, LedgerIdentity, schema_of, tables_of

IDENTITY_FILE = "ledger.json"
_LOCK_FILE = "writer.lock"
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def lock_ledger(folder: Path) -> FileLock:
    """Become the one writer of a ledger. Raises InputError where another process is; a dead one's lock is free."""
    lock = FileLock(folder / _LOCK_FILE)
    try:
        lock.acquire(timeout=0)
    except Timeout as error:
        raise InputError(
            f"{folder}: another process is writing this ledger; wait for it or stop it, "
            "or give this run another --output (reading needs no lock)"
        ) from error
    return lock


class LedgerWriter:
    """Appends one part per table and step, commit record last. Holds the lock until `close`."""

    def __init__(
        self, folder: Path, identity: LedgerIdentity, lock: FileLock, last_step: int, totals: Mapping[str, int]
    ) -> None:
        self.folder = folder
        self.identity = identity
        self.last_step = last_step
        self.totals = dict(totals)
        self._lock = lock
        self._tables = tables_of(identity.format)
        self._rows: dict[str, list[dict[str, Any]]] = {table: [] for table in self._tables if table != BODIES}
        self._bodies = BodyBuffer()

    def append(self, table: str, row: dict[str, Any]) -> None:
        """Add a row, all columns given, to what the next flush writes; what the format does not have is dropped."""
        if table in self._rows:
            self._rows[table].append(row)

    def append_trajectory(self, body: Body, row: dict[str, Any]) -> None:
        """Add a row of `trajectories` and its body; its id must be the next one."""
        assert row["trajectory_id"] == self.totals[BODIES] + len(self._bodies)
        self.append(TRAJECTORIES, row)
        self._bodies.append(body)

    def is_pending(self, trajectory_id: int) -> bool:
        """Whether a trajectory waits for the next flush."""
        return trajectory_id >= self.totals[BODIES]

    def pending_body(self, trajectory_id: int) -> Body:
        """Tokens and log-probs of a trajectory that waits for the next flush."""
        return self._bodies.read(trajectory_id - self.totals[BODIES])

    def flush(self, step: int) -> list[PartInfo]:
        """Write the pending rows as those of the steps up to `step`, and return the new parts of `bodies`.

        Raises RunError where the disk refuses; earlier steps stay complete, and the pending rows stay pending.
        """
        tables = {}
        for table, rows in self._rows.items():
            schema = schema_of(table, self.identity.format)
            tables[table] = pa.table({name: [row[name] for row in rows] for name in schema.names}, schema=schema)
        batches = (self._bodies.batch(self.totals[BODIES]) for _ in range(1))
        return self.write(step, tables, batches, len(self._bodies))

    def write(
        self, step: int, tables: Mapping[str, pa.Table], bodies: Iterable[pa.RecordBatch], num_bodies: int
    ) -> list[PartInfo]:
        """Make tables and bodies, numbered on from those already there, one committed step."""
        # The very first part may be of step 0 (a warm start); after it each begins where the last one ended.
        first_step = min(self.last_step + 1, step)
        assert step > self.last_step or not any(self.totals.values())
        counts = {BODIES: num_bodies} | {table: len(rows) for table, rows in tables.items()}
        totals = {table: self.totals[table] + counts[table] for table in self._tables}
        commit = Commit(step=step, totals=totals)
        first_ids: list[int] = []
        jobs: dict[Path, Callable[[BinaryIO], None]] = {}
        for table in self._tables:
            path = part_path(self.folder, table, first_step, step)
            schema = schema_with_metadata(table, self.identity, [commit] if table == EVENTS else [])
            if table == BODIES and num_bodies:
                jobs[path] = partial(_write_bodies, schema=schema, batches=bodies, first_ids=first_ids)
            elif table == EVENTS or (counts[table] and table != BODIES):
                jobs[path] = partial(write_parquet, table=tables[table].replace_schema_metadata(schema.metadata))
        try:
            _publish(jobs)
        except OSError as error:
            raise _write_failed(self.folder, step, error) from error
        self.last_step, self.totals = step, totals
        self._clear()
        if not num_bodies:
            return []
        name = PartName(path=part_path(self.folder, BODIES, first_step, step), first_step=first_step, last_step=step)
        return [PartInfo(name=name, num_rows=num_bodies, commits=(), batch_first_ids=tuple(first_ids))]

    def close(self) -> None:
        """Let another process write; rows that were not flushed are lost."""
        self._lock.release()

    def _clear(self) -> None:
        for rows in self._rows.values():
            rows.clear()
        self._bodies.clear()


def create_folders(folder: Path) -> None:
    """Make the folder of every table."""
    for table in TABLES:
        (folder / table).mkdir(parents=True, exist_ok=True)


def _publish(jobs: Mapping[Path, Callable[[BinaryIO], None]]) -> None:
    """Write parts and make them visible, the last one after all others are sure to survive a power cut."""
    *others, last = jobs
    try:
        # At once, for a disk syncs several files in little more time than one.
        with ThreadPoolExecutor(len(jobs)) as pool:
            staged = dict(zip(jobs, pool.map(stage, jobs.keys(), jobs.values()), strict=True))
        for path in (*others, last):
            publish(staged[path], path)
    except BaseException:
        for path in jobs:
            partial_path(path).unlink(missing_ok=True)
        raise


def _write_bodies(
    file: BinaryIO, *, schema: pa.Schema, batches: Iterable[pa.RecordBatch], first_ids: list[int]
) -> None:
    with pa.ipc.new_file(file, schema) as sink:
        for batch in batches:
            write_bodies(sink, batch)
            first_ids.append(batch.column(0)[0].as_py())


def _write_failed(folder: Path, step: int, error: OSError) -> RunError:
    if error.errno in _DISK_FULL:
        free = shutil.disk_usage(folder).free
        return RunError(
            f"{folder}: the disk is full ({free / 2**20:.0f} MiB free) while step {step} was being written; "
            f"everything before is complete: free some space, then go on with --resume"
        )
    return RunError(f"{folder}: cannot write step {step} ({error}); everything before is complete")

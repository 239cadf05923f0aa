"""The ledger's one writer: gathers the rows of a step and makes them durable together."""

import errno
import shutil
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
from filelock import FileLock, Timeout

from exgrpo_cli.errors import InputError, RunError
from exgrpo_cli.replay.bodies import Body, body_batch
from exgrpo_cli.replay.parts import (
    PartInfo,
    PartName,
    part_path,
    schema_with_metadata,
    stage,
    sync_folder,
    write_parquet,
)
from exgrpo_cli.replay.schemas import BODIES, EVENTS, SCHEMAS, TABLES, TRAJECTORIES, LedgerIdentity

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
        self._rows: dict[str, dict[str, list[Any]]] = {}
        self._bodies: list[Body] = []
        self._clear()

    def append(self, table: str, **columns: Sequence[Any]) -> None:
        """Add rows, all columns of the table given, to what the next flush writes."""
        pending = self._rows[table]
        for name in SCHEMAS[table].names:
            pending[name].extend(columns[name])

    def append_trajectory(self, body: Body, **columns: Any) -> None:
        """Add one trajectory with its body; its id must be the next one."""
        assert columns["trajectory_id"] == self.totals[TRAJECTORIES] + len(self._bodies)
        self.append(TRAJECTORIES, **{name: [value] for name, value in columns.items()})
        self._bodies.append(body)

    def is_pending(self, trajectory_id: int) -> bool:
        """Whether a trajectory waits for the next flush."""
        return trajectory_id >= self.totals[BODIES]

    def pending_body(self, trajectory_id: int) -> Body:
        return self._bodies[trajectory_id - self.totals[BODIES]]

    def flush(self, step: int) -> list[PartInfo]:
        """Write the pending rows as those of the steps up to `step`, and return the new parts of `bodies`.

        Raises RunError where the disk refuses; earlier steps stay complete, and the pending rows stay pending.
        """
        batches: list[tuple[int, Sequence[Body]]] = [(self.totals[BODIES], self._bodies)] if self._bodies else []
        tables = {table: pa.table(rows, schema=SCHEMAS[table]) for table, rows in self._rows.items()}
        return self.write(step, tables, iter(batches), len(self._bodies))

    def write(
        self, step: int, tables: Mapping[str, pa.Table], bodies: Iterator[tuple[int, Sequence[Body]]], num_bodies: int
    ) -> list[PartInfo]:
        """Make tables and bodies one committed step; bodies come in batches, each with the id of its first."""
        # The very first part may be of step 0 (a warm start); after it each begins where the last one ended.
        first_step = min(self.last_step + 1, step)
        assert step > self.last_step or not any(self.totals.values())
        counts = {table: len(tables[table]) if table in tables else num_bodies for table in TABLES}
        totals = {table: self.totals[table] + counts[table] for table in TABLES}
        first_ids: list[int] = []
        staged: dict[str, tuple[Path, Path]] = {}
        try:
            for table in TABLES:
                if not counts[table] and table != EVENTS:
                    continue
                path = part_path(self.folder, table, first_step, step)
                schema = schema_with_metadata(table, self.identity, totals if table == EVENTS else {})
                if table == BODIES:
                    write = partial(_write_bodies, schema=schema, batches=bodies, first_ids=first_ids)
                else:
                    write = partial(write_parquet, table=tables[table].replace_schema_metadata(schema.metadata))
                staged[table] = (stage(path, write), path)
            for table, (temporary, path) in staged.items():
                if table == EVENTS:
                    for other in staged:
                        sync_folder(self.folder / other)
                temporary.replace(path)
            sync_folder(self.folder / EVENTS)
        except OSError as error:
            for temporary, _ in staged.values():
                temporary.unlink(missing_ok=True)
            raise _write_failed(self.folder, step, error) from error
        self.last_step, self.totals = step, totals
        self._clear()
        if BODIES not in staged:
            return []
        name = PartName(path=staged[BODIES][1], first_step=first_step, last_step=step)
        return [PartInfo(name=name, num_rows=num_bodies, totals={}, batch_first_ids=tuple(first_ids))]

    def close(self) -> None:
        self._lock.release()

    def _clear(self) -> None:
        self._rows = {table: {name: [] for name in SCHEMAS[table].names} for table in TABLES if table != BODIES}
        self._bodies = []


def create_folders(folder: Path) -> None:
    for table in TABLES:
        (folder / table).mkdir(parents=True, exist_ok=True)


def _write_bodies(
    file: BinaryIO, schema: pa.Schema, batches: Iterator[tuple[int, Sequence[Body]]], first_ids: list[int]
) -> None:
    with pa.ipc.new_file(file, schema) as sink:
        for first_id, bodies in batches:
            sink.write_batch(body_batch(first_id, bodies, schema))
            first_ids.append(first_id)


def _write_failed(folder: Path, step: int, error: OSError) -> RunError:
    if error.errno in _DISK_FULL:
        free = shutil.disk_usage(folder).free
        return RunError(
            f"{folder}: the disk is full ({free / 2**20:.0f} MiB free) while step {step} was being written; "
            f"everything before is complete: free some space, then go on with --resume"
        )
    return RunError(f"{folder}: cannot write step {step} ({error}); everything before is complete")

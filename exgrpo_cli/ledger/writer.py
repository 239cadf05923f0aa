"""The ledger's one writer: gathers the rows of a step, shows them to readers, and makes them durable by checkpoints."""

import errno
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
from filelock import FileLock, Timeout

from exgrpo_cli.base.errors import InputError, RunError
from exgrpo_cli.base.files import partial_path, stage, write_text
from exgrpo_cli.ledger.parts import (
    Body,
    PartInfo,
    batch_checksums,
    check_cut,
    close_live,
    cut_after,
    inspect_part,
    part_path,
    read_catalogue,
    schema_with_metadata,
    write_bodies,
    write_parquet,
)
from exgrpo_cli.ledger.schemas import (
    BODIES,
    EVENTS,
    IDENTITY_FILE,
    RESUME_FIELDS,
    SCHEMAS,
    TABLES,
    TRAJECTORIES,
    LedgerIdentity,
)

_LOCK_FILE = "writer.lock"
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_LIVE_ROWS, _LIVE_BYTES = 1 << 15, 8 << 20
"""Live parts of so many rows in all, or of bodies of that size, are closed without a checkpoint, for they are kept in
memory and written anew at every step: some milliseconds at half of that."""


def bodies_batch(first_id: int, bodies: Sequence[Body]) -> pa.RecordBatch:
    """Bodies as one record batch, numbered from `first_id`."""
    offsets = np.cumsum([0, *(len(token_ids) for token_ids, _ in bodies)], dtype=np.int32)
    token_ids = np.concatenate([np.empty(0, dtype=np.int32), *(token_ids for token_ids, _ in bodies)])
    logprobs = np.concatenate([np.empty(0, dtype=np.float32), *(logprobs for _, logprobs in bodies)])
    ids = np.arange(first_id, first_id + len(bodies), dtype=np.int64)
    lists = [pa.ListArray.from_arrays(pa.array(offsets), pa.array(values)) for values in (token_ids, logprobs)]
    return pa.record_batch([pa.array(ids), *lists], schema=SCHEMAS[BODIES])


class LedgerWriter:
    """Appends steps to the live part of each table, commit record last, and closes it. Holds the lock until `close`."""

    def __init__(self, folder: Path, identity: LedgerIdentity, at_step: int | None = None) -> None:
        """Become the one writer of a new ledger, or with `at_step` of one that is cut back to there.

        The folder stays as it is until `begin`. Raises InputError where it holds a ledger, or another run's, or one
        that is being written (a dead process's lock is free) or is not whole up to that step.
        """
        self.folder, self.identity, self._is_new = folder, identity, at_step is None
        if at_step is not None:
            identity.require_match(LedgerIdentity.read(folder), str(folder), RESUME_FIELDS)
        elif (folder / IDENTITY_FILE).exists():
            raise InputError(f"{folder} holds a ledger already; resume that run, or give another --output")
        for table in TABLES:
            (folder / table).mkdir(parents=True, exist_ok=True)
        self._lock = FileLock(folder / _LOCK_FILE)
        try:
            self._lock.acquire(timeout=0)
        except Timeout as error:
            raise InputError(
                f"{folder}: another process is writing this ledger; wait for it or stop it, "
                "or give this run another --output (reading needs no lock)"
            ) from error
        self.last_step = at_step or 0
        try:
            self.catalogue = check_cut(folder, self.last_step) if at_step is not None else read_catalogue(folder)
        except BaseException:
            self.close()
            raise
        # Rows of every table, of the steps flushed; of the live part of each its first step, the rows before it, and
        # what it holds.
        self.totals = dict(self.catalogue.totals)
        self._closed, self._first_steps = dict(self.totals), dict.fromkeys(TABLES, self.last_step + 1)
        self._tables = {table: SCHEMAS[table].empty_table() for table in TABLES if table != BODIES}
        self._rows: dict[str, dict[str, list[Any]]] = {table: defaultdict(list) for table in self._tables}
        self._batches: list[tuple[pa.RecordBatch, bytes]] = []
        self._bodies: list[Body] = []

    def begin(self) -> None:
        """Make the folder this run's ledger, without what it holds of later steps."""
        if self._is_new:
            write_text(self.folder / IDENTITY_FILE, self.identity.to_json())
        else:
            cut_after(self.folder, self.last_step)

    def append(self, table: str, **columns: Any) -> None:
        """Add a row, or as many as there are values in the columns that are arrays or lists, to the next flush."""
        sizes = {len(values) for values in columns.values() if isinstance(values, np.ndarray | list)}
        num = sizes.pop() if sizes else 1
        for name, values in columns.items():
            many = values.tolist() if isinstance(values, np.ndarray) else values
            self._rows[table][name] += many if isinstance(many, list) else [values] * num

    def append_trajectory(self, body: Body, **row: Any) -> None:
        """Add a row of `trajectories` and its body; its id must be the next one."""
        token_ids, logprobs = body
        assert row["trajectory_id"] == self._closed[BODIES] + len(self._bodies) and len(token_ids) == len(logprobs)
        self.append(TRAJECTORIES, **row)
        self._bodies.append((token_ids.copy(), logprobs.copy()))

    def is_pending(self, trajectory_id: int) -> bool:
        """Whether a trajectory is in no closed part yet."""
        return trajectory_id >= self._closed[BODIES]

    def pending_body(self, trajectory_id: int) -> Body:
        """Tokens and log-probs of a trajectory that is in no closed part yet."""
        token_ids, logprobs = self._bodies[trajectory_id - self._closed[BODIES]]
        return token_ids.copy(), logprobs.copy()

    def flush(self, step: int) -> list[PartInfo]:
        """Let readers see the pending rows as those of the steps up to `step`; returns new closed parts of `bodies`.

        Raises RunError where the disk refuses; earlier steps stay complete, and the pending rows stay pending.
        """
        tables, batches = {}, self._batches
        for table, rows in self._rows.items():
            # What may be null is where it is NaN.
            new = [pa.array(rows[own.name], own.type, from_pandas=own.nullable) for own in SCHEMAS[table]]
            tables[table] = pa.concat_tables([self._tables[table], pa.table(new, schema=SCHEMAS[table])])
        if bodies := self._bodies[self.totals[BODIES] - self._closed[BODIES] :]:
            batch = bodies_batch(self.totals[BODIES], bodies)
            batches = [*batches, (batch, batch_checksums(batch))]
        self._write_live(step, tables, batches, len(self._bodies))
        self._tables, self._batches = tables, batches
        for rows in self._rows.values():
            rows.clear()
        if sum(map(len, tables.values())) > _LIVE_ROWS:
            return self._close(TABLES)
        return self._close((BODIES,)) if sum(batch.nbytes for batch, _ in batches) > _LIVE_BYTES else []

    def write(
        self, step: int, tables: Mapping[str, pa.Table], bodies: Iterable[pa.RecordBatch], num_bodies: int
    ) -> list[PartInfo]:
        """Make tables and bodies, numbered on from those already there, one step and closed parts."""
        assert self.totals == self._closed and (step > self.last_step or not any(self.totals.values()))
        self._first_steps = {table: min(first, step) for table, first in self._first_steps.items()}
        self._write_live(step, tables, ((batch, batch_checksums(batch)) for batch in bodies), num_bodies)
        return self.seal()

    def seal(self) -> list[PartInfo]:
        """Close the live parts, so that the ledger is on the disk and can be cut here; returns those of `bodies`.

        Every row must have been flushed. Raises RunError where the disk refuses.
        """
        return self._close(TABLES)

    def close(self) -> None:
        """Let another process write; rows that were not flushed are lost."""
        self._lock.release()

    def _close(self, tables: Sequence[str]) -> list[PartInfo]:
        assert not any(self._rows.values())
        try:
            close_live(self.folder, tables, self.last_step)
            path = part_path(self.folder, BODIES, self._first_steps[BODIES], self.last_step)
            closed = [inspect_part(BODIES, path)] if self.totals[BODIES] > self._closed[BODIES] else []
        except OSError as error:
            raise _write_failed(self.folder, self.last_step, error) from error
        for table in tables:
            self._first_steps[table], self._closed[table] = self.last_step + 1, self.totals[table]
            if table == BODIES:
                self._batches, self._bodies = [], []
            else:
                self._tables[table] = SCHEMAS[table].empty_table()
        return closed

    def _write_live(
        self,
        step: int,
        tables: Mapping[str, pa.Table],
        batches: Iterable[tuple[pa.RecordBatch, bytes]],
        num_bodies: int,
    ) -> None:
        """Replace the live parts that have new rows, and that of events, which commits, by ones up to `step`."""
        counts = {BODIES: num_bodies} | {table: len(rows) for table, rows in tables.items()}
        totals = {table: self._closed[table] + counts.get(table, 0) for table in TABLES}
        jobs: dict[Path, Callable[[BinaryIO], None]] = {}
        for table in TABLES:
            if totals[table] == self.totals[table] and table != EVENTS:
                continue
            schema = schema_with_metadata(table, step, totals if table == EVENTS else None)
            path = part_path(self.folder, table, self._first_steps[table])
            if table == BODIES:
                jobs[path] = partial(write_bodies, batches=batches, schema=schema)
            else:
                jobs[path] = partial(write_parquet, table=tables[table], schema=schema)
        try:
            for path, staged in {path: stage(path, job, sync=False) for path, job in jobs.items()}.items():
                staged.replace(path)
        except OSError as error:
            raise _write_failed(self.folder, step, error) from error
        finally:
            for path in jobs:
                partial_path(path).unlink(missing_ok=True)
        self.last_step, self.totals = step, totals


def _write_failed(folder: Path, step: int, error: OSError) -> RunError:
    if error.errno in _DISK_FULL:
        free = shutil.disk_usage(folder).free
        return RunError(
            f"{folder}: the disk is full ({free / 2**20:.0f} MiB free) while step {step} was being written; "
            f"everything before is complete: free some space, then go on with --resume"
        )
    return RunError(f"{folder}: cannot write step {step} ({error}); everything before is complete")

"""The ledger's one writer: gathers the rows of a step, shows them to readers, and makes them durable by checkpoints.

`parts.py` tells live and closed parts of a table apart. A body is the tokens of a trajectory and their log-probs.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa

from exgrpo_cli.base.errors import RunError
from exgrpo_cli.base.files import partial_path, stage, write_text
from exgrpo_cli.ledger.parts import (
    Body,
    DamagedBytes,
    batch_checksums,
    bodies_batch,
    close_live,
    cut_after,
    inspect_part,
    open_ledger,
    part_path,
    schema_with_metadata,
    write_bodies,
    write_failed,
    write_parquet,
)
from exgrpo_cli.ledger.reader import BodyStore
from exgrpo_cli.ledger.schemas import BODIES, EVENTS, IDENTITY_FILE, SCHEMAS, TABLES, TRAJECTORIES, LedgerIdentity

_LIVE_ROWS, _LIVE_BYTES = 1 << 15, 8 << 20
"""Rows in all live parts, or bytes of live bodies, above which these are closed without a checkpoint: they are kept in
memory and written anew at every step, in some milliseconds at half of that."""


class LedgerWriter:
    """Appends steps to the live part of each table, the commit record last. Holds the writer lock until `close`."""

    def __init__(self, folder: Path, identity: LedgerIdentity, at_step: int | None = None) -> None:
        """A new ledger, or with `at_step` one that goes on from there; the folder stays as it is until `begin`.

        Raises InputError as `open_ledger` does.
        """
        self._lock, self.catalogue = open_ledger(folder, identity, at_step)
        self.folder, self.identity, self._is_new, self.last_step = folder, identity, at_step is None, at_step or 0
        self.totals = dict(self.catalogue.totals)
        """Rows of every table, of the steps flushed."""
        self._stored = BodyStore(self.catalogue.parts[BODIES])
        # Of the live part of each table: its first step, the rows before it, and what it holds.
        self._closed, self._first_steps = dict(self.totals), dict.fromkeys(TABLES, self.last_step + 1)
        self._tables = {table: SCHEMAS[table].empty_table() for table in TABLES if table != BODIES}
        self._rows: dict[str, list[dict[str, Any]]] = {table: [] for table in self._tables}
        self._batches: list[tuple[pa.RecordBatch, bytes]] = []
        self._bodies: list[Body] = []

    def begin(self) -> None:
        """Make the folder this run's ledger, without what it holds of later steps."""
        if self._is_new:
            write_text(self.folder / IDENTITY_FILE, self.identity.to_json())
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

    def append_trajectory(self, body: Body, **row: Any) -> None:
        """Add a row of `trajectories` and its body; its id must be the next one."""
        token_ids, logprobs = body
        assert row["trajectory_id"] == self._closed[BODIES] + len(self._bodies) and len(token_ids) == len(logprobs)
        self.append(TRAJECTORIES, **row)
        self._bodies.append((token_ids.copy(), logprobs.copy()))

    def bodies(self, trajectory_ids: Sequence[int]) -> list[Body]:
        """Copies of bodies, flushed or not. Raises RunError naming the file where one is damaged."""
        closed = self._closed[BODIES]
        try:
            stored = iter(self._stored.read([i for i in trajectory_ids if i < closed]))
        except DamagedBytes as error:
            raise RunError(f"{error}; restore the file from a copy, then go on with --resume") from error
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
            columns = {own: [row[own.name] for row in rows] for own in SCHEMAS[table]}
            new = [pa.array(values, own.type, from_pandas=own.nullable) for own, values in columns.items()]
            tables[table] = pa.concat_tables([self._tables[table], pa.table(new, schema=SCHEMAS[table])])
        if bodies := self._bodies[self.totals[BODIES] - self._closed[BODIES] :]:
            batch = bodies_batch(self.totals[BODIES], bodies)
            batches = [*batches, (batch, batch_checksums(batch))]
        self._write_live(step, tables, batches, len(self._bodies))
        self._tables, self._batches = tables, batches
        for rows in self._rows.values():
            rows.clear()
        if sum(map(len, tables.values())) > _LIVE_ROWS:
            self._close_parts(TABLES)
        elif sum(batch.nbytes for batch, _ in batches) > _LIVE_BYTES:
            self._close_parts((BODIES,))

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
        self._close_parts(TABLES)

    def close(self) -> None:
        """Let another process write; rows that were not flushed are lost."""
        self._lock.release()

    def _close_parts(self, tables: Sequence[str]) -> None:
        """Close live parts, that of `bodies` among them."""
        assert not any(self._rows.values())
        try:
            close_live(self.folder, tables, self.last_step)
            path = part_path(self.folder, BODIES, self._first_steps[BODIES], self.last_step)
            if self.totals[BODIES] > self._closed[BODIES]:
                self._stored.add(inspect_part(BODIES, path))
        except OSError as error:
            raise write_failed(self.folder, self.last_step, error) from error
        for table in tables:
            self._first_steps[table], self._closed[table] = self.last_step + 1, self.totals[table]
            if table == BODIES:
                self._batches, self._bodies = [], []
            else:
                self._tables[table] = SCHEMAS[table].empty_table()

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
            raise write_failed(self.folder, step, error) from error
        finally:
            for path in jobs:
                partial_path(path).unlink(missing_ok=True)
        self.last_step, self.totals = step, totals

"""Compaction: merging the small parts that a ledger collects, one per table and step.

Parts are merged only between the steps of kept checkpoints, so a run can still be cut back to each of them. The merged
part is renamed before the old ones are deleted; a crash in between leaves both, and every reader then takes the merged
one.
"""

from bisect import bisect_left
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import BinaryIO

import pyarrow as pa

from exgrpo_cli.base.files import publish, stage
from exgrpo_cli.ledger.catalogue import read_catalogue
from exgrpo_cli.ledger.parts import PartInfo, part_path, schema_with_metadata, write_parquet
from exgrpo_cli.ledger.reader import read_rows
from exgrpo_cli.ledger.schemas import BODIES, TABLES, LedgerIdentity

FEWEST = 8
"""Fewest parts worth a merge: each row is then rewritten at most log_8 of the run's length times."""
_TARGET_BYTES = 128 << 20
"""A merged part stays below it."""
_SMALL_BYTES = 16 << 20
"""Larger parts are left alone: rewriting them would save few files."""


def compact(folder: Path, identity: LedgerIdentity, kept_checkpoints: Sequence[int], *, fewest: int = FEWEST) -> int:
    """Merge runs of at least `fewest` parts and return the number of parts that are gone.

    The caller holds the writer lock.
    """
    parts = read_catalogue(folder).parts
    return sum(
        _merge(folder, table, identity, run)
        for table in TABLES
        for run in _mergeable(parts[table], kept_checkpoints)
        if len(run) >= max(fewest, 2)
    )


def _mergeable(parts: Sequence[PartInfo], kept_checkpoints: Sequence[int]) -> list[list[PartInfo]]:
    """Runs of adjacent small parts between kept checkpoints; nothing beyond the last of those."""
    bounds = sorted(set(kept_checkpoints))
    runs = []
    complete = [part for part in parts if bounds and part.name.last_step <= bounds[-1]]
    for _, between in groupby(complete, key=lambda part: bisect_left(bounds, part.name.last_step)):
        run: list[PartInfo] = []
        size = 0
        for part in between:
            part_size = part.name.path.stat().st_size
            if run and (size + part_size > _TARGET_BYTES or part_size > _SMALL_BYTES):
                runs.append(run)
                run, size = [], 0
            if part_size <= _SMALL_BYTES:
                run.append(part)
                size += part_size
        runs.append(run)
    return runs


def _merge(folder: Path, table: str, identity: LedgerIdentity, run: Sequence[PartInfo]) -> int:
    path = part_path(folder, table, run[0].name.first_step, run[-1].name.last_step)
    schema = schema_with_metadata(table, identity, [commit for part in run for commit in part.commits])

    def write(file: BinaryIO) -> None:
        if table == BODIES:
            _copy_bodies(file, schema, run)
        else:
            write_parquet(file, read_rows(table, run, schema.names).replace_schema_metadata(schema.metadata))

    publish(stage(path, write), path)
    for part in run:
        part.name.path.unlink()
    return len(run) - 1


def _copy_bodies(file: BinaryIO, schema: pa.Schema, run: Sequence[PartInfo]) -> None:
    with pa.ipc.new_file(file, schema) as sink:
        for part in run:
            with pa.memory_map(str(part.name.path)) as source:
                stored = pa.ipc.open_file(source)
                for position in range(stored.num_record_batches):
                    # With the checksums of its bodies, where it has them: what was damaged before stays found out.
                    batch, checksums = stored.get_batch_with_custom_metadata(position)
                    sink.write_batch(batch, custom_metadata=checksums)

"""Parts: the files a table consists of, each holding the rows of a range of steps, and which of them belong together.

A closed part, `part-00000001-00000025.parquet`, is on the disk and never changes. The steps since the last one are in
the live part, `part-00000026-live.parquet`: written anew under a temporary name and renamed, step by step, and given
its final name when a checkpoint is taken, or when it has become large. Rows only grow behind those already there.

A step is complete once a part of `events` reaches it, for that one is renamed last and carries the number of rows that
every table has by then. Whatever is damaged, missing or beyond the last complete step is left out and counted, never
half-read.
"""

import errno
import json
import re
import shutil
import warnings
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, BinaryIO
from zlib import crc32

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from filelock import FileLock, Timeout
from jaxtyping import Float32, Int32

from exgrpo_cli.base.errors import InputError, RunError, ToolkitWarning, first_line
from exgrpo_cli.base.files import publish, sync_folder
from exgrpo_cli.ledger.schemas import (
    BODIES,
    EVENTS,
    IDENTITY_FILE,
    METADATA_KEY,
    RESUME_FIELDS,
    SCHEMAS,
    TABLES,
    LedgerIdentity,
)

CHECKSUMS = b"crc32"
"""Key of a record batch's metadata: the CRC-32 of every body in it, eight hexadecimal digits each."""
_LOCK_FILE = "writer.lock"
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_LIVE = "live"
_NAME = re.compile(rf"part-(\d{{8}})-(\d{{8}}|{_LIVE})\.(?:parquet|arrow)")
_COMMIT_FIRST = (EVENTS, *(table for table in TABLES if table != EVENTS))
"""Reading: the rows a commit record promises were there before it, so a table listed later has them. Deleting: without
its record a step was never finished, whatever comes between."""
_DICTIONARY_BYTES = 16 << 20
"""46,000 question ids must fit one Parquet dictionary, or the column falls back to plain strings and opens slowly."""
_ATTEMPTS = 20
"""A live part may get its final name after it was listed, which happens once a checkpoint."""


class DamagedBytes(Exception):
    """A file that is truncated, overwritten or has the columns of something else; the message says which."""


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

    def up_to(self, step: int) -> "Catalogue":
        """The catalogue after a cut at a `step` at which parts end."""
        parts = {table: tuple(part for part in own if part.last_step <= step) for table, own in self.parts.items()}
        totals = parts[EVENTS][-1].totals if parts[EVENTS] else dict.fromkeys(TABLES, 0)
        return Catalogue(parts=parts, totals=totals, last_step=step, dropped="")


def part_path(folder: Path, table: str, first_step: int, last_step: int | None = None) -> Path:
    """Path of the part of a table with these steps; the live one without `last_step`."""
    suffix = "arrow" if table == BODIES else "parquet"
    return folder / table / f"part-{first_step:08d}-{_LIVE if last_step is None else f'{last_step:08d}'}.{suffix}"


def steps_of(path: Path) -> tuple[int, int | None]:
    """First and last step of a part by its name; no last one where it is live."""
    _, first, last = path.stem.split("-")
    return int(first), None if last == _LIVE else int(last)


def list_parts(folder: Path, table: str) -> list[Path]:
    """Parts of a table in order of steps, the live one last."""
    return sorted(path for path in (folder / table).glob("part-*") if _NAME.fullmatch(path.name))


def list_unfinished(folder: Path) -> list[Path]:
    """Files whose writer died, or is still writing."""
    return sorted(path for table in TABLES for path in (folder / table).glob(".part-*"))


def schema_with_metadata(table: str, last_step: int, totals: Mapping[str, int] | None = None) -> pa.Schema:
    """The table's schema with its last step and, in parts of `events`, the commit record."""
    content = {"last_step": last_step, "totals": dict(totals or {})}
    return SCHEMAS[table].with_metadata({METADATA_KEY: json.dumps(content).encode()})


def write_parquet(file: BinaryIO, table: pa.Table, schema: pa.Schema) -> None:
    """Write a table, under the metadata of `schema`, with a CRC-32 per page, which every reader of Parquet can check.

    Only words get a dictionary, and Snappy packs them: bodies outweigh these tables a hundred times, so what counts is
    the time to write and to read them, about 0.4 times that with dictionaries for all columns and Zstandard.
    """
    pq.write_table(
        table.replace_schema_metadata(schema.metadata),
        file,
        compression="snappy",
        use_dictionary=[field.name for field in schema if field.type == pa.string()],
        dictionary_pagesize_limit=_DICTIONARY_BYTES,
        write_page_checksum=True,
    )


def checksum(token_ids: Int32[np.ndarray, " tokens"], logprobs: Float32[np.ndarray, " tokens"]) -> bytes:
    """The CRC-32 of a body's token ids and then log-probs as they are stored, in hexadecimal digits."""
    return b"%08x" % crc32(logprobs.data, crc32(token_ids.data))


Body = tuple[Int32[np.ndarray, "..."], Float32[np.ndarray, "..."]]
"""Token ids and behaviour log-probs of one trajectory, as many of one as of the other."""
Columns = tuple[Int32[np.ndarray, " offsets"], Int32[np.ndarray, " values"], Float32[np.ndarray, " values"]]
"""Offsets, token ids and log-probs of the bodies of a record batch."""


def body_columns(batch: pa.RecordBatch) -> Columns:
    """Views of the memory of a record batch of bodies."""
    token_ids, logprobs = batch.column("token_ids"), batch.column("behaviour_logprobs")
    return token_ids.offsets.to_numpy(), token_ids.values.to_numpy(), logprobs.values.to_numpy()


def batch_checksums(batch: pa.RecordBatch) -> bytes:
    """The checksums of all bodies of a record batch."""
    offsets, token_ids, logprobs = body_columns(batch)
    return b"".join(checksum(token_ids[begin:end], logprobs[begin:end]) for begin, end in pairwise(offsets.tolist()))


def bodies_batch(first_id: int, bodies: Sequence[Body]) -> pa.RecordBatch:
    """Bodies as one record batch, numbered from `first_id`."""
    offsets = np.cumsum([0, *(len(token_ids) for token_ids, _ in bodies)], dtype=np.int32)
    token_ids = np.concatenate([np.empty(0, dtype=np.int32), *(token_ids for token_ids, _ in bodies)])
    logprobs = np.concatenate([np.empty(0, dtype=np.float32), *(logprobs for _, logprobs in bodies)])
    ids = np.arange(first_id, first_id + len(bodies), dtype=np.int64)
    lists = [pa.ListArray.from_arrays(pa.array(offsets), pa.array(values)) for values in (token_ids, logprobs)]
    return pa.record_batch([pa.array(ids), *lists], schema=SCHEMAS[BODIES])


def write_bodies(file: BinaryIO, batches: Iterable[tuple[pa.RecordBatch, bytes]], schema: pa.Schema) -> None:
    """Write record batches of bodies, each with its checksums."""
    with pa.ipc.new_file(file, schema) as sink:
        for batch, checksums in batches:
            sink.write_batch(batch, custom_metadata={CHECKSUMS: checksums})


def write_failed(folder: Path, step: int, error: OSError) -> RunError:
    """The error of a step that the disk refused, for the user."""
    if error.errno in _DISK_FULL:
        free = shutil.disk_usage(folder).free
        return RunError(
            f"{folder}: the disk is full ({free / 2**20:.0f} MiB free) while step {step} was being written; "
            f"everything before is complete: free some space, then go on with --resume"
        )
    return RunError(f"{folder}: cannot write step {step} ({error}); everything before is complete")


def close_live(folder: Path, tables: Sequence[str], step: int) -> None:
    """Give live parts their final names, as ones of steps up to `step`; all is on the disk when this returns."""
    live = [path for table in tables for path in list_parts(folder, table)[-1:] if steps_of(path)[1] is None]
    # At once, for a disk syncs several files in little more time than one.
    with ThreadPoolExecutor() as pool:
        list(pool.map(sync_folder, live))
    for path in live:
        publish(path, part_path(folder, path.parent.name, steps_of(path)[0], step))


def inspect_part(table: str, path: Path) -> PartInfo:
    """Open a part's footer and compare its schema.

    Raises DamagedBytes, FileNotFoundError where the part has got its final name since it was listed, and any other
    OSError of a file system that refuses it.
    """
    name, first_ids = f"{table}/{path.name}", []
    with reading(f"{name} is truncated or damaged"):
        if table == BODIES:
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
            with pq.ParquetFile(path) as file:
                schema, num_rows = file.schema_arrow, file.metadata.num_rows
        if not schema.equals(SCHEMAS[table]):
            texts = [each.to_string(show_schema_metadata=False) for each in (schema, SCHEMAS[table])]
            found, expected = (text.splitlines() for text in texts)
            wrong = [field for field in found if field not in expected]
            missing = [field for field in expected if field not in found]
            raise DamagedBytes(f"{name}: columns {wrong[:2]} instead of {missing[:2]}")
        content: dict[str, Any] = json.loads((schema.metadata or {}).get(METADATA_KEY, b"{}"))
    first_step, last_step = steps_of(path)
    return PartInfo(
        path=path,
        first_step=first_step,
        last_step=int(content.get("last_step", first_step)) if last_step is None else last_step,
        num_rows=num_rows,
        totals={name: content.get("totals", {}).get(name, 0) for name in TABLES},
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
    # Each of the three is what Arrow raises for damaged bytes, as above; nothing else is caught.
    except (ValueError, pa.ArrowNotImplementedError, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise DamagedBytes(f"{name}: {first_line(error)}" if name else first_line(error)) from error


def read_catalogue(folder: Path) -> Catalogue:
    """List and check the parts of the ledger in `folder`, also while a run writes it."""
    for _ in range(_ATTEMPTS - 1):
        try:
            return _read_once(folder)
        except FileNotFoundError:
            continue
    return _read_once(folder)


def _read_once(folder: Path) -> Catalogue:
    listed, problems = {}, []
    for table in _COMMIT_FIRST:
        listed[table], problem = _readable_prefix(folder, table)
        problems += problem
    commit, mismatch = _last_whole_commit(listed)
    last_step, totals = (commit.last_step, commit.totals) if commit else (0, dict.fromkeys(TABLES, 0))
    kept = {table: tuple(part for part in listed[table] if commit and part.first_step <= last_step) for table in TABLES}
    if later := [part for parts in listed.values() for part in parts if commit is None or part.last_step > last_step]:
        rows = sum(part.num_rows for parts in listed.values() for part in parts) - sum(totals.values())
        reason = mismatch or "not complete (still being written, or cut short)"
        problems.append(f"{rows} rows up to step {max(part.last_step for part in later)} left out: {reason}")
    if unfinished := list_unfinished(folder):
        problems.append(f"{len(unfinished)} unfinished files ignored")
    return Catalogue(parts=kept, totals=totals, last_step=last_step, dropped="; ".join(problems))


def _readable_prefix(folder: Path, table: str) -> tuple[list[PartInfo], list[str]]:
    """Parts up to the first unreadable one, and what is wrong with that one."""
    paths = list_parts(folder, table)
    readable: list[PartInfo] = []
    for path in paths:
        try:
            readable.append(inspect_part(table, path))
        except DamagedBytes as error:
            left = f"{len(paths) - len(readable)} parts of {table} from step {steps_of(path)[0]} left out"
            return readable, [f"{error}; {left}"]
    return readable, []


def _last_whole_commit(listed: Mapping[str, Sequence[PartInfo]]) -> tuple[PartInfo | None, str]:
    """The last part of events by whose end every table has the rows it promises, and what is wrong after it."""
    firsts = {table: [part.first_step for part in parts] for table, parts in listed.items()}
    sums = {table: [*accumulate((part.num_rows for part in parts), initial=0)] for table, parts in listed.items()}
    last, reached = None, 0
    for commit in listed[EVENTS]:
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


def open_ledger(folder: Path, identity: LedgerIdentity, at_step: int | None) -> tuple[FileLock, Catalogue]:
    """Become the one writer of a new ledger, or with `at_step` of the one there: its lock, and what it holds by then.

    Raises InputError where the folder holds a ledger, or another run's, or one that is being written (the lock of a
    dead process is free), or one that is not whole up to that step.
    """
    if at_step is not None:
        identity.require_match(LedgerIdentity.read(folder), str(folder), RESUME_FIELDS)
    elif (folder / IDENTITY_FILE).exists():
        raise InputError(f"{folder} holds a ledger already; resume that run, or give another --output")
    for table in TABLES:
        (folder / table).mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / _LOCK_FILE)
    try:
        lock.acquire(timeout=0)
        return lock, read_catalogue(folder) if at_step is None else check_cut(folder, at_step)
    except Timeout as error:
        raise InputError(
            f"{folder}: another process is writing this ledger; wait for it or stop it, "
            "or give this run another --output (reading needs no lock)"
        ) from error
    except BaseException:
        lock.release()
        raise


def check_cut(folder: Path, step: int) -> Catalogue:
    """Rows that a cut after `step` would leave of the ledger; deletes nothing.

    Raises InputError where the ledger is not whole up to `step` or cannot be cut there.
    """
    catalogue = read_catalogue(folder)
    for part in (part for parts in catalogue.parts.values() for part in parts):
        is_live = steps_of(part.path)[1] is None
        if part.first_step <= step and (is_live or step < part.last_step):
            raise InputError(
                f"{part.path} holds steps {part.first_step} to {part.last_step} in one part and cannot be cut at step "
                f"{step}; resume from a checkpoint at which a part ends"
            )
    if catalogue.last_step < step:
        raise InputError(
            f"{folder} is whole only up to step {catalogue.last_step}, but the checkpoint is of step {step}"
            f"{': ' + catalogue.dropped if catalogue.dropped else ''}; "
            f"to resume from an earlier checkpoint, remove those after step {catalogue.last_step}"
        )
    return catalogue.up_to(step)


def cut_after(folder: Path, step: int) -> None:
    """Delete what the ledger holds of later steps; the caller holds the writer lock and has called `check_cut`."""
    unfinished = list_unfinished(folder)
    for path in unfinished:
        path.unlink()
    if unfinished:
        warnings.warn(
            f"{folder}: {len(unfinished)} unfinished files of a stopped run removed", ToolkitWarning, stacklevel=3
        )
    for table in _COMMIT_FIRST:
        later = [path for path in list_parts(folder, table) if steps_of(path)[0] > step]
        for path in reversed(later):
            path.unlink()
        if later:
            sync_folder(folder / table)

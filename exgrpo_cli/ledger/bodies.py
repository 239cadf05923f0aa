"""Bodies: random access to the token ids and log-probs of stored trajectories, memory-mapped from Arrow IPC files.

Ids are consecutive over a ledger, so the place of a trajectory follows from the first id of each record batch and needs
no memory of its own. What is read are pages of the mapped files: they belong to the page cache, not to the process.
"""

import itertools
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from pathlib import Path
from zlib import crc32

import numpy as np
import pyarrow as pa
from jaxtyping import Float32, Int32

from exgrpo_cli.ledger.parts import DamagedBytes, PartInfo, reading
from exgrpo_cli.ledger.schemas import BODIES, SCHEMAS

Body = tuple[Int32[np.ndarray, " tokens"], Float32[np.ndarray, " tokens"]]
"""Token ids and behaviour log-probs of one trajectory."""


CHECKSUMS = b"crc32"
"""Key of a record batch's metadata: the CRC-32 of every body in it, eight hexadecimal digits each."""


def checksum(token_ids: Int32[np.ndarray, " tokens"], logprobs: Float32[np.ndarray, " tokens"]) -> bytes:
    """The CRC-32 of a body's token ids and then log-probs as they are stored, in hexadecimal digits."""
    return b"%08x" % crc32(logprobs.data, crc32(token_ids.data))


class BodyBuffer:
    """Bodies on their way to the disk, in two flat arrays that are kept from step to step."""

    def __init__(self) -> None:
        self._token_ids: Int32[np.ndarray, " capacity"] = np.empty(0, dtype=np.int32)
        self._logprobs: Float32[np.ndarray, " capacity"] = np.empty(0, dtype=np.float32)
        self._offsets = [0]

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def append(self, body: Body) -> None:
        """Copy a body behind the others."""
        token_ids, logprobs = body
        assert len(token_ids) == len(logprobs)
        begin, end = self._offsets[-1], self._offsets[-1] + len(token_ids)
        if end > len(self._token_ids):
            # Every element below `begin` is kept; doubling keeps the cost of growing in proportion to what is stored.
            self._token_ids = np.resize(self._token_ids, max(1 << 16, 2 * end))
            self._logprobs = np.resize(self._logprobs, max(1 << 16, 2 * end))
        self._token_ids[begin:end] = token_ids
        self._logprobs[begin:end] = logprobs
        self._offsets.append(end)

    def read(self, position: int) -> Body:
        """A copy of the body at `position`, counted from the last `clear`."""
        begin, end = self._offsets[position], self._offsets[position + 1]
        return self._token_ids[begin:end].copy(), self._logprobs[begin:end].copy()

    def batch(self, first_id: int) -> pa.RecordBatch:
        """All bodies, numbered from `first_id`, over this buffer's memory: write it before the next `clear`."""
        offsets, end = pa.array(self._offsets, type=pa.int32()), self._offsets[-1]
        return pa.record_batch(
            [
                pa.array(np.arange(first_id, first_id + len(self), dtype=np.int64)),
                pa.ListArray.from_arrays(offsets, pa.array(self._token_ids[:end])),
                pa.ListArray.from_arrays(offsets, pa.array(self._logprobs[:end])),
            ],
            schema=SCHEMAS[BODIES],
        )

    def clear(self) -> None:
        """Forget all bodies and keep the memory."""
        self._offsets = [0]


def write_bodies(sink: pa.ipc.RecordBatchFileWriter, batch: pa.RecordBatch) -> None:
    """Add a record batch with the checksums of its bodies."""
    offsets, token_ids, logprobs = _columns(batch)
    bounds = itertools.pairwise(offsets.tolist())
    checksums = (checksum(token_ids[begin:end], logprobs[begin:end]) for begin, end in bounds)
    sink.write_batch(batch, custom_metadata={CHECKSUMS: b"".join(checksums)})


class BodyStore:
    """Bodies by trajectory id."""

    def __init__(self, parts: Iterable[PartInfo]) -> None:
        self._first_ids: list[int] = []
        self._places: list[tuple[Path, int]] = []
        self._mapped: dict[Path, list[tuple[_Columns, bytes]]] = {}
        self._checked = bytearray()
        """Of each trajectory, whether this process has found its checksum right: what is read again is in memory."""
        for part in parts:
            self.add(part)

    def add(self, part: PartInfo) -> None:
        """Take in a part whose ids follow those already here."""
        for position, first_id in enumerate(part.batch_first_ids):
            self._first_ids.append(first_id)
            self._places.append((part.name.path, position))

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
        columns, checksums = self._mapped[path][batch]
        row = trajectory_id - self._first_ids[place]
        body = _body(columns, row)
        # Parts of older versions have no checksums.
        if checksums and not self._checked[trajectory_id]:
            if checksums[8 * row : 8 * row + 8] != checksum(*body):
                raise DamagedBytes(f"{path}: trajectory {trajectory_id} is damaged (its checksum differs)")
            self._checked[trajectory_id] = 1
        return body


_Columns = tuple[Int32[np.ndarray, " offsets"], Int32[np.ndarray, " values"], Float32[np.ndarray, " values"]]


def _map_columns(path: Path) -> list[tuple[_Columns, bytes]]:
    """Columns of every record batch of a part, as views of the mapped file, and its checksums, empty without any.

    Raises DamagedBytes naming the file.
    """
    views = []
    # The views keep the mapping alive; closing the file gives its descriptor back, of which a process has few.
    with reading(str(path)), pa.memory_map(str(path)) as source:
        file = pa.ipc.open_file(source)
        for position in range(file.num_record_batches):
            batch, metadata = file.get_batch_with_custom_metadata(position)
            batch.validate()
            views.append((_columns(batch), (metadata or {}).get(CHECKSUMS, b"")))
    return views


def _columns(batch: pa.RecordBatch) -> _Columns:
    """Offsets, token ids and log-probs of a record batch, as views of its memory."""
    token_ids, logprobs = batch.column("token_ids"), batch.column("behaviour_logprobs")
    return token_ids.offsets.to_numpy(), token_ids.values.to_numpy(), logprobs.values.to_numpy()


def _body(columns: _Columns, row: int) -> Body:
    offsets, token_ids, logprobs = columns
    begin, end = offsets[row], offsets[row + 1]
    return token_ids[begin:end].copy(), logprobs[begin:end].copy()

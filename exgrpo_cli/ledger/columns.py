"""The ledger's rows as numpy columns: the one decoder, for recovery, statistics and what-if alike.

Questions become numbers (positions among known ids) and events codes, so that everything downstream is integer
arithmetic.
"""

from dataclasses import dataclass, fields

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from jaxtyping import Int64

from exgrpo_cli.base.errors import InputError
from exgrpo_cli.ledger.schemas import Event

KINDS = tuple(Event)
COLLECTED, MOVED, SELECTED, RETIRED, EVICTED, READMITTED = range(len(KINDS))
"""Codes of the events: positions in KINDS."""
NO_BUCKET = -1
"""Stands for the null bucket of a question that is in none."""
MISSING = -1
"""Stands for any other null."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EventColumns:
    """Changes of questions and trajectories, in order."""

    step: Int64[np.ndarray, " events"]
    kind: Int64[np.ndarray, " events"]
    """Index into KINDS."""
    question: Int64[np.ndarray, " events"]
    """Position among the known ids."""
    trajectory_id: Int64[np.ndarray, " events"]
    """MISSING where the event concerns the question alone."""
    bucket: Int64[np.ndarray, " events"]
    """The question's bucket after the event, NO_BUCKET for none."""
    num_members: Int64[np.ndarray, " events"]
    """Rollouts a success count is over: K, or K - 1 where fresh members alone count; MISSING without a bucket."""

    def of(self, kind: int) -> "EventColumns":
        """The rows of one kind."""
        keep = self.kind == kind
        return EventColumns(**{field.name: getattr(self, field.name)[keep] for field in fields(self)})


def decode_events(table: pa.Table, known_ids: pa.Array) -> EventColumns:
    """Rows of the event table, question ids and event words dictionary-encoded.

    Raises InputError for a question that is not among `known_ids`, and for a word that is no event.
    """
    words, numbers = encoded_words(table.column("event"))
    found = pc.index_in(words, value_set=pa.array([kind.value for kind in KINDS]))
    codes = pc.fill_null(found, MISSING).to_numpy().astype(np.int64)
    if unknown := [word for word, code in zip(words.to_pylist(), codes, strict=True) if code == MISSING]:
        raise InputError(f"the ledger holds an event {unknown[0]!r}, which this version does not know")
    others = {name: column(table, name) for name in ("step", "trajectory_id", "bucket", "num_members")}
    return EventColumns(kind=codes[numbers], question=question_numbers(table, known_ids), **others)


def question_numbers(table: pa.Table, known_ids: pa.Array) -> Int64[np.ndarray, " rows"]:
    """Position in `known_ids` of each row's question. Raises InputError where one is not there."""
    words, numbers = encoded_words(table.column("question_id"))
    found = pc.fill_null(pc.index_in(words, value_set=known_ids), MISSING).to_numpy().astype(np.int64)[numbers]
    missing = np.unique(numbers[found < 0])
    if len(missing):
        raise InputError(
            f"the ledger holds {len(missing)} questions that are not in this run's question file, "
            f"{words[int(missing[0])].as_py()} first; use the question file it was made with"
        )
    return found


def encoded_words(column: pa.ChunkedArray) -> tuple[pa.Array, Int64[np.ndarray, " rows"]]:
    """The distinct words of a dictionary-encoded column, and the number of each row's word."""
    encoded = flat(column)
    return encoded.dictionary.cast(pa.string()), encoded.indices.to_numpy(zero_copy_only=False).astype(np.int64)


def column(table: pa.Table, name: str) -> np.ndarray:
    """One column: int64 with MISSING for null, float64 with NaN for null, or bool."""
    values = flat(table.column(name))
    if pa.types.is_boolean(values.type):
        return np.asarray(values.to_numpy(zero_copy_only=False), dtype=bool)
    if pa.types.is_floating(values.type):
        return values.cast(pa.float64()).to_numpy(zero_copy_only=False)
    return pc.fill_null(values.cast(pa.int64()), MISSING).to_numpy(zero_copy_only=False)


def flat(column: pa.ChunkedArray) -> pa.Array:
    """One contiguous array; `combine_chunks` of a column without chunks is one of length 0."""
    combined = column.combine_chunks()
    return combined if isinstance(combined, pa.Array) else pa.concat_arrays(combined.chunks)

"""Which slot each row belongs in: rows of like length side by side, so that attention reads few columns in vain.

Decoding is bound by reading keys and values. Rows of one attention call all read as many columns as the longest of them
has, so a batch whose rows are replaced as they end, where lengths differ widely, is cut into runs of like length. Rows
move only when they are in the wrong run after others have ended; runs that are not worth a call of their own merge.

Axes: rows = rows in use, moves = rows that change their slot, runs = runs of neighbouring slots.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Int

CALL_CELLS = 500
"""What one more attention call costs, in cells (a row times a column) of keys and values read."""
GPU_CALL_CELLS = 2**15
"""On a GPU, by arithmetic: three launches a call take some 5 microseconds each, the keys and values of a cell (two
heads of 128 in bfloat16: 1 KiB) half a nanosecond at 2 TB/s."""
SHORT = 64
"""Rows shorter than this are one class: telling them apart saves less than moving them costs."""
MANY_ROWS = 128
"""From here on a class of half the width has rows enough to be worth its call and their moves."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Regrouping:
    """Slots after rows have left."""

    sources: Int[np.ndarray, " moves"]
    targets: Int[np.ndarray, " moves"]
    run_starts: Int[np.ndarray, " runs"]
    """First slot of each run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionChunk:
    """Neighbouring slots that attend in one call, over columns 0 .. span - 1."""

    start: int
    stop: int
    span: int


def length_class(lengths: Int[np.ndarray, " rows"]) -> Int[np.ndarray, " rows"]:
    """Rows of one class read at most twice the columns they have, among `MANY_ROWS` at most 1.4 times as many.

    Short rows are one class, whatever they read in vain.
    """
    halvings = np.log2(np.maximum(lengths, SHORT - 1))
    return np.floor(halvings if len(lengths) < MANY_ROWS else 2 * halvings).astype(np.int64)


def regroup(lengths: Int[np.ndarray, " rows"], alive: Bool[np.ndarray, " rows"]) -> Regrouping:
    """Bring the living rows to the first slots, longest class first, moving as few of them as possible."""
    classes = length_class(lengths)
    counts = np.bincount(classes[alive])
    present = counts.nonzero()[0][::-1]
    sizes = counts[present]
    wanted = np.repeat(present, sizes)
    in_place = alive[: len(wanted)] & (classes[: len(wanted)] == wanted)
    elsewhere = alive.copy()
    elsewhere[: len(wanted)] &= ~in_place
    sources, targets = elsewhere.nonzero()[0], (~in_place).nonzero()[0]
    # Both sides hold the same number of rows of each class: sorted by class, they match one to one.
    sources = sources[np.argsort(-classes[sources], kind="stable")]
    return Regrouping(sources=sources, targets=targets, run_starts=sizes.cumsum() - sizes)


def attention_chunks(
    lengths: Int[np.ndarray, " rows"], run_starts: Int[np.ndarray, " runs"], device_type: str = "cpu"
) -> tuple[AttentionChunk, ...]:
    """The attention calls of a step in which a row of `lengths` cached tokens attends to these and to itself."""
    call_cells = CALL_CELLS if device_type == "cpu" else GPU_CALL_CELLS
    spans = np.maximum.reduceat(lengths, run_starts) + 1
    chunks: list[AttentionChunk] = []
    for start, stop, span in zip(run_starts, [*run_starts[1:], len(lengths)], spans, strict=True):
        run = AttentionChunk(start=int(start), stop=int(stop), span=int(span))
        if chunks and _cells(merged := _merge(chunks[-1], run)) <= _cells(chunks[-1]) + _cells(run) + call_cells:
            chunks[-1] = merged
        else:
            chunks.append(run)
    return tuple(chunks)


def widened(chunks: tuple[AttentionChunk, ...]) -> tuple[AttentionChunk, ...]:
    """The same calls over one more column."""
    return tuple(AttentionChunk(start=chunk.start, stop=chunk.stop, span=chunk.span + 1) for chunk in chunks)


def _merge(first: AttentionChunk, second: AttentionChunk) -> AttentionChunk:
    return AttentionChunk(start=first.start, stop=second.stop, span=max(first.span, second.span))


def _cells(chunk: AttentionChunk) -> int:
    return (chunk.stop - chunk.start) * chunk.span

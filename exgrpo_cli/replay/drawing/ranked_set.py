"""A set of small integers that is drawn from by rank: membership changes and look-ups cost the logarithm of its range.

The order is that of the integers, whatever the history of insertions, so a state rebuilt from the ledger draws exactly
as the one that lived through the run. The counts are a Fenwick tree (Fenwick 1994).
"""

from array import array
from collections.abc import Iterable, Iterator

import numpy as np
from jaxtyping import Bool, Int64


class RankedSet:
    """Subset of range(capacity)."""

    def __init__(self, capacity: int, members: Int64[np.ndarray, " members"] | None = None) -> None:
        self._present = bytearray(capacity)
        self._top = 1 << capacity.bit_length()
        self._size = 0 if members is None else len(members)
        if members is None:
            self._tree = array("i", bytes(4 * (capacity + 1)))
        else:
            present = np.zeros(capacity, dtype=np.int32)
            present[members] = 1
            self._present[:] = present.astype(np.uint8).tobytes()
            prefix = np.concatenate([[0], np.cumsum(present)])
            nodes = np.arange(capacity + 1)
            self._tree = array("i", (prefix - prefix[nodes - (nodes & -nodes)]).astype(np.int32).tobytes())

    def __len__(self) -> int:
        return self._size

    def __contains__(self, member: int) -> bool:
        return bool(self._present[member])

    def __iter__(self) -> Iterator[int]:
        return iter(np.flatnonzero(self.mask()).tolist())

    def mask(self) -> Bool[np.ndarray, " capacity"]:
        """Which integers are members."""
        return np.frombuffer(self._present, dtype=np.uint8).astype(bool)

    def add(self, member: int) -> None:
        """Make `member` one; nothing where it is already."""
        if not self._present[member]:
            self._present[member] = 1
            self._change(member, 1)

    def discard(self, member: int) -> None:
        """Take `member` out; nothing where it is not one."""
        if self._present[member]:
            self._present[member] = 0
            self._change(member, -1)

    def at(self, rank: int) -> int:
        """The member with `rank` smaller ones."""
        if not 0 <= rank < self._size:
            raise IndexError(f"rank {rank} of a set of {self._size}")
        tree, node, step = self._tree, 0, self._top
        while step:
            reach = node + step
            if reach < len(tree) and tree[reach] <= rank:
                node = reach
                rank -= tree[reach]
            step >>= 1
        return node

    def at_all(self, ranks: Iterable[int]) -> list[int]:
        """The members of these ranks, counted from 0 in ascending order."""
        return [self.at(int(rank)) for rank in ranks]

    def _change(self, member: int, difference: int) -> None:
        self._size += difference
        tree, node = self._tree, member + 1
        while node < len(tree):
            tree[node] += difference
            node += node & -node

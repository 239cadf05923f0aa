"""Two trees over numbered units: draws in proportion to a weight, and the first few in an order.

Both cost the logarithm of the store to change and to ask. A node is always recomputed from all its children, never
adjusted, so a tree rebuilt from the ledger equals the one that lived through the run, bit for bit.

Axes: nodes = inner nodes of one level; children = FAN of each; some = any units or queries.
"""

import itertools
from collections.abc import Callable

import numpy as np
from jaxtyping import Bool, Float64, Int, Int32, Int64

FAN = 64
"""Children of a node: a tree of 10^6 leaves has four levels, and inner nodes take 1/63 of the leaves' memory."""

Rank = Callable[[Int64[np.ndarray, " some"]], tuple[Float64[np.ndarray, " some"], Float64[np.ndarray, " some"]]]
"""Units in, their key and what breaks its ties out, the highest of both first; then the lowest number is first."""


class SumTree:
    """Weights of the units 0, 1, 2, ...; a weight of 0 is never drawn. Knows their sum and the least of the others."""

    def __init__(self, weights: Float64[np.ndarray, " units"]) -> None:
        self._levels = [_padded(weights, 0.0)]
        self._leasts: list[Float64[np.ndarray, " nodes"]] = []
        while len(self._levels[-1]) > FAN:
            nodes = np.arange(len(self._levels[-1]) // FAN)
            self._leasts.append(_padded(self._least_under(len(self._leasts), nodes), np.inf))
            self._levels.append(_padded(self._levels[-1].reshape(-1, FAN).sum(axis=1), 0.0))

    @property
    def weights(self) -> Float64[np.ndarray, " capacity"]:
        """Weight of each unit; 0 of those that are out."""
        return self._levels[0]

    @property
    def total(self) -> float:
        """Sum of all weights."""
        return float(self._levels[-1].sum())

    @property
    def least(self) -> float:
        """The least weight above 0; infinite without any."""
        return float(self._least_under(len(self._leasts), np.arange(len(self._levels[-1]) // FAN)).min())

    @property
    def nbytes(self) -> int:
        """Memory in bytes."""
        return sum(level.nbytes for level in (*self._levels, *self._leasts))

    def set(self, units: Int64[np.ndarray, " some"], weights: Float64[np.ndarray, " some"]) -> None:
        """Give distinct units new weights."""
        self._levels[0][units] = weights
        nodes = np.unique(units // FAN)
        for level, (lower, upper) in enumerate(itertools.pairwise(self._levels)):
            upper[nodes] = lower.reshape(-1, FAN)[nodes].sum(axis=1)
            self._leasts[level][nodes] = self._least_under(level, nodes)
            nodes = np.unique(nodes // FAN)

    def _least_under(self, level: int, nodes: Int64[np.ndarray, " nodes"]) -> Float64[np.ndarray, " nodes"]:
        """Least weight above 0 under some nodes, the children of which are on `level`."""
        if level:
            return self._leasts[level - 1].reshape(-1, FAN)[nodes].min(axis=1)
        weights = self._levels[0].reshape(-1, FAN)[nodes]
        return np.where(weights > 0, weights, np.inf).min(axis=1)

    def find(self, targets: Float64[np.ndarray, " some"]) -> Int64[np.ndarray, " some"]:
        """The unit in whose part of the running sum of weights each target in [0, total) lies."""
        nodes = np.zeros(len(targets), dtype=np.int64)
        rows = np.arange(len(targets))
        for level in reversed(self._levels):
            children = level.reshape(-1, FAN)[nodes]
            reached = children.cumsum(axis=1)
            # Sums of another order may differ in their last digit: such a target takes the last child with a weight.
            last = FAN - 1 - (children[:, ::-1] > 0).argmax(axis=1)
            chosen = np.minimum((reached <= targets[:, None]).sum(axis=1), last)
            targets = targets - np.where(chosen > 0, reached[rows, chosen - 1], 0.0)
            nodes = nodes * FAN + chosen
        return nodes


class OrderTree:
    """The present ones among the units 0, 1, 2, ..., in the order of a rank that is asked, not stored."""

    def __init__(self, present: Bool[np.ndarray, " units"], rank: Rank) -> None:
        self._rank = rank
        self._present = _padded(present, False)
        self._levels: list[Int32[np.ndarray, " nodes"]] = []
        nodes = np.arange(len(self._present) // FAN)
        while True:
            self._levels.append(_padded(np.full(len(nodes), -1, dtype=np.int32), -1))
            self._renew(len(self._levels) - 1, nodes)
            if len(nodes) <= FAN:
                return
            nodes = np.arange(len(self._levels[-1]) // FAN)

    @property
    def nbytes(self) -> int:
        """Memory in bytes."""
        return self._present.nbytes + sum(level.nbytes for level in self._levels)

    def set(self, units: Int64[np.ndarray, " some"], present: Bool[np.ndarray, " some"]) -> None:
        """Let units in or out, or take note that the rank of present ones has changed."""
        self._present[units] = present
        nodes = np.unique(units // FAN)
        for level in range(len(self._levels)):
            self._renew(level, nodes)
            nodes = np.unique(nodes // FAN)

    def first(self, num: int) -> Int64[np.ndarray, " units"]:
        """The `num` first units, in order; all there are, if fewer."""
        # The first `num` units lie under the `num` nodes whose own first units come first.
        nodes = np.flatnonzero(self._levels[-1] >= 0)
        for level in reversed(range(len(self._levels))):
            nodes = nodes[self._foremost(self._levels[level][nodes], num)]
            nodes = (nodes[:, None] * FAN + np.arange(FAN)).ravel()
            nodes = nodes[self._levels[level - 1][nodes] >= 0 if level else self._present[nodes]]
        nodes = nodes[self._foremost(nodes, num)]
        key, tie = self._rank(nodes)
        return nodes[np.lexsort((nodes, -tie, -key))]

    def _foremost(self, units: Int[np.ndarray, " some"], num: int) -> Int64[np.ndarray, " first"]:
        """Positions of the `num` first ones, in any order: partitions, which cost a fraction of a sort."""
        left, sure = np.arange(len(units)), np.zeros(0, dtype=np.int64)
        for values in (*self._rank(units.astype(np.int64)), -units.astype(np.float64)):
            wanted = num - len(sure)
            if len(left) <= wanted or not wanted:
                break
            own = values[left]
            bound = np.partition(own, len(own) - wanted)[len(own) - wanted]
            sure, left = np.append(sure, left[own > bound]), left[own == bound]
        return np.append(sure, left[: num - len(sure)])

    def _renew(self, level: int, nodes: Int64[np.ndarray, " nodes"]) -> None:
        """Find the first unit under each node again."""
        children = nodes[:, None] * FAN + np.arange(FAN)
        units = np.where(self._present[children], children, -1) if level == 0 else self._levels[level - 1][children]
        here = units >= 0
        key, tie = np.full(units.shape, -np.inf), np.full(units.shape, -np.inf)
        key[here], tie[here] = self._rank(units[here].astype(np.int64))
        here &= key == key.max(axis=1, keepdims=True)
        tie[~here] = -np.inf
        here &= tie == tie.max(axis=1, keepdims=True)
        first = units[np.arange(len(nodes)), here.argmax(axis=1)]
        self._levels[level][nodes] = np.where(here.any(axis=1), first, -1)


def _padded(values: np.ndarray, filler: float) -> np.ndarray:
    """Whole blocks of FAN, at least one."""
    missing = -len(values) % FAN if len(values) else FAN
    return np.concatenate([values, np.full(missing, filler, dtype=values.dtype)])

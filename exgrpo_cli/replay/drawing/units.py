"""The store of units that are drawn by priority: rows, or whole groups under the number of their first row.

A priority changes with age by exp(-age / age_decay), a factor that all units share up to their step of birth: weights
and keys are kept relative to a moving reference step, so that nothing is recomputed as steps go by. Only every
REFERENCE_RANGE of that exponent the reference moves on, and once per step for priorities of the user's own.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float64, Int64

from exgrpo_cli.config.sections.replay import ReplaySettings
from exgrpo_cli.replay.drawing.priorities import StoredUnits, bias_weights, checked_priorities, own_priority
from exgrpo_cli.replay.drawing.trees import OrderTree, SumTree
from exgrpo_cli.replay.trajectory_index import TrajectoryIndex

REFERENCE_RANGE = 300.0
"""Largest exponent of a weight: e^300 is finite, and the weight of a unit of that age is negligible."""
_LOWEST_KEY = -1e300
"""Stands for the logarithm of a priority of 0, which comes last but is there."""

Units = Int64[np.ndarray, " some"]


@dataclass(frozen=True, kw_only=True, slots=True)
class DrawnUnit:
    """A unit in the order drawn, and how it came to be."""

    unit_id: int
    priority: float
    """Its age included."""
    probability: float | None
    """Of the first draw from the whole store; None where the highest were taken."""
    weight: float
    """By which its rows' advantages are multiplied."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScannedUnit:
    """What became of a drawn unit."""

    unit_id: int
    accepted: bool
    """It is replayed in this step."""
    drift: float | None = None
    headroom: float | None = None
    """Both as measured under pi_old; None where nothing was measured."""


class UnitStore:
    """The units of the questions in the buffer. Memory: a byte and, for proportional draws, 8 bytes a row."""

    def __init__(
        self, rules: ReplaySettings, index: TrajectoryIndex, question_ids: Sequence[str], live: Units, *, groups: bool
    ) -> None:
        """`live` are the numbers of the units to begin with."""
        self.groups = groups
        self._rules = rules
        self._index = index
        self._question_ids = question_ids
        self._own = own_priority(rules.priority)
        self._draws = rules.composition in ("append", "refill")
        self._proportional = self._draws and rules.draw == "proportional"
        self._reference = 0
        self._scale = 1.0
        self._present: Bool[np.ndarray, " capacity"] = np.zeros(_capacity(len(index)), dtype=bool)
        self._present[live] = True
        self._size = len(live)
        self._taken: dict[int, float] = {}
        self._last_wave: Units = np.zeros(0, dtype=np.int64)
        self._moved = self._proportional
        self._build()

    def _build(self) -> None:
        live = np.flatnonzero(self._present)
        self._sum = self._top = self._evicted_first = None
        if self._proportional:
            weights = np.zeros(len(self._present))
            weights[live] = self._weights(live)
            self._sum = SumTree(weights)
        elif self._draws:
            self._top = OrderTree(self._present & (self._keys_of_all() > -np.inf), self._rank_by_key)
        if self._rules.capacity:
            self._evicted_first = OrderTree(self._present, self._rank_by_eviction)

    def __len__(self) -> int:
        return self._size

    @property
    def nbytes(self) -> int:
        """Memory in bytes."""
        trees = (self._sum, self._top, self._evicted_first)
        return self._present.nbytes + sum(tree.nbytes for tree in trees if tree is not None)

    def unit_of(self, trajectory_id: int) -> int:
        """The unit that a row belongs to."""
        return self._index.group_of(trajectory_id) if self.groups else trajectory_id

    def members(self, unit: int) -> list[int]:
        """The rows of a unit."""
        return self._index.group_members(unit) if self.groups else [unit]

    def add(self, units: Sequence[int]) -> None:
        """Take in units whose rows and priorities are in the index; those that are here stay."""
        new = np.array(
            [unit for unit in units if unit >= len(self._present) or not self._present[unit]], dtype=np.int64
        )
        if not len(new):
            return
        grows = int(new.max()) >= len(self._present)
        if grows:
            grown = np.zeros(_capacity(int(new.max()) + 1), dtype=bool)
            grown[: len(self._present)] = self._present
            self._present = grown
        self._present[new] = True
        self._size += len(new)
        self._build() if grows else self._refresh(new)

    def discard(self, unit: int) -> bool:
        """Let a unit go; returns whether it was there."""
        here = unit < len(self._present) and bool(self._present[unit])
        if here:
            self._present[unit] = False
            self._size -= 1
            self._taken.pop(unit, None)
            self._refresh(np.array([unit]))
        return here

    def excess(self) -> list[int]:
        """The units that must go for the store to hold no more than its capacity."""
        if self._evicted_first is None or self._size <= self._rules.capacity:
            return []
        return self._evicted_first.first(self._size - self._rules.capacity).tolist()

    def draw(self, num: int, step: int, rng: np.random.Generator) -> list[DrawnUnit]:
        """The next units in the order drawn, at most `num`; those of earlier calls are left out until `end_draw`.

        Proportional: without replacement, P ~ priority^exponent. Top: highest first, of equals the newest, then the
        lowest number. Raises RunError where a priority of the user's own breaks its promises.
        """
        if not self._taken:
            self._begin(step, rng)
        if num <= 0 or not self._size:
            return []
        units = self._draw_proportionally(num, rng) if self._proportional else self._take_first(num)
        priority, born = self._index.priorities(units)
        decay = self._rules.age_decay
        priorities = (priority * np.exp(-(step - born) / decay) if decay else priority).tolist()
        probabilities: list[float | None] = [None] * len(units)
        weights = np.ones(len(units))
        if self._proportional:
            chances = np.array([self._taken[unit] for unit in units.tolist()]) / self._total
            if self._rules.bias_correction and len(units):
                weights = bias_weights(chances, self._least / self._total, self._rules.bias_correction)
            probabilities = chances.tolist()
        return [
            DrawnUnit(unit_id=unit, priority=priority, probability=probability, weight=weight)
            for unit, priority, probability, weight in zip(
                units.tolist(), priorities, probabilities, weights.tolist(), strict=True
            )
        ]

    def end_draw(self) -> None:
        """Let what was drawn be drawn again, by the priorities as they are now."""
        taken, self._taken = list(self._taken), {}
        if taken and (self._moved or self._rules.max_drift > 0):
            self._refresh(np.array(taken))
        self._moved = self._proportional

    def _begin(self, step: int, rng: np.random.Generator) -> None:
        self._follow(step)
        if self._own is not None:
            self._ask_own(rng)
        if self._sum is not None:
            self._total, self._least = self._sum.total, self._sum.least

    def _draw_proportionally(self, num: int, rng: np.random.Generator) -> Units:
        assert self._sum is not None
        drawn: list[int] = []
        while len(drawn) < num:
            total = self._sum.total
            if total <= 0:
                break
            # Drawing with replacement and passing over repeats is drawing without replacement.
            found = list(dict.fromkeys(self._sum.find(rng.random(num - len(drawn)) * total).tolist()))
            weights = self._sum.weights[found]
            self._taken.update(zip(found, weights.tolist(), strict=True))
            self._sum.set(np.array(found), np.zeros(len(found)))
            drawn += found
        return np.array(drawn, dtype=np.int64)

    def _take_first(self, num: int) -> Units:
        assert self._top is not None
        # Most draws take one wave: what it took leaves the tree only where another one follows.
        if self._taken:
            self._top.set(self._last_wave, np.zeros(len(self._last_wave), dtype=bool))
            self._moved = True
        self._last_wave = self._top.first(num)
        self._taken.update(dict.fromkeys(self._last_wave.tolist(), 0.0))
        return self._last_wave

    def _refresh(self, units: Units) -> None:
        """Bring the trees up to date with some units."""
        here = self._present[units]
        drawable = here & ~np.isin(units, list(self._taken))
        if self._sum is not None:
            self._sum.set(units, np.where(drawable, self._weights(units), 0.0))
        if self._top is not None:
            self._top.set(units, drawable & (self.keys(units) > -np.inf))
        if self._evicted_first is not None:
            self._evicted_first.set(units, here)

    def _follow(self, step: int) -> None:
        """Move the reference on where weights would outgrow their range: a function of the step alone."""
        decay = self._rules.age_decay
        if not (decay and self._proportional):
            return
        every = max(1, int(REFERENCE_RANGE * decay / self._rules.exponent))
        reference = step - step % every
        if reference != self._reference:
            self._reference = reference
            self._build()

    def _weights(self, units: Units) -> Float64[np.ndarray, " some"]:
        """priority^exponent, its age counted from the reference; NaN, before the user's function is asked, is 0."""
        priority, born = self._index.priorities(units)
        exponent, decay = self._rules.exponent, self._rules.age_decay
        weights = (np.nan_to_num(priority, nan=0.0) / self._scale) ** exponent
        if decay:
            # Capped for a unit born after the reference of a tree that the next draw will rebuild.
            weights = weights * np.exp(np.minimum(exponent * (born - self._reference) / decay, 2 * REFERENCE_RANGE))
        return weights

    def keys(self, units: Units) -> Float64[np.ndarray, " some"]:
        """What orders units as priorities do at any one step: log priority + born / age_decay where age counts."""
        priority, born = self._index.priorities(units)
        priority = np.nan_to_num(priority, nan=-np.inf)
        decay = self._rules.age_decay
        if not decay or self._own is not None:
            return priority
        with np.errstate(divide="ignore"):
            return np.maximum(np.log(priority) + born / decay, _LOWEST_KEY)

    def _keys_of_all(self) -> Float64[np.ndarray, " capacity"]:
        keys = np.full(len(self._present), -np.inf)
        live = np.flatnonzero(self._present)
        keys[live] = self.keys(live)
        return keys

    def _rank_by_key(self, units: Units) -> tuple[np.ndarray, np.ndarray]:
        return self.keys(units), self._index.priorities(units)[1]

    def _rank_by_eviction(self, units: Units) -> tuple[np.ndarray, np.ndarray]:
        """What goes first comes first; of equals the oldest."""
        equal = np.zeros(len(units))
        match self._rules.eviction:
            case "lowest-priority":
                return -self.keys(units), equal
            case "longest":
                return self._described(units).tokens.astype(np.float64), equal
            case "random":
                return -self._index.column("token_hash", units).astype(np.float64), equal
        return equal, equal

    def _ask_own(self, rng: np.random.Generator) -> None:
        assert self._own is not None
        live = np.flatnonzero(self._present)
        if not len(live):
            return
        units = self._described(live)
        given = checked_priorities(self._own(units, rng), units, self._rules.priority, proportional=self._proportional)
        self._index.set_priorities(live, given)
        # Chances are ratios: relative to the largest no power of a priority overflows.
        self._scale = float(given.max()) if self._proportional and given.any() else 1.0
        self._build()

    def _described(self, units: Units) -> StoredUnits:
        sums = self._index.sums(units, groups=self.groups)
        return StoredUnits(
            ids=units,
            question_ids=tuple(self._question_ids[number] for number in self._index.column("question", units).tolist()),
            **sums,
        )


def _capacity(num: int) -> int:
    return max(1024, 1 << (num - 1).bit_length())

"""Replay by unit: what a row, or the group of rows of one visit, weighs, and how units are drawn from the whole store.

All of a draw is flat: a cumulative sum for draws in proportion to a weight, partitions for the first few in an order.

Axes: rows = the rows of one unit; tokens = all response tokens of the unit, row after row; units = those of a store;
some = any of these.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import ClassVar, Literal

import numpy as np
from jaxtyping import Float32, Float64, Int32, Int64

from exgrpo_cli.base.errors import RunError
from exgrpo_cli.base.types import Trajectory
from exgrpo_cli.config.names import PREFIX, replay_function
from exgrpo_cli.config.names import PRIORITIES as PRIORITY_NAMES
from exgrpo_cli.config.sections import refuse_together, require_known, require_non_negative, require_positive
from exgrpo_cli.replay.place import Asked, Experience, Metrics, Place

SMALLEST = 1e-6
"""Added to advantages and rewards, so that what has none can still be drawn."""

LOWEST_KEY = -1e300
"""Stands for the logarithm of a priority of 0, which comes last but is there."""

Units = Int64[np.ndarray, " units"]
Rows = Float64[np.ndarray, " rows"]
TokenRows = Sequence[Float32[np.ndarray, "..."]]
"""Log-probs of the tokens of each row."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BornUnit:
    """A unit at its birth."""

    step: int
    rewards: Rows
    advantages: Rows
    logprobs: TokenRows
    """Under the policy that counts as the sampler."""


PRIORITIES: dict[str, Callable[[BornUnit], float]] = {
    "uniform": lambda unit: 1.0,
    "latest": lambda unit: float(unit.step),
    # Of a group the mean over its rows.
    "advantage": lambda unit: float(np.mean(np.abs(unit.advantages) + SMALLEST)),
    "reward": lambda unit: float(np.mean(unit.rewards + SMALLEST)),
    "headroom": lambda unit: token_headroom(unit.logprobs, unit.advantages),
    # sum |A| * sd(r), sd over K - 1.
    "signal": lambda unit: float(np.abs(unit.advantages).sum() * unit.rewards.std(ddof=1)),
}
"""What a unit weighs at its birth, by the name of the priority."""


def priorities_at_birth(
    name: str,
    ids: Int64[np.ndarray, " rows"],
    *,
    steps: Int64[np.ndarray, " rows"],
    rewards: Rows,
    advantages: Rows,
    logprobs: Callable[[int, int], TokenRows],
) -> Rows:
    """What a built-in priority gives each row: that of its unit, the neighbours with the same of `ids`.

    `logprobs(begin, end)` reads those of some rows, and is called for the priority that looks at them alone.
    """
    values = np.full(len(ids), np.nan)
    bounds = [*np.flatnonzero(np.diff(ids, prepend=-1)).tolist(), len(ids)]
    for begin, end in pairwise(bounds):
        unit = BornUnit(
            step=int(steps[begin]),
            rewards=rewards[begin:end],
            advantages=advantages[begin:end],
            logprobs=logprobs(begin, end) if name == "headroom" else [],
        )
        values[begin:end] = PRIORITIES[name](unit)
    return values


def token_headroom(logprobs: TokenRows, advantages: Rows) -> float:
    """H: mean over tokens of how far each can still move: 1 - pi where A > 0, pi where A < 0, 0 where A = 0."""
    parts = []
    for row, own in zip(logprobs, advantages.tolist(), strict=True):
        probabilities = np.exp(row.astype(np.float64))
        parts.append(1 - probabilities if own > 0 else probabilities if own < 0 else np.zeros(len(row)))
    tokens = np.concatenate(parts)
    return float(tokens.mean()) if len(tokens) else 0.0


def token_drift(now: TokenRows, birth: TokenRows) -> float:
    """Mean over tokens of (log pi_now - log pi_birth)^2."""
    apart = np.concatenate(
        [after.astype(np.float64) - before.astype(np.float64) for after, before in zip(now, birth, strict=True)]
    )
    return float(np.mean(apart**2)) if len(apart) else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredUnits:
    """The units of a store as a priority of the user's own sees them, oldest first."""

    ids: Int64[np.ndarray, " units"]
    """The first trajectory of each."""
    question_ids: tuple[str, ...]
    step: Int64[np.ndarray, " units"]
    """Of birth."""
    version: Int64[np.ndarray, " units"]
    """Weight version that sampled it; -1 where that was another run's."""
    uses: Int64[np.ndarray, " units"]
    """How often it was replayed."""
    k: Int64[np.ndarray, " units"]
    """Successes of the visit that stored it."""
    reward: Float64[np.ndarray, " units"]
    """Mean over its rows."""
    advantage: Float64[np.ndarray, " units"]
    """Mean of |A| over its rows."""
    tokens: Int64[np.ndarray, " units"]
    """Response tokens of all its rows."""

    def __len__(self) -> int:
        return len(self.ids)

    @classmethod
    def of_rows(cls, rows: np.ndarray, units: Units, question_ids: Sequence[str], *, groups: bool) -> "StoredUnits":
        """The units among a store's rows, sums and means taken over theirs; a group's rows stand together."""
        first, members = rows[units], members_of(rows, units, groups=groups)
        return cls(
            ids=units,
            question_ids=tuple(question_ids[number] for number in first["question"].tolist()),
            step=first["step_born"].astype(np.int64),
            version=first["born_version"].astype(np.int64),
            uses=first["uses"].astype(np.int64),
            k=first["success_count"].astype(np.int64),
            reward=np.array([own["reward"].mean(dtype=np.float64) for own in members]),
            advantage=np.array([np.abs(own["advantage"]).mean() for own in members]),
            tokens=np.array([own["num_tokens"].sum() for own in members], dtype=np.int64),
        )


def members_of(rows: np.ndarray, units: Units, *, groups: bool) -> list[np.ndarray]:
    """The rows of each unit; those of a group, which its first row gives the number, stand together."""
    ends = np.searchsorted(rows["group"], units, side="right") if groups else units + 1
    return [rows[begin:end] for begin, end in zip(units.tolist(), ends.tolist(), strict=True)]


def checked_priorities(
    given: object, units: StoredUnits, name: str, *, proportional: bool
) -> Float64[np.ndarray, " units"]:
    """Raises RunError unless there is one number per unit, not NaN and, where draws are proportional, none negative or
    infinite."""
    try:
        values = np.asarray(given, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise RunError(f"replay.priority {name} gave no numbers ({error}); it must return one per unit") from None
    if values.shape != (len(units),):
        raise RunError(
            f"replay.priority {name} gave priorities of shape {values.shape} for {len(units)} units; "
            "it must return one per unit"
        )
    wrong = np.isnan(values) | (values == np.inf)
    if proportional:
        wrong |= values < 0
    if wrong.any():
        position = int(np.flatnonzero(wrong)[0])
        bound = "finite and at least 0" if proportional else "finite, or -inf for what must not be drawn"
        raise RunError(
            f"replay.priority {name} gave {values[position]} for unit {units.ids[position]} of question "
            f"{units.question_ids[position]}; priorities must be {bound}"
        )
    return values


@dataclass(frozen=True, kw_only=True, slots=True)
class DrawnUnit:
    """A unit in the order drawn, how it came to be, and what became of it."""

    unit_id: int
    """Its first trajectory."""
    priority: float
    """Its age included."""
    probability: float | None
    """Of the first draw from the whole store; None where the highest were taken."""
    weight: float
    """By which its rows' advantages are multiplied."""
    trajectories: tuple[Trajectory, ...] = ()
    accepted: bool = True
    """It is replayed in this step."""
    drift: float | None = None
    headroom: float | None = None
    """Both as measured under pi_old; None where nothing was measured."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitPlace(Place):
    """Replay of units drawn from the whole store by priority: the keys of `append` and `refill`."""

    draws_units: ClassVar[bool] = True

    eviction: Literal["oldest", "highest-entropy", "longest", "random", "lowest-priority"] = "oldest"
    priority: str = "uniform"
    """What a unit weighs: `uniform`, `latest`, `advantage`, `reward`, `headroom`, `signal`, or `python:m:f`."""
    draw: Literal["proportional", "top"] = "proportional"
    """Units drawn without replacement, P ~ priority^exponent, or those of highest priority."""
    exponent: float = 1.0
    age_decay: float = 0.0
    """Steps in which a priority falls to 1/e; 0 is never."""
    bias_correction: float = 0.0
    """b: a replayed unit's rows weigh (N P)^-b over the largest such weight in the store; 0 is off."""
    max_drift: float = 0.0
    """A drawn unit is replayed only if the mean over its tokens of (log pi_old - log pi_birth)^2 is at most this; 0 is
    off."""
    order: Literal["mixed", "first", "last"] = "mixed"
    """Replayed units among the fresh mini-batches, or in mini-batches of their own."""

    def __post_init__(self) -> None:
        Place.__post_init__(self)
        require_positive("replay", self, "exponent")
        require_non_negative("replay", self, "age_decay", "bias_correction", "max_drift")
        require_known("replay.priority", self.priority, PRIORITY_NAMES, python=True)
        if self.enabled:
            self._require_drawable()

    def _require_drawable(self) -> None:
        """Raise InputError where the way of drawing has no use for what else is set."""
        own = self.priority.startswith(PREFIX)
        if self.draw == "top" and self.exponent != 1:
            instead, reason = "leave it at 1, or use draw = 'proportional'", "a power does not change which are highest"
            refuse_together("replay", self, "exponent", "draw", reason, instead)
        if self.draw == "top" and self.bias_correction:
            instead, reason = "leave it at 0, or use draw = 'proportional'", "what is taken from the top has no chance"
            refuse_together("replay", self, "bias_correction", "draw", reason, instead)
        if self.draw == "top" and own and self.age_decay:
            reason = "what your own function orders by need not be above 0, and would not fade"
            instead = "let the function look at units.step, or use draw = 'proportional'"
            refuse_together("replay", self, "age_decay", "priority", reason, instead)
        if self.draw == "proportional" and self.priority == "latest":
            instead = "use draw = 'top', or priority = 'uniform' with replay.age_decay"
            refuse_together("replay", self, "priority", "draw", "a step number is an order, not a weight", instead)
        if not (self.capacity or self.max_age):
            limit = "set replay.capacity or replay.max_age"
            if own:
                reason = "your own function is asked about the whole store in every step"
                refuse_together("replay", self, "priority", "capacity", reason, limit)
            if self.max_drift:
                reason = "a step may score the whole store before it finds what it wants"
                refuse_together("replay", self, "max_drift", "capacity", reason, limit)
        if own and self.eviction == "lowest-priority":
            reason = "what your own function said of the store is not in the ledger to resume from"
            instead = "use another eviction, or a built-in priority"
            refuse_together("replay", self, "eviction", "priority", reason, instead)

    def keys(
        self, priority: Float64[np.ndarray, " some"], born: Int32[np.ndarray, " some"]
    ) -> Float64[np.ndarray, " some"]:
        """What orders units as priorities do at any one step: log priority + born / age_decay where age counts."""
        priority = np.nan_to_num(priority, nan=-np.inf)
        if not self.age_decay or self.priority.startswith(PREFIX):
            return priority
        with np.errstate(divide="ignore"):
            return np.maximum(np.log(priority) + born / self.age_decay, LOWEST_KEY)

    def replay(self, asked: Asked, wanted: int) -> Experience:
        """Scan units in the order drawn, and take those whose drift is in bounds, until there are enough or no more."""
        scanned: list[DrawnUnit] = []
        taken: list[DrawnUnit] = []
        draw = asked.store.draw_units(self, asked.step, asked.rngs["draw"]) if wanted else None
        while draw is not None and len(taken) < wanted:
            wave = asked.store.load_units(draw.take(wanted - len(taken)))
            if self.max_drift:
                asked.scored([trajectory for unit in wave for trajectory in unit.trajectories])
                wave = [self._judged(asked, unit) for unit in wave]
            scanned += wave
            taken += [unit for unit in wave if unit.accepted]
            if not wave or not self.max_drift:
                break
        asked.store.record_scan(asked.step, scanned)
        if asked.from_old:
            asked.scored([each for unit in taken for each in unit.trajectories])
        return Experience(
            units=tuple(tuple(asked.replayed(each, unit.weight) for each in unit.trajectories) for unit in taken),
            order=self.order,
            metrics=self._metrics(taken, scanned, asked.step),
            tokens_scored=asked.tokens_scored,
        )

    def _judged(self, asked: Asked, unit: DrawnUnit) -> DrawnUnit:
        """The unit with its drift and its headroom of now, refused where it has drifted too far."""
        now = [asked.scores[trajectory.trajectory_id].logprobs for trajectory in unit.trajectories]
        drift = token_drift(now, [trajectory.behaviour_logprobs for trajectory in unit.trajectories])
        headroom = token_headroom(now, np.array([trajectory.advantage for trajectory in unit.trajectories]))
        return replace(unit, accepted=drift <= self.max_drift, drift=drift, headroom=headroom)

    def _metrics(self, taken: Sequence[DrawnUnit], scanned: Sequence[DrawnUnit], step: int) -> Metrics:
        """`replay/*` keys of a scan."""
        ages = [step - trajectory.step_born for unit in taken for trajectory in unit.trajectories]
        drifts = [unit.drift for unit in scanned if unit.drift is not None]
        metrics: Metrics = {
            "replay/used": len(ages),
            "replay/scanned": len(scanned),
            "replay/accepted": len(taken),
        }
        if ages:
            metrics["replay/age_mean"] = float(np.mean(ages))
        if drifts:
            metrics["replay/drift"] = float(np.mean(drifts))
        return metrics


class UnitDraw:
    """One step's draw: units in their order, in waves of as many as are wanted, none twice.

    Proportional: without replacement, P ~ priority^exponent. Top: highest first, of equals the newest, then the lowest
    number.
    """

    def __init__(
        self,
        place: UnitPlace,
        rows: np.ndarray,
        units: Units,
        question_ids: Sequence[str],
        step: int,
        rng: np.random.Generator,
    ) -> None:
        """`rows` are all of a store, `units` those to draw from. Raises RunError where the user's function breaks its
        promises."""
        self._place, self._rng = place, rng
        self._units = units
        priority, born = rows["priority"][units], rows["step_born"][units]
        if place.priority.startswith(PREFIX) and len(units):
            described = StoredUnits.of_rows(rows, units, question_ids, groups=place.draws_groups)
            given = replay_function("replay.priority", place.priority)(described, rng)
            priority = checked_priorities(given, described, place.priority, proportional=place.draw == "proportional")
        self._priorities = priority * np.exp(-(step - born) / place.age_decay) if place.age_decay else priority
        if place.draw == "proportional":
            self._weights = self._first_weights = _weights(place, priority, born)
            self._total = float(self._weights.sum())
        else:
            self._keys, self._born = place.keys(priority, born), born
            self._left = np.flatnonzero(self._keys > -np.inf)

    def take(self, num: int) -> list[DrawnUnit]:
        """The next units, at most `num`; fewer where they end."""
        found = self.choose(num)
        chances: list[float | None] = [None] * len(found)
        weights = np.ones(len(found))
        if self._place.draw == "proportional" and len(found):
            own = self._first_weights[found]
            chances = (own / self._total).tolist()
            if self._place.bias_correction:
                # (N P)^-b over its maximum in the store, N and the sum cancelling (arXiv 1511.05952, 3.4).
                least = self._first_weights[self._first_weights > 0].min()
                weights = (least / own) ** self._place.bias_correction
        return [
            DrawnUnit(unit_id=unit, priority=priority, probability=chance, weight=weight)
            for unit, priority, chance, weight in zip(
                self._units[found].tolist(), self._priorities[found].tolist(), chances, weights.tolist(), strict=True
            )
        ]

    def choose(self, num: int) -> Int64[np.ndarray, " some"]:
        """Positions of the next units, at most `num`."""
        if num <= 0 or not len(self._units):
            return np.zeros(0, dtype=np.int64)
        return self._take_proportionally(num) if self._place.draw == "proportional" else self._take_first(num)

    def _take_proportionally(self, num: int) -> Int64[np.ndarray, " some"]:
        """Positions of the units drawn: with replacement, passing over repeats, which is without replacement."""
        drawn: list[int] = []
        while len(drawn) < num and (self._weights > 0).any():
            sums = np.cumsum(self._weights)
            targets = self._rng.random(num - len(drawn)) * sums[-1]
            # A target that rounds up to the sum falls to the last unit with a weight.
            last = int(np.flatnonzero(self._weights)[-1])
            found = list(dict.fromkeys(np.minimum(np.searchsorted(sums, targets, side="right"), last).tolist()))
            self._weights = self._weights.copy()
            self._weights[found] = 0.0
            drawn += found
        return np.array(drawn, dtype=np.int64)

    def _take_first(self, num: int) -> Int64[np.ndarray, " some"]:
        positions = self._left
        first = foremost((self._keys[positions], self._born[positions], -positions), num)
        self._left = np.delete(positions, first)
        return positions[first]


def _weights(
    place: UnitPlace, priority: Float64[np.ndarray, " units"], born: Int32[np.ndarray, " units"]
) -> Float64[np.ndarray, " units"]:
    """priority^exponent, fading with age; relative to the largest and the youngest, so that no power overflows."""
    own = place.priority.startswith(PREFIX) and priority.any()
    weights = (np.nan_to_num(priority, nan=0.0) / (priority.max() if own else 1.0)) ** place.exponent
    if place.age_decay and len(born):
        weights = weights * np.exp(-place.exponent * (born.max() - born) / place.age_decay)
    return weights


def foremost(ranks: Sequence[np.ndarray], num: int) -> Int64[np.ndarray, " first"]:
    """Positions of the `num` highest by the first rank, ties by the next, in order; the last rank has no ties.

    Partitions, which cost a fraction of a sort of everything.
    """
    left, sure = np.arange(len(ranks[0])), np.zeros(0, dtype=np.int64)
    for values in ranks:
        wanted = num - len(sure)
        if len(left) <= wanted or wanted <= 0:
            break
        own = values[left]
        bound = np.partition(own, len(own) - wanted)[len(own) - wanted]
        sure, left = np.append(sure, left[own > bound]), left[own == bound]
    first = np.append(sure, left[: max(0, num - len(sure))])
    return first[np.lexsort([-values[first] for values in reversed(ranks)])]


def leaving(
    rule: str, rows: np.ndarray, units: Units, keys: Float64[np.ndarray, " units"], num: int, *, groups: bool
) -> Int64[np.ndarray, " leaving"]:
    """The `num` units that leave a store or question that is too full, in the order they go; of equals the oldest."""
    match rule:
        case "lowest-priority":
            rank = -keys
        case "longest":
            rank = np.array([own["num_tokens"].sum() for own in members_of(rows, units, groups=groups)])
        case "highest-entropy":
            # As last measured, perhaps under other weights than the next; what was not measured goes first.
            rank = np.nan_to_num(rows["entropy"][units], nan=np.inf)
        case "random":
            # The lowest fingerprint goes, so what stays is a uniform sample of all that was ever collected: drawing
            # the loser afresh each time would favour the newest. Bottom-k sampling (Cohen & Kaplan 2007).
            rank = ~rows["token_hash"][units]
        case _:
            rank = np.zeros(len(units))
    return units[foremost((rank, -units), num)]

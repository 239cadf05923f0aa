"""Replay by unit: what a row, or the group of rows of one visit, weighs, and how units are drawn from the whole store.

All of a draw is flat: a cumulative sum for draws in proportion to a weight, partitions for the first few in an order.

Proportional draws and their bias correction: prioritised experience replay (arXiv 1511.05952, sections 3.3 and 3.4).

Axes: rows = the rows of one unit; tokens = all response tokens of the unit, row after row; units = those of a store;
some = any of these.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Literal

import numpy as np
from jaxtyping import Float32, Float64, Int32, Int64

from exgrpo_cli.base.types import Trajectory
from exgrpo_cli.config.names import PREFIX, replay_function
from exgrpo_cli.config.sections import NON_NEGATIVE, POSITIVE, SET, Needs, setting
from exgrpo_cli.replay.place import Asked, Experience, Metrics, Place, checked_numbers

if TYPE_CHECKING:
    from exgrpo_cli.replay.rows import Rows

EPSILON = 1e-6
"""Added to advantages and rewards, so that what has none can still be drawn (arXiv 1511.05952, 3.3)."""

LOWEST_KEY = -1e300
"""Stands for the logarithm of a priority of 0, which comes last but is there."""

Units = Int64[np.ndarray, " units"]
Values = Float64[np.ndarray, " rows"]
TokenRows = Sequence[Float32[np.ndarray, "..."]]
"""Log-probs of the tokens of each row."""


PRIORITIES: dict[str, Callable[[int, Values, Values, TokenRows], float]] = {
    "uniform": lambda step, rewards, advantages, logprobs: 1.0,
    "latest": lambda step, rewards, advantages, logprobs: float(step),
    # Of a group the mean over its rows (arXiv 2606.04560; rewards: arXiv 2604.16918).
    "advantage": lambda step, rewards, advantages, logprobs: float(np.mean(np.abs(advantages) + EPSILON)),
    "reward": lambda step, rewards, advantages, logprobs: float(np.mean(rewards + EPSILON)),
    "headroom": lambda step, rewards, advantages, logprobs: token_headroom(logprobs, advantages),
    # sum |A| * sd(r), sd over K - 1 (TRL's GRPO with replay buffer).
    "signal": lambda step, rewards, advantages, logprobs: float(np.abs(advantages).sum() * rewards.std(ddof=1)),
}
"""Priority of a unit at its birth, by the name of the rule: from its step, and of its rows the rewards, advantages
and log-probs under the policy that counts as the sampler."""
BUILT_IN = tuple(PRIORITIES)
BOUNDED = {"capacity": SET, "max_age": SET}
"""Settings of which one must be set where a step reads the whole store: each bounds it."""


def priorities_at_birth(
    rules: Place,
    groups: Int64[np.ndarray, " rows"],
    step: int,
    rewards: Values,
    advantages: Values,
    logprobs: Callable[[int, int], TokenRows],
) -> Values:
    """Priority of each row born at `step`: that of its unit, the row, or all rows with its number in `groups`, which
    stand together.

    NaN where units are not drawn, or by a priority of the user's own. `logprobs(begin, end)` reads those of rows begin
    to end, and is called only where the priority is `headroom`.
    """
    values = np.full(len(groups), np.nan)
    if not isinstance(rules, UnitPlace) or rules.priority not in PRIORITIES:
        return values
    ids = groups if rules.draws_groups else np.arange(len(groups))
    for begin, end in pairwise([*np.flatnonzero(np.diff(ids, prepend=-1)).tolist(), len(ids)]):
        own = logprobs(begin, end) if rules.priority == "headroom" else ()
        values[begin:end] = PRIORITIES[rules.priority](step, rewards[begin:end], advantages[begin:end], own)
    return values


def token_headroom(logprobs: TokenRows, advantages: Values) -> float:
    """H: mean over tokens of how far each can still move: 1 - pi where A > 0, pi where A < 0, 0 where A = 0.

    Source: arXiv 2609.03941, as the drift.
    """
    probabilities = np.exp(np.concatenate(logprobs).astype(np.float64))
    own = np.repeat(advantages, [len(row) for row in logprobs])
    tokens = np.select([own > 0, own < 0], [1 - probabilities, probabilities], 0.0)
    return float(tokens.mean()) if len(tokens) else 0.0


def token_drift(now: TokenRows, birth: TokenRows) -> float:
    """Mean over tokens of (log pi_now - log pi_birth)^2."""
    pairs = zip(now, birth, strict=True)
    apart = np.concatenate([after.astype(np.float64) - before.astype(np.float64) for after, before in pairs])
    return float(np.mean(apart**2)) if len(apart) else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredUnits:
    """The units of a store, oldest first, as a priority of the user's own sees them (`docs/custom-replay.md`)."""

    ids: Int64[np.ndarray, " units"]
    """The first trajectory of each."""
    question_ids: tuple[str, ...]
    step: Int64[np.ndarray, " units"]
    """Step of birth."""
    version: Int64[np.ndarray, " units"]
    """Weight version that sampled it; -1 where that was another run's."""
    uses: Int64[np.ndarray, " units"]
    """Number of times it was replayed."""
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
    def of_rows(cls, rows: "Rows", units: Units, question_ids: np.ndarray, *, groups: bool) -> "StoredUnits":
        """The units among a store's rows, sums and means taken over theirs."""
        members = rows.members(units, groups=groups)
        columns = {"step": "step_born", "version": "weight_version", "uses": "uses", "k": "k"}
        return cls(
            ids=units,
            question_ids=tuple(question_ids[rows["question"][units]].tolist()),
            **{name: rows[column][units].astype(np.int64) for name, column in columns.items()},
            reward=np.array([rows["reward"][own].mean(dtype=np.float64) for own in members]),
            advantage=np.array([np.abs(rows["advantage"][own]).mean() for own in members]),
            tokens=np.array([rows["num_tokens"][own].sum() for own in members], dtype=np.int64),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class DrawnUnit:
    """A unit in the order drawn, how it came to be, and what became of it."""

    unit_id: int
    """Its first trajectory."""
    priority: float
    """Its age included."""
    probability: float | None
    """Probability of the first draw from the whole store; None where the highest were taken."""
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

    eviction: Literal["oldest", "highest-entropy", "longest", "random", "lowest-priority"] = setting(
        "oldest", needs={"lowest-priority": Needs("the ledger has no numbers of your function", priority=BUILT_IN)}
    )
    priority: str = setting(
        "uniform",
        (*BUILT_IN, PREFIX),
        {
            "latest": Needs("a step number is an order, not a weight", draw="top"),
            "signal": Needs("one row has no spread of rewards", unit="group"),
            PREFIX: Needs("your function is asked about the whole store in every step", **BOUNDED),
        },
    )
    """Priority of a unit: `uniform`, `latest`, `advantage`, `reward`, `headroom`, `signal`, or `python:m:f`."""
    draw: Literal["proportional", "top"] = "proportional"
    """Units drawn without replacement, P ~ priority^exponent, or those of highest priority."""
    exponent: float = setting(1.0, POSITIVE, Needs("a power does not change which are highest", draw="proportional"))
    """Power of a priority in a proportional draw: 0.5 evens out, 2 sharpens."""
    age_decay: float = setting(
        0.0, NON_NEGATIVE, Needs("your function looks at units.step itself", draw="proportional", priority=BUILT_IN)
    )
    """Steps in which a priority falls to 1/e; 0 is never."""
    bias_correction: float = setting(0.0, NON_NEGATIVE, Needs("the top is taken, not drawn", draw="proportional"))
    """b: a replayed unit's rows weigh (N P)^-b over the largest such weight in the store; 0 is off."""
    max_drift: float = setting(0.0, NON_NEGATIVE, Needs("a step may score the whole store", **BOUNDED))
    """A drawn unit is replayed only if the mean over its tokens of (log pi_old - log pi_birth)^2 is at most this; 0 is
    off."""
    order: Literal["mixed", "first", "last"] = "mixed"
    """Replayed units among the fresh mini-batches, or in mini-batches of their own."""

    def sort_keys(
        self, priority: Float64[np.ndarray, " some"], born: Int32[np.ndarray, " some"]
    ) -> Float64[np.ndarray, " some"]:
        """Numbers that order units as priorities do at any step: log priority + born / age_decay where age counts."""
        priority = np.where(np.isnan(priority), -np.inf, priority)
        if not self.age_decay or self.priority.startswith(PREFIX):
            return priority
        with np.errstate(divide="ignore"):
            return np.maximum(np.log(priority) + born / self.age_decay, LOWEST_KEY)

    def replay(self, asked: Asked, wanted: int) -> Experience:
        """Scan units in the order drawn, and take those whose drift is in bounds, until there are enough or no more."""
        store, step = asked.store, asked.step
        scanned: list[DrawnUnit] = []
        taken: list[DrawnUnit] = []
        draw = store.draw_units(self, step, asked.rngs["draw"]) if wanted else None
        while draw and (wave := store.load_units(draw.take(wanted - len(taken)))):
            if self.max_drift:
                asked.scored([row for unit in wave for row in unit.trajectories])
                wave = [self._judged(asked, unit) for unit in wave]
            scanned += wave
            taken += [unit for unit in wave if unit.accepted]
        store.record_scan(step, scanned)
        rows = [row for unit in taken for row in unit.trajectories]
        if asked.from_old:
            asked.scored(rows)
        metrics: Metrics = {"replay/used": len(rows), "replay/scanned": len(scanned), "replay/accepted": len(taken)}
        if rows:
            metrics["replay/age_mean"] = float(np.mean([step - row.step_born for row in rows]))
        if scanned and self.max_drift:
            metrics["replay/drift"] = float(np.mean([unit.drift for unit in scanned]))
        units = tuple(tuple(asked.replayed(each, unit.weight) for each in unit.trajectories) for unit in taken)
        return Experience(units=units, metrics=metrics, tokens_scored=asked.tokens_scored)

    def _judged(self, asked: Asked, unit: DrawnUnit) -> DrawnUnit:
        """The unit with its drift and its headroom of now, refused where it has drifted too far."""
        now = [asked.scores[row.trajectory_id].logprobs for row in unit.trajectories]
        drift = token_drift(now, [row.behaviour_logprobs for row in unit.trajectories])
        headroom = token_headroom(now, np.array([row.advantage for row in unit.trajectories]))
        return replace(unit, accepted=drift <= self.max_drift, drift=drift, headroom=headroom)


class UnitDraw:
    """One step's draw: units in their order, in waves of as many as are wanted, none twice.

    Proportional: without replacement, P ~ priority^exponent. Top: highest first, of equals the newest, then the lowest
    number.
    """

    def __init__(
        self,
        place: UnitPlace,
        rows: "Rows",
        units: Units,
        question_ids: np.ndarray,
        step: int,
        rng: np.random.Generator,
    ) -> None:
        """`rows` are all of a store, `units` those to draw from. Raises RunError where the user's function breaks its
        promises."""
        self._place, self._rng, self._units = place, rng, units
        priority, self._born = rows["priority"][units], rows["step_born"][units]
        proportional = place.draw == "proportional"
        if place.priority.startswith(PREFIX) and len(units):
            described = StoredUnits.of_rows(rows, units, question_ids, groups=place.draws_groups)
            priority = checked_numbers(
                replay_function("replay.priority", place.priority)(described, rng),
                f"replay.priority {place.priority}",
                len(units),
                lambda position: f"unit {units[position]} of question {described.question_ids[position]}",
                least=0.0 if proportional else -np.inf,
                bound="finite and at least 0" if proportional else "finite, or -inf for what must not be drawn",
            )
        self._priorities = priority * np.exp(-(step - self._born) / place.age_decay) if place.age_decay else priority
        # What is left to draw: a weight of 0, or a key of -inf, is never drawn again.
        self._left = _weights(place, priority, self._born) if proportional else place.sort_keys(priority, self._born)
        self._weights = self._left.copy() if proportional else None

    def take(self, num: int) -> list[DrawnUnit]:
        """The next units, at most `num`; fewer where they end."""
        found = self.choose(num)
        chances: list[float | None] = [None] * len(found)
        weights = np.ones(len(found))
        if self._weights is not None and len(found):
            own = self._weights[found]
            chances = (own / float(self._weights.sum())).tolist()
            if self._place.bias_correction:
                # (N P)^-b over its maximum in the store, N and the sum cancelling (arXiv 1511.05952, 3.4).
                least = self._weights[self._weights > 0].min()
                weights = (least / own) ** self._place.bias_correction
        return [
            DrawnUnit(unit_id=unit, priority=priority, probability=chance, weight=weight)
            for unit, priority, chance, weight in zip(
                self._units[found].tolist(), self._priorities[found].tolist(), chances, weights.tolist(), strict=True
            )
        ]

    def choose(self, num: int) -> Int64[np.ndarray, " some"]:
        """Positions of the next units, at most `num`."""
        if self._weights is None:
            found = foremost((self._left, self._born), num)
            found = found[self._left[found] > -np.inf]
            self._left[found] = -np.inf
            return found
        # With replacement, passing over repeats, which is without replacement.
        drawn, earliest = np.zeros(0, dtype=np.int64), np.zeros(len(self._left), dtype=np.int64)
        while len(drawn) < num and self._left.any():
            sums = np.cumsum(self._left)
            targets = self._rng.random(num - len(drawn)) * sums[-1]
            # A target that rounds up to the sum falls to the last unit with a weight.
            found = np.minimum(np.searchsorted(sums, targets, side="right"), np.searchsorted(sums, sums[-1]))
            self._left[found] = 0.0
            order = np.arange(len(found))
            # Of repeats the earliest is written last, and stays.
            earliest[found[::-1]] = order[::-1]
            drawn = np.append(drawn, found[earliest[found] == order])
        return drawn


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
    """Positions of the `num` highest, in order: by the first of `ranks`, ties by the next, at last the lowest position.

    Partitions, which cost a fraction of a sort of everything.
    """
    left, sure = np.arange(len(ranks[0])), np.zeros(0, dtype=np.int64)
    for values in ranks:
        wanted = num - len(sure)
        if len(left) <= wanted or wanted <= 0:
            break
        own = values[left] if len(left) < len(values) else values
        bound = np.partition(own, len(own) - wanted)[len(own) - wanted]
        sure, left = np.append(sure, left[own > bound]), left[own == bound]
    first = np.append(sure, left[: max(0, num - len(sure))])
    return first[np.lexsort([first, *(-values[first] for values in reversed(ranks))])]


def leaving(rules: Place, rows: "Rows", units: Units, num: int) -> Int64[np.ndarray, " leaving"]:
    """The `num` units that leave a store or question that is too full, in the order they go; of equals the oldest."""
    match rules.eviction:
        case "lowest-priority":
            assert isinstance(rules, UnitPlace), "no other place has this eviction"
            rank = -rules.sort_keys(rows["priority"][units], rows["step_born"][units])
        case "longest":
            rank = np.array([rows["num_tokens"][own].sum() for own in rows.members(units, groups=rules.draws_groups)])
        case "highest-entropy":
            # As last measured, perhaps under other weights than the next, of a group its first row's; what was not
            # measured goes first.
            rank = np.nan_to_num(rows["entropy"][units], nan=np.inf)
        case "random":
            # The lowest fingerprint goes, so what stays is a uniform sample of all that was ever collected: drawing
            # the loser afresh each time would favour the newest. Bottom-k sampling (Cohen & Kaplan 2007).
            rank = ~rows["token_hash"][units]
        case _:
            rank = np.zeros(len(units))
    return units[foremost((rank,), num)]

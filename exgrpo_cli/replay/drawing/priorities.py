"""What a unit of stored rows weighs, and how far the policy has moved from it: one function per equation.

Axes: rows = the rows of one unit, one or the K of a visit; tokens = all response tokens of the unit, row after row;
units = the units of a store.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from jaxtyping import Float32, Float64, Int64

from exgrpo_cli.base.errors import RunError
from exgrpo_cli.config.names import PREFIX, replay_function

SMALLEST = 1e-6
"""Added to advantages and rewards, so that what has none can still be drawn."""

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


def uniform(unit: BornUnit) -> float:
    """The same for every unit."""
    return 1.0


def latest(unit: BornUnit) -> float:
    """The step of birth."""
    return float(unit.step)


def advantage(unit: BornUnit) -> float:
    """|A| + 1e-6, in a group its mean over the rows."""
    return float(np.mean(np.abs(unit.advantages) + SMALLEST))


def reward(unit: BornUnit) -> float:
    """r + 1e-6, in a group its mean over the rows."""
    return float(np.mean(unit.rewards + SMALLEST))


def signal(unit: BornUnit) -> float:
    """sum |A| * sd(r), sd over K - 1."""
    return float(np.abs(unit.advantages).sum() * unit.rewards.std(ddof=1))


def headroom(unit: BornUnit) -> float:
    """Mean room of the unit's tokens before the clip (`token_headroom`)."""
    return token_headroom(unit.logprobs, unit.advantages)


PRIORITIES: dict[str, Callable[[BornUnit], float]] = {
    "uniform": uniform,
    "latest": latest,
    "advantage": advantage,
    "reward": reward,
    "headroom": headroom,
    "signal": signal,
}


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


def bias_weights(
    probabilities: Float64[np.ndarray, " some"], smallest: float, exponent: float
) -> Float64[np.ndarray, " some"]:
    """(N P)^-b over its maximum in the store, N and the least P cancelling: (P_min / P)^b (arXiv 1511.05952, 3.4)."""
    return (smallest / probabilities) ** exponent


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


OwnPriority = Callable[[StoredUnits, np.random.Generator], Float64[np.ndarray, " units"]]


def own_priority(name: str) -> OwnPriority | None:
    """The user's function where the setting names one. Raises InputError where it cannot be imported."""
    return replay_function("replay.priority", name) if name.startswith(PREFIX) else None


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

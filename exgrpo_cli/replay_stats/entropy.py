"""Entropy of trajectories: chosen against available at each draw, and at birth by the difficulty of the question.

The second is the paper's analysis of correct trajectories by difficulty group. Entropies are means over valid tokens,
in nats. Axis `steps` runs from 0 to the last step; `draws` are (step, question) pairs whose candidates were measured.
"""

import itertools
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64, Int64

from exgrpo_cli.replay_stats.record import RunRecord, ScoreColumns
from exgrpo_cli.replay_stats.replays import mean_by_step

HARD_BELOW = 0.25
EASY_ABOVE = 0.75
"""Pass rates that bound the difficulty groups: hard (0, 1/4], medium, easy [3/4, 1)."""
GROUPS = ("hard", "medium", "easy")
WINDOWS = 4
SHORTEST_WINDOW = 5
"""Steps: with fewer there is one window."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SelectionEntropy:
    """What selection had to choose from and what it chose.

    `available` is the mean over the drawn questions of their candidates' mean: what choosing at random would have
    replayed. A plain mean over all candidates would mix in which questions happen to have many.
    """

    selected: Float64[np.ndarray, " steps"]
    available: Float64[np.ndarray, " steps"]
    candidates: Float64[np.ndarray, " steps"]
    """Mean number of candidates of a drawn question."""
    mean_selected: float
    """Over all draws of the run; NaN without any."""
    mean_available: float
    share_with_choice: float
    """Share of the draws that had two candidates or more."""
    measured: bool
    """Whether the run measured its candidates at each draw; the metrics `length` and `random` need no measurement, and
    the entropies are then those of birth."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EntropyGroup:
    """Entropy at birth of the trajectories of one bucket or difficulty group."""

    name: str
    """The success count, or a name from GROUPS."""
    trajectories: int
    mean: float
    quantiles: tuple[float, float, float, float, float]
    """5, 25, 50, 75 and 95 %."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EntropyWindow:
    """Entropy at birth within a stretch of steps, which the falling entropy of the policy moves less than the run."""

    first_step: int
    last_step: int
    by_bucket: tuple[EntropyGroup, ...]
    by_difficulty: tuple[EntropyGroup, ...]

    @property
    def steps(self) -> str:
        """As "6-54", or "6" where it is one step."""
        return str(self.first_step) if self.first_step == self.last_step else f"{self.first_step}-{self.last_step}"

    @property
    def hard_over_easy(self) -> float:
        """Mean entropy of hard over that of easy questions' trajectories; NaN without either."""
        means = {group.name: group.mean for group in self.by_difficulty}
        return means.get("hard", float("nan")) / means.get("easy", float("nan"))


def draw_numbers(scores: ScoreColumns, question: Int64[np.ndarray, " scores"]) -> Int64[np.ndarray, " scores"]:
    """Number of the (step, question) draw each score belongs to, in order of step, then question."""
    span = int(question.max(initial=0)) + 1
    _, numbers = np.unique(scores.step * span + question, return_inverse=True)
    return numbers


def selection_entropy(record: RunRecord) -> SelectionEntropy:
    """Chosen against available entropy over the draws that replayed something."""
    scores = record.scores
    numbers = draw_numbers(scores, record.trajectories.question[scores.row])
    counts = np.bincount(numbers)
    num_chosen = np.bincount(numbers, weights=scores.chosen)
    kept = num_chosen > 0  # an effective-sample-size guard measures draws that are then given up
    available = np.bincount(numbers, weights=scores.entropy)[kept] / counts[kept]
    selected = np.bincount(numbers, weights=np.where(scores.chosen, scores.entropy, 0.0))[kept] / num_chosen[kept]
    first = np.zeros(len(counts), dtype=np.int64)
    first[numbers] = scores.step
    steps = first[kept]
    return SelectionEntropy(
        selected=mean_by_step(steps, selected, record.last_step),
        available=mean_by_step(steps, available, record.last_step),
        candidates=mean_by_step(steps, counts[kept], record.last_step),
        mean_selected=_mean(selected),
        mean_available=_mean(available),
        share_with_choice=_mean(counts[kept] > 1),
        measured=record.config.replay.needs_scores,
    )


def entropy_at_birth(record: RunRecord, first_step: int, last_step: int) -> EntropyWindow:
    """Entropy of right trajectories born in the steps first..last, by success count and by the paper's difficulty."""
    stored = record.trajectories
    inside = (stored.step_born >= first_step) & (stored.step_born <= last_step) & (stored.reward > 0)
    counts, entropy = stored.success_count[inside], stored.entropy[inside]
    rates = counts / record.config.rollout.group_size
    difficulty = {
        "hard": rates <= HARD_BELOW,
        "medium": (rates > HARD_BELOW) & (rates < EASY_ABOVE),
        "easy": rates >= EASY_ABOVE,
    }
    return EntropyWindow(
        first_step=first_step,
        last_step=last_step,
        by_bucket=tuple(_group(str(count), entropy[counts == count]) for count in np.unique(counts)),
        by_difficulty=tuple(_group(name, entropy[difficulty[name]]) for name in GROUPS if difficulty[name].any()),
    )


def entropy_windows(record: RunRecord) -> tuple[EntropyWindow, ...]:
    """The run in up to WINDOWS stretches of equally many steps, from the first birth on; none without a birth.

    Pooled over a run, hard questions' trajectories come mostly from its beginning, when every entropy is high: the
    comparison by difficulty is fair within a stretch only.
    """
    born = record.trajectories.step_born
    if not len(born):
        return ()
    first = int(born.min())
    num = min(WINDOWS, max(1, (record.last_step - first + 1) // SHORTEST_WINDOW))
    edges = np.linspace(first, record.last_step + 1, num + 1).round().astype(int).tolist()
    return tuple(entropy_at_birth(record, begin, end - 1) for begin, end in itertools.pairwise(edges))


def _group(name: str, entropy: Float64[np.ndarray, " trajectories"]) -> EntropyGroup:
    known = entropy[np.isfinite(entropy)]  # NaN where a trajectory was not measured at birth
    quantiles = np.quantile(known, (0.05, 0.25, 0.5, 0.75, 0.95)) if len(known) else np.full(5, np.nan)
    low, lower, median, upper, high = quantiles.tolist()
    return EntropyGroup(
        name=name,
        trajectories=len(entropy),
        mean=_mean(known),
        quantiles=(low, lower, median, upper, high),
    )


def _mean(values: np.ndarray) -> float:
    return float(values.mean()) if len(values) else float("nan")

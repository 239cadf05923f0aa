"""What a run asks of its experience buffer, and the buffer of a run that keeps none.

The calls are coarse: a few a step, however many questions are drawn, since under ranks each of them is an exchange.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np

from exgrpo_cli.base.types import Trajectory
from exgrpo_cli.replay.drawing.selection import Candidates
from exgrpo_cli.replay.drawing.units import DrawnUnit, ScannedUnit
from exgrpo_cli.replay.visits import Visit
from exgrpo_cli.replay.warm_start import WarmStartReport


@dataclass(frozen=True, kw_only=True, slots=True)
class Offer:
    """The questions drawn for a step's replay and what each has to offer."""

    candidates: tuple[Candidates, ...] = ()
    """One for each question, in the order drawn."""
    unmeasured: tuple[Trajectory, ...] = ()
    """Candidates that must be measured under the current weights before a choice, in the order of the candidates."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """The trajectories to replay of each offered question."""

    positions: tuple[tuple[int, ...], ...]
    """For each question those among its candidates, best first."""
    trajectories: tuple[Trajectory, ...]
    """Of all questions, in that order."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayUnit:
    """A unit drawn from the whole store, with its rows."""

    drawn: DrawnUnit
    trajectories: tuple[Trajectory, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class BufferCounts:
    """How much a buffer holds."""

    num_questions: int = 0
    """Questions in the buffer, resting ones included."""
    num_trajectories: int = 0
    """Trajectories of the questions in the buffer."""
    num_retired: int = 0
    buckets: dict[int, int] = field(default_factory=dict)
    """Buffered questions by latest success count; empty buckets are absent."""


@runtime_checkable
class Buffer(Protocol):
    """The experience buffer of a run. Under several ranks all make the same calls in the same order."""

    @property
    def retired(self) -> Collection[str]:
        """Ids of the retired questions."""

    @property
    def counts(self) -> BufferCounts:
        """What the buffer holds after the last step; within a step, where work is shared, not yet its changes."""

    def warm_start(self, source: Path, *, max_response_tokens: int, with_retired: bool) -> WarmStartReport:
        """Fill the still empty buffer from another run's ledger. Raises InputError where the two do not match."""

    def readmit(self, step: int, rng: np.random.Generator) -> Sequence[str]:
        """Let a share of the retired questions return, in the steps that the settings say; returns their ids."""

    def offer(self, num: int, step: int, weight_version: int, rng: np.random.Generator) -> Offer:
        """Draw up to `num` questions; what they offer is to be measured by weights of version `weight_version`."""

    def offer_joining(self, question_ids: Sequence[str], step: int, weight_version: int) -> Offer:
        """What those of the questions that hold enough stored rows offer to their own fresh groups."""

    def choose_from(self, candidates: Sequence[Candidates], rng: np.random.Generator) -> Choice:
        """The trajectories to replay of each question, by the settings' metric and direction."""

    def record_replay(self, step: int, candidates: Sequence[Candidates], choice: Choice | None) -> None:
        """Record the measurements and the choice; None where the draw is given back and nothing is replayed."""

    def scan(self, num: int, step: int, rng: np.random.Generator) -> tuple[ReplayUnit, ...]:
        """The next `num` units in the order drawn, from the whole store; fewer where it ends."""

    def end_scan(self, step: int, verdicts: Sequence[ScannedUnit]) -> None:
        """Record which of the units scanned in this step are replayed."""

    def record_visits(self, visits: Sequence[Visit], *, collecting: bool) -> None:
        """How the step's questions went: retires and moves them and, with `collecting`, stores their successes."""

    def flush(self, step: int) -> None:
        """Let readers of the ledger see the step. Raises RunError where the disk refuses."""

    def seal(self) -> None:
        """Make the steps flushed durable, so that the ledger can be cut back to here: before each checkpoint."""


class NoBuffer:
    """Implements `Buffer` for a run that neither replays nor retires: takes everything, keeps and offers nothing."""

    retired: frozenset[str] = frozenset()
    counts = BufferCounts()

    def warm_start(self, source: Path, *, max_response_tokens: int, with_retired: bool) -> WarmStartReport:
        """See `Buffer.warm_start`."""
        raise AssertionError("a run without a buffer has no warm start")

    def readmit(self, step: int, rng: np.random.Generator) -> Sequence[str]:
        """See `Buffer.readmit`."""
        return ()

    def offer(self, num: int, step: int, weight_version: int, rng: np.random.Generator) -> Offer:
        """See `Buffer.offer`."""
        return Offer()

    def offer_joining(self, question_ids: Sequence[str], step: int, weight_version: int) -> Offer:
        """See `Buffer.offer_joining`."""
        return Offer()

    def scan(self, num: int, step: int, rng: np.random.Generator) -> tuple[ReplayUnit, ...]:
        """See `Buffer.scan`."""
        return ()

    def end_scan(self, step: int, verdicts: Sequence[ScannedUnit]) -> None:
        """See `Buffer.end_scan`."""

    def choose_from(self, candidates: Sequence[Candidates], rng: np.random.Generator) -> Choice:
        """See `Buffer.choose_from`."""
        assert not candidates
        return Choice(positions=(), trajectories=())

    def record_replay(self, step: int, candidates: Sequence[Candidates], choice: Choice | None) -> None:
        """See `Buffer.record_replay`."""

    def record_visits(self, visits: Sequence[Visit], *, collecting: bool) -> None:
        """See `Buffer.record_visits`."""

    def flush(self, step: int) -> None:
        """See `Buffer.flush`."""

    def seal(self) -> None:
        """See `Buffer.seal`."""

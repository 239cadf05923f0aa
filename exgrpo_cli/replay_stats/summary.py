"""What the experience buffer of one run did, in numbers: everything `replay-stats` shows, from the run folder alone.

Needs neither a model nor torch, and works while the run goes on. Axis `steps` runs from 0 (before step 1) to the last
step; `rows` are the steps that metrics.jsonl holds.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Float64, Int64

from exgrpo_cli.config.settings import Config
from exgrpo_cli.replay_stats.draws import DrawTest, draw_test
from exgrpo_cli.replay_stats.entropy import (
    EntropyWindow,
    SelectionEntropy,
    entropy_at_birth,
    entropy_windows,
    selection_entropy,
)
from exgrpo_cli.replay_stats.flow import BucketFlow, bucket_flow
from exgrpo_cli.replay_stats.occupancy import OccupancyHistory, occupancy
from exgrpo_cli.replay_stats.questions import ReplayedQuestion, most_replayed
from exgrpo_cli.replay_stats.record import RunRecord, read_run
from exgrpo_cli.replay_stats.replays import Replays, ReplayShares, Scans, mean_by_step, replay_shares, replays, scans

MOST_REPLAYED_SHOWN = 10


@dataclass(frozen=True, kw_only=True, slots=True)
class ImportanceRatios:
    """Importance ratios w = pi_theta / pi_past of replayed tokens, as the run logged them."""

    steps: Int64[np.ndarray, " rows"]
    mean: Float64[np.ndarray, " rows"]
    maximum: Float64[np.ndarray, " rows"]
    effective_sample_size: Float64[np.ndarray, " rows"]
    """(sum w)^2 / (n sum w^2), from 1/n to 1; NaN in a step without replay, as above."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplaySummary:
    """One run's experience buffer, now and over time."""

    run: Path
    config: Config
    last_step: int
    first_mixed_step: int | None
    num_training_questions: int
    stored: int
    """Trajectories ever stored."""
    occupancy: OccupancyHistory
    replays: Replays
    age_over_time: Float64[np.ndarray, " steps"]
    """Mean age, in steps, of the trajectories that a step replayed."""
    scans: Scans
    """Of units that are drawn by priority; zeros where questions are drawn."""
    shares: ReplayShares
    selection: SelectionEntropy
    entropy: EntropyWindow
    """Entropy at birth over the whole run."""
    entropy_windows: tuple[EntropyWindow, ...]
    """The same within stretches of steps."""
    flow: BucketFlow
    ratios: ImportanceRatios
    draws: DrawTest
    most_replayed: tuple[ReplayedQuestion, ...]
    incomplete: str
    """What of the ledger could not be read and why; empty when all of it could."""

    @property
    def buckets(self) -> dict[int, int]:
        """Questions per bucket now; empty buckets are left out."""
        now = self.occupancy.in_bucket[-1]
        return {int(bucket): int(now[bucket]) for bucket in np.flatnonzero(now)}

    @property
    def questions(self) -> int:
        """Questions in the buffer now."""
        return int(self.occupancy.buffered[-1])

    @property
    def retired(self) -> int:
        """Retired questions now."""
        return int(self.occupancy.retired[-1])

    @property
    def trajectories(self) -> int:
        """Stored trajectories of the questions in the buffer now."""
        return int(self.occupancy.trajectories[-1])


def summarise(run: Path) -> ReplaySummary:
    """Read a run folder, finished or running, and summarise its buffer. Raises InputError as `read_run` does."""
    return summarise_record(read_run(run))


def summarise_record(record: RunRecord) -> ReplaySummary:
    """Summarise a run that has been read."""
    drawn = replays(record)
    return ReplaySummary(
        run=record.run,
        config=record.config,
        last_step=record.last_step,
        first_mixed_step=record.metrics.first_mixed_step,
        num_training_questions=record.num_training_questions,
        stored=len(record.trajectories.trajectory_id),
        occupancy=occupancy(record),
        replays=drawn,
        age_over_time=mean_by_step(drawn.step, drawn.age, record.last_step),
        scans=scans(record),
        shares=replay_shares(record, drawn),
        selection=selection_entropy(record),
        entropy=entropy_at_birth(record, 0, record.last_step),
        entropy_windows=entropy_windows(record),
        flow=bucket_flow(record),
        ratios=ImportanceRatios(
            steps=record.metrics.steps,
            mean=record.metrics.series("policy/ratio_replay"),
            maximum=record.metrics.series("policy/ratio_replay_max"),
            effective_sample_size=record.metrics.series("replay/ess"),
        ),
        draws=draw_test(record.draws),
        most_replayed=most_replayed(record, drawn, MOST_REPLAYED_SHOWN),
        incomplete=record.incomplete,
    )

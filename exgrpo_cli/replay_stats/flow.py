"""What a replay visit does to a question: from the bucket it was drawn from to where it is after the step."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Int64

from exgrpo_cli.ledger.columns import NO_BUCKET, RETIRED, SELECTED
from exgrpo_cli.replay_stats.record import RunRecord


@dataclass(frozen=True, kw_only=True, slots=True)
class BucketFlow:
    """Replay visits by success count before and after; axis `before` is 0..K - 1, or more where counts go further."""

    between: Int64[np.ndarray, "before after"]
    """Visits that left the question in a bucket."""
    retired: Int64[np.ndarray, " before"]
    """Visits after which it was retired: solved by all rollouts."""
    dropped: Int64[np.ndarray, " before"]
    """Visits after which it was in no bucket: its count left the bounds, or its trajectories were evicted."""

    @property
    def visits(self) -> Int64[np.ndarray, " before"]:
        """All replay visits by the success count before."""
        return self.between.sum(axis=1) + self.retired + self.dropped


def bucket_flow(record: RunRecord) -> BucketFlow:
    """Follow every replayed question to the last thing that its step did to it."""
    events = record.events
    size = max(record.config.rollout.group_size, int(events.bucket.max(initial=0)) + 1)
    # Events are in order of time, so that the last of equal keys is the last event of a question in a step.
    keys = events.step * (len(record.question_ids) + 1) + events.question
    order = np.argsort(keys, kind="stable")
    drawn = np.flatnonzero((events.kind == SELECTED) & (events.bucket != NO_BUCKET))
    last = order[np.searchsorted(keys[order], keys[drawn], side="right") - 1]
    before, after = events.bucket[drawn], events.bucket[last]
    retired = events.kind[last] == RETIRED
    dropped = ~retired & (after == NO_BUCKET)
    between = np.zeros((size, size), dtype=np.int64)
    stays = ~retired & ~dropped
    np.add.at(between, (before[stays], after[stays]), 1)
    return BucketFlow(
        between=between,
        retired=np.bincount(before[retired], minlength=size),
        dropped=np.bincount(before[dropped], minlength=size),
    )

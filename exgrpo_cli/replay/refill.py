"""Stored groups in the places of fresh groups that are not mixed (TRL's GRPO with replay buffer; arXiv 2602.20722)."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from exgrpo_cli.config.sections import setting
from exgrpo_cli.replay.by_unit import UnitPlace
from exgrpo_cli.replay.place import NEEDS_A_RUN, Asked, Experience


@dataclass(frozen=True, kw_only=True, slots=True)
class Refill(UnitPlace):
    """Fresh groups of equal rewards neither train nor count in N of the loss; stored groups take their places.

    A group is replayed with all its rows, so all rows of a visit are stored.
    """

    composition: Literal["refill"] = "refill"
    store: Literal["all", "none"] = setting("all", needs=NEEDS_A_RUN)

    unit = "group"

    def beside(self, asked: Asked, groups: Sequence[Any], experience: Experience) -> Experience:
        """As many stored groups as fresh ones are not mixed."""
        drawn = self.replay(asked, sum(not group.is_mixed for group in groups))
        metrics = {**drawn.metrics, "replay/refilled": len(drawn.units)}
        return replace(drawn, metrics=metrics, drops_unmixed=True)

"""Stored units of any question beside the batch (arXiv 2609.03941, 2606.04560, 2604.16918 and 2604.08706)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from exgrpo_cli.config.sections import NON_NEGATIVE, Needs, between, setting
from exgrpo_cli.replay.by_unit import UnitPlace
from exgrpo_cli.replay.place import NEEDS_A_RUN, Asked, Experience, whole_share


@dataclass(frozen=True, kw_only=True, slots=True)
class Append(UnitPlace):
    """Units drawn from the whole store train beside the step's groups."""

    composition: Literal["append"] = "append"
    store: Literal["successes", "all", "none"] = setting("successes", needs=NEEDS_A_RUN)
    unit: Literal["row", "group"] = setting("row", needs=Needs("a group is replayed whole", store=("all", "none")))
    """Unit of a draw: single rows, or the K rows of one visit."""
    ratio: float = setting(0.5, between(0, 1))
    """Drawn groups per question of the step, or drawn rows per fresh row of its mixed groups."""
    max_per_question: int = setting(0, NON_NEGATIVE, Needs("groups stay whole; capacity counts them", unit="row"))
    """Most trajectories kept per question, of single rows; 0 is unbounded."""

    def beside(self, asked: Asked, groups: Sequence[Any], experience: Experience) -> Experience:
        """floor(`ratio` * questions of the step) groups, or round(`ratio` * fresh rows of its mixed groups) rows."""
        if self.draws_groups:
            return self.replay(asked, whole_share(self.ratio, asked.questions_per_step))
        rows = sum(len(group.fresh) for group in groups if group.is_mixed)
        return self.replay(asked, round(round(self.ratio * rows, 9)))

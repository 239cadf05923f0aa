"""Stored units of any question beside the batch (headroom-drift, adv-per and their kin)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from exgrpo_cli.config.sections import refuse_together, require_fraction, require_non_negative
from exgrpo_cli.replay.by_unit import UnitPlace
from exgrpo_cli.replay.place import Asked, Experience, FreshGroup
from exgrpo_cli.replay.replace import whole_share


@dataclass(frozen=True, kw_only=True, slots=True)
class Append(UnitPlace):
    """Units drawn from the whole store train beside the step's groups."""

    composition: Literal["append"] = "append"
    store: Literal["successes", "all", "none"] = "successes"
    unit: Literal["row", "group"] = "row"
    """What is drawn: single rows, or the K rows of one visit."""
    ratio: float = 0.5
    """Groups per question of the step, or rows per row of its mixed groups."""
    max_per_question: int = 0
    """Most trajectories kept per question, of single rows; 0 is unbounded."""

    def __post_init__(self) -> None:
        UnitPlace.__post_init__(self)
        require_fraction("replay", self, "ratio")
        require_non_negative("replay", self, "max_per_question")
        if self.enabled and self.unit == "group":
            self._require_whole_groups()
        if self.enabled and self.unit == "row" and self.priority == "signal":
            instead = "use unit = 'group', or priority = 'advantage'"
            refuse_together("replay", self, "priority", "unit", "one row has no spread of rewards", instead)

    def _require_whole_groups(self) -> None:
        if self.store == "successes":
            reason = "a group is replayed with all its rows, failures included"
            refuse_together("replay", self, "unit", "store", reason, "use store = 'all', or unit = 'row'")
        if self.max_per_question:
            instead = "use replay.capacity, which counts groups, or unit = 'row'"
            reason = "it would take single rows out of a group"
            refuse_together("replay", self, "unit", "max_per_question", reason, instead)

    @property
    def draws_groups(self) -> bool:
        """Whether a unit is the K rows of one visit."""
        return self.unit == "group"

    def beside(self, asked: Asked, groups: Sequence[FreshGroup], experience: Experience) -> Experience:
        """A share of the step's questions in groups, or of the rows of its mixed groups in rows."""
        if self.draws_groups:
            return self.replay(asked, whole_share(self.ratio, asked.questions_per_step))
        rows = sum(len(group.fresh) for group in groups if group.is_mixed)
        return self.replay(asked, round(round(self.ratio * rows, 9)))

"""Stored units of any question beside the batch (headroom-drift, adv-per and their kin)."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from exgrpo_cli.config.sections import require_fraction, require_non_negative
from exgrpo_cli.replay.by_unit import UnitPlace
from exgrpo_cli.replay.place import Asked, Clash, Experience
from exgrpo_cli.replay.replace import whole_share


@dataclass(frozen=True, kw_only=True, slots=True)
class Append(UnitPlace):
    """Units drawn from the whole store train beside the step's groups."""

    composition: Literal["append"] = "append"
    store: Literal["successes", "all", "none"] = "successes"
    unit: Literal["row", "group"] = "row"
    """Unit of a draw: single rows, or the K rows of one visit."""
    ratio: float = 0.5
    """Groups per question of the step, or rows per row of its mixed groups."""
    max_per_question: int = 0
    """Most trajectories kept per question, of single rows; 0 is unbounded."""

    def __post_init__(self) -> None:
        UnitPlace.__post_init__(self)
        require_fraction("replay", self, "ratio")
        require_non_negative("replay", self, "max_per_question")

    def clashes(self) -> Iterator[Clash]:
        """Keys that have no use for each other."""
        yield from UnitPlace.clashes(self)
        if self.enabled and self.draws_groups and self.store == "successes":
            reason = "a group is replayed with all its rows, failures included"
            yield "unit", "store", reason, "use store = 'all', or unit = 'row'"
        if self.enabled and self.draws_groups and self.max_per_question:
            instead = "use replay.capacity, which counts groups, or unit = 'row'"
            yield "unit", "max_per_question", "it would take single rows out of a group", instead
        if self.enabled and not self.draws_groups and self.priority == "signal":
            instead = "use unit = 'group', or priority = 'advantage'"
            yield "priority", "unit", "one row has no spread of rewards", instead

    @property
    def draws_groups(self) -> bool:
        """Whether a unit is the K rows of one visit."""
        return self.unit == "group"

    def beside(self, asked: Asked, groups: Sequence[Any], experience: Experience) -> Experience:
        """A share of the step's questions in groups, or of the rows of its mixed groups in rows."""
        if self.draws_groups:
            return self.replay(asked, whole_share(self.ratio, asked.questions_per_step))
        rows = sum(len(group.fresh) for group in groups if group.is_mixed)
        return self.replay(asked, round(round(self.ratio * rows, 9)))

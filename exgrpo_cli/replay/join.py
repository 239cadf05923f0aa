"""Stored rows beside the fresh rollouts of their own question (RePO, RLEP)."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from exgrpo_cli.config.sections import require_positive
from exgrpo_cli.replay.by_question import QuestionPlace
from exgrpo_cli.replay.place import NO_EXPERIENCE, Asked, Clash, Experience


@dataclass(frozen=True, kw_only=True, slots=True)
class Join(QuestionPlace):
    """A fresh question that holds enough stored rows gets the best of them beside its K rollouts."""

    composition: Literal["join"] = "join"
    store: Literal["successes", "all", "none"] = "successes"
    min_stored: int = 1
    """Stored rows that a fresh question must have before any of them joins it."""

    def __post_init__(self) -> None:
        QuestionPlace.__post_init__(self)
        require_positive("replay", self, "min_stored")

    def clashes(self) -> Iterator[Clash]:
        """Keys that have no use for each other."""
        yield from QuestionPlace.clashes(self)
        if self.enabled and 0 < self.max_per_question < self.min_stored:
            instead = "use a min_stored of at most max_per_question"
            yield "min_stored", "max_per_question", "no question ever holds so many rows", instead

    def beside(self, asked: Asked, groups: Sequence[Any], experience: Experience) -> Experience:
        """The rows that join the groups of their questions."""
        store = asked.store
        drawable = store.only_drawable([group.question.id for group in groups], asked.step)
        held = zip(drawable, store.held_by(drawable), strict=True)
        holding = [question_id for question_id, ids in held if len(ids) >= self.min_stored]
        return replace(self.replay(asked, holding), joined=True) if holding else NO_EXPERIENCE

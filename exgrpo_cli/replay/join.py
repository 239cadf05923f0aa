"""Stored rows beside the fresh rollouts of their own question (RePO, RLEP)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from exgrpo_cli.config.sections import refuse_together, require_positive
from exgrpo_cli.replay.by_question import QuestionPlace, rows_by_question
from exgrpo_cli.replay.place import NO_EXPERIENCE, Asked, Experience, FreshGroup


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
        if self.enabled and 0 < self.max_per_question < self.min_stored:
            instead, reason = "use a min_stored of at most max_per_question", "no question ever holds so many rows"
            refuse_together("replay", self, "min_stored", "max_per_question", reason, instead)

    def beside(self, asked: Asked, groups: Sequence[FreshGroup], experience: Experience) -> Experience:
        """The rows that join the groups of their questions."""
        store, step = asked.store, asked.step
        held = store.candidates(store.only_drawable([group.question.id for group in groups], step))
        offered = [each for each in held if len(each) >= self.min_stored]
        if not offered:
            return NO_EXPERIENCE
        offered = self.choose(asked, offered)
        chosen = store.load([trajectory_id for each in offered for trajectory_id in each.chosen_ids])
        if asked.from_old:
            asked.scored(chosen)
        store.record_choice(step, offered)
        return Experience(
            by_question=rows_by_question(asked, chosen),
            joined=True,
            own_advantages=self.advantage_over == "own",
            metrics=self.metrics(offered, chosen, step),
            tokens_scored=asked.tokens_scored,
        )

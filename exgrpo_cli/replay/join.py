"""Stored rows beside the fresh rollouts of their own question (RePO, arXiv 2506.09340; RLEP, arXiv 2507.07451)."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from exgrpo_cli.config.sections import POSITIVE, setting
from exgrpo_cli.replay.by_question import MemberPlace
from exgrpo_cli.replay.place import NEEDS_A_RUN, NO_EXPERIENCE, Asked, Experience


@dataclass(frozen=True, kw_only=True, slots=True)
class Join(MemberPlace):
    """A fresh question that holds enough stored rows gets the best of them beside its K rollouts."""

    composition: Literal["join"] = "join"
    store: Literal["successes", "all", "none"] = setting("successes", needs=NEEDS_A_RUN)
    min_stored: int = setting(1, POSITIVE)
    """Stored rows that a fresh question must have before any of them joins it."""

    def beside(self, asked: Asked, groups: Sequence[Any], experience: Experience) -> Experience:
        """The rows that join the groups of their questions."""
        store, ids = asked.store, [group.question.id for group in groups]
        drawable = {question_id for bucket in store.drawable(asked.step) for question_id in bucket.question_ids}
        held = zip(ids, store.held_by(ids), strict=True)
        holding = [each for each, rows in held if each in drawable and len(rows) >= self.min_stored]
        return replace(self.replay(asked, holding), joined=True) if holding else NO_EXPERIENCE

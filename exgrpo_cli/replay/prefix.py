"""Fresh rollouts that begin with part of a stored trajectory, on which no loss falls.

What grows from it is on-policy, so no ratio is needed: from successes for questions that mostly fail (Prefix Sampling,
arXiv 2605.05112; PrefixRL, arXiv 2601.18795), from failures for those that are mostly solved (arXiv 2601.20829).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from exgrpo_cli.base.types import Trajectory
from exgrpo_cli.config.sections import FRACTION, NON_NEGATIVE, Needs, between, setting
from exgrpo_cli.replay.by_question import Bucket, QuestionDraw, RowPlace, draw_by_weights
from exgrpo_cli.replay.place import NO_EXPERIENCE, Asked, Beginning, Experience

CUTS: dict[str, Callable[["Prefix", Asked, Trajectory], int]] = {
    "uniform": lambda place, asked, row: int(asked.rngs["choice"].integers(1, len(row.token_ids))),
    "share": lambda place, asked, row: max(1, int(place.cut_share * len(row.token_ids))),
    # Before the token whose choice was least certain, which is where a failure may have turned wrong.
    "entropy-peak": lambda place, asked, row: 1 + int(asked.scored([row])[row.trajectory_id].entropies[1:].argmax()),
}
"""Tokens that begin the rollouts, of a row of two tokens or more, by the name of the cut."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prefix(RowPlace):
    """All K rollouts of some questions go on from the beginning of a stored row of theirs.

    Successes begin those of questions that were (nearly) never solved at their latest visit, failures those that were
    (nearly) always. What grows is no visit: it moves no question, retires none, and is not stored.
    """

    composition: Literal["prefix"] = "prefix"
    store: Literal["successes", "failures"] = "successes"
    ratio: float = setting(0.5, between(0, 1))
    """rho: the largest share of a mixed step's questions that is drawn."""
    at_most: int = setting(0, NON_NEGATIVE)
    """Successes (with `store = "failures"`: failures) in its latest group that a question begun so has at most."""
    cut: Literal["uniform", "share", "entropy-peak"] = "uniform"
    """End of the beginning: anywhere in the row, at a share of its tokens, or before the one of highest entropy."""
    cut_share: float = setting(0.5, FRACTION, Needs("nothing is cut at a share", cut="share"))
    """Share of a row's tokens that begins the rollouts, rounded down, one at the least."""

    def before(self, asked: Asked) -> Experience:
        """Draw the questions, each as likely as another, choose a row of each, and cut it."""

        def uniform(buckets: Sequence[Bucket], num: int, rng: np.random.Generator) -> QuestionDraw:
            solved = self.store == "successes"
            alike = [each.success_count if solved else each.num_members - each.success_count for each in buckets]
            weights = [len(each) * (own <= self.at_most) for each, own in zip(buckets, alike, strict=True)]
            return draw_by_weights(buckets, weights, num, rng)

        drawn = self.drawn(asked, uniform, self.ratio)
        if not drawn:
            return NO_EXPERIENCE
        chosen, beginnings = self.replay(asked, drawn), {}
        for question_id, [each] in chosen.by_question.items():
            row = each.trajectory
            num = CUTS[self.cut](self, asked, row) if len(row.token_ids) > 1 else 0
            beginnings[question_id] = Beginning(trajectory_id=row.trajectory_id, token_ids=row.token_ids[:num])
        mean = float(np.mean([len(each.token_ids) for each in beginnings.values()]))
        metrics = chosen.metrics | {"replay/prefix_tokens": mean}
        return replace(
            chosen, by_question={}, beginnings=beginnings, metrics=metrics, tokens_scored=asked.tokens_scored
        )

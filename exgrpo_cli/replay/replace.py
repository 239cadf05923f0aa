"""Stored rows in the place of fresh rollouts: the paper's replay (section 3.2)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from exgrpo_cli.base.types import TokenScores, Trajectory
from exgrpo_cli.config.names import SAMPLERS
from exgrpo_cli.config.sections import require, require_fraction, require_known, require_positive
from exgrpo_cli.replay.by_question import QuestionPlace, check_draw, resolve_sampler, rows_by_question
from exgrpo_cli.replay.place import NO_EXPERIENCE, Asked, Experience

if TYPE_CHECKING:
    from exgrpo_cli.replay.store import Store


@dataclass(frozen=True, kw_only=True, slots=True)
class Replace(QuestionPlace):
    """A share of a step's questions is drawn from the store: of each, stored rows stand in for as many of K rollouts.

    A failure in the place of a rollout would count as a member of the fresh group, so only successes are stored.
    """

    composition: Literal["replace"] = "replace"
    store: Literal["successes", "none"] = "successes"
    ratio: float = 0.5
    """rho: the share of a mixed step's questions that are experiential."""
    sampler: str = "normal"
    """Which questions are replayed: `normal`, `linear`, `linear-clip`, `sqrt`, `uniform`, or `python:m:f`."""
    mu: float = 0.5
    """Mean of the `normal` sampler, on the accuracy scale."""
    sigma: float = 0.125
    """Standard deviation of the `normal` sampler, on the accuracy scale."""
    count_fresh_only: bool = False
    """An experiential group's success count is over its K-1 fresh members instead of all K."""
    ess_bound: float = 0.0
    """Least effective sample size (share of tokens) of a replayed draw; below it the step stays fresh. 0 is off."""

    def __post_init__(self) -> None:
        QuestionPlace.__post_init__(self)
        require_fraction("replay", self, "ratio", "ess_bound")
        require_positive("replay", self, "sigma")
        require(math.isfinite(self.mu), "replay.mu", self.mu, "a finite number")
        require_known("replay.sampler", self.sampler, SAMPLERS, python=True)

    def before(self, asked: Asked) -> Experience:
        """Draw the experiential questions and the rows that stand in, before the step's rollouts.

        A draw whose effective sample size, as a share of its tokens, is below `ess_bound` is given back.
        """
        store, num = asked.store, whole_share(self.ratio, asked.questions_per_step)
        drawn = self.draw_questions(store, num, asked.step, asked.rngs["draw"])
        if not drawn:
            return NO_EXPERIENCE
        offered = self.choose(asked, store.candidates(drawn))
        chosen = store.load([trajectory_id for each in offered for trajectory_id in each.chosen_ids])
        metrics = self.metrics(offered, chosen, asked.step)
        if asked.from_old or self.ess_bound:
            asked.scored(chosen)
        if self.ess_bound:
            ess = effective_sample_share(chosen, [asked.scores[each.trajectory_id] for each in chosen])
            metrics["replay/ess_before"] = ess
            if ess < self.ess_bound:
                store.record_choice(asked.step, offered, taken=False)
                return self._given_back(asked.step, ess)
        store.record_choice(asked.step, offered)
        return Experience(
            by_question=rows_by_question(asked, chosen),
            own_advantages=self.advantage_over == "own",
            metrics=metrics,
            tokens_scored=asked.tokens_scored,
        )

    def draw_questions(self, store: "Store", num: int, step: int, rng: np.random.Generator) -> tuple[str, ...]:
        """Draw up to `num` distinct questions, and record what the sampler promised of each bucket.

        Raises RunError where a sampler of the user's breaks its promises.
        """
        buckets = store.drawable(step)
        num = min(num, sum(map(len, buckets)))
        if not num:
            return ()
        sampler = resolve_sampler(self.sampler, self.mu, self.sigma)
        drawn = check_draw(sampler(buckets, num, rng), buckets, num, self.sampler)
        store.record_draw(step, buckets, drawn)
        return drawn.question_ids

    def _given_back(self, step: int, ess: float) -> Experience:
        """No replay in this step; the draw's other figures are of rows that are not replayed."""
        note = (
            f"step {step}: the draw's effective sample size {ess:.3f} is below replay.ess_bound = {self.ess_bound}; "
            "its questions stay in the buffer and the step takes fresh ones"
        )
        return Experience(metrics={"replay/used": 0, "replay/ess_before": ess}, notes=(note,))


def whole_share(ratio: float, questions_per_step: int) -> int:
    """floor(rho * B), with rho * B taken to 9 decimals first: 0.29 * 100 is 29 questions, not 28."""
    return math.floor(round(ratio * questions_per_step, 9))


def effective_sample_share(chosen: Sequence[Trajectory], current: Sequence[TokenScores]) -> float:
    """(sum w)^2 / (n sum w^2) over the replayed tokens, w = pi_now / pi_behaviour; 1 when nothing has moved.

    Taken from log w less its maximum, which cancels, so that no ratio overflows.
    """
    log_w = np.concatenate(
        [
            scores.logprobs.astype(np.float64) - trajectory.behaviour_logprobs
            for trajectory, scores in zip(chosen, current, strict=True)
        ]
    )
    w = np.exp(log_w - log_w.max())
    return float(w.sum() ** 2 / (len(w) * (w**2).sum()))

"""Stored rows in the place of fresh rollouts: ExGRPO's replay (arXiv 2510.02245, section 4.2)."""

from dataclasses import dataclass
from typing import Literal

from exgrpo_cli.config.names import PREFIX
from exgrpo_cli.config.sections import FINITE, POSITIVE, between, setting
from exgrpo_cli.replay.by_question import SAMPLERS, MemberPlace, resolve_sampler
from exgrpo_cli.replay.place import NEEDS_A_RUN, NO_EXPERIENCE, Asked, Experience


@dataclass(frozen=True, kw_only=True, slots=True)
class Replace(MemberPlace):
    """A share of a step's questions is drawn from the store: of each, stored rows stand in for as many of K rollouts.

    A failure in the place of a rollout would count as a member of the fresh group, so only successes are stored.
    """

    composition: Literal["replace"] = "replace"
    store: Literal["successes", "none"] = setting("successes", needs=NEEDS_A_RUN)
    ratio: float = setting(0.5, between(0, 1))
    """rho: the share of a mixed step's questions that are experiential."""
    sampler: str = setting("normal", (*SAMPLERS, PREFIX))
    """Sampler of replayed questions: `normal`, `linear`, `linear-clip`, `sqrt`, `uniform`, or `python:m:f`."""
    mu: float = setting(0.5, FINITE)
    """Mean of the `normal` sampler, on the scale of pass rates, 0 to 1."""
    sigma: float = setting(0.125, POSITIVE)
    """Standard deviation of the `normal` sampler, on the scale of pass rates, 0 to 1."""
    count_fresh_only: bool = False
    """An experiential group's success count is over its K-1 fresh members instead of all K."""
    ess_bound: float = setting(0.0, between(0, 1))
    """Least effective sample size (share of tokens) of a draw; below it all questions are fresh. 0 is off."""

    def before(self, asked: Asked) -> Experience:
        """Draw the experiential questions and the rows that stand in, before the step's rollouts.

        A draw whose effective sample size, as a share of its
        tokens, is below `ess_bound` is given back. Raises RunError where a sampler of the user's breaks its promises.
        """
        drawn = self.drawn(asked, resolve_sampler(self.sampler, self.mu, self.sigma), self.ratio)
        return self.replay(asked, drawn, ess_bound=self.ess_bound) if drawn else NO_EXPERIENCE

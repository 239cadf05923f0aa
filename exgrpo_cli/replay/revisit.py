"""Earlier questions asked again in the places of fresh ones: of what is stored, the question alone is replayed.

Their K rollouts are on-policy. Questions of middling difficulty, until they retire (Prompt Replay, arXiv 2603.21177);
solved ones, some steps later, before they are forgotten (arXiv 2606.03087).
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from exgrpo_cli.config.names import PREFIX
from exgrpo_cli.config.sections import FINITE, POSITIVE, between, setting
from exgrpo_cli.replay.by_question import SAMPLERS, QuestionPlace, resolve_sampler
from exgrpo_cli.replay.place import NO_EXPERIENCE, Asked, Experience


@dataclass(frozen=True, kw_only=True, slots=True)
class Revisit(QuestionPlace):
    """A share of a step's questions is drawn from those that hold a stored row: the visits that store say which.

    They are asked as fresh ones are, and that is a visit: it stores rows and moves them, or retires them. One rests
    `cooldown` steps after it was stored or asked again, and is asked until its newest row is older than `max_age`.
    """

    composition: Literal["revisit"] = "revisit"
    store: Literal["successes", "failures"] = "successes"
    ratio: float = setting(0.5, between(0, 1))
    """rho: the largest share of a mixed step's questions that is drawn."""
    sampler: str = setting("normal", (*SAMPLERS, PREFIX))
    """Sampler of replayed questions: `normal`, `linear`, `linear-clip`, `sqrt`, `uniform`, or `python:m:f`."""
    mu: float = setting(0.5, FINITE)
    """Mean of the `normal` sampler, on the scale of pass rates, 0 to 1."""
    sigma: float = setting(0.125, POSITIVE)
    """Standard deviation of the `normal` sampler, on the scale of pass rates, 0 to 1."""

    rests_when_stored = True

    def before(self, asked: Asked) -> Experience:
        """Draw the questions; the newest row of each stands for it in the ledger, as the one replayed."""
        drawn = self.drawn(asked, resolve_sampler(self.sampler, self.mu, self.sigma), self.ratio)
        if not drawn:
            return NO_EXPERIENCE
        offered = asked.store.candidates(drawn)
        asked.store.record_choice(asked.step, offered, [each.trajectory_ids[-1:].tolist() for each in offered])
        age = asked.step - float(np.mean([each.step_born[-1] for each in offered]))
        return Experience(beginnings=dict.fromkeys(drawn), metrics={"replay/used": len(drawn), "replay/age_mean": age})

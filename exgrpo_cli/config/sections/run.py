"""The run as a whole: length, device, checkpoints, trackers."""

import math
from dataclasses import dataclass
from typing import Literal

from exgrpo_cli.config.checks import require, require_known, require_non_negative, require_positive

Budget = Literal["steps", "generated", "trained", "seconds"]
BUDGET_STEPS = 4
"""Most steps of a run with another budget, as a multiple of `run.steps`: what hardly spends anything ends too."""
MOST_STEPS = 10**9
MOST_SEED = 2**63 - 1
"""The generators of torch and numpy take 64 bits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSettings:
    """The run as a whole."""

    method: str = "exgrpo"
    """Name of the method preset."""
    regime: str = ""
    """Name of the regime preset: task, start and lengths; empty is the backbone's own."""
    seed: int = 0
    """Seed of every random stream of the run: questions, rollouts, replay draws, mini-batch order."""
    steps: int = 150
    """Rollout batches to train on."""
    budget: Budget = "steps"
    """What the run may spend: `steps`, or tokens generated, tokens trained or seconds of training up to
    `budget_amount`. The run ends with the step that reaches it, after 4 x steps at the latest, and the learning rate
    follows the share that is spent."""
    budget_amount: float = 0.0
    """Tokens or seconds of the budget; 0 with `steps`."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the policy lives; "auto" takes a GPU when one is visible."""
    threads: int = 0
    """CPU threads of torch; 0 takes half the cores and records the choice."""
    nproc: int = 1
    """Ranks to start on this host; 0 is one per visible GPU (one on a CPU)."""
    rank_timeout: float = 60.0
    """Minutes that ranks wait for one of them before the run ends: more than their rollouts end apart."""
    phase_timeout: float = 120.0
    """Minutes a phase (rollout, update, sync, validation, ...) may last before the run ends with the stacks of all its
    ranks in `stacks/`; 0 waits without limit."""
    save_every: int = 25
    """Steps between checkpoints; the last step is always saved."""
    keep_checkpoints: int = 2
    """Newest checkpoints kept; the best by validation is kept besides. 0 keeps all."""
    samples_per_step: int = 4
    """Rollouts a step written to `samples/`."""
    plots: bool = True
    """Draw `plots/` when the run ends; `exgrpo replay-stats` draws the replay ones at any time."""
    log: tuple[str, ...] = ()
    """Trackers besides the journal: "tensorboard", "wandb", "trackio"."""

    def __post_init__(self) -> None:
        require_positive("run", self, "steps", "rank_timeout", "save_every")
        require_non_negative(
            "run", self, "seed", "nproc", "threads", "phase_timeout", "keep_checkpoints", "samples_per_step"
        )
        require(
            math.isfinite(self.budget_amount) and (self.budget_amount > 0) == (self.budget != "steps"),
            "run.budget_amount",
            self.budget_amount,
            "0 with run.budget = 'steps', which run.steps counts"
            if self.budget == "steps"
            else f"an amount above 0 for run.budget = {self.budget!r}",
        )
        require(self.steps <= MOST_STEPS, "run.steps", self.steps, f"at most {MOST_STEPS}")
        require(self.seed <= MOST_SEED, "run.seed", self.seed, f"a whole number from 0 to {MOST_SEED}")
        for name in self.log:
            require_known("run.log", name, ("tensorboard", "wandb", "trackio"))

    @property
    def whole_budget(self) -> int:
        """Steps, tokens or seconds that the run may spend."""
        return self.steps if self.budget == "steps" else int(self.budget_amount)

    @property
    def last_step(self) -> int:
        """Step after which the run ends, whatever is left of another budget."""
        return self.steps if self.budget == "steps" else BUDGET_STEPS * self.steps

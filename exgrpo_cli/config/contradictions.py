"""Settings of different sections that contradict each other: one table, read before a run starts.

Keys of one section are checked by its own type, which for `replay` depends on the place. Each entry here says why no
type can refuse it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from exgrpo_cli.base.errors import InputError
from exgrpo_cli.replay.append import Append, Refill
from exgrpo_cli.replay.replace import Replace

if TYPE_CHECKING:
    from exgrpo_cli.config.settings import Config


@dataclass(frozen=True, kw_only=True, slots=True)
class Contradiction:
    """Two settings that cannot stand together."""

    keys: tuple[str, str]
    """`section.key` of both."""
    holds: "Callable[[Config], bool]"
    reason: str
    instead: str

    def message(self, config: "Config") -> str:
        """The one line for a user whose settings contradict each other."""
        stated = [f"{key} = {setting(config, key)!r}" for key in self.keys]
        return f"{stated[0]} contradicts {stated[1]}: {self.reason}; {self.instead}."


def require_consistent(config: "Config") -> None:
    """Raise InputError naming both keys of the first contradiction, the reason and what to use instead."""
    for contradiction in (*ALWAYS, *(REPLAYING if config.replay.enabled else ())):
        if contradiction.holds(config):
            raise InputError(contradiction.message(config))


def setting(config: "Config", key: str) -> object:
    """The value of `section.key`."""
    section, name = key.split(".")
    return getattr(getattr(config, section), name)


def _bias_correction(config: "Config") -> float:
    return config.replay.bias_correction if isinstance(config.replay, Append | Refill) else 0.0


ALWAYS = (
    # K and B are of the rollouts, whatever is replayed, stored or trained of them.
    Contradiction(
        keys=("replay.upper_bound", "replay.retirement"),
        holds=lambda c: c.replay.upper_bound >= c.rollout.group_size and c.replay.retirement,
        reason="a question that all K solve retires before it stores",
        instead="use an upper_bound below K, or replay.retirement = false",
    ),
    Contradiction(
        keys=("replay.lower_bound", "replay.upper_bound"),
        holds=lambda c: c.replay.lower_bound >= c.replay.upper(c.rollout.group_size),
        reason="no success count is between them, and a visit stores when lower_bound < k <= upper_bound",
        instead="lower the one or raise the other (-1 is K - 1)",
    ),
    Contradiction(
        keys=("optim.minibatches", "rollout.questions_per_step"),
        holds=lambda c: c.optim.minibatches > c.rollout.questions_per_step,
        reason="a mini-batch holds at least one whole group",
        instead="use at most as many mini-batches as questions",
    ),
)
"""What is stored and when a question retires acts without replay too."""

REPLAYING = (
    # Both sections are whole without the other: what rewards are compared with, and whether anything is replayed.
    Contradiction(
        keys=("objective.baseline", "replay.enabled"),
        holds=lambda c: c.objective.baseline == "history",
        reason="a replayed success is no visit of the current policy",
        instead="set replay.enabled = false, or use baseline = 'group'",
    ),
    # Rounds of fresh questions serve every other place.
    Contradiction(
        keys=("replay.composition", "rollout.max_rounds"),
        holds=lambda c: isinstance(c.replay, Refill) and c.rollout.max_rounds > 1,
        reason="both fill the places of groups that are not mixed",
        instead="leave rollout.max_rounds at 1, or use another composition",
    ),
    # K is of the rollouts.
    Contradiction(
        keys=("replay.per_question", "rollout.group_size"),
        holds=lambda c: isinstance(c.replay, Replace) and c.replay.per_question >= c.rollout.group_size,
        reason="a replaced question needs at least one fresh rollout",
        instead="use fewer than K, or composition = 'join'",
    ),
    # The loss of a replayed token is the objective's, so that one study can hold it equal over all places.
    Contradiction(
        keys=("objective.replay_surrogate", "replay.store"),
        holds=lambda c: c.objective.replay_surrogate == "likelihood" and c.replay.replays_failures,
        reason="failures would be imitated",
        instead="use store = 'successes' and rows, not groups, or another surrogate",
    ),
    Contradiction(
        keys=("objective.replay_surrogate", "replay.bias_correction"),
        holds=lambda c: c.objective.replay_surrogate == "likelihood" and _bias_correction(c) != 0,
        reason="the correction weighs advantages, which -log pi does not have",
        instead="leave bias_correction at 0, or use another surrogate",
    ),
)

"""Which settings of replay contradict each other: one table, read before a run starts.

A setting that the chosen composition would not read is refused too, since a value without effect misleads.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from exgrpo_cli.base.errors import InputError

if TYPE_CHECKING:
    from exgrpo_cli.config.settings import Config

UNITS = ("append", "refill")
"""Compositions that draw units by priority."""
QUESTIONS = ("replace", "join")
"""Compositions that replay rows of a question among its own rollouts."""

READ_BY: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("sampler", "mu", "sigma", "count_fresh_only", "ess_bound"), ("replace",)),
    **dict.fromkeys(
        ("metric", "direction", "per_question", "advantage_over", "max_score_staleness", "cooldown"), QUESTIONS
    ),
    "min_stored": ("join",),
    "ratio": ("replace", "append"),
    "unit": ("append",),
    "max_per_question": ("replace", "join", "append"),
    **dict.fromkeys(("priority", "draw", "exponent", "age_decay", "bias_correction", "max_drift", "order"), UNITS),
}
"""Keys of `replay` that not every composition reads, and which do."""


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
    if config.replay.enabled:
        _require_read(config)
    for contradiction in (*ALWAYS, *(REPLAYING if config.replay.enabled else ())):
        if contradiction.holds(config):
            raise InputError(contradiction.message(config))


def _require_read(config: "Config") -> None:
    replay = config.replay
    defaults = {field.name: field.default for field in fields(replay)}
    for name, places in READ_BY.items():
        if getattr(replay, name) != defaults[name] and replay.composition not in places:
            raise InputError(
                f"replay.{name} = {getattr(replay, name)!r} contradicts replay.composition = {replay.composition!r}, "
                f"which does not read it: leave it at {defaults[name]!r}, or use composition {' or '.join(places)}."
            )


def setting(config: "Config", key: str) -> object:
    """The value of `section.key`."""
    section, name = key.split(".")
    return getattr(getattr(config, section), name)


def _unbounded(config: "Config") -> bool:
    return not (config.replay.capacity or config.replay.max_age)


def _groups_by(config: "Config") -> bool:
    return config.replay.composition == "append" and config.replay.unit == "group"


ALWAYS = (
    Contradiction(
        keys=("replay.retire_at", "replay.retirement"),
        holds=lambda c: c.replay.retire_at > 0 and not c.replay.retirement,
        reason="no question retires",
        instead="set replay.retirement = true, or leave retire_at at 0",
    ),
    Contradiction(
        keys=("replay.retire_at", "rollout.group_size"),
        holds=lambda c: c.replay.retire_at > c.rollout.group_size,
        reason="no visit has so many successes",
        instead="use at most K, or 0 for all members",
    ),
    Contradiction(
        keys=("replay.upper_bound", "replay.retirement"),
        holds=lambda c: c.replay.upper_bound >= c.rollout.group_size and c.replay.retirement,
        reason="a question that all K solve retires before it stores",
        instead="use an upper_bound below K, or replay.retirement = false",
    ),
    Contradiction(
        keys=("optim.offload_during_rollouts", "optim.engine"),
        holds=lambda c: c.optim.offload_during_rollouts and c.optim.engine == "deepspeed",
        reason="DeepSpeed moves its state by itself",
        instead="use optim.offload = true, or optim.engine = 'torch'",
    ),
)
"""Retirement acts without replay too."""

REPLAYING = (
    Contradiction(
        keys=("objective.baseline", "replay.enabled"),
        holds=lambda c: c.objective.baseline == "history",
        reason="a replayed success is no visit of the current policy",
        instead="set replay.enabled = false, or use baseline = 'group'",
    ),
    Contradiction(
        keys=("replay.upper_bound", "replay.retire_at"),
        holds=lambda c: 0 < c.replay.retire_at <= c.replay.upper_bound,
        reason="a question with so many successes retires before it stores",
        instead="use an upper_bound below retire_at, or -1",
    ),
    Contradiction(
        keys=("replay.composition", "replay.store"),
        holds=lambda c: c.replay.composition == "replace" and c.replay.store == "all",
        reason="a failure in the place of a rollout would count as a member of the fresh group",
        instead="use store = 'successes', or composition = 'join', 'append' or 'refill'",
    ),
    Contradiction(
        keys=("replay.unit", "replay.store"),
        holds=lambda c: _groups_by(c) and c.replay.store == "successes",
        reason="a group is replayed with all its rows, failures included",
        instead="use store = 'all', or unit = 'row'",
    ),
    Contradiction(
        keys=("replay.composition", "replay.store"),
        holds=lambda c: c.replay.composition == "refill" and c.replay.store == "successes",
        reason="a group is replayed with all its rows, failures included",
        instead="use store = 'all'",
    ),
    Contradiction(
        keys=("replay.composition", "rollout.max_rounds"),
        holds=lambda c: c.replay.composition == "refill" and c.rollout.max_rounds > 1,
        reason="both fill the places of groups that are not mixed",
        instead="leave rollout.max_rounds at 1, or use another composition",
    ),
    Contradiction(
        keys=("replay.unit", "replay.max_per_question"),
        holds=lambda c: _groups_by(c) and c.replay.max_per_question > 0,
        reason="it would take single rows out of a group",
        instead="use replay.capacity, which counts groups, or unit = 'row'",
    ),
    Contradiction(
        keys=("replay.store", "replay.warm_start"),
        holds=lambda c: c.replay.store == "none" and not c.replay.warm_start,
        reason="nothing would ever be stored",
        instead="name a run to take experience from (--replay-from RUN), or use store = 'successes' or 'all'",
    ),
    Contradiction(
        keys=("replay.store", "replay.collect_before_start"),
        holds=lambda c: c.replay.store == "none" and c.replay.collect_before_start,
        reason="nothing is collected at any time",
        instead="leave collect_before_start off, or use store = 'successes' or 'all'",
    ),
    Contradiction(
        keys=("replay.lower_bound", "replay.store"),
        holds=lambda c: c.replay.lower_bound < 0 and c.replay.store != "all",
        reason="a visit without a success has nothing to store",
        instead="use lower_bound = 0, or store = 'all'",
    ),
    Contradiction(
        keys=("replay.per_question", "rollout.group_size"),
        holds=lambda c: c.replay.composition == "replace" and c.replay.per_question >= c.rollout.group_size,
        reason="a replaced question needs at least one fresh rollout",
        instead="use fewer than K, or composition = 'join'",
    ),
    Contradiction(
        keys=("replay.min_stored", "replay.max_per_question"),
        holds=lambda c: 0 < c.replay.max_per_question < c.replay.min_stored,
        reason="no question ever holds so many rows",
        instead="use a min_stored of at most max_per_question",
    ),
    Contradiction(
        keys=("replay.age_decay", "replay.priority"),
        holds=lambda c: c.replay.age_decay > 0 and c.replay.priority.startswith("python:") and c.replay.draw == "top",
        reason="what your own function orders by need not be above 0, and would not fade",
        instead="let the function look at units.step, or use draw = 'proportional'",
    ),
    Contradiction(
        keys=("replay.advantage_over", "replay.per_question"),
        holds=lambda c: c.replay.advantage_over == "own" and c.replay.per_question < 2,
        reason="the advantage of one row over itself is 0",
        instead="use per_question of at least 2, or advantage_over = 'group'",
    ),
    Contradiction(
        keys=("replay.metric", "replay.store"),
        holds=lambda c: c.replay.metric == "reward" and c.replay.store == "successes",
        reason="all stored rewards are equal",
        instead="use store = 'all', or another metric",
    ),
    Contradiction(
        keys=("replay.exponent", "replay.draw"),
        holds=lambda c: c.replay.draw == "top" and c.replay.exponent != 1,
        reason="a power does not change which priorities are highest",
        instead="leave it at 1, or use draw = 'proportional'",
    ),
    Contradiction(
        keys=("replay.bias_correction", "replay.draw"),
        holds=lambda c: c.replay.draw == "top" and c.replay.bias_correction != 0,
        reason="what is taken from the top has no probability",
        instead="leave it at 0, or use draw = 'proportional'",
    ),
    Contradiction(
        keys=("replay.priority", "replay.draw"),
        holds=lambda c: c.replay.priority == "latest" and c.replay.draw == "proportional" and c.replay.draws_units,
        reason="a step number is an order, not a weight",
        instead="use draw = 'top', or priority = 'uniform' with replay.age_decay",
    ),
    Contradiction(
        keys=("replay.priority", "replay.unit"),
        holds=lambda c: c.replay.priority == "signal" and c.replay.draws_units and not c.replay.draws_groups,
        reason="one row has no spread of rewards",
        instead="use unit = 'group', or priority = 'advantage'",
    ),
    Contradiction(
        keys=("replay.priority", "replay.capacity"),
        holds=lambda c: c.replay.priority.startswith("python:") and _unbounded(c),
        reason="your own function is asked about the whole store in every step",
        instead="set replay.capacity or replay.max_age",
    ),
    Contradiction(
        keys=("replay.max_drift", "replay.capacity"),
        holds=lambda c: c.replay.max_drift > 0 and _unbounded(c),
        reason="a step may score the whole store before it finds what it wants",
        instead="set replay.capacity or replay.max_age",
    ),
    Contradiction(
        keys=("replay.eviction", "replay.composition"),
        holds=lambda c: c.replay.eviction == "lowest-priority" and not c.replay.draws_units,
        reason="only units that are drawn by priority have one",
        instead="use another eviction, or composition = 'append' or 'refill'",
    ),
    Contradiction(
        keys=("replay.eviction", "replay.priority"),
        holds=lambda c: c.replay.eviction == "lowest-priority" and c.replay.priority.startswith("python:"),
        reason="what your own function said of the store is not in the ledger to resume from",
        instead="use another eviction, or a built-in priority",
    ),
    Contradiction(
        keys=("replay.eviction", "replay.capacity"),
        holds=lambda c: (
            c.replay.eviction == "lowest-priority" and not c.replay.capacity and not c.replay.max_per_question
        ),
        reason="a store without a limit evicts nothing",
        instead="set replay.capacity, or leave eviction at 'oldest'",
    ),
    Contradiction(
        keys=("replay.eviction", "replay.capacity"),
        holds=lambda c: c.replay.eviction == "highest-entropy" and c.replay.capacity > 0,
        reason="entropies are measured question by question, not over the whole store",
        instead="use eviction = 'oldest', 'longest' or 'random', or replay.max_per_question",
    ),
    Contradiction(
        keys=("objective.replay_surrogate", "objective.shaping"),
        holds=lambda c: c.objective.replay_surrogate != "shaped" and not c.objective.shaping,
        reason="shaping = false is the older name of replay_surrogate = 'raw'",
        instead="leave shaping out",
    ),
    Contradiction(
        keys=("objective.replay_surrogate", "replay.store"),
        holds=lambda c: c.objective.replay_surrogate == "likelihood" and c.replay.store == "all",
        reason="failures would be imitated",
        instead="use store = 'successes', or another surrogate",
    ),
    Contradiction(
        keys=("objective.replay_surrogate", "replay.composition"),
        holds=lambda c: c.objective.surrogate == "likelihood" and c.replay.draws_groups,
        reason="a group holds failures, which would be imitated",
        instead="use composition = 'append' with unit = 'row', 'join' or 'replace', or another surrogate",
    ),
    Contradiction(
        keys=("objective.replay_surrogate", "objective.importance"),
        holds=lambda c: c.objective.replay_surrogate == "likelihood" and c.objective.importance == "old",
        reason="-log pi has no importance ratio",
        instead="leave importance at 'behaviour', or use another surrogate",
    ),
    Contradiction(
        keys=("objective.replay_surrogate", "replay.bias_correction"),
        holds=lambda c: c.objective.replay_surrogate == "likelihood" and c.replay.bias_correction != 0,
        reason="the correction weighs advantages, which -log pi does not have",
        instead="leave bias_correction at 0, or use another surrogate",
    ),
    Contradiction(
        keys=("replay.warmup_steps", "replay.collect_before_start"),
        holds=lambda c: c.replay.warmup_steps > 0 and not c.replay.collect_before_start and c.replay.store != "none",
        reason="nothing would be stored while the run warms up",
        instead="set collect_before_start = true, or use replay.start_threshold",
    ),
)

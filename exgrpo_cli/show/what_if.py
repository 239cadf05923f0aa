"""Draws of another policy from a run's ledger at each of its steps, without training, by the rules of training itself.

The buffer stays the recorded one: had the other policy really run, later steps would have found another buffer. Of a
step's own events those before its draw count: what was re-admitted and what grew too old.
"""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pyarrow.compute as pc
from jaxtyping import Float64, Int64

from exgrpo_cli.base.errors import InputError, nearest
from exgrpo_cli.config.names import DIRECTIONS
from exgrpo_cli.config.settings import SECTIONS, parse_assignments, read_section
from exgrpo_cli.ledger.columns import EVICTED, MISSING, READMITTED, SELECTED
from exgrpo_cli.replay.by_question import Candidates, QuestionPlace, choose, resolve_metric, resolve_sampler
from exgrpo_cli.replay.by_unit import UnitPlace
from exgrpo_cli.replay.place import Place
from exgrpo_cli.replay.replace import Replace
from exgrpo_cli.replay.rows import Questions
from exgrpo_cli.show.queries import Numbers, draw_numbers, mean_by_step
from exgrpo_cli.show.record import RunRecord

REPETITIONS = 4
"""Draws by another sampler at each step; their mean is reported."""
KINDS = {
    "sampler": ("sampler", "mu", "sigma"),
    "metric": ("metric", "direction"),
}
"""Kinds of draw, each with the keys of `replay` that change it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OtherPolicy:
    """The run's rules with what is named otherwise, and which kinds of draw that concerns."""

    rules: Any
    """A place that has the keys of what is asked."""
    asked: tuple[str, ...]
    """Some of KINDS."""


def parse_what_if(text: str, own: Place) -> OtherPolicy:
    """Read `sampler=linear,metric=ppl:max,mu=0.4`; what is not named is as in the run.

    Raises InputError for a key that the run does not draw by, and for a value that its settings could not have.
    """
    known = [key for keys in KINDS.values() for key in keys if hasattr(own, key)]
    given: dict[str, Any] = {}
    for item in text.split(","):
        key, equals, value = (part.strip() for part in item.partition("="))
        key = key.removeprefix("replay.")
        if not equals or not value or key in given:
            raise InputError(f"--what-if {text!r}: {item!r} is not a new key=value; write sampler=linear,metric=ppl.")
        if key not in known:
            asked = f"composition = {own.composition!r} can be asked for {', '.join(known) or 'none'}"
            raise InputError(f"--what-if {text!r}: unknown key {key!r}: {asked}.{nearest(key, known)}")
        given |= parse_assignments([f"replay.{key}={value}"])["replay"]
    name, _, last = str(given.get("metric", "")).rpartition(":")
    if last in DIRECTIONS:  # `ent:max` is metric `ent` with direction `max`, as in `exgrpo ablate`
        if given.get("direction", last) != last:
            raise InputError(f"--what-if {text!r}: metric says {last} and direction {given['direction']}; give one.")
        given |= {"metric": name, "direction": last}
    # Not a run's own settings: which of them fit together is not asked.
    tables = [("the run", asdict(own)), ("--what-if", given | {"enabled": False})]
    rules = read_section("replay", SECTIONS["replay"], tables)
    if given.keys() & {"mu", "sigma"} and rules.sampler != "normal":
        raise InputError(f"--what-if {text!r}: mu and sigma are those of the sampler normal, not of {rules.sampler}.")
    return OtherPolicy(rules=rules, asked=tuple(kind for kind, keys in KINDS.items() if given.keys() & set(keys)))


def titles(rules: Place) -> dict[str, str]:
    """Name of each kind of a place's draws."""
    found = {}
    if isinstance(rules, Replace):
        found["sampler"] = f"normal({rules.mu:g}, {rules.sigma:g})" if rules.sampler == "normal" else rules.sampler
    if isinstance(rules, QuestionPlace):
        found["metric"] = rules.metric if rules.metric == "random" else f"{rules.metric}:{rules.direction}"
    if isinstance(rules, UnitPlace):
        fading = f", fading in {rules.age_decay:g} steps" if rules.age_decay else ""
        power = f"^{rules.exponent:g}" if rules.exponent != 1 else ""
        found["priority"] = f"{rules.priority}{power}, {rules.draw}{fading}"
    return found


def ask(record: RunRecord, other: OtherPolicy, rng: np.random.Generator) -> Numbers:
    """Draws of the run beside those of the other policy, by what was asked of KINDS.

    Raises RunError where a function of the user returns what it must not.
    """
    askers: dict[str, Callable[[RunRecord, Any, np.random.Generator], Numbers]]
    askers = {"sampler": other_sampler, "metric": other_metric}
    return {kind: askers[kind](record, other.rules, rng) for kind in other.asked}


def states_before(record: RunRecord, steps: Int64[np.ndarray, " draws"]) -> Iterator[Questions]:
    """Question states as the draw of each of `steps` found them, in rising order; changed in place from one to the
    next."""
    events, rules = record.events, record.config.replay
    early = events.kind == READMITTED
    if rules.max_age:
        evicted = np.flatnonzero((events.kind == EVICTED) & (events.trajectory_id != MISSING))
        step_born = record.trajectories.step_born[record.rows_of(events.trajectory_id[evicted])]
        early[evicted] = step_born < events.step[evicted] - rules.max_age
    moments = 2 * events.step + ~early
    order = np.argsort(moments, kind="stable")
    # Questions are numbered by the ranks of their ids.
    question = np.argsort(pc.sort_indices(record.question_ids).to_numpy())[events.question]
    states = Questions(record.question_ids.to_pylist())
    # Of the events of one question the last one is assigned last, and stays.
    for new in np.split(order, np.searchsorted(moments[order], 2 * steps + 1))[:-1]:
        states.success_counts[question[new]] = events.bucket[new]
        states.num_members[question[new]] = events.num_members[new]
        drawn = new[events.kind[new] == SELECTED]
        if rules.cooldown:
            states.rests_until[question[drawn]] = events.step[drawn] + rules.cooldown
        yield states


def other_sampler(record: RunRecord, rules: Replace, rng: np.random.Generator) -> Numbers:
    """Ask another sampler at each draw of the run, over all questions drawable then, REPETITIONS times.

    Returns questions `drawn` by the run and `expected` of the other, by success count, in all and `by_step`, and mean
    pass rates of each of the `steps` that drew.
    """
    sampler, draws = resolve_sampler(rules.sampler, rules.mu, rules.sigma), record.draws
    steps, rows = np.unique(draws.step, return_inverse=True)
    wanted = np.bincount(rows, weights=draws.num_drawn).astype(np.int64)
    rates = np.bincount(rows, weights=draws.num_drawn * draws.bucket / draws.num_members)
    shape = (len(steps), max(record.config.rollout.group_size, int(draws.bucket.max(initial=0))) + 1)
    counts = {"drawn": np.zeros(shape, dtype=np.int64), "expected": np.zeros(shape)}
    np.add.at(counts["drawn"], (rows, draws.bucket), draws.num_drawn)
    other_rates = np.full(len(steps), np.nan)
    for place, states in enumerate(states_before(record, steps)):
        buckets, num = states.drawable(int(steps[place])), int(wanted[place])
        found = [sampler(buckets, num, rng) for _ in range(REPETITIONS)]
        chosen = np.array([states.number(name) for each in found for name in each.question_ids], dtype=np.int64)
        np.add.at(counts["expected"][place], states.success_counts[chosen], 1 / REPETITIONS)
        if len(chosen):
            other_rates[place] = np.mean(states.success_counts[chosen] / states.num_members[chosen])
    by_step = {name: {k: own[:, k] for k in np.flatnonzero(own.any(axis=0)).tolist()} for name, own in counts.items()}
    return {
        "sampler": rules.sampler,
        **{name: {k: own.sum().item() for k, own in each.items()} for name, each in by_step.items()},
        "steps": steps,
        "pass_rate": np.divide(rates, wanted, out=np.full(len(steps), np.nan), where=wanted > 0),
        "expected_pass_rate": other_rates,
        "by_step": by_step,
    }


def other_metric(record: RunRecord, rules: QuestionPlace, rng: np.random.Generator) -> Numbers:
    """Let another metric choose among the candidates of every draw that replayed, by that step's measurements.

    Returns means over the draws of what the run has `chosen` and the `other` would have, in all and `by_step`, and how
    often there was a choice and both made the same. Not `measured` are candidates of which values of birth are taken.
    """
    metric, scores, own_rules = resolve_metric(rules.metric), record.scores, record.config.replay
    numbers = draw_numbers(scores, record.trajectories.question[scores.row])
    order = np.lexsort((scores.row, numbers))
    taken, others, same = [order[:0]], [order[:0]], []
    for rows in np.split(order, np.flatnonzero(np.diff(numbers[order])) + 1):
        own = rows[scores.chosen[rows]]
        if len(own):
            found = rows[choose(_candidates(record, rows), metric, rules.direction, rng, num=len(own))]
            taken, others = [*taken, own], [*others, found]
            if len(rows) > len(own):
                same.append(set(own.tolist()) == set(found.tolist()))
    num, steps = len(taken) - 1, np.unique(scores.step[np.concatenate(taken)])
    own_means, other_means = (_means(record, np.concatenate(rows), steps) for rows in (taken, others))
    return {
        "metric": rules.metric,
        "direction": rules.direction,
        "measured": isinstance(own_rules, QuestionPlace) and own_rules.needs_scores,
        "draws": num,
        "share_with_choice": len(same) / num if num else np.nan,
        "share_same": float(np.mean(same)) if same else np.nan,
        "chosen": own_means[0],
        "other": other_means[0],
        "steps": steps,
        "by_step": {"chosen": own_means[1], "other": other_means[1]},
    }


def _candidates(record: RunRecord, rows: Int64[np.ndarray, " candidates"]) -> Candidates:
    """Rows of the scores of one question's draw, as selection saw them."""
    scores, born = record.scores, record.trajectories
    stored = scores.row[rows]
    return Candidates(
        question_id=record.question_ids[int(born.question[stored[0]])].as_py(),
        trajectory_ids=born.trajectory_id[stored],
        num_tokens=born.num_tokens[stored].astype(np.int32),
        step_born=born.step_born[stored].astype(np.int32),
        born_version=born.weight_version[stored].astype(np.int32),
        entropy=scores.entropy[rows],
        nll=scores.nll[rows],
        measured_version=scores.weight_version[rows].astype(np.int32),
        reward=born.reward[stored].astype(np.float32),
    )


Means = tuple[dict[str, float], dict[str, Float64[np.ndarray, " steps"]]]
"""By name, over all rows and over those of each step."""


def _means(record: RunRecord, rows: Int64[np.ndarray, " chosen"], steps: Int64[np.ndarray, " steps"]) -> Means:
    scores, born = record.scores, record.trajectories
    stored, at = scores.row[rows], scores.step[rows]
    columns = {
        "entropy": scores.entropy[rows],
        "nll": scores.nll[rows],
        "num_tokens": born.num_tokens[stored],
        "age": at - born.step_born[stored],
    }
    totals = {name: float(column.mean()) if len(column) else np.nan for name, column in columns.items()}
    return totals, {name: mean_by_step(at, column, record.last_step)[steps] for name, column in columns.items()}

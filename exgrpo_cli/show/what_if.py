"""Draws of another policy from a run's ledger at each of its steps, without training, by the rules of training itself.

The buffer stays the recorded one: had the other policy really run, later steps would have found another buffer. Of a
step's own events those before its draw count: what was re-admitted and what grew too old.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow.compute as pc
from jaxtyping import Float64, Int64

from exgrpo_cli.base.errors import InputError, nearest
from exgrpo_cli.config.names import DIRECTIONS, DRAWS, PREFIX, replay_function
from exgrpo_cli.ledger.columns import COLLECTED, EVICTED, MISSING, NO_BUCKET, READMITTED, RETIRED, SELECTED
from exgrpo_cli.ledger.reader import LedgerReader
from exgrpo_cli.replay.append import Append
from exgrpo_cli.replay.by_question import (
    Bucket,
    Candidates,
    QuestionPlace,
    check_draw,
    choose,
    resolve_metric,
    resolve_sampler,
)
from exgrpo_cli.replay.by_unit import PRIORITIES, StoredUnits, UnitPlace, checked_priorities, priorities_at_birth
from exgrpo_cli.replay.place import Place
from exgrpo_cli.replay.replace import Replace
from exgrpo_cli.show.queries import Numbers, draw_numbers, mean_by_step, rows_of_units
from exgrpo_cli.show.record import LEDGER_FOLDER, RunRecord

REPETITIONS = 4
"""Draws by another sampler or priority at each step; their mean is reported."""
KINDS = ("sampler", "metric", "priority", "max_drift")
NUMBERS = ("mu", "sigma", "exponent", "age_decay", "max_drift")
KEYS = ("sampler", "metric", "direction", "mu", "sigma", "priority", "draw", "exponent", "age_decay", "max_drift")

Steps = Int64[np.ndarray, " _"]
"""One step a draw, a row or a unit."""
Units = Int64[np.ndarray, " _"]
"""Rows of the first trajectory of each unit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OtherPolicy:
    """The run's rules with what is named otherwise, and which kinds of draw that concerns."""

    rules: Place
    asked: tuple[str, ...]
    """Of KINDS."""


def parse_what_if(text: str, own: Place) -> OtherPolicy:
    """Read `sampler=linear,metric=ppl:max,mu=0.4`; what is not named is as in the run.

    Raises InputError for an unknown key, priority, direction or number.
    """
    given: dict[str, Any] = {}
    for item in text.split(","):
        key, equals, value = (part.strip() for part in item.partition("="))
        key = key.removeprefix("replay.")
        if not equals or not value or key in given:
            raise InputError(f"--what-if {text!r}: {item!r} is not a new key=value; write sampler=linear,metric=ppl.")
        if key not in KEYS:
            raise InputError(f"--what-if {text!r}: unknown key {key!r}.{nearest(key, KEYS)}")
        given[key] = _number(text, key, value) if key in NUMBERS else value
    name, colon, last = given.get("metric", "").rpartition(":")
    if colon and last in DIRECTIONS:  # `ent:max` is metric `ent` with direction `max`, as in `exgrpo ablate`
        if given.get("direction", last) != last:
            raise InputError(f"--what-if {text!r}: metric says {last} and direction {given['direction']}; give one.")
        given |= {"metric": name, "direction": last}
    for key, known in (("direction", DIRECTIONS), ("draw", DRAWS)):
        if given.get(key, known[0]) not in known:
            hint = nearest(given[key], known)
            raise InputError(f"--what-if {text!r}: {key} = {given[key]!r} is not known.{hint}")
    if "direction" in given:
        given.setdefault("metric", getattr(own, "metric", Replace().metric))
    if (
        given.keys() & {"mu", "sigma"}
        and given.setdefault("sampler", getattr(own, "sampler", Replace().sampler)) != "normal"
    ):
        raise InputError(
            f"--what-if {text!r}: mu and sigma are those of the sampler normal, not of {given['sampler']}."
        )
    if given.get("priority") == "latest":
        given.setdefault("draw", "top")  # a step number is an order, not a weight
    units = given.keys() & {"priority", "draw", "exponent", "age_decay"}
    asked = tuple(kind for kind in KINDS if (units if kind == "priority" else kind in given))
    return OtherPolicy(rules=_with(own, given), asked=asked)


def _with(own: Place, given: Mapping[str, Any]) -> Place:
    """The run's place with what is given, or where it has no such keys one that has. Not a run's own settings: which of
    them fit together is not asked."""
    place = next((each for each in (own, Replace(), Append()) if all(hasattr(each, key) for key in given)), None)
    if place is None:
        raise InputError(f"--what-if: no run draws by {', '.join(given)} at once: ask for questions or units.")
    try:
        return replace(place, enabled=False, **given)
    except InputError as error:
        raise InputError(f"--what-if: {error}") from None


def _number(text: str, key: str, value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        raise InputError(f"--what-if {text!r}: {key} = {value!r} is not a number.") from None
    if not np.isfinite(number) or (key == "sigma" and number <= 0):
        raise InputError(f"--what-if {text!r}: {key} = {value} is out of range: use a finite number, sigma above 0.")
    return number


def sampler_title(rules: Place) -> str:
    """The sampler's name, with mean and deviation where it is the normal one."""
    if not isinstance(rules, Replace):
        return ""
    return f"normal({rules.mu:g}, {rules.sigma:g})" if rules.sampler == "normal" else rules.sampler


def metric_title(rules: Place) -> str:
    """The metric with its direction, which a random choice has not."""
    if not isinstance(rules, QuestionPlace):
        return ""
    return rules.metric if rules.metric == "random" else f"{rules.metric}:{rules.direction}"


def priority_title(rules: Place) -> str:
    """The priority with what else orders or weighs units."""
    if not isinstance(rules, UnitPlace):
        return ""
    fading = f", fading in {rules.age_decay:g} steps" if rules.age_decay else ""
    power = f"^{rules.exponent:g}" if rules.exponent != 1 else ""
    return f"{rules.priority}{power}, {rules.draw}{fading}"


def titles(own: Place, other: Place) -> dict[str, tuple[str, str]]:
    """How the draws of the run and of the other policy are called, by kind."""
    return {
        "sampler": (sampler_title(own), sampler_title(other)),
        "metric": (metric_title(own), metric_title(other)),
        "priority": (priority_title(own), priority_title(other)),
        "max_drift": (f"{_bound(own):g}", f"{_bound(other):g}"),
    }


def _bound(rules: Place) -> float:
    return rules.max_drift if isinstance(rules, UnitPlace) else 0.0


def ask(record: RunRecord, other: OtherPolicy, rng: np.random.Generator) -> Numbers:
    """Draws of the run beside those of the other policy, by what was asked of KINDS.

    Raises InputError where the run has no such draw, RunError where a function of the user returns what it must not.
    """
    _require(record, other.asked)
    # `parse_what_if` chose a place that has the keys of what is asked.
    rules: Any = other.rules
    askers: dict[str, Callable[[], Numbers]] = {
        "sampler": lambda: other_sampler(record, rules, rng),
        "metric": lambda: other_metric(record, rules, rng),
        "priority": lambda: other_priority(record, rules, rng),
        "max_drift": lambda: other_bound(record, _bound(other.rules)),
    }
    return {kind: askers[kind]() for kind in other.asked}


def _require(record: RunRecord, asked: tuple[str, ...]) -> None:
    replay = record.config.replay
    where = f"(replay.composition = {replay.composition!r})"
    for kind in asked:
        if (kind == "sampler" and replay.composition != "replace") or (kind == "metric" and replay.draws_units):
            others = "priority or max_drift" if replay.draws_units else "metric"
            raise InputError(f"--what-if: {record.run} draws by no {kind} {where}: ask for another {others}.")
        if kind in ("priority", "max_drift") and not replay.draws_units:
            raise InputError(f"--what-if: {record.run} draws questions {where}: ask for another sampler or metric.")
    if "max_drift" in asked and not np.isfinite(record.units.drift).any():
        raise InputError(f"--what-if: {record.run} measured no drift (replay.max_drift = {_bound(replay):g}).")


def _events_before(record: RunRecord, steps: Steps) -> Iterator[Int64[np.ndarray, " events"]]:
    """For each of `steps`, in rising order, the events that its draw finds and the one before did not, in order."""
    events, max_age = record.events, record.config.replay.max_age
    early = events.kind == READMITTED
    if max_age:
        evicted = np.flatnonzero((events.kind == EVICTED) & (events.trajectory_id != MISSING))
        born = record.trajectories.step_born[record.trajectories.rows_of(events.trajectory_id[evicted])]
        early[evicted] = born < events.step[evicted] - max_age
    moments = 2 * events.step + ~early
    order = np.argsort(moments, kind="stable")
    begin = 0
    for end in np.searchsorted(moments[order], 2 * steps + 1).tolist():
        yield order[begin:end]
        begin = end


def buckets_before(record: RunRecord, steps: Steps) -> Iterator[list[Bucket]]:
    """The non-empty buckets of drawable questions as they stood at the draw of each of `steps`, in ascending order."""
    events, cooldown = record.events, record.config.replay.cooldown
    by_id = pc.sort_indices(record.question_ids).to_numpy()
    names = np.array(record.question_ids.to_pylist(), dtype=object)[by_id]
    rank = np.argsort(by_id)
    counts, members = np.full(len(names), NO_BUCKET), np.zeros(len(names), dtype=np.int64)
    rests_until = np.full(len(names), -1)
    for step, new in zip(steps.tolist(), _events_before(record, steps), strict=True):
        drawn = new[events.kind[new] == SELECTED]
        rests_until[rank[events.question[drawn]]] = events.step[drawn] + cooldown if cooldown else -1
        new = new[events.kind[new] != SELECTED]
        # Of a question's events the last one is assigned last, and stays.
        counts[rank[events.question[new]]] = np.where(events.kind[new] == RETIRED, NO_BUCKET, events.bucket[new])
        members[rank[events.question[new]]] = events.num_members[new]
        drawable = np.flatnonzero((counts != NO_BUCKET) & (rests_until < step))
        keys = np.stack([counts[drawable], members[drawable]])
        distinct, which = np.unique(keys, axis=1, return_inverse=True)
        yield [
            Bucket(success_count=count, num_members=of, question_ids=names[drawable[which.ravel() == place]].tolist())
            for place, (count, of) in enumerate(distinct.T.tolist())
        ]


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
    drawn, expected, other_rates = np.zeros(shape, dtype=np.int64), np.zeros(shape), np.full(len(steps), np.nan)
    np.add.at(drawn, (rows, draws.bucket), draws.num_drawn)
    for place, buckets in enumerate(buckets_before(record, steps)):
        num = int(wanted[place])
        found = [sampler(buckets, num, rng) for _ in range(REPETITIONS)]
        if rules.sampler.startswith(PREFIX):
            found = [check_draw(each, buckets, num, rules.sampler) for each in found]
        bucket_of = {name: bucket for bucket in buckets for name in bucket.question_ids}
        chosen = [bucket_of[name] for each in found for name in each.question_ids]
        np.add.at(expected[place], [bucket.success_count for bucket in chosen], 1 / REPETITIONS)
        other_rates[place] = np.mean([bucket.pass_rate for bucket in chosen]) if chosen else np.nan
    totals, by_step = {}, {}
    for name, counts in (("drawn", drawn), ("expected", expected)):
        nonzero = np.flatnonzero(counts.sum(axis=0)).tolist()
        totals[name] = {k: counts.sum(axis=0)[k].item() for k in nonzero}
        by_step[name] = {k: counts[:, k] for k in nonzero}
    own_rates = np.divide(rates, wanted, out=np.full(len(steps), np.nan), where=wanted > 0)
    told = {"steps": steps, "pass_rate": own_rates, "expected_pass_rate": other_rates, "by_step": by_step}
    return {"sampler": rules.sampler, **totals, **told}


def other_metric(record: RunRecord, rules: QuestionPlace, rng: np.random.Generator) -> Numbers:
    """Let another metric choose among the candidates of every draw that replayed, by that step's measurements.

    Returns means over the draws of what the run has `chosen` and the `other` would have, in all and `by_step`, and how
    often there was a choice and both made the same. Not `measured` are candidates of which values of birth are taken.
    """
    metric, scores, born = resolve_metric(rules.metric), record.scores, record.trajectories
    numbers = draw_numbers(scores, born.question[scores.row])
    order = np.lexsort((scores.row, numbers))
    bounds = np.searchsorted(numbers[order], np.arange(numbers.max(initial=-1) + 2)).tolist()
    taken: list[int] = []
    others: list[int] = []
    choices: list[bool] = []
    same: list[bool] = []
    for begin, end in itertools.pairwise(bounds):
        rows = order[begin:end]
        own = rows[scores.chosen[rows]].tolist()
        if own:
            found = choose(_candidates(record, rows), metric, rules.direction, rng, num=len(own))
            taken, others = taken + own, others + rows[found].tolist()
            choices.append(len(rows) > len(own))
            same.append(set(own) == set(rows[found].tolist()))
    steps, [(own_means, own_series), (other_means, other_series)] = _means_of_scores(record, taken, others)
    with_choice = np.array(same)[np.array(choices)] if choices else np.zeros(0)
    return {
        "metric": rules.metric,
        "direction": rules.direction,
        "measured": isinstance(own_rules := record.config.replay, QuestionPlace) and own_rules.needs_scores,
        "draws": len(choices),
        "share_with_choice": float(np.mean(choices)) if choices else np.nan,
        "share_same": float(with_choice.mean()) if len(with_choice) else np.nan,
        "chosen": own_means,
        "other": other_means,
        "steps": steps,
        "by_step": {"chosen": own_series, "other": other_series},
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


def _means_of_scores(record: RunRecord, *choices: list[int]) -> tuple[Steps, list[Means]]:
    scores, born = record.scores, record.trajectories
    found, steps = [], np.zeros(0, dtype=np.int64)
    for choice in choices:
        rows = np.array(choice, dtype=np.int64)
        stored, at = scores.row[rows], scores.step[rows]
        steps = np.unique(at)
        columns = {
            "entropy": scores.entropy[rows],
            "nll": scores.nll[rows],
            "num_tokens": born.num_tokens[stored],
            "age": at - born.step_born[stored],
        }
        found.append(_means(columns, at, steps, record.last_step))
    return steps, found


def _means(columns: Mapping[str, np.ndarray], at: Steps, steps: Steps, last_step: int) -> Means:
    totals = {name: float(column.mean()) if len(column) else np.nan for name, column in columns.items()}
    return totals, {name: mean_by_step(at, column, last_step)[steps] for name, column in columns.items()}


def other_bound(record: RunRecord, bound: float) -> Numbers:
    """Hold the drift of every unit scanned against another bound: how many it would accept, and after how many scans
    as many as the run took would have been found."""
    units, last = record.units, record.last_step
    passes = units.drift <= bound
    scans, needed, steps = [], [], np.unique(units.step[units.accepted])
    for step in steps.tolist():
        rows = np.flatnonzero(units.step == step)
        found = np.flatnonzero(passes[rows])
        taken = int(units.accepted[rows].sum())
        if len(found) >= taken:
            scans.append(len(rows))
            needed.append(int(found[taken - 1]) + 1)
    scan_steps = np.unique(units.step)
    return {
        "own": _bound(record.config.replay),
        "other": bound,
        "scanned": len(passes),
        "accepted": int(units.accepted.sum()),
        "would_accept": int(passes.sum()),
        "steps": len(steps),
        "steps_enough": len(scans),
        "scans": float(np.mean(scans)) if scans else np.nan,
        "scans_needed": float(np.mean(needed)) if needed else np.nan,
        "scan_steps": scan_steps,
        "drift_by_step": mean_by_step(units.step, units.drift, last)[scan_steps],
        "accepted_by_step": np.bincount(units.step[units.accepted], minlength=last + 1)[scan_steps],
        "would_accept_by_step": np.bincount(units.step[passes], minlength=last + 1)[scan_steps],
    }


def other_priority(record: RunRecord, rules: UnitPlace, rng: np.random.Generator) -> Numbers:
    """Draw by another priority at every step that took a unit, over the units stored then, REPETITIONS times.

    Returns means over the rows of the units that the run has `taken` and of those `expected` of the other, in all and
    by step, and the expected share of the latter that the run took in the same step. Raises InputError for a priority
    of groups where rows are drawn.
    """
    if rules.priority == "signal" and not rules.draws_groups:
        raise InputError("--what-if: priority = 'signal' is of groups, and this run draws rows.")
    born, taken = record.trajectories, record.units.accepted
    at, own_units = record.units.step[taken], born.rows_of(record.units.unit[taken])
    steps, priority = np.unique(at), _priority_at_birth(record, rules)
    drawn, drawn_at, same = [own_units[:0]], [at[:0]], 0.0
    for step, live in zip(steps.tolist(), units_before(record, steps), strict=True):
        if rules.priority == "headroom":
            _renew_headroom(record, priority, step)
        elif rules.priority.startswith(PREFIX):
            priority[live] = _ask_own(record, rules, live, rng)
        mine = own_units[at == step]
        for _ in range(REPETITIONS):
            found = _draw(rules, live, priority[live], born.step_born[live], step, len(mine), rng)
            same += len(np.intersect1d(mine, found)) / REPETITIONS
            drawn.append(found)
            drawn_at.append(np.full(len(found), step))
    means = [
        _means_of_units(record, moments, units, steps)
        for moments, units in ((at, own_units), (np.concatenate(drawn_at), np.concatenate(drawn)))
    ]
    return {
        "own": priority_title(record.config.replay),
        "other": priority_title(rules),
        "steps": steps,
        "units": len(own_units),
        "share_same": same / len(own_units) if len(own_units) else np.nan,
        "taken": means[0][0],
        "expected": means[1][0],
        "taken_by_step": means[0][1],
        "expected_by_step": means[1][1],
    }


def units_before(record: RunRecord, steps: Steps) -> Iterator[Units]:
    """The units in the store at the draw of each of `steps`: collected, not evicted, of questions not retired."""
    events, born = record.events, record.trajectories
    unit_of = born.rows_of(born.group if record.config.replay.draws_groups else born.trajectory_id)
    held, retired = np.zeros(len(unit_of), dtype=bool), np.zeros(len(record.question_ids), dtype=bool)
    for new in _events_before(record, steps):
        moved = new[np.isin(events.kind[new], (COLLECTED, EVICTED))]
        held[unit_of[born.rows_of(events.trajectory_id[moved])]] = events.kind[moved] == COLLECTED
        moved = new[np.isin(events.kind[new], (RETIRED, READMITTED))]
        retired[events.question[moved]] = events.kind[moved] == RETIRED
        yield np.flatnonzero(held & ~retired[born.question])


def _priority_at_birth(record: RunRecord, rules: UnitPlace) -> Float64[np.ndarray, " trajectories"]:
    born = record.trajectories
    if rules.priority not in PRIORITIES:
        return np.full(len(born.trajectory_id), np.nan)
    if rules.priority == getattr(record.config.replay, "priority", ""):
        return born.priority.copy()
    reader = LedgerReader(record.run / LEDGER_FOLDER)
    return priorities_at_birth(
        rules.priority,
        born.group if rules.draws_groups else born.trajectory_id,
        steps=born.step_born,
        rewards=born.reward,
        advantages=born.advantage,
        logprobs=lambda begin, end: [each for _, each in reader.bodies(born.trajectory_id[begin:end].tolist())],
    )


def _renew_headroom(record: RunRecord, priority: Float64[np.ndarray, " trajectories"], step: int) -> None:
    """Let the headrooms measured before `step` order their units, in place; of several the last."""
    units = record.units
    measured = np.flatnonzero((units.step < step) & np.isfinite(units.headroom))
    priority[record.trajectories.rows_of(units.unit[measured])] = units.headroom[measured]


def _ask_own(
    record: RunRecord, rules: UnitPlace, live: Units, rng: np.random.Generator
) -> Float64[np.ndarray, " units"]:
    """Priorities by the user's function, checked as in training."""
    born = record.trajectories
    which, rows = rows_of_units(record, born.trajectory_id[live])
    sizes = np.bincount(which, minlength=len(live))
    sums = [
        np.bincount(which, weights=column[rows], minlength=len(live))
        for column in (born.reward, np.abs(born.advantage), born.num_tokens)
    ]
    units = StoredUnits(
        ids=born.trajectory_id[live],
        question_ids=tuple(record.question_ids[number].as_py() for number in born.question[live].tolist()),
        step=born.step_born[live],
        version=born.weight_version[live],
        uses=np.zeros(len(live), dtype=np.int64),
        k=born.success_count[live],
        reward=sums[0] / sizes,
        advantage=sums[1] / sizes,
        tokens=sums[2].astype(np.int64),
    )
    own = replay_function("replay.priority", rules.priority)
    return checked_priorities(own(units, rng), units, rules.priority, proportional=rules.draw == "proportional")


def _draw(
    rules: UnitPlace,
    live: Units,
    priority: Float64[np.ndarray, " units"],
    born: Steps,
    step: int,
    num: int,
    rng: np.random.Generator,
) -> Units:
    """`num` units without replacement, P ~ priority^exponent; or the highest, of equals the newest, then the first.

    A priority fades with age by exp(-age / age_decay); one that is NaN is not drawn.
    """
    fades = (born - step) / rules.age_decay if rules.age_decay else np.zeros(len(live))
    if rules.draw == "proportional":
        weights = np.nan_to_num(priority, nan=0.0)
        weights = (weights / max(weights.max(initial=0.0), 1e-300)) ** rules.exponent * np.exp(rules.exponent * fades)
        num = min(num, int((weights > 0).sum()))
        return rng.choice(live, num, replace=False, p=weights / weights.sum()) if num else live[:0]
    keys = priority
    if rules.age_decay and rules.priority in PRIORITIES:
        with np.errstate(divide="ignore"):
            keys = np.log(priority) + fades
    order = np.lexsort((live, -born, -np.nan_to_num(keys, nan=-np.inf, neginf=-1e300)))
    return live[order[np.isfinite(priority[order])][:num]]


def _means_of_units(record: RunRecord, at: Steps, units: Units, steps: Steps) -> Means:
    """Means over the rows of the units, each taken at a step."""
    born = record.trajectories
    which, rows = rows_of_units(record, born.trajectory_id[units])
    columns = {
        "reward": born.reward[rows],
        "advantage": np.abs(born.advantage[rows]),
        "pass_rate": born.success_count[rows] / record.config.rollout.group_size,
        "age": at[which] - born.step_born[rows],
        "num_tokens": born.num_tokens[rows],
    }
    return _means(columns, at[which], steps, record.last_step)

"""Answers about one run beside its statistics: a step's replay, a question's history, and another policy's draws.

Each is a part of the object that `--json` prints. Draws of another policy are those that the rules of training itself
make from the ledger at each of the run's steps, without training. The buffer stays the recorded one: had the other
policy really run, later steps would have found another buffer. Of a step's own events those before its draw count: what
was re-admitted and what grew too old.
"""

import itertools
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import numpy as np
import pyarrow.compute as pc
from jaxtyping import Float64, Int64

from exgrpo_cli.base.errors import InputError, nearest
from exgrpo_cli.config.names import DIRECTIONS, is_function
from exgrpo_cli.config.settings import SECTIONS, Author, Written, parse_assignments, read_section
from exgrpo_cli.ledger.columns import EVICTED, KINDS, MISSING, NO_BUCKET, READMITTED, SELECTED
from exgrpo_cli.ledger.schemas import Event
from exgrpo_cli.replay.by_question import Candidates, RowPlace, choose, resolve_metric, resolve_sampler
from exgrpo_cli.replay.place import Place
from exgrpo_cli.replay.rows import RESTING, Questions
from exgrpo_cli.show import queries, tables
from exgrpo_cli.show.record import RunRecord, question_texts, response_texts, rows_of, table_rows, take

MOMENTS = {"scored": 0, "refused": 1, "selected": 1}
"""Events of a draw, in the order in which a history has those of a step."""
REPETITIONS = 4
"""Draws by another sampler at each step; their mean is reported."""
KEYS = {"sampler": ("sampler", "mu", "sigma"), "metric": ("metric", "direction")}
"""Kinds of draw that another policy can make, each with the keys of `replay` that change it."""


def step_replay(record: RunRecord, step: int) -> queries.Numbers:
    """Offers and draws of one step: `buckets` that could be drawn from, the drawn `questions` with their candidates as
    selection saw them, or the `units` scanned in the order drawn; `nothing` is why nothing was replayed, else empty.

    Raises InputError for a step that the run has not finished.
    """
    if not 1 <= step <= record.last_step:
        reached = f"its steps go from 1 to {record.last_step}" if record.last_step else "it has not finished a step yet"
        raise InputError(f"--step {step} is not in {record.run}: {reached}.")
    draws, rows = record.draws, record.draws.step == step
    questions, units = _drawn_questions(record, step), _scanned_units(record, step)
    offers = take(draws, rows, "bucket", "num_members", "probability")
    return {
        "step": step,
        "nothing": _why_nothing(record, step, questions, units),
        "buckets": table_rows(questions=draws.num_questions[rows], drawn=draws.num_drawn[rows], **offers),
        "questions": questions,
        "units": units,
    }


def _drawn_questions(record: RunRecord, step: int) -> list[queries.Numbers]:
    """In the order drawn, each with its candidates in order of birth; none is chosen where the draw was given back."""
    scores, born = record.scores, record.trajectories
    scored = scores.step == step
    rows = scores.row[scored]
    candidates = table_rows(
        age=step - born.step_born[rows],
        **_with_texts(record, rows, "num_tokens"),
        **take(scores, scored, "chosen", "entropy", "nll"),
    )
    questions = []
    for number, asked in _questions(record, born.question[rows]).items():
        own = list(itertools.compress(candidates, born.question[rows] == number))
        questions.append({**asked, "candidates": own, **_place_at_draw(record, number, step)})
    return questions


def _questions(record: RunRecord, owners: Int64[np.ndarray, " rows"]) -> dict[int, queries.Numbers]:
    """Id and words of the distinct questions among `owners` by number, in the order in which they first come up."""
    ids = {number: record.question_ids[number].as_py() for number in dict.fromkeys(owners.tolist())}
    texts = question_texts(record.run, list(ids.values()))
    return {number: {"question_id": name, "question": texts[name]} for number, name in ids.items()}


def _responses(record: RunRecord, rows: Int64[np.ndarray, " rows"]) -> dict[int, str]:
    ids = record.trajectories.trajectory_id[rows].tolist()
    return response_texts(record.run, record.config.backbone.source, ids)


def _with_texts(record: RunRecord, rows: Int64[np.ndarray, " rows"], *names: str) -> dict[str, Any]:
    """Columns of some trajectories: decoded response (None without a tokenizer), id, and those of the `names`."""
    columns, responses = take(record.trajectories, rows, "trajectory_id", *names), _responses(record, rows)
    return {"text": [responses.get(each) for each in columns["trajectory_id"].tolist()], **columns}


def _place_at_draw(record: RunRecord, question: int, step: int) -> queries.Numbers:
    """Bucket and members of a question when the step drew, and its probability at each single draw: the bucket's over
    its questions, which are equally likely. None where it was in no bucket, or this one was not offered."""
    events, draws = record.events, record.draws
    known = (events.question == question) & ((events.step < step) | ((events.step == step) & (events.kind == SELECTED)))
    rows = np.flatnonzero(known)
    if not len(rows) or events.bucket[rows[-1]] == NO_BUCKET:
        return {"bucket": None, "num_members": None, "probability": None}
    bucket, num_members = int(events.bucket[rows[-1]]), int(events.num_members[rows[-1]])
    offers = np.flatnonzero((draws.step == step) & (draws.bucket == bucket) & (draws.num_members == num_members))
    chance = float(draws.probability[offers[0]] / draws.num_questions[offers[0]]) if len(offers) else None
    return {"bucket": bucket, "num_members": num_members, "probability": chance}


def _scanned_units(record: RunRecord, step: int) -> list[queries.Numbers]:
    columns, born = record.units, record.trajectories
    scanned = np.flatnonzero(columns.step == step)
    which, rows = queries.rows_of_units(record, columns.unit_id[scanned])
    members = table_rows(**_with_texts(record, rows, "reward", "advantage", "num_tokens"))
    ends = np.searchsorted(which, np.arange(len(scanned) + 1)).tolist()
    first = rows[ends[:-1]]
    units = table_rows(
        unit_id=columns.unit_id[scanned],
        success_count=born.k[first],
        age=step - born.step_born[first],
        rows=[members[begin:end] for begin, end in itertools.pairwise(ends)],
        **take(columns, scanned, "accepted", "priority", "probability", "drift", "headroom", "weight"),
    )
    asked, owners = _questions(record, born.question[first]), born.question[first].tolist()
    return [unit | asked[number] for unit, number in zip(units, owners, strict=True)]


def _why_nothing(record: RunRecord, step: int, questions: list[queries.Numbers], units: list[queries.Numbers]) -> str:
    chosen = [candidate["chosen"] for question in questions for candidate in question["candidates"]]
    if any(chosen) or any(unit["accepted"] for unit in units):
        return ""
    replay = record.config.replay
    if units:
        return f"every unit scanned had drifted by more than replay.max_drift = {getattr(replay, 'max_drift', 0.0):g}"
    if questions:
        return "the draw was given back: its effective sample size was below replay.ess_bound"
    first = record.metrics.first_mixed_step
    if first is None or step < first:
        begins = "has not begun yet" if first is None else f"begins with step {first}"
        return f"on-policy phase: replay {begins}"
    return str(tables.TABLES["nothing_drawn"][replay.composition])


def question_history(record: RunRecord, question_id: str) -> queries.Numbers:
    """All that the ledger says about one question, named by its id or by an unambiguous beginning of it.

    `events` are its events, "scored" for a candidate that was measured and not chosen, and of units "selected" or
    "refused", one a row. Entropy and nll are those of birth for a collected trajectory, else as measured. `responses`
    are decoded, by trajectory id. Raises InputError for an id that neither the training set nor the ledger knows.
    """
    question = _find(record, question_id)
    [asked] = _questions(record, np.array([question])).values()
    # In a step what was replayed comes before what the rollouts caused.
    rows = sorted(_history(record, question), key=lambda row: (row["step"], MOMENTS.get(row["event"], len(MOMENTS))))
    return {
        "question_id": asked["question_id"],
        **asked["question"],
        "state": queries.state_of(record, question),
        "events": rows,
        "responses": _responses(record, np.flatnonzero(record.trajectories.question == question)),
    }


def _find(record: RunRecord, question_id: str) -> int:
    exact = pc.index(record.question_ids, question_id).as_py()
    if exact >= 0:
        return exact
    matches = np.flatnonzero(pc.starts_with(record.question_ids, pattern=question_id).to_numpy(zero_copy_only=False))
    if len(matches) == 1 and question_id:
        return int(matches[0])
    if len(matches) > 1:
        raise InputError(f"question {question_id!r} is the beginning of {len(matches)} ids. Give more characters.")
    hint = "Ids are in the column `id` of the run's data/train.parquet."
    raise InputError(f"question {question_id!r} is not in {record.run}. {hint}")


def _history(record: RunRecord, question: int) -> Iterator[queries.Numbers]:
    """Events but the draws, which the scores of their candidates and the units scanned tell."""
    events, scores, units, born = record.events, record.scores, record.units, record.trajectories
    for index in np.flatnonzero((events.question == question) & (events.kind != SELECTED)).tolist():
        kind, bucket, own = KINDS[events.kind[index]], int(events.bucket[index]), events.trajectory_id[index]
        at = None if own == MISSING else int(rows_of(born, np.array([own]))[0])
        known: queries.Numbers = {"bucket": None if bucket == NO_BUCKET else bucket}
        if at is not None and kind == Event.COLLECTED:
            known |= {"entropy": float(born.entropy[at]), "nll": float(born.nll[at])}
        yield _history_row(record, int(events.step[index]), str(kind), at, known)
    for index in np.flatnonzero(born.question[scores.row] == question).tolist():
        step, known = int(scores.step[index]), {"entropy": scores.entropy[index], "nll": scores.nll[index]}
        if scores.chosen[index]:
            place = _place_at_draw(record, question, step)
            known |= {name: place[name] for name in ("bucket", "probability")}
        event = "selected" if scores.chosen[index] else "scored"
        yield _history_row(record, step, event, int(scores.row[index]), known)
    which, rows = queries.rows_of_units(record, units.unit_id)
    for member in np.flatnonzero(born.question[rows] == question).tolist():
        unit = which[member]
        event, chance = "selected" if units.accepted[unit] else "refused", float(units.probability[unit])
        known = {"probability": None if np.isnan(chance) else chance}
        yield _history_row(record, int(units.step[unit]), event, int(rows[member]), known)


def _history_row(record: RunRecord, step: int, event: str, at: int | None, known: queries.Numbers) -> queries.Numbers:
    """A row of a history; of the trajectory in row `at` where one is given, and with its age where it was drawn."""
    born = record.trajectories
    names = ("trajectory_id", "bucket", "probability", "age", "num_tokens", "entropy", "nll")
    row: queries.Numbers = {"step": step, "event": event, **dict.fromkeys(names)}
    if at is not None:
        row |= {name: int(getattr(born, name)[at]) for name in ("trajectory_id", "num_tokens")}
        row["age"] = step - int(born.step_born[at]) if event in MOMENTS else None
    return row | known


def parse_what_if(text: str, own: Place) -> tuple[Any, tuple[str, ...]]:
    """Rules that `sampler=linear,metric=ppl:max,mu=0.4` makes of a run's own, and the kinds of draw (KEYS) it names.

    Raises InputError for a key that the run does not draw by, and for a value that its settings could not have.
    """
    known = [key for keys in KEYS.values() for key in keys if hasattr(own, key)]
    given: dict[str, Any] = {}
    for item in text.split(","):
        key, equals, value = (part.strip() for part in item.partition("="))
        key = key.removeprefix("replay.")
        if not equals or not value or key in given:
            raise InputError(f"--what-if {text!r}: {item!r} is not a new key=value; write sampler=linear,metric=ppl.")
        if key not in known:
            hint = nearest(key, known) if known else ""
            asked = f"composition = {own.composition!r} can be asked for {', '.join(known) or 'none'}"
            raise InputError(f"--what-if {text!r}: unknown key {key!r}: {asked}.{hint}")
        given |= parse_assignments([f"replay.{key}={value}"])["replay"]
    name, _, last = str(given.get("metric", "")).rpartition(":")
    if last in DIRECTIONS:  # `ent:max` is metric `ent` with direction `max`, as in `exgrpo ablate`
        if given.get("direction", last) != last:
            raise InputError(f"--what-if {text!r}: metric says {last} and direction {given['direction']}; give one.")
        given |= {"metric": name, "direction": last}
    # Not a run's own settings: which of them fit together is not asked.
    both = [Written("the run", asdict(own), Author.READ), Written("--what-if", given | {"enabled": False}, Author.USER)]
    rules = read_section("replay", SECTIONS["replay"], both)
    if given.keys() & {"mu", "sigma"} and rules.sampler != "normal":
        raise InputError(f"--what-if {text!r}: mu and sigma are those of the sampler normal, not of {rules.sampler}.")
    kinds = tuple(kind for kind, keys in KEYS.items() if given.keys() & set(keys))
    for kind in kinds:
        # A run's own function is its author's; one that is typed is the user's.
        if is_function(getattr(rules, kind)) and kind not in given:
            raise InputError(f"--what-if {text!r} asks the run's own {getattr(rules, kind)}: name it, {kind}=..., too.")
    return rules, kinds


def what_if(record: RunRecord, text: str) -> queries.Numbers:
    """Draws of the run beside those of another policy, by kind, with their `names` (the run's first).

    Raises InputError as `parse_what_if`, RunError where a function of the user returns what it must not.
    """
    rules, kinds = parse_what_if(text, record.config.replay)
    ask, rng = {"sampler": other_sampler, "metric": other_metric}, np.random.default_rng(0)
    own, other = queries.draw_names(record.config.replay), queries.draw_names(rules)
    return {kind: {"names": [own[kind], other[kind]], **ask[kind](record, rules, rng)} for kind in kinds}


def states_before(record: RunRecord, steps: Int64[np.ndarray, " draws"]) -> Iterator[Questions]:
    """Question states as the draw of each of `steps` found them, in rising order; changed in place from one to the
    next."""
    events, born, rules = record.events, record.trajectories, record.config.replay
    early = events.kind == READMITTED
    if rules.max_age:
        evicted = np.flatnonzero((events.kind == EVICTED) & (events.trajectory_id != MISSING))
        step_born = born.step_born[rows_of(born, events.trajectory_id[evicted])]
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
        rest = new[np.isin(events.kind[new], RESTING[rules.rests_when_stored])]
        if rules.cooldown:
            states.rests_until[question[rest]] = events.step[rest] + rules.cooldown
        yield states


def other_sampler(record: RunRecord, rules: Any, rng: np.random.Generator) -> queries.Numbers:
    """Ask another sampler at each draw of the run, over all questions drawable then, REPETITIONS times.

    Returns questions `drawn` by the run and `expected` of the other, by success count, in all and `by_step`, and mean
    pass rates of each of the `steps` that drew.
    """
    sampler, draws = resolve_sampler(rules.sampler, rules.mu, rules.sigma), record.draws
    steps, rows = np.unique(draws.step, return_inverse=True)
    wanted = np.bincount(rows, weights=draws.num_drawn).astype(np.int64)
    rates = np.bincount(rows, weights=draws.num_drawn * draws.bucket / draws.num_members)
    shape = (len(steps), max(int(own.bucket.max(initial=0)) for own in (draws, record.events)) + 1)
    counts = {"drawn": np.zeros(shape, dtype=np.int64), "expected": np.zeros(shape)}
    np.add.at(counts["drawn"], (rows, draws.bucket), draws.num_drawn)
    other_rates = np.full(len(steps), np.nan)
    for place, states in enumerate(states_before(record, steps)):
        buckets, num = states.drawable(int(steps[place])), int(wanted[place])
        found = [sampler(buckets, num, rng) for _ in range(REPETITIONS)]
        chosen = np.array([states.numbers[name] for each in found for name in each.question_ids], dtype=np.int64)
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


def other_metric(record: RunRecord, rules: Any, rng: np.random.Generator) -> queries.Numbers:
    """Let another metric choose among the candidates of every draw that replayed, by that step's measurements.

    Returns means over the draws of what the run has `chosen` and the `other` would have, in all and `by_step`, and how
    often there was a choice and both made the same. Not `measured` are candidates of which values of birth are taken.
    """
    metric, scores, own_rules = resolve_metric(rules.metric), record.scores, record.config.replay
    _, numbers = queries.draw_numbers(record)
    order = np.lexsort((scores.row, numbers))
    taken, others, same = [order[:0]], [order[:0]], []
    for rows in np.split(order, np.flatnonzero(np.diff(numbers[order])) + 1):
        own = rows[scores.chosen[rows]]
        if len(own):
            found = rows[choose(_candidates(record, rows), metric, rules.direction, rng, num=len(own))]
            taken.append(own)
            others.append(found)
            if len(rows) > len(own):
                same.append(set(own.tolist()) == set(found.tolist()))
    num, steps = len(taken) - 1, np.unique(scores.step[np.concatenate(taken)])
    means = {name: _means(record, np.concatenate(rows), steps) for name, rows in (("chosen", taken), ("other", others))}
    return {
        "metric": rules.metric,
        "direction": rules.direction,
        "measured": isinstance(own_rules, RowPlace) and own_rules.needs_scores,
        "draws": num,
        "share_with_choice": len(same) / num if num else np.nan,
        "share_same": queries.mean(np.array(same)),
        **{name: overall for name, (overall, _) in means.items()},
        "steps": steps,
        "by_step": {name: by_step for name, (_, by_step) in means.items()},
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


def _means(
    record: RunRecord, rows: Int64[np.ndarray, " chosen"], steps: Int64[np.ndarray, " steps"]
) -> tuple[dict[str, float], dict[str, Float64[np.ndarray, " steps"]]]:
    """By name, over all rows and over those of each step."""
    scores, born = record.scores, record.trajectories
    stored, at = scores.row[rows], scores.step[rows]
    columns = {
        "entropy": scores.entropy[rows],
        "nll": scores.nll[rows],
        "num_tokens": born.num_tokens[stored],
        "age": at - born.step_born[stored],
    }
    totals = {name: queries.mean(column) for name, column in columns.items()}
    return totals, {name: queries.mean_by_step(at, column, record.last_step)[steps] for name, column in columns.items()}

"""Numbers of one run's replay, from its record: every query returns a part of the object that `--json` prints.

Axes: `steps` runs from 0 (before step 1, after a warm start) to the last step; `replays` are the trajectories replayed,
in order of time, one as often as it was replayed. Means over nothing are NaN.
"""

import itertools
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
from jaxtyping import Float64, Int64

from exgrpo_cli.ledger.columns import COLLECTED, EVICTED, NO_BUCKET, READMITTED, RETIRED, SELECTED, EventColumns
from exgrpo_cli.ledger.schemas import WARM_START_STEP
from exgrpo_cli.replay import by_question, by_unit, place, prefix, replace, revisit
from exgrpo_cli.show.draw_test import draw_test
from exgrpo_cli.show.record import RunRecord, question_texts, rows_of, table_rows

Numbers = dict[str, Any]
Steps = Int64[np.ndarray, " steps"]
Members = Int64[np.ndarray, " members"]

MOST_REPLAYED = 10
"""Questions listed."""
HARD_BELOW = 0.25
EASY_ABOVE = 0.75
"""Pass rates that bound the paper's difficulty groups: hard (0, 1/4], medium, easy [3/4, 1)."""
GROUPS = ("hard", "medium", "easy")
QUANTILES = {"5%": 0.05, "25%": 0.25, "50%": 0.5, "75%": 0.75, "95%": 0.95}
WINDOWS = 4
SHORTEST_WINDOW = 5
"""Steps: with fewer there is one window."""


def series(told: Mapping[str, Any], path: str) -> Any:
    """Array (None where it is not known) under a path such as `over_time.units.drift`, one value a step.

    Those of `ratios`, which are one a logged step, are spread over all of them.
    """
    values: Any = told
    for name in path.split("."):
        values = None if values is None else values[int(name) if name.isdigit() else name]
    if path.startswith("ratios."):
        logged, values = values, np.full(told["steps"] + 1, np.nan)
        values[told["ratios"]["steps"]] = logged
    return values


def draw_names(rules: place.Place) -> dict[str, str]:
    """Name of each kind of a place's draws."""
    names = {}
    if isinstance(rules, replace.Replace | revisit.Revisit):
        names["sampler"] = f"normal({rules.mu:g}, {rules.sigma:g})" if rules.sampler == "normal" else rules.sampler
    if isinstance(rules, by_question.RowPlace):
        names["metric"] = rules.metric if rules.metric == "random" else f"{rules.metric}:{rules.direction}"
    if isinstance(rules, by_unit.UnitPlace):
        fading = f", fading in {rules.age_decay:g} steps" if rules.age_decay else ""
        power = f"^{rules.exponent:g}" if rules.exponent != 1 else ""
        names["priority"] = f"{rules.priority}{power}, {rules.draw}{fading}"
    return names


def run_facts(record: RunRecord) -> Numbers:
    """Names and rules of the run, and how far its record goes."""
    rules = record.config.replay
    return {
        "run": str(record.run),
        "method": record.config.run.method,
        "composition": rules.composition,
        "sampler": getattr(rules, "sampler", "uniform" if isinstance(rules, prefix.Prefix) else None),
        "metric": f"{rules.metric}:{rules.direction}" if isinstance(rules, by_question.RowPlace) else None,
        "priority": rules.priority if isinstance(rules, by_unit.UnitPlace) else None,
        "drawn_by": ", ".join(draw_names(rules).values()),
        "group_size": record.config.rollout.group_size,
        "steps": record.last_step,
        "first_mixed_step": record.metrics.first_mixed_step,
        "incomplete": record.incomplete,
    }


def question_states(record: RunRecord) -> Numbers:
    """Questions by state after every step, rebuilt from events, each of which names the bucket of its question.

    `tried` was visited and is neither stored nor retired, `unseen` never drawn from the stream. Both are None without
    the training set, and where questions came from another run or back from retirement: which of those the stream gave
    out since is unknown.
    """
    events, num_steps, total = record.events, record.last_step + 1, record.num_training_questions
    in_bucket, trajectories = _buffer_contents(events, num_steps)
    changes = [np.bincount(events.step[events.kind == kind], minlength=num_steps) for kind in (RETIRED, READMITTED)]
    buffered, retired = in_bucket.sum(axis=1), (changes[0] - changes[1]).cumsum()
    series: dict[str, Any] = {"questions": buffered, "retired": retired, "tried": None, "unseen": None}
    if total and not ((events.step == WARM_START_STEP) | (events.kind == READMITTED)).any():
        known = buffered + retired
        series["tried"] = np.clip(_seen(record, num_steps) - known, 0, None)
        series["unseen"] = np.clip(total - known - series["tried"], 0, None)
    series["trajectories"] = trajectories
    now = np.flatnonzero(in_bucket[-1]).tolist()
    occupied = np.flatnonzero(in_bucket.any(axis=0)).tolist()
    return {
        "buckets": {bucket: int(in_bucket[-1, bucket]) for bucket in now},
        **{name: None if values is None else int(values[-1]) for name, values in series.items()},
        "stored": len(record.trajectories.trajectory_id),
        "over_time": {"buckets": {bucket: in_bucket[:, bucket] for bucket in occupied}, **series},
    }


def _buffer_contents(events: EventColumns, num_steps: int) -> tuple[Int64[np.ndarray, "steps buckets"], Steps]:
    """Questions per bucket and trajectories of buffered questions, after every step.

    With the events grouped by question, each one takes its question out of the bucket that the previous one left it in,
    and the trajectories it has come and go with the question.
    """
    order = np.argsort(events.question, kind="stable")
    step, after, kind = events.step[order], events.bucket[order], events.kind[order]
    question = events.question[order]
    follows = np.zeros(len(question), dtype=bool)
    follows[1:] = question[1:] == question[:-1]
    before = np.where(follows, np.roll(after, 1), NO_BUCKET)
    change = (kind == COLLECTED).astype(np.int64) - (kind == EVICTED)
    starts = np.flatnonzero(~follows)
    carried = np.repeat((change.cumsum() - change)[starts], np.diff(np.append(starts, len(change))))
    stored = change.cumsum() - carried
    held_after = np.where(after == NO_BUCKET, 0, stored)
    held_before = np.where(follows, np.roll(held_after, 1), 0)

    questions = np.zeros((num_steps, int(after.max(initial=0)) + 1), dtype=np.int64)
    for buckets, sign in ((after, 1), (before, -1)):
        inside = buckets != NO_BUCKET
        np.add.at(questions, (step[inside], buckets[inside]), sign)
    trajectories = np.zeros(num_steps, dtype=np.int64)
    np.add.at(trajectories, step, held_after - held_before)
    return questions.cumsum(axis=0), trajectories.cumsum()


def _seen(record: RunRecord, num_steps: int) -> Steps:
    """Distinct questions the stream has given out after each step.

    The stream is a permutation of the training set, so that up to its end every fresh draw is a question not seen
    before. A step's fresh draws are in its metrics; before these are written, B less those that were replayed.
    """
    replayed = np.bincount(record.events.step[record.events.kind == SELECTED], minlength=num_steps)
    fresh = (record.config.rollout.questions_per_step - replayed).astype(np.float64)
    fresh[0] = 0
    logged = record.metrics.series("batch/questions")
    known = np.isfinite(logged)
    fresh[record.metrics.steps[known]] = logged[known]
    return np.minimum(fresh.cumsum(), record.num_training_questions).astype(np.int64)


def replays(record: RunRecord) -> Numbers:
    """Age and use of what was replayed, its share of the training, and the questions replayed most often."""
    born, last = record.trajectories, record.last_step
    selected, taken = record.events.of(SELECTED), record.units.accepted
    which, unit_rows = rows_of_units(record, record.units.unit_id[taken])
    # Of those selected, then of the rows of accepted units.
    steps = np.concatenate([selected.step, record.units.step[taken][which]])
    rows = np.concatenate([rows_of(born, selected.trajectory_id), unit_rows])
    age, reuse = steps - born.step_born[rows], np.bincount(rows, minlength=len(born.trajectory_id))
    evicted = record.events.of(EVICTED).trajectory_id
    rows_of(born, evicted[evicted >= 0])  # raises where the ledger lost one
    num_replays = np.bincount(steps, minlength=last + 1)
    tokens = np.bincount(steps, weights=born.num_tokens[rows], minlength=last + 1)
    trained = record.metrics.series("tokens/trained")
    known = np.isfinite(trained) & (record.metrics.steps >= 0)
    # Of a beginning, or a question asked again, no row is trained.
    total = 0.0 if isinstance(record.config.replay, prefix.Prefix | revisit.Revisit) else trained[known].sum()
    return {
        "evicted": int((evicted >= 0).sum()),
        "age": _spread(age),
        "reuse": {**_spread(reuse), "never": int((reuse == 0).sum())},
        "used": len(steps),
        "share": {
            "steps": float((num_replays > 0).sum() / max(last, 1)),
            "tokens": float(tokens[record.metrics.steps[known]].sum() / total) if total > 0 else np.nan,
        },
        "most_replayed": _most_replayed(record, rows),
        "over_time": {"age": mean_by_step(steps, age, last)},
    }


def rows_of_units(record: RunRecord, units: Int64[np.ndarray, " units"]) -> tuple[Members, Members]:
    """Position among `units` and trajectory row of each of their members, unit by unit."""
    if not record.config.replay.draws_groups:
        return np.arange(len(units)), rows_of(record.trajectories, units)
    # The rows of a visit stand together, in the order of their ids.
    begins = np.searchsorted(record.trajectories.group_id, units)
    lengths = np.searchsorted(record.trajectories.group_id, units, side="right") - begins
    which = np.repeat(np.arange(len(units)), lengths)
    within = np.arange(len(which)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    return which, np.repeat(begins, lengths) + within


def _most_replayed(record: RunRecord, rows: Int64[np.ndarray, " replays"]) -> list[dict[str, Any]]:
    """The questions replayed most often; of equal ones the first in the training set."""
    num, owners = len(record.question_ids), record.trajectories.question
    counts, stored = np.bincount(owners[rows], minlength=num), np.bincount(owners, minlength=num)
    distinct = np.bincount(owners[np.unique(rows)], minlength=num)
    top = np.argsort(-counts, kind="stable")[:MOST_REPLAYED]
    top = top[counts[top] > 0]
    ids = [record.question_ids[int(question)].as_py() for question in top]
    texts = question_texts(record.run, ids)
    return table_rows(
        question_id=ids,
        replays=counts[top],
        trajectories=stored[top],
        distinct=distinct[top],
        state=[state_of(record, question) for question in top.tolist()],
        question=[texts[question_id] for question_id in ids],
    )


def state_of(record: RunRecord, question: int) -> str:
    """`bucket <k>`, `retired` or `not buffered`, after the last step."""
    own = record.events.question == question
    kinds, buckets = record.events.kind[own], record.events.bucket[own]
    leaving = kinds[(kinds == RETIRED) | (kinds == READMITTED)]
    if len(leaving) and leaving[-1] == RETIRED:
        return "retired"
    return "not buffered" if not len(kinds) or buckets[-1] == NO_BUCKET else f"bucket {buckets[-1]}"


def scanned_units(record: RunRecord) -> Numbers:
    """Units scanned and taken in each step, priority and weight of the taken, drift of the scanned."""
    units, last = record.units, record.last_step
    step, taken = units.step, units.accepted
    found = {
        "scanned": np.bincount(step, minlength=last + 1),
        "taken": np.bincount(step[taken], minlength=last + 1),
        "priority": mean_by_step(step[taken], units.priority[taken], last),
        "weight": mean_by_step(step[taken], units.weight[taken], last),
        "drift": mean_by_step(step, units.drift, last),
    }
    return {"over_time": {"units": found if isinstance(record.config.replay, by_unit.UnitPlace) else None}}


def begun_groups(record: RunRecord) -> Numbers:
    """Groups of each step whose rollouts began with a stored row: how many, tokens of their beginnings, pass@1."""
    begun, last = record.begun, record.last_step
    found = {
        "groups": np.bincount(begun.step, minlength=last + 1),
        "tokens": mean_by_step(begun.step, begun.num_tokens, last),
        "pass_at_1": mean_by_step(begun.step, begun.k / begun.num_members, last),
    }
    return {"over_time": {"begun": found if isinstance(record.config.replay, prefix.Prefix) else None}}


def entropy_of_choice(record: RunRecord) -> Numbers:
    """Entropy of what was replayed against that of what could have been, over the draws that replayed something.

    `available` is the mean over the drawn questions of their candidates' mean: what choosing at random would have
    replayed. A plain mean over all candidates would mix in which questions happen to have many. Where the metric needs
    no measurement the entropies are those of birth.
    """
    scores, last = record.scores, record.last_step
    steps, numbers = draw_numbers(record)
    counts, num_chosen = np.bincount(numbers), np.bincount(numbers, weights=scores.chosen)
    kept = num_chosen > 0  # an effective-sample-size guard measures draws that are then given up
    available = np.bincount(numbers, weights=scores.entropy)[kept] / counts[kept]
    selected = np.bincount(numbers, weights=np.where(scores.chosen, scores.entropy, 0.0))[kept] / num_chosen[kept]
    entropy = {"selected": mean(selected), "available": mean(available), "share_with_choice": mean(counts[kept] > 1)}
    return {
        "entropy": entropy,
        "over_time": {
            "entropy_selected": mean_by_step(steps[kept], selected, last),
            "entropy_available": mean_by_step(steps[kept], available, last),
            "candidates": mean_by_step(steps[kept], counts[kept], last),
        },
    }


def draw_numbers(record: RunRecord) -> tuple[Int64[np.ndarray, " draws"], Int64[np.ndarray, " scores"]]:
    """Step of each draw, of one question in one step, and the number of the draw that each score belongs to."""
    question = record.trajectories.question[record.scores.row]
    num = int(question.max(initial=0)) + 1
    draws, numbers = np.unique(record.scores.step * num + question, return_inverse=True)
    return draws // num, numbers


def entropy_at_birth(record: RunRecord) -> Numbers:
    """Entropy of right trajectories at birth, by success count and difficulty: the paper's analysis, whole and in
    stretches of equally many steps from the first birth on, none without a birth.

    Pooled over a run, hard questions' trajectories come mostly from its beginning, when every entropy is high: the
    comparison by difficulty is fair within a stretch only.
    """
    born, last = record.trajectories.step_born, record.last_step
    windows = []
    if len(born):
        first = int(born.min())
        num = min(WINDOWS, max(1, (last - first + 1) // SHORTEST_WINDOW))
        edges = np.linspace(first, last + 1, num + 1).round().astype(int).tolist()
        windows = [
            {"first_step": begin, "last_step": end - 1, **_born_within(record, begin, end - 1)}
            for begin, end in itertools.pairwise(edges)
        ]
    return {"entropy": {**_born_within(record, 0, last), "windows": windows}}


def span_of(window: Mapping[str, Any]) -> str:
    """Steps of a window as "6-54", or "6" where it is one step; "all" of the whole run."""
    first, last = window.get("first_step"), window.get("last_step")
    return "all" if first is None else str(first) if first == last else f"{first}-{last}"


def _born_within(record: RunRecord, first_step: int, last_step: int) -> Numbers:
    stored = record.trajectories
    inside = (stored.step_born >= first_step) & (stored.step_born <= last_step) & stored.correct
    counts, entropy = stored.k[inside], stored.entropy[inside]
    rates = counts / record.config.rollout.group_size
    hard, easy = rates <= HARD_BELOW, rates >= EASY_ABOVE
    difficulty = dict(zip(GROUPS, (hard, ~hard & ~easy, easy), strict=True))
    groups = [_entropies(name, entropy[own]) for name, own in difficulty.items() if own.any()]
    means = {group["name"]: group["mean"] for group in groups}
    return {
        "by_bucket": [_entropies(str(count), entropy[counts == count]) for count in np.unique(counts)],
        "by_difficulty": groups,
        "hard_over_easy": means.get("hard", np.nan) / means.get("easy", np.nan),
    }


def _entropies(name: str, entropy: Float64[np.ndarray, " trajectories"]) -> Numbers:
    known = entropy[np.isfinite(entropy)]  # NaN where a trajectory was not measured at birth
    quantiles = np.quantile(known, list(QUANTILES.values())) if len(known) else np.full(len(QUANTILES), np.nan)
    return {
        "name": name,
        "trajectories": len(entropy),
        "mean": mean(known),
        "quantiles": dict(zip(QUANTILES, quantiles.tolist(), strict=True)),
    }


def bucket_flow(record: RunRecord) -> Numbers:
    """Replay visits by success count before, and where the question was when its step ended: another count, retired, or
    dropped from all buckets because its count left the bounds or its trajectories were evicted."""
    events = record.events
    # Events are in order of time, so that the last of equal keys is the last event of a question in a step.
    keys = events.step * (len(record.question_ids) + 1) + events.question
    order = np.argsort(keys, kind="stable")
    drawn = np.flatnonzero((events.kind == SELECTED) & (events.bucket != NO_BUCKET))
    last = order[np.searchsorted(keys[order], keys[drawn], side="right") - 1]
    before, after, retired = events.bucket[drawn], events.bucket[last], events.kind[last] == RETIRED
    flow = {}
    for bucket in np.unique(before).tolist():
        own = before == bucket
        stays = after[own & ~retired & (after != NO_BUCKET)]
        flow[bucket] = {
            "after": {k: int(num) for k, num in zip(*np.unique(stays, return_counts=True), strict=True)},
            "retired": int((own & retired).sum()),
            "dropped": int((own & ~retired & (after == NO_BUCKET)).sum()),
        }
    return {"flow": flow}


def draws_and_promise(record: RunRecord) -> Numbers:
    """Questions drawn from each bucket against what the sampler promised."""
    return {"draws": draw_test(record.draws)}


def importance_ratios(record: RunRecord) -> Numbers:
    """Importance ratios w = pi_theta / pi_past of replayed tokens as logged, one value a logged step, NaN without
    replay; `ess` is their effective sample size (sum w)^2 / (n sum w^2), from 1/n to 1."""
    logged = {"mean": "policy/ratio_replay", "max": "policy/ratio_replay_max", "ess": "replay/ess"}
    series = {name: record.metrics.series(key) for name, key in logged.items()}
    return {"ratios": {"steps": record.metrics.steps, **series}}


def mean_by_step(
    steps: Int64[np.ndarray, " rows"], values: Float64[np.ndarray, " rows"] | Int64[np.ndarray, " rows"], last_step: int
) -> Float64[np.ndarray, " steps"]:
    """Mean of the rows of each step 0..last_step, NaN for a step without rows."""
    totals = np.bincount(steps, weights=values, minlength=last_step + 1)
    counts = np.bincount(steps, minlength=last_step + 1)
    return np.divide(totals, counts, out=np.full(last_step + 1, np.nan), where=counts > 0)


def _spread(values: Int64[np.ndarray, " values"]) -> Numbers:
    """Mean, median, 90 % quantile, largest, and how many there are of each value."""
    measures: dict[str, Any] = {"mean": np.mean, "median": np.median, "p90": partial(np.quantile, q=0.9), "max": np.max}
    counts = np.bincount(values)
    return {
        **{name: measure(values).item() if len(values) else None for name, measure in measures.items()},
        "histogram": {value: int(counts[value]) for value in np.flatnonzero(counts).tolist()},
    }


def mean(values: np.ndarray) -> float:
    """The mean, NaN of nothing."""
    return float(values.mean()) if len(values) else np.nan

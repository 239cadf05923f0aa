"""What is replayed beside a step's fresh groups: a question's own stored rows, or units drawn from the whole store.

All of it is chosen after the log-probs under pi_old and before this step's rows are stored, so that no step replays
itself. What stands in for fresh rollouts is drawn before them: `training.step.experience`.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from exgrpo_cli.algo.batching import TrainingRow
from exgrpo_cli.replay.drawing.priorities import token_drift, token_headroom
from exgrpo_cli.replay.drawing.units import ScannedUnit
from exgrpo_cli.replay.protocol import ReplayUnit
from exgrpo_cli.training.parts import Parts
from exgrpo_cli.training.step.experience import (
    NO_EXPERIENCE,
    Experience,
    Scores,
    by_question,
    choose,
    draw_metrics,
    experiential_count,
    score,
    tokens_of,
    with_scores,
)
from exgrpo_cli.training.step.groups import Group, Replayed, replayed_row

Composed = tuple[Sequence[Group], Experience]
"""A step's groups, and what is replayed with them."""


def join(parts: Parts, groups: Sequence[Group], experience: Experience, step: int) -> Composed:
    """A fresh question that trains and holds enough rows gets the best of them beside its K rollouts."""
    buffer, trains_all = parts.buffer, parts.config.rollout.max_rounds == 1
    joining = [group.question.id for group in groups if trains_all or group.is_mixed]
    offer = buffer.offer_joining(joining, step, parts.policy.weight_version)
    if not offer.candidates:
        return groups, NO_EXPERIENCE
    candidates, choice, scores = choose(parts, offer)
    from_old = parts.config.objective.importance == "old"
    if from_old:
        scores = with_scores(parts, choice.trajectories, scores)
    buffer.record_replay(step, candidates, choice)
    replayed = by_question(choice.trajectories, scores if from_old else None)
    joined = [
        replace(group, replayed=replayed[group.question.id], joined=True) if group.question.id in replayed else group
        for group in groups
    ]
    return joined, Experience(
        replayed={},
        metrics=draw_metrics(candidates, choice, step, measured=parts.config.replay.needs_scores),
        tokens_scored=tokens_of(scores),
    )


def append(parts: Parts, groups: Sequence[Group], experience: Experience, step: int) -> Composed:
    """Units of any question train beside the batch."""
    replay = parts.config.replay
    if replay.draws_groups:
        wanted = experiential_count(replay.ratio, parts.config.rollout.questions_per_step)
    else:
        wanted = round(round(replay.ratio * sum(len(group.fresh) for group in groups if group.is_mixed), 9))
    return groups, draw_units(parts, wanted, step)


def refill(parts: Parts, groups: Sequence[Group], experience: Experience, step: int) -> Composed:
    """Stored groups take the places of groups that are not mixed: those do not train, refilled or not."""
    drawn = draw_units(parts, sum(not group.is_mixed for group in groups), step)
    return groups, replace(drawn, metrics={**drawn.metrics, "replay/refilled": len(drawn.units)})


COMPOSITIONS: dict[str, Callable[[Parts, Sequence[Group], Experience, int], Composed]] = {
    # Replayed rows stand in for rollouts already.
    "replace": lambda parts, groups, experience, step: (groups, experience),
    "join": join,
    "append": append,
    "refill": refill,
}
"""By `replay.composition`: adds the replay of a mixed step to its groups."""


def draw_units(parts: Parts, wanted: int, step: int) -> Experience:
    """Scan units in the order drawn, and take those whose drift is in bounds, until there are enough or no more."""
    taken: list[ReplayUnit] = []
    verdicts: list[ScannedUnit] = []
    known: Scores = {}
    gated = parts.config.replay.max_drift > 0
    while len(taken) < wanted:
        wave = parts.buffer.scan(wanted - len(taken), step, parts.rngs["draw"])
        if gated:
            rows = [trajectory for unit in wave for trajectory in unit.trajectories]
            known = {**known, **score(parts.policy, parts.prompts, rows)}
        scanned = [verdict_on(parts, unit, known) for unit in wave]
        verdicts += scanned
        taken += [unit for unit, verdict in zip(wave, scanned, strict=True) if verdict.accepted]
        if not wave or not gated:
            break
    parts.buffer.end_scan(step, verdicts)
    if parts.config.objective.importance == "old":
        known = with_scores(parts, [each for unit in taken for each in unit.trajectories], known)
    return Experience(
        replayed={},
        metrics=unit_metrics(taken, verdicts, step),
        units=tuple(unit_rows(parts, unit, known) for unit in taken),
        tokens_scored=tokens_of(known),
    )


def verdict_on(parts: Parts, unit: ReplayUnit, scores: Scores) -> ScannedUnit:
    """Whether a unit is replayed, with its drift and its headroom of now where there is a bound on the drift."""
    bound = parts.config.replay.max_drift
    if not bound:
        return ScannedUnit(unit_id=unit.drawn.unit_id, accepted=True)
    now = [scores[trajectory.trajectory_id].logprobs for trajectory in unit.trajectories]
    drift = token_drift(now, [trajectory.behaviour_logprobs for trajectory in unit.trajectories])
    advantages = np.array([trajectory.advantage for trajectory in unit.trajectories])
    return ScannedUnit(
        unit_id=unit.drawn.unit_id, accepted=drift <= bound, drift=drift, headroom=token_headroom(now, advantages)
    )


def unit_rows(parts: Parts, unit: ReplayUnit, scores: Scores) -> tuple[TrainingRow, ...]:
    """The rows that a unit trains, with the advantages of their birth.

    An unrecorded one is 0: it comes with the surrogate that reads none, and NaN would spread through its gradient.
    """
    old = parts.config.objective.importance == "old"
    return tuple(
        replayed_row(
            Replayed(
                trajectory=each,
                behaviour_logprobs=scores[each.trajectory_id].logprobs if old else each.behaviour_logprobs,
            ),
            parts.prompts[each.question_id],
            0.0 if math.isnan(each.advantage) else each.advantage,
            unit.drawn.weight,
        )
        for each in unit.trajectories
    )


def unit_metrics(taken: Sequence[ReplayUnit], verdicts: Sequence[ScannedUnit], step: int) -> dict[str, float | int]:
    """`replay/*` keys of a scan."""
    ages = [step - trajectory.step_born for unit in taken for trajectory in unit.trajectories]
    drifts = [verdict.drift for verdict in verdicts if verdict.drift is not None]
    metrics: dict[str, float | int] = {
        "replay/used": len(ages),
        "replay/scanned": len(verdicts),
        "replay/accepted": len(taken),
    }
    if ages:
        metrics["replay/age_mean"] = float(np.mean(ages))
    if drifts:
        metrics["replay/drift"] = float(np.mean(drifts))
    return metrics

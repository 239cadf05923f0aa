"""One step of ExGRPO (arXiv 2510.02245, algorithm 1): draw, sync, roll out and grade, join stored rows, record, update.

`run.py` takes step after step. Where we depart from paper and released code: `docs/algorithm.md`.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from exgrpo_cli.algo import advantages
from exgrpo_cli.algo.batching import TrainingRow, split_minibatches
from exgrpo_cli.base.errors import RunError
from exgrpo_cli.config.sections.objective import ObjectiveSettings
from exgrpo_cli.engines.policy.policy import UpdateReport
from exgrpo_cli.replay.place import NO_EXPERIENCE, Experience
from exgrpo_cli.training import metrics
from exgrpo_cli.training.state import Parts, RunState
from exgrpo_cli.training.step.groups import Advantage, Group, replayed_row
from exgrpo_cli.training.step.rollouts import compare, compares_in_update, roll_out


def run_step(
    parts: Parts, state: RunState, step: int, clock: metrics.Clock
) -> tuple[dict[str, Any], Sequence[Group], list[str]] | None:
    """Train one step and advance `state`: its journal line, groups and notes; None when every question is retired and
    nothing is left to train on.

    `clock` times the phases. Raises RunError after too many consecutive skipped updates.
    """
    config, place = parts.config, parts.config.replay
    mixed = place.enabled and state.is_mixed(step, place.start_threshold, place.warmup_steps)

    with clock.phase("replay"):
        if parts.store is not None:
            parts.stream.readmit(parts.store.readmit(step, parts.rngs["readmit"]))
        if mixed:
            # Candidates are scored while the rollout engine sleeps: what both take at once is more than either.
            parts.generator.sleep()
        experience = parts.ask_place(place.before, step, state.carried) if mixed else NO_EXPERIENCE
    with clock.phase("sync"):
        parts.wake()
    rolled = roll_out(parts, state, step, experience, clock)
    if rolled is None:
        return None
    groups = rolled.groups
    notes = [*experience.notes, *rolled.notes]

    if config.objective.keeps_history:
        state.count_successes(groups, config.objective)
    with clock.phase("replay"):
        if mixed:
            training = [group for group in groups if group.question.id in rolled.trained]
            experience = parts.ask_place(partial(place.beside, groups=training, experience=experience), step)
            groups = [with_joined(group, experience) for group in groups]
        record_visits(parts, state, groups, step, collecting=mixed or place.collect_before_start)
    with clock.phase("update"):
        rows = [
            group.rows(advantage_of(group, config.objective, state))
            for group in groups
            if group.question.id in rolled.trained and (group.is_mixed or not experience.drops_unmixed)
        ]
        clip = not mixed or config.objective.clip_in_mixed_phase
        reports, told = update(parts, state, rows, experience, clip=clip)
    notes += told
    notes += [f"step {step}: an update was skipped: {report.skip_reason}" for report in reports if not report.applied]
    with clock.phase("sync"):
        parts.policy.offload()
    with clock.phase("replay"):
        if parts.store is not None:
            parts.store.flush(step)

    if state.start_exceeded_at < 0 and not mixed and metrics.pass_at_1(groups) > place.start_threshold:
        state.start_exceeded_at = step
    line = metrics.journal_line(
        step,
        "mixed" if mixed else "on-policy",
        metrics.batch_metrics(groups),
        # Of rows that waited, those count that train now.
        (experience.metrics if place.enabled else {}) | rolled.metrics,
        metrics.store_metrics(parts.store) if parts.store is not None and place.keeps_buffer else {},
        metrics.truncation(groups),
        metrics.update_metrics(reports),
        metrics.policy_entropy(groups),
        {"tokens/scored": experience.tokens_scored + rolled.tokens_scored},
        clock.metrics(),
    )
    state.count_step(groups, line, clock.seconds)
    if config.run.budget != "steps":
        line["budget/spent"] = state.spent(config.run.budget)
    return line, groups, notes


def advantage_of(group: Group, settings: ObjectiveSettings, state: RunState) -> Advantage:
    """The function from the rewards of a group to its advantages, by the settings."""
    normalised = settings.advantage == "normalised"
    if settings.baseline == "history":
        history = state.history.get(group.question.id, advantages.SuccessHistory())
        return partial(
            advantages.normalised_history_advantages if normalised else advantages.history_advantages, history=history
        )
    form = advantages.normalised_advantages if normalised else advantages.centred_advantages
    if settings.baseline == "confidence":
        logprobs, weight = [each.logprobs for each in group.scores], settings.all_wrong_weight
        return partial(advantages.confidence_advantages, form=form, logprobs=logprobs, all_wrong_weight=weight)
    return partial(advantages.beside_a_success, form=form) if settings.baseline == "virtual" else form


def with_joined(group: Group, experience: Experience) -> Group:
    """The group with the stored rows that stand beside its K rollouts, where it has some."""
    rows = experience.by_question.get(group.question.id, ()) if experience.joined else ()
    return replace(group, replayed=rows, joined=True, own_advantages=experience.own_advantages) if rows else group


def record_visits(parts: Parts, state: RunState, groups: Sequence[Group], step: int, *, collecting: bool) -> None:
    """Record the outcome of each group in the store, on rank 0: questions retire or change buckets, rows are stored."""
    if parts.store is not None:
        goal, history = parts.config.objective, state.history
        visits = []
        for own in groups:
            visit = own.visit(step, advantage_of(own, goal, state), history.get(own.question.id))
            if own.beginning:
                parts.store.record_beginning(visit, own.beginning)
            else:
                visits.append(visit)
        parts.store.record_visits(visits, collecting=collecting and parts.config.replay.enabled)


def update(
    parts: Parts, state: RunState, groups: Sequence[Sequence[TrainingRow]], experience: Experience, *, clip: bool
) -> tuple[list[UpdateReport], list[str]]:
    """M optimizer updates on the rows of whole `groups` and on replayed units, or M and those of the units alone
    (`replay.order`); and a word where the sampler's log-probs, that stand for the trainer's, are not near enough.

    Advantages are fixed for the step. Raises RunError after `optim.max_skipped` skipped updates in a row, and for
    log-probs that differ by more than rounding.
    """
    config = parts.config
    minibatches = split_minibatches(
        groups,
        [[replayed_row(row, parts.prompts[row.trajectory.question_id]) for row in unit] for unit in experience.units],
        num_minibatches=config.optim.minibatches,
        max_response_tokens=config.rollout.max_response_tokens,
        clip=clip,
        rng=parts.rngs["minibatch"],
        order=config.replay.order,
    )
    progress, reports, notes = state.spent_share(config.run, parts.ranks), list[UpdateReport](), list[str]()
    for minibatch in minibatches:
        # Only the first gradient is taken at the weights that sampled.
        comparing = compares_in_update(config) and not reports
        reports.append(parts.policy.update(replace(minibatch, progress=progress, with_scores=comparing)))
        if reports[-1].scores:
            gap, told = compare(parts, state, reports[-1].scores)
            reports[-1].metrics.update(gap)
            notes += told
        if parts.policy.consecutive_skips >= config.optim.max_skipped:
            raise RunError(
                f"{parts.policy.consecutive_skips} consecutive updates were skipped (last: {reports[-1].skip_reason}); "
                "lower optim.learning_rate, or raise optim.skip_norm or optim.max_skipped."
            )
    return reports, notes

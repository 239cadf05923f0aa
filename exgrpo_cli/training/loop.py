"""One step of ExGRPO: draw, roll out, grade, record, mix, update, sync (paper, algorithm 1).

Where we depart from the released code: `docs/algorithm.md`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from exgrpo_cli.algo.advantages import centred_advantages, normalised_advantages
from exgrpo_cli.algo.batching import TrainingRow, split_minibatches
from exgrpo_cli.algo.history import SuccessHistory, history_advantages, normalised_history_advantages
from exgrpo_cli.base.errors import RunError
from exgrpo_cli.config.sections.objective import ObjectiveSettings
from exgrpo_cli.config.sections.replay import ReplaySettings
from exgrpo_cli.engines.protocols import UpdateReport
from exgrpo_cli.training.metrics import (
    Clock,
    batch_metrics,
    journal_line,
    pass_at_1,
    policy_entropy,
    truncation,
    update_metrics,
)
from exgrpo_cli.training.parts import Parts
from exgrpo_cli.training.resuming.state import RunState
from exgrpo_cli.training.step.composition import COMPOSITIONS
from exgrpo_cli.training.step.experience import (
    NO_EXPERIENCE,
    Experience,
    buffer_metrics,
    draw_experience,
    readmit,
    record_visits,
)
from exgrpo_cli.training.step.groups import Advantage, Group
from exgrpo_cli.training.step.rollouts import StepRollouts, roll_out


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """What a step leaves behind for the journal."""

    line: dict[str, Any]
    groups: tuple[Group, ...]
    notes: tuple[str, ...]


def run_step(parts: Parts, state: RunState, step: int, clock: Clock | None = None) -> StepResult | None:
    """Train one step and advance `state`; None when every question is retired and nothing is left to train on.

    `clock` times the phases; a new one where none is given.

    Raises RunError after too many consecutive skipped updates.
    """
    config, clock = parts.config, clock or Clock()
    mixed = config.replay.enabled and state.is_mixed(step, config.replay.start_threshold, config.replay.warmup_steps)

    with clock.phase("replay"):
        readmit(parts, step)
        replaces = mixed and config.replay.composition == "replace"
        experience = draw_experience(parts, step) if replaces else NO_EXPERIENCE
    rolled = roll_out(parts, state, step, experience, clock)
    groups: Sequence[Group] = rolled.groups
    if not groups:
        return None
    notes = [*experience.notes, *rolled.notes]

    if config.objective.baseline == "history":
        state.count_successes(groups, config.objective.history_discount)
    advantage = partial(advantage_of, settings=config.objective, state=state)
    with clock.phase("replay"):
        if mixed:
            groups, experience = COMPOSITIONS[config.replay.composition](parts, groups, experience, step)
        collecting = mixed or config.replay.collect_before_start
        record_visits(parts, groups, step, advantage, state.history, collecting=collecting)
    with clock.phase("update"):
        clip = not mixed or config.objective.clip_in_mixed_phase
        trained = [group for group in groups if trains(group, rolled, parts.config.replay, mixed=mixed)]
        rows = [group.rows(advantage(group.question.id)) for group in trained]
        reports = update(parts, state, rows, experience.units, clip=clip)
    notes += [f"step {step}: an update was skipped: {report.skip_reason}" for report in reports if not report.applied]
    with clock.phase("sync"):
        sync(parts)
    with clock.phase("replay"):
        parts.buffer.flush(step)

    if state.start_exceeded_at < 0 and not mixed and pass_at_1(groups) > config.replay.start_threshold:
        state.start_exceeded_at = step
    line = journal_line(
        step,
        "mixed" if mixed else "on-policy",
        batch_metrics(groups),
        rolled.metrics,
        experience.metrics if config.replay.enabled else {},
        buffer_metrics(parts.buffer.counts) if config.replay.keeps_buffer else {},
        truncation(groups),
        update_metrics(reports),
        policy_entropy(groups),
        {"tokens/scored": experience.tokens_scored + rolled.tokens_scored},
        clock.metrics(),
    )
    advance(state, step, groups, experience, line, clock)
    if config.run.budget != "steps":
        line["budget/spent"] = state.spent(config.run.budget)
    return StepResult(line=line, groups=tuple(groups), notes=tuple(notes))


def advantage_of(question_id: str, *, settings: ObjectiveSettings, state: RunState) -> Advantage:
    """From the rewards of a question's group to its advantages."""
    normalised = settings.advantage == "normalised"
    if settings.baseline == "history":
        history = state.history.get(question_id, SuccessHistory())
        return partial(normalised_history_advantages if normalised else history_advantages, history=history)
    return normalised_advantages if normalised else centred_advantages


def trains(group: Group, rolled: StepRollouts, replay: ReplaySettings, *, mixed: bool) -> bool:
    """Whether a group is part of the step's N."""
    return group.question.id in rolled.trained and (group.is_mixed or not (mixed and replay.drops_unmixed))


def update(
    parts: Parts,
    state: RunState,
    groups: Sequence[Sequence[TrainingRow]],
    units: Sequence[Sequence[TrainingRow]],
    *,
    clip: bool,
) -> list[UpdateReport]:
    """M optimizer updates on whole groups and replayed units, or M and those of the units alone (`replay.order`).

    Advantages and denominators are fixed for the step.
    """
    config = parts.config
    minibatches = split_minibatches(
        groups,
        units,
        num_minibatches=config.optim.minibatches,
        max_response_tokens=config.rollout.max_response_tokens,
        clip=clip,
        rng=parts.rngs["minibatch"],
        order=config.replay.order,
    )
    progress, reports = spent_share(parts, state), []
    for minibatch in minibatches:
        reports.append(parts.policy.update(replace(minibatch, progress=progress)))
        if parts.policy.consecutive_skips >= config.optim.max_skipped:
            raise RunError(
                f"{parts.policy.consecutive_skips} consecutive updates were skipped (last: {reports[-1].skip_reason}); "
                "lower optim.learning_rate, or raise optim.skip_norm or optim.max_skipped."
            )
    return reports


def spent_share(parts: Parts, state: RunState) -> float | None:
    """Share of the run's budget that has been spent, the same on every rank; None where steps are counted."""
    settings = parts.config.run
    if settings.budget == "steps":
        return None
    return parts.ranks.from_main(lambda: state.spent(settings.budget)) / settings.budget_amount


def sync(parts: Parts) -> None:
    """Hand the policy's weights to the generator, which proves that it has them; no update comes before rollouts."""
    parts.policy.rest()
    parts.generator.sync(parts.policy.named_weights(), parts.policy.weight_version, parts.policy.score)


def advance(
    state: RunState,
    step: int,
    groups: Sequence[Group],
    experience: Experience,
    line: Mapping[str, Any],
    clock: Clock,
) -> None:
    """Count the finished step into the run's state."""
    state.step = step
    state.visits.update(group.question.id for group in groups)
    state.replayed += int(experience.metrics["replay/used"])
    state.tokens_generated += line["tokens/generated"]
    state.tokens_trained += line["tokens/trained"]
    state.updates_applied += line["optim/updates_applied"]
    state.updates_skipped += line["optim/updates_skipped"]
    for name, seconds in clock.seconds.items():
        state.add_seconds(name, seconds)

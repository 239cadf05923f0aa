"""One step of ExGRPO: draw, roll out, grade, record, mix, update, sync (paper, algorithm 1).

Where we depart from the released code: `docs/algorithm.md`.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from exgrpo_cli.algo.advantages import centred_advantages, normalised_advantages
from exgrpo_cli.algo.batching import split_minibatches
from exgrpo_cli.backbones.load import Backbone
from exgrpo_cli.config.settings import Config
from exgrpo_cli.data.question_file.choices import options_of
from exgrpo_cli.data.stream import QuestionStream
from exgrpo_cli.engines.protocols import Generator, Policy, UpdateReport
from exgrpo_cli.errors import RunError
from exgrpo_cli.grading import GradingItem
from exgrpo_cli.ranks.ranks import ALONE, Ranks
from exgrpo_cli.replay.buffer import Success, Visit
from exgrpo_cli.seeds import rollout_seed
from exgrpo_cli.training.experience import NOTHING, Experience, Prompts, draw_experience, experiential_count
from exgrpo_cli.training.groups import Group
from exgrpo_cli.training.metrics import (
    Clock,
    batch_metrics,
    journal_line,
    logprob_gap,
    pass_at_1,
    policy_entropy,
    truncation,
    update_metrics,
)
from exgrpo_cli.training.ranked_buffer import AnyBuffer
from exgrpo_cli.training.ranked_pool import AnyPool
from exgrpo_cli.training.state import RunState
from exgrpo_cli.types import (
    AnswerFormat,
    GradedRollout,
    Question,
    Rollout,
    RolloutRequest,
    SamplingParams,
    StopReason,
    TokenSequence,
    Verdict,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    """Everything a step works with."""

    config: Config
    questions: Mapping[str, Question]
    prompts: Prompts
    answer_format: AnswerFormat
    backbone: Backbone
    generator: Generator
    policy: Policy
    pool: AnyPool
    stream: QuestionStream
    buffer: AnyBuffer | None
    """None when neither replay nor retirement is on."""
    rngs: Mapping[str, np.random.Generator]
    ranks: Ranks = ALONE
    """Engines, pool and buffer share their work by it; the step itself never asks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """What a step leaves behind for the journal."""

    line: dict[str, Any]
    groups: tuple[Group, ...]
    notes: tuple[str, ...] = field(default=())


def run_step(parts: Parts, state: RunState, step: int) -> StepResult | None:
    """Train one step and advance `state`; None when every question is retired and nothing is left to train on.

    Raises RunError after too many consecutive skipped updates.
    """
    config, clock, notes = parts.config, Clock(), []
    mixed = config.replay.enabled and state.is_mixed(step, config.replay.start_threshold)

    with clock.phase("replay"):
        readmit(parts, step)
        experience = draw(parts, step) if mixed else NOTHING
    if experience.given_back:
        ess = experience.metrics["replay/ess_before"]
        notes.append(
            f"step {step}: the draw's effective sample size {ess:.3f} is below replay.ess_bound = "
            f"{config.replay.ess_bound}; its questions stay in the buffer and the step takes fresh ones"
        )
    wanted = config.rollout.questions_per_step - len(experience.replayed)
    retired: Collection[str] = parts.buffer.retired if parts.buffer is not None else frozenset()
    fresh_ids = parts.stream.take(wanted, retired=retired, experiential=frozenset(experience.replayed))
    if not fresh_ids and not experience.replayed:
        return None
    if len(fresh_ids) < wanted:
        notes.append(f"step {step}: only {len(fresh_ids)} of {wanted} fresh questions are left unretired")

    requests = rollout_requests(parts, state, [*experience.replayed, *fresh_ids], experience)
    with clock.phase("rollout"):
        rollouts = parts.generator.generate(requests, sampling_params(config))
    with clock.phase("sync"):
        parts.generator.sleep()
    with clock.phase("reward"):
        graded = grade(parts, requests, rollouts)
    with clock.phase("logprobs"):
        groups = score_groups(parts, requests, graded, experience)
    with clock.phase("replay"):
        record_visits(parts, groups, step, collecting=mixed or config.replay.collect_before_start)
    with clock.phase("update"):
        reports = update(parts, groups, clip=not mixed or config.objective.clip_in_mixed_phase)
    notes += [f"step {step}: an update was skipped: {report.skip_reason}" for report in reports if not report.applied]
    with clock.phase("sync"):
        sync(parts)
    with clock.phase("replay"):
        if parts.buffer is not None:
            parts.buffer.flush(step)

    if state.start_exceeded_at < 0 and not mixed and pass_at_1(groups) > config.replay.start_threshold:
        state.start_exceeded_at = step
    line = journal_line(
        step,
        "mixed" if mixed else "on-policy",
        batch_metrics(groups),
        experience.metrics if config.replay.enabled else {},
        buffer_metrics(parts.buffer),
        logprob_gap(groups),
        truncation(groups),
        update_metrics(reports),
        policy_entropy(groups),
        clock.metrics(),
    )
    advance(state, step, requests, experience, line, clock)
    return StepResult(line=line, groups=tuple(groups), notes=tuple(notes))


def readmit(parts: Parts, step: int) -> None:
    """Bring a share of the retired questions back, in the steps where the settings say so."""
    if parts.buffer is not None:
        parts.stream.readmit(parts.buffer.readmit(step, parts.rngs["readmit"]))


def draw(parts: Parts, step: int) -> Experience:
    """The step's experiential questions with their chosen trajectories."""
    if parts.buffer is None:
        return NOTHING
    replay = parts.config.replay
    return draw_experience(
        parts.buffer,
        parts.policy,
        parts.prompts,
        num=experiential_count(replay.ratio, parts.config.rollout.questions_per_step),
        step=step,
        draw_rng=parts.rngs["draw"],
        choice_rng=parts.rngs["choice"],
        importance_from_old=parts.config.objective.importance == "old",
        ess_bound=replay.ess_bound,
    )


def sampling_params(config: Config) -> SamplingParams:
    rollout = config.rollout
    return SamplingParams(
        temperature=rollout.temperature, top_p=rollout.top_p, max_new_tokens=rollout.max_response_tokens
    )


def rollout_requests(
    parts: Parts, state: RunState, question_ids: Sequence[str], experience: Experience
) -> list[RolloutRequest]:
    """K seeds for a fresh question, K-1 for an experiential one; keyed by (seed, question, visit, member)."""
    config = parts.config
    return [
        RolloutRequest(
            question_id=question_id,
            prompt_ids=parts.prompts[question_id],
            seeds=tuple(
                rollout_seed(config.run.seed, question_id, state.visits[question_id], member)
                for member in range(config.rollout.group_size - (question_id in experience.replayed))
            ),
        )
        for question_id in question_ids
    ]


def grade(
    parts: Parts, requests: Sequence[RolloutRequest], rollouts: Sequence[Sequence[Rollout]]
) -> list[list[GradedRollout]]:
    """Verdicts of all rollouts, in their order."""
    texts = [[parts.backbone.decode(rollout.token_ids) for rollout in group] for group in rollouts]
    items = [
        GradingItem(
            gold=parts.questions[request.question_id].answer,
            response=text,
            finished=rollout.stop_reason is StopReason.EOS,
            answer_format=parts.answer_format,
            options=options_of(parts.questions[request.question_id]),
        )
        for request, group, group_texts in zip(requests, rollouts, texts, strict=True)
        for rollout, text in zip(group, group_texts, strict=True)
    ]
    verdicts = iter(parts.pool.grade(items))
    return [
        [
            GradedRollout(rollout=rollout, text=text, verdict=next(verdicts))
            for rollout, text in zip(group, group_texts, strict=True)
        ]
        for group, group_texts in zip(rollouts, texts, strict=True)
    ]


def score_groups(
    parts: Parts,
    requests: Sequence[RolloutRequest],
    graded: Sequence[Sequence[GradedRollout]],
    experience: Experience,
) -> list[Group]:
    """Log-probs under pi_old for every fresh rollout, before the step's first update."""
    sequences = [
        TokenSequence(prompt_ids=request.prompt_ids, response_ids=member.rollout.token_ids)
        for request, members in zip(requests, graded, strict=True)
        for member in members
    ]
    scores = iter(parts.policy.score(sequences))
    return [
        Group(
            question=parts.questions[request.question_id],
            prompt_ids=request.prompt_ids,
            fresh=tuple(members),
            scores=tuple(next(scores) for _ in members),
            replayed=experience.replayed.get(request.question_id),
            tis_cap=parts.config.objective.tis_cap if parts.config.rollout.logprobs == "engine" else None,
        )
        for request, members in zip(requests, graded, strict=True)
    ]


def record_visits(parts: Parts, groups: Sequence[Group], step: int, *, collecting: bool) -> None:
    """Tell the buffer how each question went; it retires, moves and collects."""
    if parts.buffer is None:
        return
    collecting = collecting and parts.config.replay.enabled
    for group in groups:
        parts.buffer.record_visit(
            Visit(
                question_id=group.question.id,
                step=step,
                weight_version=parts.policy.weight_version,
                success_count=group.success_count,
                num_fresh_successes=group.num_fresh_correct,
                experiential=group.replayed is not None,
                verifier_failed=group.verifier_failed,
                successes=list(successes(group)) if collecting else [],
            ),
            collecting=collecting,
        )


def successes(group: Group) -> Iterator[Success]:
    """The group's correct fresh rollouts, with the log-probs of the policy that counts as their sampler."""
    for member, scores, behaviour in zip(group.fresh, group.scores, group.behaviour_logprobs(), strict=True):
        if member.verdict is Verdict.CORRECT:
            yield Success(
                token_ids=member.rollout.token_ids,
                behaviour_logprobs=behaviour,
                entropy=scores.mean_entropy,
                nll=scores.mean_nll,
            )


def update(parts: Parts, groups: Sequence[Group], *, clip: bool) -> list[UpdateReport]:
    """M optimizer updates on whole groups; advantages and denominators are fixed for the step."""
    config = parts.config
    advantage = centred_advantages if config.objective.advantage == "mean" else normalised_advantages
    minibatches = split_minibatches(
        [group.rows(advantage) for group in groups],
        num_minibatches=config.optim.minibatches,
        max_response_tokens=config.rollout.max_response_tokens,
        clip=clip,
        rng=parts.rngs["minibatch"],
    )
    reports = []
    for minibatch in minibatches:
        reports.append(parts.policy.update(minibatch))
        if parts.policy.consecutive_skips >= config.optim.max_skipped:
            raise RunError(
                f"{parts.policy.consecutive_skips} consecutive updates were skipped (last: {reports[-1].skip_reason}); "
                "lower optim.learning_rate, or raise optim.skip_norm or optim.max_skipped."
            )
    return reports


def sync(parts: Parts) -> None:
    """Hand the policy's weights to the generator, which proves that it has them."""
    parts.generator.sync(parts.policy.named_weights(), parts.policy.weight_version, parts.policy.score)


def buffer_metrics(buffer: AnyBuffer | None) -> dict[str, int]:
    """What the buffer holds after the step."""
    if buffer is None:
        return {}
    buckets = {f"replay/bucket/{k}": count for k, count in sorted(buffer.bucket_counts().items())}
    return {
        "replay/questions": buffer.num_questions,
        "replay/trajectories": buffer.num_trajectories,
        "replay/retired": buffer.num_retired,
        **buckets,
    }


def advance(
    state: RunState,
    step: int,
    requests: Sequence[RolloutRequest],
    experience: Experience,
    line: Mapping[str, Any],
    clock: Clock,
) -> None:
    """Count the finished step into the run's state."""
    state.step = step
    state.visits.update(request.question_id for request in requests)
    state.replayed += len(experience.replayed)
    state.tokens_generated += line["tokens/generated"]
    state.tokens_trained += line["tokens/trained"]
    state.updates_applied += line["optim/updates_applied"]
    state.updates_skipped += line["optim/updates_skipped"]
    for name, seconds in clock.seconds.items():
        state.add_seconds(name, seconds)

"""From questions to graded and scored groups: what is asked of the generator, the graders and the policy.

K rollouts for a fresh question, K - 1 for an experiential one.
"""

from collections.abc import Sequence

from exgrpo_cli.config.settings import Config
from exgrpo_cli.data.question_file.choices import options_of
from exgrpo_cli.grading import GradingItem
from exgrpo_cli.seeds import rollout_seed
from exgrpo_cli.training.experience import Experience
from exgrpo_cli.training.groups import Group
from exgrpo_cli.training.metrics import Clock
from exgrpo_cli.training.parts import Parts
from exgrpo_cli.training.state import RunState
from exgrpo_cli.types import GradedRollout, Rollout, RolloutRequest, SamplingParams, StopReason, TokenSequence


def roll_out(
    parts: Parts, state: RunState, fresh_ids: Sequence[str], experience: Experience, clock: Clock
) -> list[Group]:
    """The step's groups, experiential ones first, each rollout graded and scored under pi_old."""
    requests = rollout_requests(parts, state, [*experience.replayed, *fresh_ids], experience)
    with clock.phase("rollout"):
        rollouts = parts.generator.generate(requests, sampling_params(parts.config))
    with clock.phase("sync"):
        parts.generator.sleep()
    with clock.phase("reward"):
        graded = grade(parts, requests, rollouts)
    with clock.phase("logprobs"):
        return score_groups(parts, requests, graded, experience)


def sampling_params(config: Config) -> SamplingParams:
    """How rollouts are sampled."""
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

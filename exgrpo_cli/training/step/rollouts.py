"""From questions to graded and scored groups: what is asked of the generator, the graders and the policy.

K rollouts for a fresh question; for an experiential one as many fewer as stored rows stand in.
"""

import itertools
import math
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from exgrpo_cli.base import types
from exgrpo_cli.config.settings import Config
from exgrpo_cli.engines.generators import RankedGenerator
from exgrpo_cli.evaluation.sampling import QuestionRecord
from exgrpo_cli.questions.choices import options_of
from exgrpo_cli.replay.place import Experience
from exgrpo_cli.training.metrics import Clock, score_gaps
from exgrpo_cli.training.state import Parts, RunState
from exgrpo_cli.training.step.groups import Group
from exgrpo_cli.training.step.guards import require_current_weights, require_small_gap

CHECKED_ONE_IN = 16
"""With `rollout.logprobs = "sampler"` the trainer scores one rollout in so many, to see that both agree."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRollouts:
    """Rollouts of a step, and which of them are trained."""

    groups: Sequence[Group]
    """All of them, experiential ones first, each rollout graded and scored under pi_old."""
    trained: frozenset[str]
    """Questions whose groups make up the step's N."""
    tokens_scored: int
    """Fresh response tokens that the trainer has scored under pi_old."""
    metrics: dict[str, float | int]
    notes: Sequence[str]
    """Notes for the user."""


def roll_out(parts: Parts, state: RunState, step: int, experience: Experience, clock: Clock) -> StepRollouts | None:
    """Roll out the experiential questions and as many fresh ones as the step has room for; None without any question.

    With `rollout.max_rounds` above 1 fresh questions are drawn again, as many as mixed groups are missing, until there
    are enough or the rounds are over (dynamic sampling, arXiv 2503.14476); fresh groups that are not mixed then stay
    out of N. Raises RunError where the generator did not sample with the policy's weights.
    """
    config, standing_in = parts.config, experience.by_question
    wanted = missing = config.rollout.questions_per_step - len(standing_in)
    requests: list[types.RolloutRequest] = []
    graded: list[list[types.GradedRollout]] = []
    notes: list[str] = []
    rounds = 0
    while rounds < config.rollout.max_rounds and (missing or not rounds):
        drawn = {*standing_in, *(request.question_id for request in requests)}
        with clock.phase("replay"):
            fresh_ids = take_fresh(parts, missing, drawn)
        question_ids = fresh_ids if rounds else [*standing_in, *fresh_ids]
        if not question_ids:
            break
        if len(fresh_ids) < missing:
            notes.append(f"step {step}: only {len(fresh_ids)} of {missing} fresh questions are left unretired")
        asked = rollout_requests(parts, state, question_ids, experience)
        total = sum(len(request.seeds) for request in asked)
        with clock.phase("rollout") as watching:
            heard = None if watching is None else lambda *rollout, tell=watching, total=total: tell(total)
            rollouts = parts.generator.generate(asked, sampling_params(config), heard)
        require_current_weights(itertools.chain(*rollouts), parts.policy.weight_version)
        if parts.ranks.world_size > 1:
            state.remember_lengths(rollouts)
        with clock.phase("reward"):
            graded += grade(parts, asked, rollouts)
        requests += asked
        rounds += 1
        fresh = [each for request, each in zip(requests, graded, strict=True) if request.question_id not in standing_in]
        # Mixed: some of a question's rollouts are right and some are not.
        right = [{member.verdict is types.Verdict.CORRECT for member in members} for members in fresh]
        missing = wanted - sum(len(kinds) == 2 for kinds in right)
    if not requests:
        return None
    with clock.phase("sync"):
        parts.generator.sleep()
    with clock.phase("logprobs"):
        scores, metrics, tokens_scored = score(parts, graded, np.random.default_rng((config.run.seed, step)))
    if isinstance(parts.generator, RankedGenerator):
        metrics["time/rollout_idle"] = parts.generator.take_idle_seconds()
    groups = trained = [
        Group(
            question=parts.questions[request.question_id],
            prompt_ids=request.prompt_ids,
            fresh=tuple(members),
            scores=tuple(itertools.islice(scores, len(members))),
            replayed=standing_in.get(request.question_id, ()),
            own_advantages=experience.own_advantages,
            tis_cap=config.objective.tis_cap if config.rollout.logprobs == "engine" else None,
        )
        for request, members in zip(requests, graded, strict=True)
    ]
    if config.rollout.max_rounds > 1:
        metrics["rollout/rounds"] = rounds
        trained = [group for group in groups if group.replayed or group.is_mixed]
        if missing:
            notes.append(
                f"step {step}: {wanted - missing} of {wanted} fresh groups are mixed after {rounds} rounds, and trained"
            )
    return StepRollouts(
        groups=groups,
        trained=frozenset(group.question.id for group in trained),
        tokens_scored=tokens_scored,
        metrics=metrics,
        notes=notes,
    )


def take_fresh(parts: Parts, num: int, drawn: Container[str]) -> list[str]:
    """The next `num` questions of the stream that are neither retired nor `drawn` already; the same on every rank."""
    return parts.ranks.from_main(lambda: parts.stream.take(num, retired=parts.main_store.retired, experiential=drawn))


def sampling_params(config: Config) -> types.SamplingParams:
    """Sampling parameters of rollouts."""
    rollout = config.rollout
    return types.SamplingParams(
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        max_new_tokens=rollout.max_response_tokens,
        entropies=rollout.logprobs == "sampler",
    )


def rollout_requests(
    parts: Parts, state: RunState, question_ids: Sequence[str], experience: Experience
) -> list[types.RolloutRequest]:
    """K seeds for a fresh question, fewer for an experiential one; keyed by (seed, question, visit, member)."""
    config = parts.config
    return [
        types.RolloutRequest(
            question_id=question_id,
            prompt_ids=parts.prompts[question_id],
            seeds=tuple(
                types.rollout_seed(config.run.seed, question_id, state.visits.get(question_id, 0), member)
                for member in range(config.rollout.group_size - len(experience.by_question.get(question_id, ())))
            ),
            expected_tokens=state.lengths.get(question_id, state.usual_length),
        )
        for question_id in question_ids
    ]


def grade(
    parts: Parts, requests: Sequence[types.RolloutRequest], rollouts: Sequence[Sequence[types.Rollout]]
) -> list[list[types.GradedRollout]]:
    """Texts and verdicts of all rollouts, in their order; every rank decodes and grades its share."""
    asked = [
        (parts.questions[request.question_id], rollout)
        for request, group in zip(requests, rollouts, strict=True)
        for rollout in group
    ]
    items = [
        QuestionRecord(question=question, options=options_of(question)).grading_item(
            parts.backbone.decode(rollout.token_ids), rollout.stop_reason, parts.answer_format
        )
        for question, rollout in parts.ranks.scatter(asked)
    ]
    # A verdict that depends on the clock (a timeout) is the same on every rank, because one rank alone has waited.
    verdicts = parts.pool.grade(items)
    graded = parts.ranks.gather_in_order(
        [(item.response, verdict) for item, verdict in zip(items, verdicts, strict=True)]
    )
    members = (
        types.GradedRollout(rollout=rollout, text=text, verdict=verdict)
        for (_, rollout), (text, verdict) in zip(asked, graded, strict=True)
    )
    return [list(itertools.islice(members, len(group))) for group in rollouts]


def score(
    parts: Parts, graded: Sequence[Sequence[types.GradedRollout]], rng: np.random.Generator
) -> tuple[Iterator[types.TokenScores], dict[str, float | int], int]:
    """Scores of every rollout under pi_old, in their order, by `rollout.logprobs`: the trainer's, or the sampler's,
    some of which, by `rng`, the trainer checks; how far both differ, and the tokens that the trainer has scored.

    Raises RunError where they differ by more than rounding.
    """
    rollouts = [member.rollout for members in graded for member in members]
    by_sampler = parts.config.rollout.logprobs == "sampler"
    checked = [rollouts[index] for index in drawn_to_check(len(rollouts), rng)] if by_sampler else rollouts
    found = parts.score(checked)
    gap = score_gaps(checked, found)
    narrow = "bfloat16" in (parts.config.backbone.dtype, parts.config.optim.matmul_dtype)
    require_small_gap(gap, "bfloat16" if narrow else "float32", num_checked=len(checked))
    scores = found
    if by_sampler:
        scores = [
            types.TokenScores(logprobs=each.engine_logprobs, entropies=each.engine_entropies)  # type: ignore[arg-type]
            for each in rollouts
        ]
    return iter(scores), gap, sum(len(each.logprobs) for each in found)


def drawn_to_check(count: int, rng: np.random.Generator) -> list[int]:
    """Positions of one rollout in `CHECKED_ONE_IN`, at least one: any member of any group, from any rank."""
    return sorted(rng.choice(count, size=math.ceil(count / CHECKED_ONE_IN), replace=False).tolist())

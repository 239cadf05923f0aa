"""A mixed step's replay: draw questions, score their trajectories under the current policy, choose one of each; and
afterwards tell the buffer how the step's questions went.

Paper, section 3.2. The draw happens before the step's rollouts, so that one whose importance weights have collapsed can
be given back (the effective-sample-size guard) and the step taken fresh instead.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from exgrpo_cli.algo.batching import TrainingRow
from exgrpo_cli.algo.history import SuccessHistory
from exgrpo_cli.base.types import TokenScores, TokenSequence, Trajectory, Verdict
from exgrpo_cli.engines.protocols import Policy
from exgrpo_cli.replay.drawing.selection import Candidates
from exgrpo_cli.replay.protocol import BufferCounts, Choice, Offer
from exgrpo_cli.replay.visits import FreshRow, Visit
from exgrpo_cli.training.parts import Parts, Prompts
from exgrpo_cli.training.step.groups import Advantage, Group, Replayed

Scores = Mapping[int, TokenScores]
"""Token scores by trajectory id."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Experience:
    """What a step replays."""

    replayed: dict[str, tuple[Replayed, ...]]
    """The stored rows that stand in for rollouts, by experiential question, in the order drawn."""
    metrics: dict[str, float | int]
    """`replay/*` keys of the draw."""
    units: tuple[tuple[TrainingRow, ...], ...] = ()
    """Units drawn from the whole store, each with the rows that it trains beside the step's groups."""
    tokens_scored: int = 0
    """Response tokens of stored rows that the current policy has scored."""
    notes: tuple[str, ...] = ()
    """What the user should hear of the draw."""


NO_EXPERIENCE = Experience(replayed={}, metrics={"replay/used": 0})
"""A step without replay."""


def readmit(parts: Parts, step: int) -> None:
    """Bring a share of the retired questions back to the stream, in the steps where the settings say so."""
    parts.stream.readmit(parts.buffer.readmit(step, parts.rngs["readmit"]))


def draw_experience(parts: Parts, step: int) -> Experience:
    """Draw the step's experiential questions and the trajectories to replay of each.

    With `objective.importance = "old"` ratios divide by this step's pi_old instead of the trajectory's own behaviour
    policy (an ablation of the paper). A draw whose effective sample size, as a share of its tokens, is below
    `replay.ess_bound` is given back.
    """
    config, policy, buffer = parts.config, parts.policy, parts.buffer
    num = experiential_count(config.replay.ratio, config.rollout.questions_per_step)
    offer = buffer.offer(num, step, policy.weight_version, parts.rngs["draw"])
    if not offer.candidates:
        return NO_EXPERIENCE
    candidates, choice, scores = choose(parts, offer)
    metrics = draw_metrics(candidates, choice, step, measured=config.replay.needs_scores)

    from_old = config.objective.importance == "old"
    if from_old or config.replay.ess_bound > 0:
        scores = with_scores(parts, choice.trajectories, scores)
    if config.replay.ess_bound > 0:
        ess = effective_sample_share(choice.trajectories, [scores[each.trajectory_id] for each in choice.trajectories])
        metrics["replay/ess_before"] = ess
        if ess < config.replay.ess_bound:
            buffer.record_replay(step, candidates, None)
            return given_back(step, ess, config.replay.ess_bound)

    buffer.record_replay(step, candidates, choice)
    return Experience(
        replayed=by_question(choice.trajectories, scores if from_old else None),
        metrics=metrics,
        tokens_scored=tokens_of(scores),
    )


def choose(parts: Parts, offer: Offer) -> tuple[tuple[Candidates, ...], Choice, dict[int, TokenScores]]:
    """Measure what is offered and choose from it; with the token scores that this took."""
    scores = score(parts.policy, parts.prompts, offer.unmeasured)
    candidates = with_measurements(offer, scores, parts.policy.weight_version)
    return candidates, parts.buffer.choose_from(candidates, parts.rngs["choice"]), scores


def with_scores(parts: Parts, trajectories: Sequence[Trajectory], scores: Scores) -> dict[int, TokenScores]:
    """Scores under the current weights, those of the trajectories that were not scored yet added."""
    missing = [trajectory for trajectory in trajectories if trajectory.trajectory_id not in scores]
    return {**scores, **score(parts.policy, parts.prompts, missing)}


def by_question(trajectories: Sequence[Trajectory], old: Scores | None) -> dict[str, tuple[Replayed, ...]]:
    """Chosen trajectories of each question; ratios are to their own behaviour policy, or to `old` where given."""
    chosen: dict[str, tuple[Replayed, ...]] = {}
    for each in trajectories:
        logprobs = each.behaviour_logprobs if old is None else old[each.trajectory_id].logprobs
        replayed = Replayed(trajectory=each, behaviour_logprobs=logprobs)
        chosen[each.question_id] = (*chosen.get(each.question_id, ()), replayed)
    return chosen


def tokens_of(scores: Scores) -> int:
    """Tokens that were scored."""
    return sum(len(each.logprobs) for each in scores.values())


def given_back(step: int, ess: float, bound: float) -> Experience:
    """No replay in this step; the draw's other figures are of trajectories that are not replayed."""
    note = (
        f"step {step}: the draw's effective sample size {ess:.3f} is below replay.ess_bound = {bound}; its questions "
        "stay in the buffer and the step takes fresh ones"
    )
    return replace(NO_EXPERIENCE, metrics={**NO_EXPERIENCE.metrics, "replay/ess_before": ess}, notes=(note,))


def score(policy: Policy, prompts: Prompts, trajectories: Sequence[Trajectory]) -> dict[int, TokenScores]:
    """Token scores of stored trajectories under the current weights."""
    sequences = [
        TokenSequence(prompt_ids=prompts[trajectory.question_id], response_ids=trajectory.token_ids)
        for trajectory in trajectories
    ]
    ids = [trajectory.trajectory_id for trajectory in trajectories]
    return dict(zip(ids, policy.score(sequences) if sequences else (), strict=True))


def with_measurements(offer: Offer, scores: Scores, weight_version: int) -> tuple[Candidates, ...]:
    """The offered candidates, those that have just been scored with their new measurements."""

    def renewed(candidates: Candidates) -> Candidates:
        where = np.array([int(i) in scores for i in candidates.trajectory_ids], dtype=bool)
        own = [scores[int(i)] for i in candidates.trajectory_ids[where]]
        return candidates.measured(
            where,
            entropy=np.array([each.mean_entropy for each in own]),
            nll=np.array([each.mean_nll for each in own]),
            weight_version=weight_version,
        )

    return tuple(renewed(candidates) for candidates in offer.candidates)


def effective_sample_share(chosen: Sequence[Trajectory], current: Sequence[TokenScores]) -> float:
    """(sum w)^2 / (n sum w^2) over the replayed tokens, w = pi_now / pi_behaviour; 1 when nothing has moved.

    Taken from log w less its maximum, which cancels, so that no ratio overflows.
    """
    log_w = np.concatenate(
        [
            scores.logprobs.astype(np.float64) - trajectory.behaviour_logprobs
            for trajectory, scores in zip(chosen, current, strict=True)
        ]
    )
    w = np.exp(log_w - log_w.max())
    return float(w.sum() ** 2 / (len(w) * (w**2).sum()))


def draw_metrics(
    candidates: Sequence[Candidates], choice: Choice, step: int, *, measured: bool
) -> dict[str, float | int]:
    """`replay/*` keys of a draw; entropies only where they were measured for it."""
    metrics = {
        "replay/used": len(choice.trajectories),
        "replay/candidates_mean": float(np.mean([len(group) for group in candidates])),
        "replay/age_mean": float(np.mean([step - trajectory.step_born for trajectory in choice.trajectories])),
    }
    if measured:
        selected = [group.entropy[at] for group, own in zip(candidates, choice.positions, strict=True) for at in own]
        metrics["replay/entropy_selected"] = float(np.mean(selected))
        metrics["replay/entropy_available"] = float(np.mean(np.concatenate([group.entropy for group in candidates])))
    return metrics


def experiential_count(ratio: float, questions_per_step: int) -> int:
    """floor(rho * B), with rho * B taken to 9 decimals first: 0.29 * 100 is 29 questions, not 28."""
    return math.floor(round(ratio * questions_per_step, 9))


def record_visits(
    parts: Parts,
    groups: Sequence[Group],
    step: int,
    advantage: Callable[[str], Advantage],
    histories: Mapping[str, SuccessHistory],
    *,
    collecting: bool,
) -> None:
    """Tell the buffer how each question went; it retires, moves and collects.

    `advantage` and `histories` are by question; a run without the baseline of a question's past has no histories.
    """
    replay = parts.config.replay
    collecting = collecting and replay.enabled and replay.store != "none"
    visits = [
        Visit(
            question_id=group.question.id,
            step=step,
            weight_version=parts.policy.weight_version,
            success_count=group.success_count,
            num_fresh_successes=group.num_fresh_correct,
            num_replayed=0 if group.joined else len(group.replayed),
            verifier_failed=group.verifier_failed,
            rows=list(fresh_rows(group, advantage(group.question.id), failures=replay.store == "all"))
            if collecting
            else [],
            alpha=histories[group.question.id].alpha if group.question.id in histories else None,
            beta=histories[group.question.id].beta if group.question.id in histories else None,
        )
        for group in groups
    ]
    parts.buffer.record_visits(visits, collecting=collecting)


def fresh_rows(group: Group, advantage: Advantage, *, failures: bool) -> Iterator[FreshRow]:
    """The group's correct fresh rollouts, or all of them, with the log-probs of the policy that counts as their sampler
    and the advantages that this step trains on."""
    advantages = group.advantages(advantage)[: len(group.fresh)].tolist()
    for member, scores, behaviour, value in zip(
        group.fresh, group.scores, group.behaviour_logprobs(), advantages, strict=True
    ):
        if failures or member.verdict is Verdict.CORRECT:
            yield FreshRow(
                token_ids=member.rollout.token_ids,
                behaviour_logprobs=behaviour,
                entropy=scores.mean_entropy,
                nll=scores.mean_nll,
                reward=member.reward,
                advantage=value,
            )


def buffer_metrics(counts: BufferCounts) -> dict[str, int]:
    """What the buffer holds after the step."""
    return {
        "replay/questions": counts.num_questions,
        "replay/trajectories": counts.num_trajectories,
        "replay/retired": counts.num_retired,
        **{f"replay/bucket/{k}": count for k, count in sorted(counts.buckets.items())},
    }

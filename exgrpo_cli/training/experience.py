"""A mixed step's replay: draw questions, score their trajectories under the current policy, choose one of each; and
afterwards tell the buffer how the step's questions went.

Paper, section 3.2. The draw happens before the step's rollouts, so that one whose importance weights have collapsed can
be given back (the effective-sample-size guard) and the step taken fresh instead.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from exgrpo_cli.engines.protocols import Policy
from exgrpo_cli.replay.protocol import BufferCounts, Choice, Offer
from exgrpo_cli.replay.selection import Candidates
from exgrpo_cli.replay.visits import Success, Visit
from exgrpo_cli.training.groups import Group, Replayed
from exgrpo_cli.training.parts import Parts, Prompts
from exgrpo_cli.types import TokenScores, TokenSequence, Trajectory, Verdict

Scores = Mapping[int, TokenScores]
"""Token scores by trajectory id."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Experience:
    """What a step replays: one trajectory for each experiential question, in the order drawn."""

    replayed: dict[str, Replayed]
    metrics: dict[str, float | int]
    """`replay/*` keys of the draw."""
    notes: tuple[str, ...] = ()
    """What the user should hear of the draw."""


NOTHING = Experience(replayed={}, metrics={"replay/used": 0})
"""A step without replay."""


def readmit(parts: Parts, step: int) -> None:
    """Bring a share of the retired questions back to the stream, in the steps where the settings say so."""
    parts.stream.readmit(parts.buffer.readmit(step, parts.rngs["readmit"]))


def draw_experience(parts: Parts, step: int) -> Experience:
    """Draw the step's experiential questions and one trajectory of each.

    With `objective.importance = "old"` ratios divide by this step's pi_old instead of the trajectory's own behaviour
    policy (an ablation of the paper). A draw whose effective sample size, as a share of its tokens, is below
    `replay.ess_bound` is given back.
    """
    config, policy, buffer = parts.config, parts.policy, parts.buffer
    num = experiential_count(config.replay.ratio, config.rollout.questions_per_step)
    offer = buffer.offer(num, step, policy.weight_version, parts.rngs["draw"])
    if not offer.candidates:
        return NOTHING
    scores = score(policy, parts.prompts, offer.unmeasured)
    candidates = with_measurements(offer, scores, policy.weight_version)
    choice = buffer.choose_from(candidates, parts.rngs["choice"])
    metrics = draw_metrics(candidates, choice, step, measured=config.replay.needs_scores)

    from_old = config.objective.importance == "old"
    current: list[TokenScores] = []
    if from_old or config.replay.ess_bound > 0:
        missing = [trajectory for trajectory in choice.trajectories if trajectory.trajectory_id not in scores]
        known = {**scores, **score(policy, parts.prompts, missing)}
        current = [known[trajectory.trajectory_id] for trajectory in choice.trajectories]
    if config.replay.ess_bound > 0:
        ess = effective_sample_share(choice.trajectories, current)
        metrics["replay/ess_before"] = ess
        if ess < config.replay.ess_bound:
            buffer.record_replay(step, candidates, None)
            return given_back(step, ess, config.replay.ess_bound)

    buffer.record_replay(step, candidates, choice)
    behaviour = [s.logprobs for s in current] if from_old else [t.behaviour_logprobs for t in choice.trajectories]
    return Experience(
        replayed={
            trajectory.question_id: Replayed(trajectory=trajectory, behaviour_logprobs=logprobs)
            for trajectory, logprobs in zip(choice.trajectories, behaviour, strict=True)
        },
        metrics=metrics,
    )


def given_back(step: int, ess: float, bound: float) -> Experience:
    """No replay in this step; the draw's other figures are of trajectories that nobody replays."""
    note = (
        f"step {step}: the draw's effective sample size {ess:.3f} is below replay.ess_bound = {bound}; its questions "
        "stay in the buffer and the step takes fresh ones"
    )
    return replace(NOTHING, metrics={**NOTHING.metrics, "replay/ess_before": ess}, notes=(note,))


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
        selected = [group.entropy[at] for group, at in zip(candidates, choice.positions, strict=True)]
        metrics["replay/entropy_selected"] = float(np.mean(selected))
        metrics["replay/entropy_available"] = float(np.mean(np.concatenate([group.entropy for group in candidates])))
    return metrics


def experiential_count(ratio: float, questions_per_step: int) -> int:
    """floor(rho * B), with rho * B taken to 9 decimals first: 0.29 * 100 is 29 questions, not 28."""
    return math.floor(round(ratio * questions_per_step, 9))


def record_visits(parts: Parts, groups: Sequence[Group], step: int, *, collecting: bool) -> None:
    """Tell the buffer how each question went; it retires, moves and collects."""
    collecting = collecting and parts.config.replay.enabled
    visits = [
        Visit(
            question_id=group.question.id,
            step=step,
            weight_version=parts.policy.weight_version,
            success_count=group.success_count,
            num_fresh_successes=group.num_fresh_correct,
            experiential=group.replayed is not None,
            verifier_failed=group.verifier_failed,
            successes=list(successes(group)) if collecting else [],
        )
        for group in groups
    ]
    parts.buffer.record_visits(visits, collecting=collecting)


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


def buffer_metrics(counts: BufferCounts) -> dict[str, int]:
    """What the buffer holds after the step."""
    return {
        "replay/questions": counts.num_questions,
        "replay/trajectories": counts.num_trajectories,
        "replay/retired": counts.num_retired,
        **{f"replay/bucket/{k}": count for k, count in sorted(counts.buckets.items())},
    }

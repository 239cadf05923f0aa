"""A mixed step's replay: draw questions, score their trajectories under the current policy, choose one of each.

Paper, section 3.2. Happens before the step's rollouts, so that a draw whose importance weights have collapsed can be
given back (the effective-sample-size guard) and the step taken fresh instead.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int32

from exgrpo_cli.engines.protocols import Policy
from exgrpo_cli.replay.selection import Candidates
from exgrpo_cli.training.groups import Replayed
from exgrpo_cli.training.ranked_buffer import AnyBuffer
from exgrpo_cli.types import TokenScores, TokenSequence, Trajectory

Prompts = Mapping[str, Int32[np.ndarray, " prompt_tokens"]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Experience:
    """What a step replays: one trajectory for each experiential question, in the order drawn."""

    replayed: dict[str, Replayed]
    metrics: dict[str, float | int]
    """`replay/*` keys of the draw."""
    given_back: bool = False
    """The draw's effective sample size was below the bound: its questions stay in the buffer."""


NOTHING = Experience(replayed={}, metrics={"replay/used": 0})


def draw_experience(
    buffer: AnyBuffer,
    policy: Policy,
    prompts: Prompts,
    *,
    num: int,
    step: int,
    draw_rng: np.random.Generator,
    choice_rng: np.random.Generator,
    importance_from_old: bool,
    ess_bound: float,
) -> Experience:
    """Draw up to `num` experiential questions and one trajectory of each.

    `importance_from_old` divides by this step's pi_old instead of the trajectory's own behaviour policy (an ablation of
    the paper). A draw whose effective sample size, as a share of its tokens, is below `ess_bound` is given back.
    """
    num = min(num, buffer.available(step))
    if num == 0:
        return NOTHING
    draw = buffer.draw(num, step, draw_rng)
    if not draw.question_ids:
        return NOTHING
    candidates = [buffer.candidates(question_id) for question_id in draw.question_ids]
    scores: dict[int, TokenScores] = {}
    if buffer.needs_scores:
        candidates = measure(buffer, policy, prompts, candidates, scores)
    positions = [buffer.choose(group, choice_rng) for group in candidates]
    chosen = buffer.load([int(group.trajectory_ids[at]) for group, at in zip(candidates, positions, strict=True)])
    metrics = draw_metrics(candidates, positions, chosen, step, measured=buffer.needs_scores)

    current: list[TokenScores] = []
    if ess_bound > 0 or importance_from_old:
        current = score_chosen(policy, prompts, chosen, scores)
    if ess_bound > 0:
        ess = effective_sample_share(chosen, current)
        metrics["replay/ess_before"] = ess
        if ess < ess_bound:
            for group in candidates:
                buffer.record_scores(step, group, None)
            # The draw's other figures are of trajectories that nobody replays.
            return Experience(replayed={}, metrics={"replay/used": 0, "replay/ess_before": ess}, given_back=True)

    for group, at in zip(candidates, positions, strict=True):
        buffer.record_scores(step, group, at)
    buffer.record_selected(step, [trajectory.trajectory_id for trajectory in chosen])
    behaviour = [s.logprobs for s in current] if importance_from_old else [t.behaviour_logprobs for t in chosen]
    return Experience(
        replayed={
            trajectory.question_id: Replayed(trajectory=trajectory, behaviour_logprobs=logprobs)
            for trajectory, logprobs in zip(chosen, behaviour, strict=True)
        },
        metrics=metrics,
    )


def measure(
    buffer: AnyBuffer,
    policy: Policy,
    prompts: Prompts,
    candidates: list[Candidates],
    scores: dict[int, TokenScores],
) -> list[Candidates]:
    """Measure the stale candidates of all drawn questions in one scoring pass; `scores` receives the token scores."""
    stale = [buffer.stale(group, policy.weight_version) for group in candidates]
    ids = [int(i) for group, where in zip(candidates, stale, strict=True) for i in group.trajectory_ids[where]]
    trajectories = buffer.load(ids)
    measured = policy.score([sequence_of(trajectory, prompts) for trajectory in trajectories])
    scores.update(zip(ids, measured, strict=True))
    return [
        group.measured(
            where,
            entropy=np.array([scores[int(i)].mean_entropy for i in group.trajectory_ids[where]]),
            nll=np.array([scores[int(i)].mean_nll for i in group.trajectory_ids[where]]),
            weight_version=policy.weight_version,
        )
        for group, where in zip(candidates, stale, strict=True)
    ]


def score_chosen(
    policy: Policy, prompts: Prompts, chosen: list[Trajectory], scores: Mapping[int, TokenScores]
) -> list[TokenScores]:
    """Token scores of the chosen trajectories under the current weights, measured now where not measured yet."""
    missing = [trajectory for trajectory in chosen if trajectory.trajectory_id not in scores]
    extra = dict(
        zip(
            (trajectory.trajectory_id for trajectory in missing),
            policy.score([sequence_of(trajectory, prompts) for trajectory in missing]),
            strict=True,
        )
    )
    known = {**scores, **extra}
    return [known[trajectory.trajectory_id] for trajectory in chosen]


def effective_sample_share(chosen: list[Trajectory], current: list[TokenScores]) -> float:
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
    candidates: list[Candidates], positions: list[int], chosen: list[Trajectory], step: int, *, measured: bool
) -> dict[str, float | int]:
    """`replay/*` keys of a draw; entropies only where they were measured for it."""
    metrics = {
        "replay/used": len(chosen),
        "replay/candidates_mean": float(np.mean([len(group.trajectory_ids) for group in candidates])),
        "replay/age_mean": float(np.mean([step - trajectory.step_born for trajectory in chosen])),
    }
    if measured:
        selected = [group.entropy[at] for group, at in zip(candidates, positions, strict=True)]
        metrics["replay/entropy_selected"] = float(np.mean(selected))
        metrics["replay/entropy_available"] = float(np.mean(np.concatenate([group.entropy for group in candidates])))
    return metrics


def sequence_of(trajectory: Trajectory, prompts: Prompts) -> TokenSequence:
    """The stored tokens after their question's prompt."""
    return TokenSequence(prompt_ids=prompts[trajectory.question_id], response_ids=trajectory.token_ids)


def experiential_count(ratio: float, questions_per_step: int) -> int:
    """floor(rho * B), with rho * B taken to 9 decimals first: 0.29 * 100 is 29 questions, not 28."""
    return math.floor(round(ratio * questions_per_step, 9))

"""From questions to graded and scored groups: what is asked of the generator, the graders and the policy.

K rollouts for a fresh question; for an experiential one as many fewer as stored rows stand in.
"""

import itertools
import math
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from exgrpo_cli.algo.advantages import GATES, SuccessHistory
from exgrpo_cli.base import types
from exgrpo_cli.config.settings import Config
from exgrpo_cli.engines.generators import RankedGenerator, deal, places_of
from exgrpo_cli.evaluation.sampling import QuestionRecord
from exgrpo_cli.questions.choices import options_of
from exgrpo_cli.replay.place import Experience
from exgrpo_cli.training.metrics import Clock, carrying, score_gaps
from exgrpo_cli.training.state import Parts, RunState
from exgrpo_cli.training.step import guards
from exgrpo_cli.training.step.groups import NO_SCORES, Group, UnderWay

Begun = dict[tuple[str, int], tuple[str, Callable[[], types.Grade]]]
"""Text and what waits for the grade of each rollout that this rank has sampled to its end, by question and member."""
Tell = Callable[[int], None] | None
CHECKED_ONE_IN = 16
"""Rollouts of which the trainer scores one, to see that it agrees with `rollout.logprobs = "sampler"`, where stored
rows train before fresh ones do."""


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
    config = parts.config
    stored = [UnderWay(question_id=id, replayed=rows) for id, rows in experience.by_question.items()]
    stored += [UnderWay(question_id=id, beginning=beginning) for id, beginning in experience.beginnings.items()]
    missing = config.rollout.groups_under_way - len(state.carried) - len(stored)
    # Questions that are but asked again count as fresh ones do.
    wanted = missing + sum(beginning is None for beginning in experience.beginnings.values())
    ended: list[UnderWay] = []
    sampled: list[int] = []
    notes: list[str] = []
    rounds = 0
    while rounds < config.rollout.max_rounds and (missing or not rounds):
        asked = list(state.carried)
        if not rounds:
            asked += stored
        with clock.phase("replay"):
            drawn = {group.question_id for group in (*asked, *ended)}
            fresh_ids = take_fresh(parts, missing, drawn)
        asked += [UnderWay(question_id=question_id) for question_id in fresh_ids]
        if not asked:
            break
        if len(fresh_ids) < missing:
            notes.append(f"step {step}: only {len(fresh_ids)} of {missing} fresh questions are left unretired")
        with clock.phase("rollout") as watching:
            lengths, begun = sample(parts, state, asked, watching)
        with clock.phase("reward"):
            grade(parts, asked, begun)
        sampled += lengths
        complete = [group for group in asked if len(group.grades) == len(group.rollouts)]
        complete = complete[: config.rollout.questions_per_step]
        state.carried = [group for group in asked if group not in complete]
        if parts.ranks.world_size > 1:
            state.remember_lengths([group.rollouts for group in complete])
        ended += complete
        rounds += 1
        # Mixed: rewards of a question's rollouts differ.
        fresh = [group.grades for group in ended if not (group.replayed or group.beginning)]
        missing = wanted - sum(len({grade.reward for _, grade in grades.values()}) > 1 for grades in fresh)
    if not ended:
        return None
    with clock.phase("sync"):
        parts.generator.sleep()
    with clock.phase("logprobs"):
        metrics, tokens_scored = score(parts, state, [*ended, *state.carried], step, notes)
    if isinstance(parts.generator, RankedGenerator):
        metrics["time/rollout_idle"] = parts.generator.take_idle_seconds()
    goal = config.objective
    groups = trained = [
        Group(
            question=parts.questions[group.question_id],
            prompt_ids=parts.prompt_of(group),
            fresh=group.graded(),
            scores=tuple(group.scores),
            replayed=group.replayed,
            beginning=group.beginning,
            gate=GATES[goal.gate](state.history.get(group.question_id, SuccessHistory()), goal.gate_k),
            own_advantages=config.replay.advantage_over == "own",
            tis_cap=goal.tis_cap if config.rollout.logprobs == "engine" else None,
        )
        for group in ended
    ]
    if config.rollout.carry_over:
        slots = config.rollout.max_rows * parts.ranks.world_size // config.rollout.tensor_parallel
        metrics |= carrying(trained, state.carried, sampled, slots)
        used = {"replay/used": sum(len(group.replayed) + bool(group.beginning) for group in trained)}
        metrics |= used if config.replay.enabled and config.replay.composition in ("replace", "prefix") else {}
    if goal.gate != "none":
        metrics["batch/gate"] = float(np.mean([group.gate for group in groups]))
    if config.rollout.max_rounds > 1:
        metrics["rollout/rounds"] = rounds
        trained = [group for group in groups if group.is_experiential or group.is_mixed]
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


def sample(parts: Parts, state: RunState, groups: Sequence[UnderWay], tell: Tell) -> tuple[list[int], Begun]:
    """Go on with the rollouts of `groups` until B of these are complete, or all where nothing carries over; returns the
    tokens of each row sampled, and what the graders have been handed, each rollout as it ended.

    Raises RunError where the generator did not sample with the policy's weights.
    """
    asked: list[types.RolloutRequest] = []
    owners: list[tuple[UnderWay, Sequence[int]]] = []
    waited, begun = [], Begun()
    for group in groups:
        own = rollout_requests(parts, state, group)
        waited.append({(len(asked) + at, seed) for at, seed in places_of([request for request, _ in own])})
        asked += [request for request, _ in own]
        owners += [(group, members) for _, members in own]
    # Of these a rank hears of its own.
    dealt = deal([each.expected_tokens for each in asked for _ in each.seeds], parts.ranks.world_size)
    num = min(parts.config.rollout.questions_per_step, len(groups))

    def heard(at: int, rollout: types.Rollout) -> None:
        group, members = owners[at]
        member = members[rollout.member]
        whole = group.rollouts[member].then(rollout) if group.rollouts else rollout
        question = parts.questions[group.question_id]
        item = QuestionRecord(question=question, options=options_of(question)).grading_item(
            parts.backbone.decode([*group.begun, *whole.token_ids]), whole.stop_reason, parts.answer_format
        )
        begun[group.question_id, member] = item.response, parts.pool.judge(item)
        if tell is not None:
            tell(len(dealt[parts.ranks.rank]))

    enough = (lambda ended: sum(own <= ended for own in waited) >= num) if parts.config.rollout.carry_over else None
    sampled = [*itertools.chain(*parts.generator.generate(asked, sampling_params(parts.config), heard, enough))]
    guards.require_current_weights(sampled, parts.policy.weight_version)
    more = iter(sampled)
    for group, rows in zip(groups, waited, strict=True):
        if group.rollouts:
            group.rollouts = [each.then(next(more)) if each.is_unfinished else each for each in group.rollouts]
        else:
            group.rollouts, group.scores = [*itertools.islice(more, len(rows))], [NO_SCORES] * len(rows)
    return [len(rollout.token_ids) for rollout in sampled], begun


def rollout_requests(
    parts: Parts, state: RunState, group: UnderWay
) -> list[tuple[types.RolloutRequest, Sequence[int]]]:
    """Requests for what is left of a group, each with the members that it is for: one for a group that has not begun,
    else one for each unfinished rollout, whose tokens stand behind the prompt.

    Seeds are keyed by (seed, question, visit, member): K for a fresh question, fewer for an experiential one.
    """
    config, id = parts.config, group.question_id
    visit, expected = state.visits.get(id, 0), state.lengths.get(id, state.usual_length)
    num = config.rollout.group_size - len(group.replayed)
    seeds = tuple(types.rollout_seed(config.run.seed, id, visit, member) for member in range(num))
    whole = types.RolloutRequest(
        question_id=id, prompt_ids=parts.prompt_of(group), seeds=seeds, expected_tokens=expected, drawn=len(group.begun)
    )
    if not group.rollouts:
        return [(whole, range(num))]
    return [(goes_on(whole, member, own), [member]) for member, own in enumerate(group.rollouts) if own.is_unfinished]


def goes_on(request: types.RolloutRequest, member: int, rollout: types.Rollout) -> types.RolloutRequest:
    """The request for the rest of one of its rollouts."""
    drawn = len(rollout.token_ids)
    return replace(
        request,
        prompt_ids=np.concatenate([request.prompt_ids, rollout.token_ids]),
        seeds=(request.seeds[member],),
        drawn=request.drawn + drawn,
        # Lengths have long tails: what has lasted will last.
        expected_tokens=max(request.expected_tokens - drawn, drawn),
    )


def grade(parts: Parts, groups: Sequence[UnderWay], begun: Begun) -> None:
    """Wait for the grades of what has ended in this step; every rank has `begun` those that it sampled."""
    # A verdict that depends on the clock (a timeout) is the same on every rank, because one rank alone has waited.
    own = {place: (text, graded()) for place, (text, graded) in begun.items()}
    found = {place: graded for part in parts.ranks.gather(own) for place, graded in part.items()}
    own_of = {group.question_id: group.grades for group in groups}
    for (question_id, member), graded in found.items():
        own_of[question_id][member] = graded


def score(
    parts: Parts, state: RunState, groups: Sequence[UnderWay], step: int, notes: list[str]
) -> tuple[dict[str, float | int], int]:
    """Add the scores of all tokens that the step has sampled, under pi_old, by `rollout.logprobs`: the trainer's, or
    the sampler's; returns how far both differ, and the tokens that the trainer has scored.

    Of the sampler's the trainer scores some, where they are not compared in the first update. Raises RunError where
    they differ by more than rounding; `notes` get a word before that.
    """
    rows = [
        (group, member)
        for group in groups
        for member, rollout in enumerate(group.rollouts)
        if len(rollout.token_ids) > len(group.scores[member].logprobs)
    ]
    rollouts = [group.rollouts[member] for group, member in rows]
    by_sampler = parts.config.rollout.logprobs == "sampler"
    checked: Sequence[int] = range(0 if by_sampler else len(rollouts))
    if by_sampler and not compares_in_update(parts.config):
        checked = drawn_to_check(len(rollouts), np.random.default_rng((parts.config.run.seed, step)))
    prompts = {group.question_id: parts.prompt_of(group) for group in groups}
    found = parts.policy.score(
        [
            types.TokenSequence(prompt_ids=prompts[own.question_id], response_ids=own.token_ids)
            for own in (rollouts[at] for at in checked)
        ]
    )
    gap, told = compare(parts, state, [(rollouts[at], score) for at, score in zip(checked, found, strict=True)])
    notes += told
    scores = found
    if by_sampler:
        scores = [
            types.TokenScores(logprobs=each.engine_logprobs, entropies=each.engine_entropies)  # type: ignore[arg-type]
            for each in rollouts
        ]
    for (group, member), more in zip(rows, scores, strict=True):
        group.scores[member] = group.scores[member].then(more)
    return gap, sum(len(each.logprobs) for each in found)


def compares_in_update(config: Config) -> bool:
    """Whether the first update compares the sampler's log-probs with its own: it takes the gradient of fresh rows at
    the weights that sampled them."""
    return config.rollout.logprobs == "sampler" and config.replay.order != "first"


def compare(
    parts: Parts, state: RunState, pairs: Sequence[tuple[types.Rollout, types.TokenScores]]
) -> tuple[dict[str, float | int], list[str]]:
    """Distances of the engine's log-probs and entropies of rollouts from the trainer's, and a word where these are near
    their bound. Raises RunError beyond it."""
    scores = [score for _, score in pairs]
    gap = score_gaps([own for own, _ in pairs], scores)
    return gap, watch_gap(parts, state, gap, scores) if scores else []


def watch_gap(parts: Parts, state: RunState, gap: Mapping[str, float], found: Sequence[types.TokenScores]) -> list[str]:
    """Hold a step's `gap` against its bound, and keep that of the first steps; a word where it is near, and again
    once it has grown. Raises RunError beyond the bound."""
    config, mean = parts.config, gap["policy/logprob_gap_mean"]
    dtype = "bfloat16" if "bfloat16" in (config.backbone.dtype, config.optim.matmul_dtype) else "float32"
    entropy = float(np.concatenate([each.entropies for each in found]).mean(dtype=np.float64))
    bound = guards.gap_bound(dtype, config.rollout.max_logprob_gap, state.first_gaps, entropy)
    guards.require_small_gap(gap, dtype, bound)
    if len(state.first_gaps) < guards.FIRST_STEPS:
        state.first_gaps.append((mean, entropy))
    differ = f"step {state.step + 1}: log-probs of rollout engine and trainer differ by {mean:.3g} a token"
    if mean <= guards.GAP_WARNING * bound or mean <= guards.GAP_GROWTH * state.gap_told:
        return []
    state.gap_told = mean
    return [f"{differ}, and the run stops beyond {bound:.3g} (rollout.max_logprob_gap)"]


def drawn_to_check(count: int, rng: np.random.Generator) -> list[int]:
    """Positions of one rollout in `CHECKED_ONE_IN`, at least one: any member of any group, from any rank."""
    return sorted(rng.choice(count, size=math.ceil(count / CHECKED_ONE_IN), replace=False).tolist())

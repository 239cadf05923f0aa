"""The journal line of a step: flat keys, "step" first, absent where they mean nothing.

Batch keys are over fresh rollouts of fresh questions; `replay/pass_at_1` is over the K-1 fresh members of experiential
groups; `tokens/trained` alone counts replayed tokens.
"""

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np

from exgrpo_cli.base.types import Rollout, StopReason, TokenScores, Verdict
from exgrpo_cli.engines.policy.policy import UpdateReport
from exgrpo_cli.grading.verifiers import sum_asked, valid_trace
from exgrpo_cli.replay.store import Store
from exgrpo_cli.runs.folder import PHASES
from exgrpo_cli.training.step.groups import Group, UnderWay


class Clock:
    """Seconds spent in each phase of a step."""

    def __init__(self, watch: Callable[[str], AbstractContextManager[Any]] = nullcontext) -> None:
        """`watch` is entered with the name of each phase while that phase lasts."""
        self._watch = watch
        self._started = time.perf_counter()
        self.seconds: dict[str, float] = dict.fromkeys(PHASES, 0.0)

    @contextmanager
    def phase(self, name: str) -> Iterator[Any]:
        """Work that counts into `seconds[name]`; yields what the watch does."""
        started = time.perf_counter()
        try:
            with self._watch(name) as watching:
                yield watching
        finally:
            self.seconds[name] += time.perf_counter() - started

    def metrics(self) -> dict[str, float | int]:
        """`time/<phase>` for every phase, and `time/step` for the whole since the clock was made."""
        whole = time.perf_counter() - self._started
        return {f"time/{name}": seconds for name, seconds in self.seconds.items()} | {"time/step": whole}


def mean(values: Sequence[float]) -> float:
    """Mean in float64; NaN of nothing, which no journal line takes."""
    return float(np.mean(values)) if values else math.nan


def pass_at_1(groups: Sequence[Group]) -> float:
    """Share of correct answers among the fresh rollouts of `groups`; NaN without any."""
    return mean([member.verdict is Verdict.CORRECT for group in groups for member in group.fresh])


def batch_metrics(groups: Sequence[Group]) -> dict[str, float | int]:
    """Rewards, success and lengths of a step's groups, and verdict counts over all fresh rollouts."""
    fresh = [group for group in groups if not group.is_experiential]
    experiential = [group for group in groups if group.is_experiential]
    members = [member for group in fresh for member in group.fresh]
    every = [member for group in groups for member in group.fresh]
    verdicts = Counter(member.verdict for member in every)
    values = {
        "replay/pass_at_1": pass_at_1(experiential),
        "tokens/generated": sum(len(member.rollout.token_ids) for member in every),
    }
    if members:
        values |= valid_trace_metrics(fresh)
        values |= {
            "reward/mean": mean([member.grade.reward for member in members]),
            **part_means([member.grade.parts for member in members]),
            "batch/pass_at_1": pass_at_1(fresh),
            "batch/solve_all": mean([group.num_fresh_correct == len(group.fresh) for group in fresh]),
            "batch/solve_none": mean([group.num_fresh_correct == 0 for group in fresh]),
            "batch/questions": len(fresh),
            "length/mean": mean([len(member.rollout.token_ids) for member in members]),
            "length/clipped": mean([member.rollout.stop_reason is StopReason.LENGTH for member in members]),
        }
    return values | {f"verdict/{verdict.value.replace(' ', '_')}": verdicts[verdict] for verdict in Verdict}


def part_means(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """`reward/part/<name>`: mean over the rollouts of each part of the reward, 0 where one has none of that name."""
    names = sorted({name for own in parts for name in own})
    return {f"reward/part/{name}": mean([own.get(name, 0.0) for own in parts]) for name in names}


def valid_trace_metrics(groups: Sequence[Group]) -> dict[str, float | int]:
    """Shares of valid working among fresh rollouts that can be checked: of all of them and of those that are right."""
    checked = [group for group in groups if sum_asked(group.question) is not None]
    members = [(group.question, member) for group in checked for member in group.fresh]
    valid = [bool(valid_trace(asked, own.text)) for asked, own in members if own.verdict is Verdict.CORRECT]
    # What comes to another number than the gold is not right in its last step.
    wrong = [False] * (len(members) - len(valid))
    return {"batch/valid_traces": mean(valid + wrong), "batch/valid_of_correct": mean(valid)}


def score_gaps(rollouts: Sequence[Rollout], scores: Sequence[TokenScores]) -> dict[str, float | int]:
    """|log pi_trainer - log pi_engine| over their tokens of the present weights: a growing gap means the generator has
    stale ones.

    And the same of entropies, in nats, where the engine tells them.
    """
    values: dict[str, float | int] = {}
    for name, kind in (("policy/logprob_gap", "logprobs"), ("policy/entropy_gap", "entropies")):
        gaps = [
            np.abs(getattr(score, kind) - engine)[own.num_earlier :]
            for own, score in zip(rollouts, scores, strict=True)
            if (engine := getattr(own, f"engine_{kind}")) is not None
        ]
        if gaps:
            gap = np.concatenate(gaps)
            values |= {f"{name}_mean": float(gap.mean(dtype=np.float64)), f"{name}_max": float(gap.max())}
    return values


def carrying(
    trained: Sequence[Group], carried: Sequence[UnderWay], sampled: Sequence[int], slots: int
) -> dict[str, float | int]:
    """Tokens of a step whose rollouts carry over, those of unfinished ones included, and how far they do.

    `sampled` are the tokens of each row that the step has decoded, up to `slots` of them at once. Waiting is the share
    of slots times decoding steps without a row; the steps are the fewest that do it.
    """
    rollouts = [member.rollout for group in trained for member in group.fresh]
    versions = [len({rollout.weight_version, *dict(rollout.earlier)}) for rollout in rollouts]
    unfinished = [rollout.is_unfinished for group in carried for rollout in group.rollouts]
    tokens, slots = sum(sampled), max(1, min(slots, len(sampled)))
    steps = max([1, *sampled, math.ceil(tokens / slots)])
    return {
        "tokens/generated": tokens,
        "rollout/carried": sum(unfinished) / (len(versions) + len(unfinished)),
        "rollout/versions": mean(versions),
        "rollout/versions_max": max(versions),
        "rollout/waiting": 1 - tokens / (slots * steps),
    }


def truncation(groups: Sequence[Group]) -> dict[str, float | int]:
    """Truncated importance weights of fresh tokens: their mean, and the share that the cap has cut."""
    parts = [(weights, group.tis_cap) for group in groups for weights in group.importance_weights()]
    capped = [(weights, np.float32(cap)) for weights, cap in parts if weights is not None and cap is not None]
    if not capped:
        return {}
    weights = np.concatenate([each for each, _ in capped])
    cut = np.concatenate([each >= cap * (1 - 1e-6) for each, cap in capped])
    return {"policy/tis_weight": float(weights.mean(dtype=np.float64)), "policy/tis_truncated": float(cut.mean())}


def policy_entropy(groups: Sequence[Group]) -> dict[str, float | int]:
    """Mean token entropy of pi_old over all fresh tokens; the updates may have left out rows without advantage."""
    entropies = [scores.entropies for group in groups for scores in group.scores]
    return {"policy/entropy": float(np.concatenate(entropies).mean(dtype=np.float64))} if entropies else {}


def update_metrics(reports: Sequence[UpdateReport]) -> dict[str, float | int | str]:
    """A step's updates: means of the means, maxima of the maxima, how many were applied or skipped, and why."""
    names = sorted({name for report in reports for name in report.metrics})
    values: dict[str, float | int | str] = {}
    for name in names:
        series = [report.metrics[name] for report in reports if name in report.metrics]
        values[name] = max(series) if name.endswith("_max") else mean(series)
    skipped = [report for report in reports if not report.applied]
    values |= {
        "optim/grad_norm": mean([report.grad_norm for report in reports]),
        "optim/loss": mean([report.loss for report in reports]),
        "optim/updates_applied": len(reports) - len(skipped),
        "optim/updates_skipped": len(skipped),
        "tokens/trained": sum(report.num_tokens for report in reports),
    }
    if skipped:
        values["optim/skip_reason"] = "; ".join(dict.fromkeys(report.skip_reason for report in skipped))
    return values


def store_metrics(store: Store) -> dict[str, int]:
    """Counts of the store after the step."""
    counts = store.counts
    return {
        "replay/questions": counts.num_questions,
        "replay/trajectories": counts.num_trajectories,
        "replay/retired": counts.num_retired,
        **{f"replay/bucket/{k}": count for k, count in sorted(counts.buckets.items())},
    }


def journal_line(step: int, phase: str, *parts: Mapping[str, Any]) -> dict[str, Any]:
    """Join the parts of a step's line; what is not finite is left out, since JSON has no word for it."""
    line: dict[str, Any] = {"step": step, "phase": phase}
    for part in parts:
        line |= {
            key: value for key, value in part.items() if not (isinstance(value, float) and not math.isfinite(value))
        }
    return line

"""A replay summary as one JSON object: plain numbers and lists, null where there is no value."""

import math
from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from typing import Any

import numpy as np

from exgrpo_cli.replay_stats.entropy import EntropyGroup, EntropyWindow
from exgrpo_cli.replay_stats.questions import QuestionHistory
from exgrpo_cli.replay_stats.step import StepReplay
from exgrpo_cli.replay_stats.summary import ReplaySummary
from exgrpo_cli.replay_stats.what_if.metric import MetricOutcome
from exgrpo_cli.replay_stats.what_if.sampler import SamplerOutcome

QUANTILES = ("5%", "25%", "50%", "75%", "95%")


def plain(value: Any) -> Any:
    """A value as JSON holds it: dataclasses as objects, arrays as lists, keys as text, null for NaN and infinities."""
    if is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, np.ndarray | np.generic):
        return plain(value.tolist())
    return None if isinstance(value, float) and not math.isfinite(value) else value


def summary_json(summary: ReplaySummary) -> dict[str, Any]:
    """Everything of a summary; `over_time` lists have one value per step from 0 on, `ratios` one per logged step."""
    replays, occupancy, selection = summary.replays, summary.occupancy, summary.selection
    visits_known, rules = occupancy.visits_known, summary.config.replay
    told = {
        "run": str(summary.run),
        "method": summary.config.run.method,
        "composition": rules.composition,
        "sampler": rules.sampler if rules.composition == "replace" else None,
        "metric": None if rules.draws_units else f"{rules.metric}:{rules.direction}",
        "priority": rules.priority if rules.draws_units else None,
        "group_size": summary.config.rollout.group_size,
        "steps": summary.last_step,
        "first_mixed_step": summary.first_mixed_step,
        "buckets": summary.buckets,
        "questions": summary.questions,
        "retired": summary.retired,
        "tried": occupancy.tried[-1] if visits_known else None,
        "unseen": occupancy.unseen[-1] if visits_known else None,
        "trajectories": summary.trajectories,
        "stored": summary.stored,
        "evicted": len(replays.evicted),
        "entropy": {
            "selected": selection.mean_selected,
            "available": selection.mean_available,
            "share_with_choice": selection.share_with_choice,
            **_entropies(summary.entropy),
            "windows": [
                {"first_step": window.first_step, "last_step": window.last_step, **_entropies(window)}
                for window in summary.entropy_windows
            ],
        },
        "age": _spread(replays.age),
        "reuse": {
            **_spread(replays.reuse),
            "never": (replays.reuse == 0).sum(),
            "histogram": {uses: count for uses, count in enumerate(np.bincount(replays.reuse)) if count},
        },
        "used": len(replays.step),
        "share": {"steps": summary.shares.share_of_steps, "tokens": summary.shares.share_of_tokens},
        "draws": {
            "chi_square": summary.draws.chi_square,
            "degrees_of_freedom": summary.draws.degrees_of_freedom,
            "p_value": summary.draws.p_value,
            "buckets": summary.draws.buckets,
        },
        "flow": _flow(summary),
        "most_replayed": summary.most_replayed,
        "ratios": {
            "steps": summary.ratios.steps,
            "mean": summary.ratios.mean,
            "max": summary.ratios.maximum,
            "ess": summary.ratios.effective_sample_size,
        },
        "over_time": _over_time(summary),
        "incomplete": summary.incomplete,
    }
    return {name: plain(value) for name, value in told.items()}


def _over_time(summary: ReplaySummary) -> dict[str, Any]:
    """One value per step."""
    occupancy, selection, visits_known = summary.occupancy, summary.selection, summary.occupancy.visits_known
    return {
        "buckets": {bucket: occupancy.in_bucket[:, bucket] for bucket in occupied(summary)},
        "questions": occupancy.buffered,
        "retired": occupancy.retired,
        "tried": occupancy.tried if visits_known else None,
        "unseen": occupancy.unseen if visits_known else None,
        "trajectories": occupancy.trajectories,
        "entropy_selected": selection.selected,
        "entropy_available": selection.available,
        "candidates": selection.candidates,
        "age": summary.age_over_time,
        "units": summary.scans if summary.config.replay.draws_units else None,
    }


def _flow(summary: ReplaySummary) -> dict[int, Any]:
    """Success counts before a replay visit -> what became of the questions."""
    flow = summary.flow
    return {
        before: {
            "after": {after: num for after, num in enumerate(flow.between[before]) if num},
            "retired": flow.retired[before],
            "dropped": flow.dropped[before],
        }
        for before in np.flatnonzero(flow.visits).tolist()
    }


def occupied(summary: ReplaySummary) -> list[int]:
    """Success counts whose bucket held a question at some time."""
    return np.flatnonzero(summary.occupancy.in_bucket.any(axis=0)).tolist()


def history_json(history: QuestionHistory) -> dict[str, Any]:
    """The history of one question."""
    return {
        "question_id": history.question_id,
        **asdict(history.question),
        "state": history.state,
        "events": history.rows,
        "responses": history.texts,
    }


def step_json(replay: StepReplay) -> dict[str, Any]:
    """What one step drew and replayed."""
    return {
        "step": replay.step,
        "nothing": replay.nothing,
        "buckets": replay.offers,
        "questions": replay.questions,
        "units": replay.units,
    }


def sampler_json(outcome: SamplerOutcome) -> dict[str, Any]:
    """What another question sampler would have drawn."""
    return {
        "sampler": outcome.name,
        "drawn": outcome.drawn,
        "expected": outcome.expected,
        "steps": outcome.steps,
        "pass_rate": outcome.pass_rate,
        "expected_pass_rate": outcome.expected_pass_rate,
        "by_step": {
            "drawn": {bucket: outcome.drawn_by_step[:, bucket] for bucket in outcome.drawn},
            "expected": {bucket: outcome.expected_by_step[:, bucket] for bucket in outcome.expected},
        },
    }


def metric_json(outcome: MetricOutcome) -> dict[str, Any]:
    """What another selection metric would have taken."""
    names = ("direction", "measured", "draws", "share_with_choice", "share_same", "chosen", "other", "steps")
    return {
        "metric": outcome.name,
        **{name: getattr(outcome, name) for name in names},
        "by_step": {"chosen": outcome.chosen_by_step, "other": outcome.other_by_step},
    }


def _entropies(entropy: EntropyWindow) -> dict[str, Any]:
    return {
        "by_bucket": [_group(group) for group in entropy.by_bucket],
        "by_difficulty": [_group(group) for group in entropy.by_difficulty],
        "hard_over_easy": entropy.hard_over_easy,
    }


def _group(group: EntropyGroup) -> dict[str, Any]:
    return asdict(group) | {"quantiles": dict(zip(QUANTILES, group.quantiles, strict=True))}


def _spread(values: np.ndarray) -> dict[str, Any]:
    if not len(values):
        return {"mean": None, "median": None, "p90": None, "max": None}
    return {"mean": values.mean(), "median": np.median(values), "p90": np.quantile(values, 0.9), "max": values.max()}

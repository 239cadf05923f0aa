"""A replay summary as one JSON object: plain numbers and lists, null where there is no value."""

import math
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

import numpy as np

from exgrpo_cli.replay_stats.entropy import EntropyGroup, EntropyWindow
from exgrpo_cli.replay_stats.questions import QuestionHistory
from exgrpo_cli.replay_stats.step import StepReplay
from exgrpo_cli.replay_stats.summary import ReplaySummary
from exgrpo_cli.replay_stats.what_if.metric import MetricOutcome
from exgrpo_cli.replay_stats.what_if.sampler import SamplerOutcome

QUANTILES = ("5%", "25%", "50%", "75%", "95%")


def summary_json(summary: ReplaySummary) -> dict[str, Any]:
    """Everything of a summary; `over_time` lists have one value per step from 0 on, `ratios` one per logged step."""
    replays, occupancy, selection = summary.replays, summary.occupancy, summary.selection
    return {
        "run": str(summary.run),
        "method": summary.config.run.method,
        "sampler": summary.config.replay.sampler,
        "metric": f"{summary.config.replay.metric}:{summary.config.replay.direction}",
        "group_size": summary.config.rollout.group_size,
        "steps": summary.last_step,
        "first_mixed_step": summary.first_mixed_step,
        "buckets": {str(bucket): count for bucket, count in summary.buckets.items()},
        "questions": summary.questions,
        "retired": summary.retired,
        "tried": int(occupancy.tried[-1]) if occupancy.visits_known else None,
        "unseen": int(occupancy.unseen[-1]) if occupancy.visits_known else None,
        "trajectories": summary.trajectories,
        "stored": summary.stored,
        "evicted": len(replays.evicted),
        "entropy": {
            "selected": finite(selection.mean_selected),
            "available": finite(selection.mean_available),
            "share_with_choice": finite(selection.share_with_choice),
            "by_bucket": [_group(group) for group in summary.entropy.by_bucket],
            "by_difficulty": [_group(group) for group in summary.entropy.by_difficulty],
            "hard_over_easy": finite(summary.entropy.hard_over_easy),
            "windows": [_window(window) for window in summary.entropy_windows],
        },
        "age": _spread(replays.age),
        "reuse": {
            **_spread(replays.reuse),
            "never": int((replays.reuse == 0).sum()),
            "histogram": {str(uses): int(count) for uses, count in enumerate(np.bincount(replays.reuse)) if count},
        },
        "used": len(replays.step),
        "share": {
            "steps": finite(summary.shares.share_of_steps),
            "tokens": finite(summary.shares.share_of_tokens),
        },
        "draws": {
            "chi_square": summary.draws.chi_square,
            "degrees_of_freedom": summary.draws.degrees_of_freedom,
            "p_value": summary.draws.p_value,
            "buckets": [asdict(bucket) for bucket in summary.draws.buckets],
        },
        "flow": {
            str(before): {
                "after": {str(after): int(num) for after, num in enumerate(summary.flow.between[before]) if num},
                "retired": int(summary.flow.retired[before]),
                "dropped": int(summary.flow.dropped[before]),
            }
            for before in np.flatnonzero(summary.flow.visits).tolist()
        },
        "most_replayed": [asdict(question) for question in summary.most_replayed],
        "ratios": {
            "steps": summary.ratios.steps.tolist(),
            "mean": _column(summary.ratios.mean),
            "max": _column(summary.ratios.maximum),
            "ess": _column(summary.ratios.effective_sample_size),
        },
        "over_time": {
            "buckets": {str(bucket): occupancy.in_bucket[:, bucket].tolist() for bucket in occupied(summary)},
            "questions": occupancy.buffered.tolist(),
            "retired": occupancy.retired.tolist(),
            "tried": occupancy.tried.tolist() if occupancy.visits_known else None,
            "unseen": occupancy.unseen.tolist() if occupancy.visits_known else None,
            "trajectories": occupancy.trajectories.tolist(),
            "entropy_selected": _column(selection.selected),
            "entropy_available": _column(selection.available),
            "candidates": _column(selection.candidates),
            "age": _column(summary.age_over_time),
        },
        "incomplete": summary.incomplete,
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
        "events": [{key: finite(value) for key, value in asdict(row).items()} for row in history.rows],
        "responses": {str(trajectory_id): text for trajectory_id, text in history.texts.items()},
    }


def step_json(replay: StepReplay) -> dict[str, Any]:
    """What one step drew and replayed."""
    questions = [
        {
            **asdict(drawn),
            "candidates": [{key: finite(value) for key, value in asdict(one).items()} for one in drawn.candidates],
        }
        for drawn in replay.questions
    ]
    return {
        "step": replay.step,
        "nothing": replay.nothing,
        "buckets": [asdict(offer) for offer in replay.offers],
        "questions": questions,
    }


def sampler_json(outcome: SamplerOutcome) -> dict[str, Any]:
    """What another question sampler would have drawn."""
    return {
        "sampler": outcome.name,
        "drawn": {str(bucket): count for bucket, count in outcome.drawn.items()},
        "expected": {str(bucket): count for bucket, count in outcome.expected.items()},
        "steps": outcome.steps.tolist(),
        "pass_rate": _column(outcome.pass_rate),
        "expected_pass_rate": _column(outcome.expected_pass_rate),
        "by_step": {
            "drawn": {str(bucket): outcome.drawn_by_step[:, bucket].tolist() for bucket in outcome.drawn},
            "expected": {str(bucket): outcome.expected_by_step[:, bucket].tolist() for bucket in outcome.expected},
        },
    }


def metric_json(outcome: MetricOutcome) -> dict[str, Any]:
    """What another selection metric would have taken."""
    return {
        "metric": outcome.name,
        "direction": outcome.direction,
        "measured": outcome.measured,
        "draws": outcome.draws,
        "share_with_choice": finite(outcome.share_with_choice),
        "share_same": finite(outcome.share_same),
        "chosen": {name: finite(value) for name, value in outcome.chosen.items()},
        "other": {name: finite(value) for name, value in outcome.other.items()},
        "steps": outcome.steps.tolist(),
        "by_step": {
            "chosen": {name: _column(values) for name, values in outcome.chosen_by_step.items()},
            "other": {name: _column(values) for name, values in outcome.other_by_step.items()},
        },
    }


def finite(value: Any) -> Any:
    """The value, None for NaN and infinities, which JSON cannot hold."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _column(values: Iterable[float]) -> list[float | None]:
    return [finite(float(value)) for value in values]


def _window(window: EntropyWindow) -> dict[str, Any]:
    return {
        "first_step": window.first_step,
        "last_step": window.last_step,
        "by_bucket": [_group(group) for group in window.by_bucket],
        "by_difficulty": [_group(group) for group in window.by_difficulty],
        "hard_over_easy": finite(window.hard_over_easy),
    }


def _group(group: EntropyGroup) -> dict[str, Any]:
    return {
        "name": group.name,
        "trajectories": group.trajectories,
        "mean": finite(group.mean),
        "quantiles": dict(zip(QUANTILES, map(finite, group.quantiles), strict=True)),
    }


def _spread(values: np.ndarray) -> dict[str, float | int | None]:
    if not len(values):
        return {"mean": None, "median": None, "p90": None, "max": None}
    return {
        "mean": float(values.mean()),
        "median": float(np.median(values)),
        "p90": float(np.quantile(values, 0.9)),
        "max": int(values.max()),
    }

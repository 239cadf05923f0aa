"""From finished questions to the figures of `results.json`."""

from typing import Any

from exgrpo_cli.base.statistics import RESAMPLES, smallest_detectable_difference
from exgrpo_cli.evaluation.results.records import Evaluation, QuestionRecord

BOOTSTRAP_SEED = 0


def summarise(evaluation: Evaluation) -> dict[str, Any]:
    """avg@k with its interval and what belongs beside it, as plain values.

    Raises ValueError when no question is finished.
    """
    score = evaluation.score(BOOTSTRAP_SEED)
    return {
        "avg_at_k": score.value,
        "k": score.samples,
        "low": score.low,
        "high": score.high,
        "questions": score.questions,
        "pass_at_k": {
            str(k): {"value": at_k.value, "low": at_k.low, "high": at_k.high}
            for k, at_k in evaluation.pass_at_k(BOOTSTRAP_SEED).items()
        },
        "smallest_detectable_difference": smallest_detectable_difference(evaluation.correct, evaluation.samples),
        "mean_tokens": evaluation.mean_tokens,
        "share_clipped": evaluation.share_clipped,
        "verdicts": evaluation.verdict_counts,
        "by_level": _by_level(evaluation),
        "interval": _interval_method(evaluation),
    }


def _by_level(evaluation: Evaluation) -> dict[str, dict[str, float]]:
    by_level: dict[str, list[QuestionRecord]] = {}
    for record in evaluation.records:
        if record.question.level is not None:
            by_level.setdefault(record.question.level, []).append(record)
    shown = {}
    for level, records in sorted(by_level.items()):
        score = Evaluation(records=tuple(records), samples=evaluation.samples).score(BOOTSTRAP_SEED)
        shown[level] = {"avg_at_k": score.value, "low": score.low, "high": score.high, "questions": score.questions}
    return shown


def _interval_method(evaluation: Evaluation) -> str:
    if evaluation.samples == 1:
        return "95 %, Wilson"
    if evaluation.correct.min() == evaluation.correct.max():
        return "95 %, Wilson over questions (all have the same count)"
    return f"95 %, bootstrap over questions, {RESAMPLES} resamples, seed {BOOTSTRAP_SEED}"

"""Two results of the same benchmark: the paired difference, and the questions that flipped."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int64

from exgrpo_cli.base.errors import InputError
from exgrpo_cli.base.statistics import PairedDifference, Score, compare_paired, pass_at_k_by_question, pass_at_ks
from exgrpo_cli.evaluation.results.metrics import BOOTSTRAP_SEED
from exgrpo_cli.evaluation.results.records import Evaluation
from exgrpo_cli.evaluation.results.stamp import MAY_DIFFER_IN_COMPARISON, differences
from exgrpo_cli.evaluation.results.stored import LoadedResult, stored_result


@dataclass(frozen=True, kw_only=True, slots=True)
class Flip:
    """A question that one model mostly solves and the other mostly does not."""

    question_id: str
    text: str
    first: float
    """Pass rate."""
    second: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """Second minus first, paired by question."""

    benchmark: str
    first: str
    """Name of a model."""
    second: str
    scores: tuple[Score, Score]
    difference: PairedDifference
    pass_at_k: Mapping[int, PairedDifference]
    """Of pass@k at each k above 1, paired by question as well."""
    curves: tuple[Mapping[int, Score], Mapping[int, Score]]
    """pass@k of both."""
    by_second_grader: Mapping[str, tuple[float, float, PairedDifference]]
    """avg@k of both by each second grader that graded both, and their difference."""
    flips: tuple[Flip, ...]
    """Pass rates on different sides of one half, the largest changes first."""
    notes: tuple[str, ...]
    """Differences of the two evaluations that do not forbid the comparison."""

    def to_json(self) -> dict[str, Any]:
        """The comparison as JSON; questions that flipped by id."""
        difference = self.difference
        return {
            "benchmark": self.benchmark,
            "first": self.first,
            "second": self.second,
            "scores": [asdict(score) for score in self.scores],
            **_difference_json(difference),
            "questions": difference.questions,
            "pass_at_k": {str(k): _difference_json(at_k) for k, at_k in self.pass_at_k.items()},
            "second_graders": {
                grader: {"scores": [first, second], **_difference_json(found)}
                for grader, (first, second, found) in self.by_second_grader.items()
            },
            "gained": [flip.question_id for flip in self.flips if flip.second > flip.first],
            "lost": [flip.question_id for flip in self.flips if flip.second < flip.first],
            "notes": list(self.notes),
        }


def _difference_json(found: PairedDifference) -> dict[str, float]:
    return {"difference": found.value, "low": found.low, "high": found.high, "p_value": found.p_value}


def compare_folders(first: Path, second: Path) -> Comparison:
    """Compare two finished results folders.

    Raises InputError naming every difference of their protocols that makes the scores incomparable, and for a folder
    that is unfinished.
    """
    one, other = stored_result(first), stored_result(second)
    unlike = differences(one.stamp, other.stamp, may_differ=MAY_DIFFER_IN_COMPARISON)
    if unlike:
        raise unlike_protocols(first, second, unlike)
    return compare_loaded(one.load(), other.load())


def unlike_protocols(first: Path, second: Path, unlike: Sequence[str]) -> InputError:
    """What to say of two results that do not go together."""
    return InputError(
        f"{first} and {second} cannot be compared, their protocols differ: {'; '.join(unlike)}. Evaluate one of "
        "them again as the other was."
    )


def compare_loaded(one: LoadedResult, other: LoadedResult) -> Comparison:
    """The comparison of two results with equal protocols."""
    stamps = one.stamp, other.stamp
    pairs = [(record, other.records[question_id]) for question_id, record in one.records.items()]
    samples = one.stamp["sampling"]["samples"]
    evaluations = [Evaluation(records=tuple(group), samples=samples) for group in zip(*pairs, strict=True)]
    first, second = (evaluation.correct for evaluation in evaluations)
    flips = [
        Flip(question_id=a.question.id, text=a.question.prompt[-1].content, first=a.pass_rate, second=b.pass_rate)
        for a, b in pairs
        if (a.pass_rate - 0.5) * (b.pass_rate - 0.5) < 0
    ]
    return Comparison(
        benchmark=stamps[0]["benchmark"]["name"],
        first=stamps[0]["model"]["name"],
        second=stamps[1]["model"]["name"],
        scores=(evaluations[0].score(BOOTSTRAP_SEED), evaluations[1].score(BOOTSTRAP_SEED)),
        difference=_paired(first, second, samples, 1),
        pass_at_k={k: _paired(first, second, samples, k) for k in pass_at_ks(samples)[1:]},
        curves=(evaluations[0].pass_at_k(BOOTSTRAP_SEED), evaluations[1].pass_at_k(BOOTSTRAP_SEED)),
        by_second_grader={
            grader: _by_second_grader(one, other, grader)
            for grader in one.by_second_grader
            if grader in other.by_second_grader
        },
        flips=tuple(sorted(flips, key=lambda flip: -abs(flip.second - flip.first))),
        notes=tuple(differences(*stamps, may_differ=("environment.", "model."))),
    )


def _by_second_grader(one: LoadedResult, other: LoadedResult, grader: str) -> tuple[float, float, PairedDifference]:
    samples = one.stamp["sampling"]["samples"]
    first, second = (
        np.array([result.by_second_grader[grader][question_id] for question_id in one.records], dtype=np.int64)
        for result in (one, other)
    )
    return float(first.mean()) / samples, float(second.mean()) / samples, _paired(first, second, samples, 1)


def _paired(
    first: Int64[np.ndarray, " questions"], second: Int64[np.ndarray, " questions"], samples: int, k: int
) -> PairedDifference:
    """Second minus first in pass@k, from the correct samples of each question; k = 1 is the difference in avg@k."""
    one, other = (pass_at_k_by_question(correct, samples, k) for correct in (first, second))
    return compare_paired(one, other, np.random.default_rng(BOOTSTRAP_SEED))

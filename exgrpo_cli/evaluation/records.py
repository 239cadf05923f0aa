"""Record of an evaluation: each question as it was asked, its samples with their verdicts, and the figures of all."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jaxtyping import Int64

from exgrpo_cli.base.statistics import (
    RESAMPLES,
    Score,
    avg_at_k,
    pass_at_k_score,
    pass_at_ks,
    smallest_detectable_difference,
)
from exgrpo_cli.base.types import AnswerFormat, Question, StopReason, Verdict
from exgrpo_cli.grading import GradingItem

BOOTSTRAP_SEED = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One rollout of an evaluated question, as text."""

    member: int
    seed: int
    text: str
    """Whole response, thinking included, without the EOS."""
    num_tokens: int
    stop_reason: StopReason
    logprob: float | None
    """Sum of the tokens' log-probs in nats as the engine computed them; None where it gives none."""
    verdict: Verdict


@dataclass(frozen=True, kw_only=True, slots=True)
class QuestionRecord:
    """A question with everything the model and the grader see of it, and its samples once it is finished."""

    question: Question
    prompt_text: str = ""
    """The exact text of the prompt, or the messages as JSON where a server applied the template."""
    options: tuple[str, ...] | None = None
    """Options of a multiple-choice question, A first; None where the grader is given none."""
    samples: tuple[Sample, ...] = ()
    """In the order of their members; none before the question is finished."""

    @property
    def num_correct(self) -> int:
        """Samples that are correct."""
        return sum(sample.verdict is Verdict.CORRECT for sample in self.samples)

    @property
    def pass_rate(self) -> float:
        """Share of the samples that are correct, 0 to 1."""
        return self.num_correct / len(self.samples)

    def grading_item(self, text: str, stop_reason: StopReason, answer_format: AnswerFormat) -> GradingItem:
        """A response to this question, to be graded."""
        return GradingItem(
            gold=self.question.answer,
            response=text,
            finished=stop_reason is StopReason.EOS,
            answer_format=answer_format,
            options=self.options,
            metadata=self.question.metadata,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """Finished questions, in the order they were given, each with the same number of samples."""

    records: tuple[QuestionRecord, ...]

    @property
    def samples(self) -> int:
        """Samples per question."""
        return len(self.records[0].samples)

    @property
    def correct(self) -> Int64[np.ndarray, " questions"]:
        """Correct samples per question."""
        return np.array([record.num_correct for record in self.records], dtype=np.int64)

    @property
    def all_samples(self) -> list[Sample]:
        """Samples of all questions, question by question."""
        return [sample for record in self.records for sample in record.samples]

    @property
    def mean_tokens(self) -> float:
        """Mean response length in tokens."""
        return sum(sample.num_tokens for sample in self.all_samples) / len(self.all_samples)

    @property
    def share_clipped(self) -> float:
        """Share of samples cut off at the token limit."""
        return sum(sample.stop_reason is StopReason.LENGTH for sample in self.all_samples) / len(self.all_samples)

    def score(self) -> Score:
        """avg@k with its 95 % interval."""
        return avg_at_k(self.correct, self.samples, np.random.default_rng(BOOTSTRAP_SEED))

    def curve(self) -> dict[str, Score]:
        """pass@k by k = 1, 2, 4, ... up to the number of samples, with 95 % intervals."""
        correct, samples = self.correct, self.samples
        return {
            str(k): pass_at_k_score(correct, samples, k, np.random.default_rng(BOOTSTRAP_SEED))
            for k in pass_at_ks(samples)
        }

    def pass_at_k(self) -> dict[str, dict[str, float]]:
        """The curve as {k: {`value`, `low`, `high`}}."""
        return {k: {"value": at.value, "low": at.low, "high": at.high} for k, at in self.curve().items()}

    def with_verdicts(self, verdicts: Sequence[Verdict]) -> "Evaluation":
        """The same samples with other verdicts, in the order of `all_samples`."""
        left = iter(verdicts)
        return Evaluation(
            records=tuple(
                replace(record, samples=tuple(replace(sample, verdict=next(left)) for sample in record.samples))
                for record in self.records
            )
        )

    def figures(self) -> dict[str, Any]:
        """The numbers of `results.json`: avg@k with its interval, pass@k, lengths and counts, also by level."""
        verdicts = Counter(sample.verdict for sample in self.all_samples)
        levels = sorted({record.question.level for record in self.records if record.question.level is not None})
        by_level = {
            level: Evaluation(records=tuple(record for record in self.records if record.question.level == level))
            for level in levels
        }
        return {
            **_score_figures(self.score()),
            "k": self.samples,
            "pass_at_k": self.pass_at_k(),
            "smallest_detectable_difference": smallest_detectable_difference(self.correct, self.samples),
            "mean_tokens": self.mean_tokens,
            "share_clipped": self.share_clipped,
            "verdicts": {verdict.value: verdicts[verdict] for verdict in Verdict},
            "by_level": {level: _score_figures(own.score()) for level, own in by_level.items()},
            "interval": self._interval_method(),
        }

    def _interval_method(self) -> str:
        if self.samples == 1:
            return "95 %, Wilson"
        if self.correct.min() == self.correct.max():
            return "95 %, Wilson over questions (all have the same count)"
        return f"95 %, bootstrap over questions, {RESAMPLES} resamples, seed {BOOTSTRAP_SEED}"


def _score_figures(score: Score) -> dict[str, Any]:
    return {"avg_at_k": score.value, "low": score.low, "high": score.high, "questions": score.questions}

"""What an evaluation records: every sample with its verdict, question by question."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int64

from exgrpo_cli.base.statistics import Score, avg_at_k, pass_at_k_score, pass_at_ks
from exgrpo_cli.base.types import Question, StopReason, Verdict

Options = Mapping[str, tuple[str, ...] | None]
"""Option texts of multiple-choice questions, A first, by question id; other questions have None or are not there."""


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
    """Sum of the tokens' log-probs in nats as the engine computed them; None where it does not tell."""
    verdict: Verdict


@dataclass(frozen=True, kw_only=True, slots=True)
class QuestionRecord:
    """A finished question: all of its samples, in the order of their members."""

    question: Question
    samples: tuple[Sample, ...]

    @property
    def num_correct(self) -> int:
        """Samples that are correct."""
        return sum(sample.verdict is Verdict.CORRECT for sample in self.samples)

    @property
    def pass_rate(self) -> float:
        """Their share, 0 to 1."""
        return self.num_correct / len(self.samples)


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """Finished questions, in the order they were given."""

    records: tuple[QuestionRecord, ...]
    samples: int
    """Samples per question."""

    @property
    def correct(self) -> Int64[np.ndarray, " questions"]:
        """Correct samples per question."""
        return np.array([record.num_correct for record in self.records], dtype=np.int64)

    def score(self, seed: int = 0) -> Score:
        """avg@k with its 95 % interval; `seed` is the bootstrap's."""
        return avg_at_k(self.correct, self.samples, np.random.default_rng(seed))

    def pass_at_k(self, seed: int = 0) -> dict[int, Score]:
        """pass@k with its 95 % interval for k = 1, 2, 4, ... up to the number of samples; `seed` is the bootstrap's."""
        return {
            k: pass_at_k_score(self.correct, self.samples, k, np.random.default_rng(seed))
            for k in pass_at_ks(self.samples)
        }

    @property
    def all_samples(self) -> list[Sample]:
        """Samples of all questions, question by question."""
        return [sample for record in self.records for sample in record.samples]

    @property
    def num_tokens(self) -> int:
        """Tokens of all samples together."""
        return sum(sample.num_tokens for sample in self.all_samples)

    @property
    def mean_tokens(self) -> float:
        """Mean response length in tokens."""
        return self.num_tokens / len(self.all_samples)

    @property
    def share_clipped(self) -> float:
        """Share of samples cut off at the token limit."""
        samples = self.all_samples
        return sum(sample.stop_reason is StopReason.LENGTH for sample in samples) / len(samples)

    @property
    def verdict_counts(self) -> dict[str, int]:
        """Samples per verdict, every verdict named."""
        counts = Counter(sample.verdict for sample in self.all_samples)
        return {verdict.value: counts[verdict] for verdict in Verdict}

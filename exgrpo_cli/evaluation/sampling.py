"""Sampling and grading of questions, the one path that validation and evaluation share, and the record of it.

An evaluation needs text, whoever sampled it: a Generator in this process or a server. Responses are graded while others
are still being sampled; a question is handed over as soon as its last verdict is in.
"""

import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from jaxtyping import Int64

from exgrpo_cli.base import statistics
from exgrpo_cli.base.types import AnswerFormat, Grade, Question, SamplingParams, StopReason, Verdict, rollout_seed
from exgrpo_cli.config import names, sections
from exgrpo_cli.grading import GradingItem, GradingPool, verifiers

BOOTSTRAP_SEED = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Response:
    """One sampled response as text."""

    text: str
    """All of it, thinking included, without the EOS."""
    num_tokens: int
    stop_reason: StopReason
    logprob: float | None
    """Sum over its tokens in nats as the engine computed it; None where it gives none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample(Response):
    """A response to an evaluated question, with its place and its verdict."""

    member: int
    seed: int
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

    def score(self) -> statistics.Score:
        """avg@k with its 95 % interval."""
        return statistics.avg_at_k(self.correct, self.samples, np.random.default_rng(BOOTSTRAP_SEED))

    def pass_at_k(self) -> dict[str, dict[str, float]]:
        """{k: {`value`, `low`, `high`}} of pass@k for k = 1, 2, 4, ... up to the samples, with 95 % intervals."""
        scores = {
            k: statistics.pass_at_k_score(self.correct, self.samples, k, np.random.default_rng(BOOTSTRAP_SEED))
            for k in statistics.pass_at_ks(self.samples)
        }
        return {str(k): {"value": at.value, "low": at.low, "high": at.high} for k, at in scores.items()}

    def with_verdicts(self, verdicts: Sequence[Verdict]) -> "Evaluation":
        """The same samples with other verdicts, in the order of `all_samples`."""
        left, records = iter(verdicts), []
        for record in self.records:
            samples = tuple(replace(sample, verdict=next(left)) for sample in record.samples)
            records.append(replace(record, samples=samples))
        return Evaluation(records=tuple(records))

    def figures(self) -> dict[str, Any]:
        """The numbers of `results.json`: avg@k with its interval, pass@k, lengths and counts."""
        score, verdicts = self.score(), Counter(sample.verdict for sample in self.all_samples)
        return {
            "avg_at_k": score.value,
            "low": score.low,
            "high": score.high,
            "questions": score.questions,
            "k": self.samples,
            "pass_at_k": self.pass_at_k(),
            "smallest_detectable_difference": statistics.smallest_detectable_difference(self.correct, self.samples),
            "mean_tokens": self.mean_tokens,
            "share_clipped": self.share_clipped,
            "verdicts": {verdict.value: verdicts[verdict] for verdict in Verdict},
            "interval": self._interval_method(),
        }

    def _interval_method(self) -> str:
        if self.samples == 1:
            return "95 %, Wilson"
        if self.correct.min() == self.correct.max():
            return "95 %, Wilson over questions (all have the same count)"
        return f"95 %, bootstrap over questions, {statistics.RESAMPLES} resamples, seed {BOOTSTRAP_SEED}"


OnResponse = Callable[[int, int, Response], None]
"""(index of the request, index of the seed, response), called from the thread that asked."""
Respond = Callable[[Sequence[tuple[str, tuple[int, ...]]], SamplingParams, OnResponse], None]
"""Anything that answers questions in text: of each (question id, seeds) it samples one response per seed, and hands
each over as it ends, in any order."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """A benchmark's questions with the prompts of one model, ready to be sampled."""

    records: tuple[QuestionRecord, ...]
    """With the prompts that the model sees."""
    template: str
    answer_format: AnswerFormat
    max_tokens: int
    """Response limit in tokens, EOS included: the protocol's, or what the model's window leaves of the preset's."""
    open: Callable[[], Respond]
    """Opens whoever answers: loading a model waits until a question is left to ask."""


def sample_seeds(seed: int, question_id: str, samples: int) -> tuple[int, ...]:
    """The seeds of a question's samples; more samples extend them.

    They depend on `seed` and the question's id alone: whichever questions are evaluated with it, at whatever point of a
    run, it is sampled with the same random numbers.
    """
    return tuple(rollout_seed(seed, question_id, 0, member) for member in range(samples))


def sample_and_grade(
    questions: Sequence[QuestionRecord],
    respond: Respond,
    *,
    pool: GradingPool,
    answer_format: AnswerFormat,
    params: SamplingParams,
    samples: int,
    seed: int,
    on_record: Callable[[QuestionRecord], None] = lambda record: None,
    on_sampled: Callable[[int], None] = lambda done: None,
) -> Evaluation:
    """Ask every question for `samples` responses and grade them.

    `on_record` gets each question's finished record once, in the order in which questions finish; `on_sampled` the
    number of responses so far, as each one ends.
    """
    requests = [(record.question.id, sample_seeds(seed, record.question.id, samples)) for record in questions]
    graded: dict[int, dict[int, tuple[Response, Future[Grade]]]] = defaultdict(dict)
    sampled: dict[int, dict[int, tuple[Response, Future[Grade]]]] = {}
    num_sampled = itertools.count(1)
    finished: dict[int, QuestionRecord] = {}

    def take(index: int, member: int, response: Response) -> None:
        on_sampled(next(num_sampled))
        # A finished response goes to the grader at once.
        item = questions[index].grading_item(response.text, response.stop_reason, answer_format)
        graded[index][member] = (response, pool.submit(item))
        if len(graded[index]) == samples:
            sampled[index] = graded.pop(index)
        hand_over(wait=False)

    def hand_over(*, wait: bool) -> None:
        """Pass on the sampled questions whose verdicts are in; with `wait`, all sampled ones."""
        ready = [i for i, answers in sampled.items() if wait or all(grade.done() for _, grade in answers.values())]
        for index in ready:
            # Out of these first: `on_record` may raise, and this is then called again for what is left.
            responses = sampled.pop(index)
            taken = []
            for member, own_seed in enumerate(requests[index][1]):
                response, grade = responses[member]
                verdict = grade.result().verdict
                taken.append(Sample(member=member, seed=own_seed, verdict=verdict, **asdict(response)))
            finished[index] = replace(questions[index], samples=tuple(taken))
            on_record(finished[index])

    try:
        respond(requests, params, take)
    finally:
        # When the source fails or the user stops it, what has been sampled to the end is still worth its verdicts.
        hand_over(wait=True)
    missing = len(questions) - len(finished)
    assert not missing, f"{missing} questions were not sampled to the end"
    return Evaluation(records=tuple(finished[index] for index in range(len(questions))))


def open_pool(grader: str) -> GradingPool:
    """The grading workers of an evaluation: one per core this process may use, up to eight.

    Raises InputError for a grader that is not there.
    """
    sections.require_known("--grader", grader, (*names.GRADERS, names.PREFIX))
    return GradingPool(sections.run.GradingSettings(grader=grader))


def graders_beside(grader: str, questions: Iterable[Question]) -> tuple[str, ...]:
    """Graders that stand beside `grader` unasked: `oat` beside `math`, since the paper's scores are Oat's.

    None where questions bring verifiers. Such a gold is one right answer of many: held against it alone, others are
    wrong.
    """
    has_own = any(verifiers.verifier_of(question.metadata) is not None for question in questions)
    return ("oat",) if grader == "math" and not has_own else ()


def regrade(
    evaluation: Evaluation, answer_format: AnswerFormat, pool: GradingPool, *, grader: str = "", late_only: bool = False
) -> list[Verdict]:
    """Verdicts of the pool's grader, or of another that it has, in the order of `all_samples`.

    What times out is graded once more, one after the other and with more time; with `late_only` that is all that is
    done, and the other samples keep their verdicts.
    """
    asked = ((record, sample) for record in evaluation.records for sample in record.samples)
    items = [record.grading_item(sample.text, sample.stop_reason, answer_format) for record, sample in asked]
    verdicts = [sample.verdict for sample in evaluation.all_samples] if late_only else pool.grade(items, grader=grader)
    late = [place for place, verdict in enumerate(verdicts) if verdict is Verdict.TIMEOUT]
    for place, verdict in zip(late, pool.try_again([items[place] for place in late], grader=grader), strict=True):
        verdicts[place] = verdict
    return verdicts

"""Sampling and grading of questions, the one path that validation and evaluation share.

Responses are graded while others are still being sampled; a question is handed over as soon as its last verdict is in.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future

import numpy as np
from jaxtyping import Int32

from exgrpo_cli.base.seeds import rollout_seed
from exgrpo_cli.base.types import AnswerFormat, Question, SamplingParams, StopReason, Verdict
from exgrpo_cli.engines.protocols import Generator
from exgrpo_cli.evaluation.asking.responses import GeneratorSource, Response, ResponseRequest, ResponseSource
from exgrpo_cli.evaluation.results.records import Evaluation, Options, QuestionRecord, Sample
from exgrpo_cli.grading import GradingItem, GradingPool
from exgrpo_cli.questions.question_file.choices import options_of

OnResult = Callable[[QuestionRecord], None]


def evaluate_questions(
    *,
    questions: Sequence[Question],
    prompts: Sequence[Int32[np.ndarray, " _"]],
    generator: Generator,
    decode: Callable[[np.ndarray], str],
    pool: GradingPool,
    answer_format: AnswerFormat,
    params: SamplingParams,
    samples: int,
    seed: int,
    on_result: OnResult | None = None,
) -> Evaluation:
    """Sample `samples` rollouts of every question with a Generator and grade them.

    `prompts[i]` are the token ids of questions[i] and `decode` turns response ids into text without the EOS. A
    question's seeds depend on `seed` and its id alone: whichever questions are evaluated with it, at whatever point
    of a run, it is sampled with the same random numbers.
    """
    prompt_ids = {question.id: ids for question, ids in zip(questions, prompts, strict=True)}
    source = GeneratorSource(generator=generator, decode=decode, prompt_ids=prompt_ids)
    options = {question.id: found for question in questions if (found := options_of(question)) is not None}
    return evaluate_source(
        questions=questions,
        source=source,
        pool=pool,
        answer_format=answer_format,
        params=params,
        samples=samples,
        seed=seed,
        options=options,
        on_result=on_result,
    )


def evaluate_source(
    *,
    questions: Sequence[Question],
    source: ResponseSource,
    pool: GradingPool,
    answer_format: AnswerFormat,
    params: SamplingParams,
    samples: int,
    seed: int,
    options: Options | None = None,
    on_result: OnResult | None = None,
) -> Evaluation:
    """Sample `samples` responses of every question from any source of text and grade them.

    `on_result` gets each question's record once, in the order in which questions finish.
    """
    requests = [
        ResponseRequest(question_id=question.id, seeds=sample_seeds(seed, question.id, samples))
        for question in questions
    ]
    collector = _Collector(requests, questions, pool, answer_format, options or {}, on_result or (lambda record: None))
    try:
        source.respond(requests, params, collector.take)
    finally:
        # When the source fails or the user stops it, what has been sampled to the end is still worth its verdicts.
        collector.hand_over(wait=True)
    return Evaluation(records=collector.records(), samples=samples)


def sample_seeds(seed: int, question_id: str, samples: int) -> tuple[int, ...]:
    """The seeds of a question's samples; more samples extend them."""
    return tuple(rollout_seed(seed, question_id, 0, member) for member in range(samples))


class _Collector:
    """Brings responses and their verdicts together, question by question."""

    def __init__(
        self,
        requests: Sequence[ResponseRequest],
        questions: Sequence[Question],
        pool: GradingPool,
        answer_format: AnswerFormat,
        options: Options,
        on_result: OnResult,
    ) -> None:
        self._requests = requests
        self._questions = questions
        self._pool = pool
        self._answer_format = answer_format
        self._options = options
        self._on_result = on_result
        self._graded: list[dict[int, tuple[Response, Future[Verdict]]]] = [{} for _ in requests]
        self._sampled: list[int] = []
        self._records: dict[int, QuestionRecord] = {}

    def take(self, index: int, member: int, response: Response) -> None:
        """A finished response: it goes to the grader at once."""
        question = self._questions[index]
        item = GradingItem(
            gold=question.answer,
            response=response.text,
            finished=response.stop_reason is StopReason.EOS,
            answer_format=self._answer_format,
            options=self._options.get(question.id),
            metadata=question.metadata,
        )
        self._graded[index][member] = (response, self._pool.submit(item))
        if len(self._graded[index]) == len(self._requests[index].seeds):
            self._sampled.append(index)
        self.hand_over(wait=False)

    def records(self) -> tuple[QuestionRecord, ...]:
        """All records, in the order of the questions."""
        missing = len(self._requests) - len(self._records)
        assert not missing, f"{missing} questions were not sampled to the end"
        return tuple(self._records[index] for index in range(len(self._requests)))

    def hand_over(self, *, wait: bool) -> None:
        """Pass on the sampled questions whose verdicts are in; with `wait`, all sampled ones."""
        ready = [i for i in self._sampled if wait or all(verdict.done() for _, verdict in self._graded[i].values())]
        for index in ready:
            # Out of the list first: `on_result` may raise, and this is then called again for what is left.
            self._sampled.remove(index)
            self._records[index] = self._record(index)
            self._on_result(self._records[index])

    def _record(self, index: int) -> QuestionRecord:
        graded, self._graded[index] = self._graded[index], {}
        samples = (
            Sample(
                member=member,
                seed=seed,
                text=graded[member][0].text,
                num_tokens=graded[member][0].num_tokens,
                stop_reason=graded[member][0].stop_reason,
                logprob=graded[member][0].logprob,
                verdict=graded[member][1].result(),
            )
            for member, seed in enumerate(self._requests[index].seeds)
        )
        return QuestionRecord(question=self._questions[index], samples=tuple(samples))

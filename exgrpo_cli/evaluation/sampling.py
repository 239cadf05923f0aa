"""Sampling and grading of questions, the one path that validation and evaluation share.

An evaluation needs text, whoever sampled it: a Generator in this process or a server. Responses are graded while others
are still being sampled; a question is handed over as soon as its last verdict is in.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, replace

from exgrpo_cli.base.types import AnswerFormat, SamplingParams, StopReason, Verdict, rollout_seed
from exgrpo_cli.evaluation.records import Evaluation, QuestionRecord, Sample
from exgrpo_cli.grading import GradingPool


@dataclass(frozen=True, kw_only=True, slots=True)
class Response:
    """One sampled response as text."""

    text: str
    """Without the EOS."""
    num_tokens: int
    stop_reason: StopReason
    logprob: float | None
    """Sum over its tokens in nats; None where the engine gives none."""


OnResponse = Callable[[int, int, Response], None]
"""(index of the request, index of the seed, response), called from the thread that asked."""
Respond = Callable[[Sequence[tuple[str, tuple[int, ...]]], SamplingParams, OnResponse], None]
"""Anything that answers questions in text: of each (question id, seeds) it samples one response per seed, and hands
each over as it ends, in any order."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """A benchmark's questions with the prompts of one model, ready to be sampled."""

    asked: tuple[QuestionRecord, ...]
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
) -> Evaluation:
    """Ask every question for `samples` responses and grade them.

    `on_record` gets each question's finished record once, in the order in which questions finish.
    """
    requests = [(asked.question.id, sample_seeds(seed, asked.question.id, samples)) for asked in questions]
    graded: list[dict[int, tuple[Response, Future[Verdict]]]] = [{} for _ in questions]
    sampled: list[int] = []
    finished: dict[int, QuestionRecord] = {}

    def take(index: int, member: int, response: Response) -> None:
        # A finished response goes to the grader at once.
        item = questions[index].grading_item(response.text, response.stop_reason, answer_format)
        graded[index][member] = (response, pool.submit(item))
        if len(graded[index]) == samples:
            sampled.append(index)
        hand_over(wait=False)

    def hand_over(*, wait: bool) -> None:
        """Pass on the sampled questions whose verdicts are in; with `wait`, all sampled ones."""
        ready = [i for i in sampled if wait or all(verdict.done() for _, verdict in graded[i].values())]
        for index in ready:
            # Out of the list first: `on_record` may raise, and this is then called again for what is left.
            sampled.remove(index)
            own, graded[index] = graded[index], {}
            finished[index] = replace(
                questions[index],
                samples=tuple(
                    Sample(member=member, seed=seed, verdict=own[member][1].result(), **asdict(own[member][0]))
                    for member, seed in enumerate(requests[index][1])
                ),
            )
            on_record(finished[index])

    try:
        respond(requests, params, take)
    finally:
        # When the source fails or the user stops it, what has been sampled to the end is still worth its verdicts.
        hand_over(wait=True)
    missing = len(questions) - len(finished)
    assert not missing, f"{missing} questions were not sampled to the end"
    return Evaluation(records=tuple(finished[index] for index in range(len(questions))))

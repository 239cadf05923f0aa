"""Stored samples graded again: by the same grader in another version, or by a second one."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from exgrpo_cli.base.types import AnswerFormat, Question, StopReason, Verdict
from exgrpo_cli.evaluation.results.records import Options, QuestionRecord
from exgrpo_cli.evaluation.results.stamp import Stamp
from exgrpo_cli.grading import GradingItem, GradingPool
from exgrpo_cli.grading.verifiers import verifier_of

DISAGREEMENTS_FILE = "disagreements.jsonl"
"""In a results folder: the samples that graders reward unlike."""
_BESIDE = {"math": ("oat",)}
"""Graders that always stand beside another one: the paper's scores are Oat's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Disagreement:
    """A sample on which two graders differ in reward."""

    question_id: str
    member: int
    gold: str
    text: str
    verdicts: Mapping[str, Verdict]
    """Grader's name to what it said."""

    def to_json(self) -> dict[str, Any]:
        """A line of `disagreements.jsonl`."""
        return {
            "question_id": self.question_id,
            "member": self.member,
            "gold": self.gold,
            "verdicts": {name: verdict.value for name, verdict in self.verdicts.items()},
            "text": self.text,
        }


def graders_beside(grader: str, questions: Iterable[Question]) -> tuple[str, ...]:
    """Graders that stand beside `grader` unasked; none where questions bring verifiers, which only `grader` asks.

    Such a question's gold is one right answer of many: held against it alone, others are wrong.
    """
    has_own = any(verifier_of(question.metadata) is not None for question in questions)
    return () if has_own else _BESIDE.get(grader, ())


def stamped_format(stamp: Stamp) -> AnswerFormat:
    """Where the protocol says answers are to be looked for."""
    prompt = stamp["prompt"]
    return AnswerFormat(
        opens_think=prompt["opens_think"], requires_box=prompt["requires_box"], require_eos=prompt["requires_eos"]
    )


def regrade(
    records: Sequence[QuestionRecord],
    options: Options,
    answer_format: AnswerFormat,
    pool: GradingPool,
    *,
    grader: str = "",
) -> list[QuestionRecord]:
    """The same samples with the verdicts of the pool's grader, or of another that it has; time-outs tried again."""
    items = _items(records, options, answer_format)
    return retry_timeouts(_with(records, pool.grade(items, grader=grader)), options, answer_format, pool, grader=grader)


def retry_timeouts(
    records: Sequence[QuestionRecord],
    options: Options,
    answer_format: AnswerFormat,
    pool: GradingPool,
    *,
    grader: str = "",
) -> list[QuestionRecord]:
    """The same samples; those that timed out are graded once more, one after the other and with more time."""
    verdicts = [sample.verdict for record in records for sample in record.samples]
    late = [place for place, verdict in enumerate(verdicts) if verdict is Verdict.TIMEOUT]
    if late:
        items = _items(records, options, answer_format)
        for place, verdict in zip(late, pool.try_again([items[place] for place in late], grader=grader), strict=True):
            verdicts[place] = verdict
    return _with(records, verdicts)


def _with(records: Sequence[QuestionRecord], verdicts: Iterable[Verdict]) -> list[QuestionRecord]:
    verdict = iter(verdicts)
    return [
        replace(record, samples=tuple(replace(sample, verdict=next(verdict)) for sample in record.samples))
        for record in records
    ]


def _items(records: Sequence[QuestionRecord], options: Options, answer_format: AnswerFormat) -> list[GradingItem]:
    return [
        GradingItem(
            gold=record.question.answer,
            response=sample.text,
            finished=sample.stop_reason is StopReason.EOS,
            answer_format=answer_format,
            options=options.get(record.question.id),
            metadata=record.question.metadata,
        )
        for record in records
        for sample in record.samples
    ]


def disagreements(
    first_name: str, first: Sequence[QuestionRecord], second_name: str, second: Sequence[QuestionRecord]
) -> list[Disagreement]:
    """Samples that one grader rewards and the other does not."""
    return [
        Disagreement(
            question_id=one.question.id,
            member=a.member,
            gold=one.question.answer,
            text=a.text,
            verdicts={first_name: a.verdict, second_name: b.verdict},
        )
        for one, other in zip(first, second, strict=True)
        for a, b in zip(one.samples, other.samples, strict=True)
        if a.verdict.reward != b.verdict.reward
    ]

"""maj@k: the share of questions whose most frequent answer is right, answers grouped by mathematical equivalence."""

from collections.abc import Sequence

import numpy as np

from exgrpo_cli.base.statistics import majority_share
from exgrpo_cli.base.types import AnswerFormat, StopReason, Verdict
from exgrpo_cli.evaluation.results.records import Options, QuestionRecord
from exgrpo_cli.grading import GradingPool, graded_part

_CORRECT = 0


def majority_at_k(
    records: Sequence[QuestionRecord],
    answer_format: AnswerFormat,
    pool: GradingPool,
    options: Options,
) -> float:
    """Mean over questions of whether the largest group of equal answers is the correct one; ties count by share.

    Correct samples are one group: all equal the gold. Wrong answers, boxed or not, are compared with each other by the
    grader. Samples without an answer do not vote. `options` are those of multiple-choice questions, by question id.
    """
    return float(
        np.mean([_majority_share(record, answer_format, pool, options.get(record.question.id)) for record in records])
    )


def _majority_share(
    record: QuestionRecord, answer_format: AnswerFormat, pool: GradingPool, options: tuple[str, ...] | None
) -> float:
    wrong = [sample for sample in record.samples if sample.verdict is Verdict.WRONG]
    # Where no sample is correct, or the correct ones outnumber all others together, grouping changes nothing.
    if record.num_correct == 0 or record.num_correct > len(wrong):
        return float(record.num_correct > 0)
    answers = [
        graded_part(sample.text, finished=sample.stop_reason is StopReason.EOS, answer_format=answer_format) or ""
        for sample in wrong
    ]
    groups = _group(answers, pool, options)
    return majority_share(np.array([_CORRECT] * record.num_correct + groups), _CORRECT)


def _group(answers: Sequence[str], pool: GradingPool, options: tuple[str, ...] | None) -> list[int]:
    """A group number from 1 for each answer; equivalent answers share theirs."""
    representatives: dict[int, str] = {}
    known: dict[str, int] = {}
    groups = []
    for number, answer in enumerate(answers, start=1):
        if answer not in known:
            same = pool.same_answer([(earlier, answer) for earlier in representatives.values()], options)
            equals = (group for group, is_same in zip(representatives, same, strict=True) if is_same)
            known[answer] = next(equals, number)
            representatives.setdefault(known[answer], answer)
        groups.append(known[answer])
    return groups

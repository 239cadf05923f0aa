"""maj@k: the share of questions whose most frequent answer is right, answers grouped by mathematical equivalence."""

from collections.abc import Sequence

import numpy as np

from exgrpo_cli.evaluation.records import QuestionRecord
from exgrpo_cli.evaluation.statistics import majority_share
from exgrpo_cli.grading import GradingItem, GradingPool, answer_text, last_boxed
from exgrpo_cli.types import AnswerFormat, StopReason, Verdict

_CORRECT = 0
_GRADED_WHOLE = AnswerFormat(opens_think=False, requires_box=True, require_eos=False)


def majority_at_k(records: Sequence[QuestionRecord], answer_format: AnswerFormat, pool: GradingPool) -> float:
    """Mean over questions of whether the largest group of equal answers is the correct one; ties count by share.

    Correct samples are one group: all equal the gold. Wrong answers are grouped by comparing boxed ones with each other
    through the grader; a wrong answer without a box stands alone. Samples without an answer do not vote.
    """
    return float(np.mean([_majority_share(record, answer_format, pool) for record in records]))


def _majority_share(record: QuestionRecord, answer_format: AnswerFormat, pool: GradingPool) -> float:
    wrong = [sample for sample in record.samples if sample.verdict is Verdict.WRONG]
    # Where no sample is correct, or the correct ones outnumber all others together, grouping changes nothing.
    if record.num_correct == 0 or record.num_correct > len(wrong):
        return float(record.num_correct > 0)
    answers = [
        answer_text(sample.text, finished=sample.stop_reason is StopReason.EOS, answer_format=answer_format)
        for sample in wrong
    ]
    groups = _group([last_boxed(answer) if answer else None for answer in answers], pool)
    return majority_share(np.array([_CORRECT] * record.num_correct + groups), _CORRECT)


def _group(answers: Sequence[str | None], pool: GradingPool) -> list[int]:
    """A group number from 1 for each answer; equivalent answers share theirs, a missing answer has its own."""
    representatives: dict[int, str] = {}
    known: dict[str, int] = {}
    groups = []
    for number, answer in enumerate(answers, start=1):
        if answer is None:
            groups.append(number)
            continue
        if answer not in known:
            known[answer] = _equivalent(answer, representatives, pool) or number
            representatives.setdefault(known[answer], answer)
        groups.append(known[answer])
    return groups


def _equivalent(answer: str, representatives: dict[int, str], pool: GradingPool) -> int | None:
    items = [
        GradingItem(gold=gold, response=f"\\boxed{{{answer}}}", finished=True, answer_format=_GRADED_WHOLE)
        for gold in representatives.values()
    ]
    verdicts = pool.grade(items)
    for number, verdict in zip(representatives, verdicts, strict=True):
        if verdict is Verdict.CORRECT:
            return number
    return None

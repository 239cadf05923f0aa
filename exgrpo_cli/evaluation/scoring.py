"""Scores of a finished results folder: avg@k, maj@k, those of second graders, and the files people read."""

import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np

from exgrpo_cli.base.files import write_json, write_json_lines, write_whole
from exgrpo_cli.base.statistics import majority_share
from exgrpo_cli.base.types import AnswerFormat, Question, StopReason, Verdict
from exgrpo_cli.config.sections.run import GradingSettings
from exgrpo_cli.evaluation.folder import ResultsFolder
from exgrpo_cli.evaluation.records import Evaluation, QuestionRecord
from exgrpo_cli.evaluation.stamp import grader_version, stamped_format
from exgrpo_cli.grading import GradingPool, graded_part
from exgrpo_cli.grading.verifiers import verifier_of

MOST_WORKERS = 8
DISAGREEMENTS_FILE = "disagreements.jsonl"
"""In a results folder: the samples that graders reward unlike."""
_BESIDE = {"math": ("oat",)}
"""Graders that always stand beside another one: the paper's scores are Oat's."""
_CORRECT = 0
_FAILURES = {
    Verdict.TIMEOUT: "timed out",
    Verdict.CRASHED: "crashed the verifier",
    Verdict.UNPARSABLE_GOLD: "have a gold that does not parse",
}


def open_pool(grader: str) -> GradingPool:
    """The grading workers of an evaluation: one per core this process may use, up to eight.

    Raises InputError for a grader that is not there.
    """
    return GradingPool(GradingSettings(grader=grader, workers=min(MOST_WORKERS, len(os.sched_getaffinity(0)))))


def graders_beside(grader: str, questions: Iterable[Question]) -> tuple[str, ...]:
    """Graders that stand beside `grader` unasked; none where questions bring verifiers, which only `grader` uses.

    Such a question's gold is one right answer of many: held against it alone, others are wrong.
    """
    has_own = any(verifier_of(question.metadata) is not None for question in questions)
    return () if has_own else _BESIDE.get(grader, ())


def regrade(
    evaluation: Evaluation, answer_format: AnswerFormat, pool: GradingPool, *, grader: str = "", late_only: bool = False
) -> list[Verdict]:
    """Verdicts of the pool's grader, or of another that it has, in the order of `all_samples`.

    What times out is graded once more, one after the other and with more time; with `late_only` that is all that is
    done, and the other samples keep their verdicts.
    """
    items = [
        record.grading_item(sample.text, sample.stop_reason, answer_format)
        for record in evaluation.records
        for sample in record.samples
    ]
    verdicts = [sample.verdict for sample in evaluation.all_samples] if late_only else pool.grade(items, grader=grader)
    late = [place for place, verdict in enumerate(verdicts) if verdict is Verdict.TIMEOUT]
    for place, verdict in zip(late, pool.try_again([items[place] for place in late], grader=grader), strict=True):
        verdicts[place] = verdict
    return verdicts


def score_folder(folder: ResultsFolder, pool: GradingPool, second_graders: Sequence[str] = ()) -> dict[str, Any]:
    """Write `results.json`, `samples.parquet` and, with second graders, `disagreements.jsonl`; return the results.

    `second_graders` come on top of those that always stand beside the protocol's. One that the pool has uses its
    workers; one of the user's own gets as many of its own. Raises InputError while questions are unfinished.
    """
    stamp, evaluation = folder.stamp, folder.evaluation()
    own, answer_format = stamp["grader"]["name"], stamped_format(stamp)
    if any(sample.verdict is Verdict.TIMEOUT for sample in evaluation.all_samples):
        evaluation = evaluation.with_verdicts(regrade(evaluation, answer_format, pool, late_only=True))
        folder.rewrite(evaluation.records)
    result = evaluation.figures()
    if evaluation.samples > 1:
        result["maj_at_k"] = majority_at_k(evaluation.records, answer_format, pool)
    beside = graders_beside(own, (record.question for record in evaluation.records))
    by_second: dict[str, list[Verdict]] = {}
    apart: list[dict[str, Any]] = []
    for grader in dict.fromkeys((*beside, *second_graders)):
        with nullcontext(pool) if pool.has(grader) else open_pool(grader) as second_pool:
            by_second[grader] = regrade(evaluation, answer_format, second_pool, grader=grader)
        figures = evaluation.with_verdicts(by_second[grader]).figures()
        kept = {key: figures[key] for key in ("avg_at_k", "low", "high", "verdicts")}
        rows = _disagreements(evaluation, own, grader, by_second[grader])
        result.setdefault("second_graders", {})[grader] = kept | {
            "version": grader_version(grader),
            "disagreements": len(rows),
        }
        apart += rows
    if by_second:
        write_json_lines(folder.path / DISAGREEMENTS_FILE, apart)
    result["protocol"] = stamp
    write_samples(folder.path / "samples.parquet", evaluation, by_second)
    write_json(folder.path / "results.json", result)
    return result


def rescore(folder: ResultsFolder, pool: GradingPool) -> None:
    """Grade all stored samples again with the protocol's grader as it is today."""
    stamp, evaluation = folder.stamp, Evaluation(records=tuple(folder.records().values()))
    folder.rewrite(evaluation.with_verdicts(regrade(evaluation, stamped_format(stamp), pool)).records)
    stamp["grader"]["version"] = grader_version(stamp["grader"]["name"])
    write_json(folder.path / "protocol.json", stamp)


def ungraded(result: Mapping[str, Any]) -> str:
    """Failures of the verifier, to stand beside the score, in which it counts as wrong; empty where it never did."""
    verdicts = result["verdicts"]
    counts = [f"{verdicts[verdict]} {text}" for verdict, text in _FAILURES.items() if verdicts.get(verdict)]
    return f"counted as wrong: {', '.join(counts)}" if counts else ""


def _disagreements(evaluation: Evaluation, own: str, name: str, verdicts: Sequence[Verdict]) -> list[dict[str, Any]]:
    """Samples that the protocol's grader `own` rewards and `name` does not, or the other way round."""
    samples = ((record.question, sample) for record in evaluation.records for sample in record.samples)
    return [
        {
            "question_id": question.id,
            "member": sample.member,
            "gold": question.answer,
            "verdicts": {own: sample.verdict.value, name: verdict.value},
            "text": sample.text,
        }
        for (question, sample), verdict in zip(samples, verdicts, strict=True)
        if sample.verdict.reward != verdict.reward
    ]


def majority_at_k(records: Sequence[QuestionRecord], answer_format: AnswerFormat, pool: GradingPool) -> float:
    """Mean over questions of whether the largest group of equal answers is the correct one; ties count by share.

    Correct samples are one group: all equal the gold. Wrong answers, boxed or not, are compared with each other by the
    grader. Samples without an answer do not vote.
    """
    return float(np.mean([_majority_share(record, answer_format, pool) for record in records]))


def _majority_share(record: QuestionRecord, answer_format: AnswerFormat, pool: GradingPool) -> float:
    wrong = [sample for sample in record.samples if sample.verdict is Verdict.WRONG]
    # Where no sample is correct, or the correct ones outnumber all others together, grouping changes nothing.
    if record.num_correct == 0 or record.num_correct > len(wrong):
        return float(record.num_correct > 0)
    representatives: dict[int, str] = {}
    known: dict[str, int] = {}
    groups = [_CORRECT] * record.num_correct
    for number, sample in enumerate(wrong, start=1):
        finished = sample.stop_reason is StopReason.EOS
        answer = graded_part(sample.text, finished=finished, answer_format=answer_format) or ""
        if answer not in known:
            same = pool.same_answer([(earlier, answer) for earlier in representatives.values()], record.options)
            equals = (group for group, is_same in zip(representatives, same, strict=True) if is_same)
            known[answer] = next(equals, number)
            representatives.setdefault(known[answer], answer)
        groups.append(known[answer])
    return majority_share(np.array(groups), _CORRECT)


def write_samples(path: Path, evaluation: Evaluation, by_second: Mapping[str, Sequence[Verdict]]) -> None:
    """One row per sample in the order of the questions, for notebooks; a second grader adds `verdict_<name>`."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    numbers = {"member": pa.int32(), "seed": pa.int64(), "tokens": pa.int32(), "logprob": pa.float64()}
    rows = []
    for record in evaluation.records:
        of_question = {"question_id": record.question.id, "prompt": record.prompt_text, "gold": record.question.answer}
        for sample in record.samples:
            own = {name: getattr(sample, name) for name in ("member", "seed", "text", "logprob")}
            ended = {"stop_reason": sample.stop_reason.value, "tokens": sample.num_tokens}
            rows.append(of_question | own | ended | {"verdict": sample.verdict.value, "level": record.question.level})
    columns = {name: pa.array([row[name] for row in rows], numbers.get(name, pa.string())) for name in rows[0]}
    for name, verdicts in by_second.items():
        columns[f"verdict_{name}"] = pa.array([verdict.value for verdict in verdicts], pa.string())
    write_whole(path, lambda file: pq.write_table(pa.table(columns), file, compression="zstd"))

"""From a finished results folder to its figures: score, maj@k, second graders, and the files people read."""

import os
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from exgrpo_cli.base.errors import InputError
from exgrpo_cli.base.files import write_json, write_json_lines, write_text
from exgrpo_cli.base.types import Verdict
from exgrpo_cli.config.sections.run import GradingSettings
from exgrpo_cli.evaluation.compare.paper_table import Rows, latex, markdown
from exgrpo_cli.evaluation.results.folder import ResultsFolder
from exgrpo_cli.evaluation.results.majority import majority_at_k
from exgrpo_cli.evaluation.results.metrics import summarise
from exgrpo_cli.evaluation.results.records import Evaluation, QuestionRecord
from exgrpo_cli.evaluation.results.regrade import (
    DISAGREEMENTS_FILE,
    Disagreement,
    disagreements,
    graders_beside,
    regrade,
    retry_timeouts,
    stamped_format,
)
from exgrpo_cli.evaluation.results.sample_table import write_samples
from exgrpo_cli.evaluation.results.stamp import Stamp, grader_version
from exgrpo_cli.grading import GradingPool

MOST_WORKERS = 8


def open_pool(grader: str) -> GradingPool:
    """The grading workers of an evaluation: one per core this process may use, up to eight.

    Raises InputError for a grader that is not there.
    """
    return GradingPool(GradingSettings(grader=grader, workers=min(MOST_WORKERS, len(os.sched_getaffinity(0)))))


def score_folder(folder: ResultsFolder, pool: GradingPool, second_graders: Sequence[str] = ()) -> dict[str, Any]:
    """Write `results.json`, `samples.parquet` and, with second graders, `disagreements.jsonl`; return the results.

    `second_graders` come on top of those that always stand beside the protocol's. One that the pool has uses its
    workers; one of the user's own gets as many of its own. Raises InputError while questions are unfinished.
    """
    stamp, asked, by_id = folder.stamp, folder.asked(), folder.records()
    if len(by_id) < len(asked):
        raise InputError(f"{folder.path} holds {len(by_id)} of {len(asked)} questions: finish the evaluation first.")
    records = [by_id[item.question.id] for item in asked]
    answer_format, options = stamped_format(stamp), {item.question.id: item.options for item in asked}
    if any(sample.verdict is Verdict.TIMEOUT for record in records for sample in record.samples):
        records = retry_timeouts(records, options, answer_format, pool)
        folder.rewrite(records)
    evaluation = Evaluation(records=tuple(records), samples=stamp["sampling"]["samples"])
    result = summarise(evaluation)
    if evaluation.samples > 1:
        result["maj_at_k"] = majority_at_k(records, answer_format, pool, options)
    seconds = {}
    beside = graders_beside(stamp["grader"]["name"], (record.question for record in records))
    for grader in dict.fromkeys((*beside, *second_graders)):
        with nullcontext(pool) if pool.has(grader) else open_pool(grader) as second_pool:
            seconds[grader] = regrade(records, options, answer_format, second_pool, grader=grader)
    differing = _disagreements(stamp, records, seconds)
    if seconds:
        result["second_graders"] = {
            name: _second(name, regraded, evaluation.samples, differing) for name, regraded in seconds.items()
        }
        write_json_lines(folder.path / DISAGREEMENTS_FILE, (item.to_json() for item in differing))
    result["protocol"] = stamp
    write_samples(folder.path / "samples.parquet", asked, records, seconds)
    write_json(folder.path / "results.json", result)
    return result


def rescore(folder: ResultsFolder, pool: GradingPool) -> None:
    """Grade all stored samples again with the protocol's grader as it is today."""
    stamp, records = folder.stamp, list(folder.records().values())
    options = {item.question.id: item.options for item in folder.asked()}
    folder.rewrite(regrade(records, options, stamped_format(stamp), pool))
    stamp["grader"]["version"] = grader_version(stamp["grader"]["name"])
    folder.restamp(stamp)


def write_tables(folder: Path, rows: Rows, footnote: str = "") -> None:
    """`table.md` and `table.tex` beside the results."""
    write_text(folder / "table.md", markdown(rows, footnote))
    write_text(folder / "table.tex", latex(rows, footnote))


def ungraded(result: Mapping[str, Any]) -> str:
    """What the verifier failed on, to stand beside the score, in which it counts as wrong; empty where it never did."""
    kinds = {
        Verdict.TIMEOUT: "timed out",
        Verdict.CRASHED: "crashed the verifier",
        Verdict.UNPARSABLE_GOLD: "have a gold that does not parse",
    }
    verdicts = result["verdicts"]
    counts = [f"{verdicts[verdict]} {text}" for verdict, text in kinds.items() if verdicts.get(verdict)]
    return f"counted as wrong: {', '.join(counts)}" if counts else ""


def _disagreements(
    stamp: Stamp, records: Sequence[QuestionRecord], seconds: dict[str, list[QuestionRecord]]
) -> list[Disagreement]:
    first = stamp["grader"]["name"]
    return [item for name, regraded in seconds.items() for item in disagreements(first, records, name, regraded)]


def _second(
    name: str, records: Sequence[QuestionRecord], samples: int, differing: Sequence[Disagreement]
) -> dict[str, Any]:
    result = summarise(Evaluation(records=tuple(records), samples=samples))
    kept = {key: result[key] for key in ("avg_at_k", "low", "high", "verdicts")}
    return {**kept, "version": grader_version(name), "disagreements": sum(name in item.verdicts for item in differing)}

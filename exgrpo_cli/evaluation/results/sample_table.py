"""`samples.parquet`: one row per sample, for notebooks."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from exgrpo_cli.base.files import write_whole
from exgrpo_cli.evaluation.results.folder import AskedQuestion
from exgrpo_cli.evaluation.results.records import QuestionRecord


def write_samples(
    path: Path,
    asked: Sequence[AskedQuestion],
    records: Sequence[QuestionRecord],
    second_verdicts: Mapping[str, Sequence[QuestionRecord]],
) -> None:
    """Write all samples in the order of the questions; a second grader adds a column `verdict_<name>`."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    prompts = {item.question.id: item.prompt_text for item in asked}
    rows: dict[str, list[Any]] = {
        "question_id": [record.question.id for record in records for _ in record.samples],
        "member": [sample.member for record in records for sample in record.samples],
        "seed": [sample.seed for record in records for sample in record.samples],
        "prompt": [prompts[record.question.id] for record in records for _ in record.samples],
        "text": [sample.text for record in records for sample in record.samples],
        "gold": [record.question.answer for record in records for _ in record.samples],
        "verdict": _verdicts(records),
        "tokens": [sample.num_tokens for record in records for sample in record.samples],
        "stop_reason": [sample.stop_reason.value for record in records for sample in record.samples],
        "logprob": [sample.logprob for record in records for sample in record.samples],
        "level": [record.question.level for record in records for _ in record.samples],
    }
    kinds = {name: pa.string() for name in rows} | {
        "member": pa.int32(),
        "seed": pa.int64(),
        "tokens": pa.int32(),
        "logprob": pa.float64(),
    }
    for name, regraded in second_verdicts.items():
        rows[f"verdict_{name}"] = _verdicts(regraded)
        kinds[f"verdict_{name}"] = pa.string()
    table = pa.table(rows, schema=pa.schema(list(kinds.items())))
    write_whole(path, lambda file: pq.write_table(table, file, compression="zstd"))


def _verdicts(records: Sequence[QuestionRecord]) -> list[str]:
    return [sample.verdict.value for record in records for sample in record.samples]

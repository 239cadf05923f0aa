"""Trajectories as rows that `datasets` and the hub's viewer show, and the ledger's bodies made from them again.

A published row is the ledger's row of `trajectories` with the question's text and answer, the decoded response, and the
body (token ids, behaviour log-probs) bit for bit, so that the bodies need not be stored twice.
"""

import warnings
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from exgrpo_cli.base.errors import InputError
from exgrpo_cli.ledger.parts import (
    batch_checksums,
    list_parts,
    part_path,
    schema_with_metadata,
    steps_of,
    write_bodies,
    write_parquet,
)
from exgrpo_cli.ledger.reader import LedgerReader, LedgerWarning
from exgrpo_cli.ledger.schemas import BODIES, EVENTS, SCHEMAS, TABLES, TRAJECTORIES
from exgrpo_cli.ledger.writer import IDENTITY_FILE
from exgrpo_cli.publishing.private import Private
from exgrpo_cli.show.record import LEDGER_FOLDER, QuestionText, question_texts, response_texts

ROWS = "trajectories"
"""Folder of the published rows."""
ROWS_PER_FILE = 50_000
BATCH = 1024
"""Rows in memory at once, and of a row group."""
SCHEMA = pa.schema(
    [
        *SCHEMAS[TRAJECTORIES],
        pa.field("question", pa.string()),
        pa.field("answer", pa.string()),
        pa.field("response", pa.string()),
        *list(SCHEMAS[BODIES])[1:],
    ]
)


def write_rows(run: Path, source: str, folder: Path, private: Private) -> int:
    """Write every trajectory of the run's ledger as rows under `folder`; returns how many there are.

    `source` is the backbone's, for its tokenizer. Raises InputError for a response or question that holds something
    private, and for a damaged ledger.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LedgerWarning)  # raised as an error of one line
        reader = LedgerReader(run / LEDGER_FOLDER)
    if reader.dropped:
        raise InputError(f"{run / LEDGER_FOLDER} is whole up to step {reader.last_step} only: {reader.dropped}.")
    table = reader.trajectories()
    folder.mkdir(parents=True)
    for number, begin in enumerate(range(0, len(table), ROWS_PER_FILE)):
        with pq.ParquetWriter(folder / f"train-{number:05d}.parquet", SCHEMA, compression="zstd") as file:
            for first in range(begin, min(begin + ROWS_PER_FILE, len(table)), BATCH):
                rows = table.slice(first, min(BATCH, begin + ROWS_PER_FILE - first))
                file.write_table(_joined(run, source, reader, rows, private))
    return len(table)


def _joined(run: Path, source: str, reader: LedgerReader, rows: pa.Table, private: Private) -> pa.Table:
    ids = rows.column("trajectory_id").to_pylist()
    owners = rows.column("question_id").to_pylist()
    questions = question_texts(run, sorted(set(owners)))
    responses = response_texts(run, source, ids)
    texts = [questions.get(owner, QuestionText()) for owner in owners]
    private.check_rows((f"{text.text}\n{text.answer}" for text in texts), "the questions")
    private.check_rows(responses.values(), "the responses")
    bodies = reader.bodies(ids)
    columns = dict(zip(rows.column_names, rows.columns, strict=True))
    columns |= {
        "question": pa.array([text.text or None for text in texts], pa.string()),
        "answer": pa.array([text.answer or None for text in texts], pa.string()),
        "response": pa.array([responses.get(trajectory_id) for trajectory_id in ids], pa.string()),
        "token_ids": pa.array([token_ids for token_ids, _ in bodies], pa.list_(pa.int32())),
        "behaviour_logprobs": pa.array([logprobs for _, logprobs in bodies], pa.list_(pa.float32())),
    }
    return pa.table(columns).cast(SCHEMA)


def write_tables(run: Path, folder: Path) -> list[str]:
    """Write each table of the run's ledger but the bodies as one part under `folder`; returns those that have rows.

    One part each, since `datasets` cannot read the parts of steps in which nothing happened.
    """
    reader = LedgerReader(run / LEDGER_FOLDER)
    tables = {name: reader.table(name) for name in TABLES if name != BODIES}
    first_step, _ = steps_of(list_parts(reader.folder, EVENTS)[0])
    totals = {name: len(tables[name if name != BODIES else TRAJECTORIES]) for name in TABLES}
    for name, rows in tables.items():
        path = part_path(folder, name, first_step, reader.last_step)
        if len(rows) or name == EVENTS:
            path.parent.mkdir(parents=True)
            with path.open("wb") as file:
                own_totals = totals if name == EVENTS else None
                write_parquet(file, rows, schema_with_metadata(name, reader.last_step, own_totals))
    (folder / IDENTITY_FILE).write_text(reader.identity.to_json(), encoding="utf-8")
    return [name for name, rows in tables.items() if len(rows)]


def restore_bodies(folder: Path, ledger: Path) -> None:
    """Write the bodies of the published rows under `folder` as the one part of `ledger`, where there are any."""
    files = sorted((folder / ROWS).glob("*.parquet"))
    if not files:
        return
    # One part of events, as `write_tables` makes it.
    [events] = list_parts(ledger, EVENTS)
    first_step, last_step = steps_of(events)
    path = part_path(ledger, BODIES, first_step, last_step)
    path.parent.mkdir(exist_ok=True)
    schema = schema_with_metadata(BODIES, last_step or 0)
    with path.open("wb") as file:
        write_bodies(file, ((batch, batch_checksums(batch)) for batch in _bodies(files)), schema)


def _bodies(files: list[Path]) -> Iterator[pa.RecordBatch]:
    for path in files:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(BATCH, columns=SCHEMAS[BODIES].names):
                yield from pa.Table.from_batches([batch]).cast(SCHEMAS[BODIES]).combine_chunks().to_batches()

"""One run's replay record in memory: its settings, step metrics, ledger tables as columns, and words.

Questions are numbered once for all tables, so that everything downstream is integer arithmetic. Axes: `trajectories`,
`scores` and `events` are the rows of the ledger's tables; `questions` are numbered in the order of `question_ids`.
"""

import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from jaxtyping import Int64

from exgrpo_cli.base.errors import InputError, first_line
from exgrpo_cli.base.files import MANIFEST, find_damage, read_json
from exgrpo_cli.config import layers, settings
from exgrpo_cli.ledger.columns import EventColumns, column, decode_events, encoded_words, flat, question_numbers
from exgrpo_cli.ledger.lives import VISITED, question_lives
from exgrpo_cli.ledger.reader import DamagedBytes, LedgerReader, LedgerWarning, reading
from exgrpo_cli.ledger.schemas import DRAWS, EVENTS, PREFIXES, REPLAYS, SCORES, TRAJECTORIES
from exgrpo_cli.runs.folder import CHECKSUMS_FILE, METRICS_FILE, POOL_FILE, RunMetrics, find_changes, read_metrics

LEDGER_FOLDER = "replay"
CONFIG_FILE = "config.toml"
QUESTIONS_FILE = Path("data") / "train.parquet"
TOKENIZER_FILE = "tokenizer.json"


COLUMNS = {
    TRAJECTORIES: "question_id trajectory_id group_id step_born weight_version k num_tokens entropy nll reward correct "
    "advantage priority",
    SCORES: "trajectory_id step weight_version entropy nll chosen",
    DRAWS: "step bucket num_members num_questions probability num_drawn",
    REPLAYS: "step unit_id priority probability weight drift headroom accepted",
    PREFIXES: "step num_tokens k num_members",
}
"""Columns of each table that are read."""

MOST_CELLS = 10**8
"""Steps times success counts that statistics are made of: arrays are as large as a run says it is."""
_LIMITS = {
    **dict.fromkeys(("k", "bucket", "num_members"), (-1, 2**15 - 1)),
    **dict.fromkeys(("num_questions", "num_drawn", "num_tokens"), (0, 2**31 - 1)),
}
"""Least and largest value of columns by which things are counted."""


class Columns(SimpleNamespace):
    """A table of the ledger as arrays by name: int64 (-1 for null), float64 (NaN for null) or bool."""


def table_rows(**columns: Sequence[Any] | np.ndarray) -> list[dict[str, Any]]:
    """Columns of one length as one mapping a row, in plain Python numbers."""
    lists = [column.tolist() if isinstance(column, np.ndarray) else column for column in columns.values()]
    return [dict(zip(columns, row, strict=True)) for row in zip(*lists, strict=True)]


def take(columns: Any, rows: np.ndarray, *names: str) -> dict[str, np.ndarray]:
    """Some of the columns, at some rows."""
    return {name: getattr(columns, name)[rows] for name in names}


class RunRecord(NamedTuple):
    """A run folder, read."""

    run: Path
    config: settings.Config
    metrics: RunMetrics
    question_ids: pa.Array
    """Text id of question 0, 1, ...: those of the training set first, in its order."""
    num_training_questions: int
    """Questions of the training set, 0 when the run folder no longer holds it."""
    trajectories: Columns
    """Every trajectory ever stored, in order of birth, with its `question`; `group_id` is the first trajectory of
    the visit that stored it, `k` its success count, `priority` that of its unit at birth."""
    scores: Columns
    """Every candidate that was measured for a replay draw, with its `row` in the trajectories."""
    events: EventColumns
    draws: Columns
    """Promises and draws of the question sampler: one row per drawable bucket of a draw."""
    lives: dict[str, Any]
    """The life table of questions."""
    units: Columns
    """Every unit scanned, in the order drawn; `unit_id` is a trajectory, or the first of a group."""
    begun: Columns
    """Every group whose rollouts began with a stored row."""
    last_step: int
    """Newest step that metrics or ledger know of; where the ledger is damaged, its last whole one."""
    incomplete: str
    """Parts of the ledger that could not be read and why, and files that the run did not write so; else empty."""


def rows_of(trajectories: Columns, ids: Int64[np.ndarray, " ids"]) -> Int64[np.ndarray, " ids"]:
    """Row of each trajectory; ids rise with the row. Raises InputError for an id that no row has."""
    rows = np.searchsorted(trajectories.trajectory_id, ids)
    found = np.append(trajectories.trajectory_id, -1)[rows] == ids
    if not found.all():
        remedy = "parts of it are missing. Restore the replay folder from a copy"
        raise InputError(f"the ledger names trajectory {ids[~found][0]}, which its trajectories table lacks: {remedy}.")
    return rows


def read_config(run: Path) -> settings.Config:
    """The settings of RUN/config.toml, or of a pool of rollouts.

    Raises InputError when the file is missing or broken.
    """
    path = run / (POOL_FILE if (run / POOL_FILE).is_file() else CONFIG_FILE)
    if not path.is_file():
        raise InputError(f"{run} is not a run folder: it has no {CONFIG_FILE}. Name the --output folder of a run.")
    try:
        return settings.resolve([settings.Written(str(path), layers.read_config(path), settings.Author.READ)])
    except InputError as error:
        # What settings are together is refused without a word of where they stand.
        raise error if str(path) in str(error) else InputError(f"{path}: {error}") from error


def keeps_experience(run: Path) -> bool:
    """Whether there is a ledger with more than visits to show. Raises InputError as `read_config`."""
    return (run / LEDGER_FOLDER).is_dir() and ((run / POOL_FILE).is_file() or read_config(run).replay.keeps_buffer)


def open_ledger(run: Path) -> LedgerReader:
    """The ledger of a run. No warning tells of damage: whoever reads on says by `dropped` what is left out."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LedgerWarning)
        return LedgerReader(run / LEDGER_FOLDER)


def read_run(run: Path) -> RunRecord:
    """Read settings, metrics and ledger of a finished or running run.

    Raises InputError for a folder that is no run, and for a run without a ledger (saying so when replay was off).
    """
    config = read_config(run)
    if not config.replay.keeps_buffer or not (run / LEDGER_FOLDER).is_dir():
        if config.replay.enabled:
            reason = f"has no replay ledger: {run / LEDGER_FOLDER} does not exist. Wait for the run's first step, or "
            raise InputError(f"{run} {reason}restore the folder from a copy.")
        reason = f"has stored nothing: replay was off (method {config.run.method!r}, replay.enabled = false)"
        raise InputError(f"{run} {reason}. Name a run of a method that replays, such as exgrpo.")
    metrics = RunMetrics() if (run / POOL_FILE).is_file() else read_metrics(run)
    reader = open_ledger(run)
    if reader.dropped:
        # Steps whose replays are not known would count as steps without any.
        metrics = RunMetrics([row for row in metrics.rows if row["step"] <= reader.last_step])
    tables = {name: reader.table(name, names.split(), dictionary=True) for name, names in COLUMNS.items()}
    changed = reader.table(EVENTS, dictionary=True)
    training_ids = flat(read_question_columns(run, ["id"]).column("id"))
    named = [encoded_words(table.column("question_id"))[0] for table in (changed, tables[TRAJECTORIES])]
    question_ids = pc.unique(pa.concat_arrays([training_ids.cast(pa.string()), *named]))
    tables[TRAJECTORIES] = tables[TRAJECTORIES].sort_by("trajectory_id")
    owners = question_numbers(tables[TRAJECTORIES], question_ids)
    tables[TRAJECTORIES] = tables[TRAJECTORIES].drop_columns("question_id")
    found = {name: Columns(**{each: column(own, each) for each in own.column_names}) for name, own in tables.items()}
    born, scores = found[TRAJECTORIES], found[SCORES]
    born.question = owners
    # A score's question is that of its trajectory, so that the longest table needs no text column.
    scores.row = rows_of(born, vars(scores).pop("trajectory_id"))
    events = decode_events(changed, question_ids)
    for name, columns in {**found, EVENTS: events}.items():
        _require_ranges(run / LEDGER_FOLDER / name, columns, reader.last_step)
    logged = int(max(metrics.steps, default=0))
    last_step = max(logged, int(events.step.max(initial=0)))
    if last_step * (most := 2 + int(events.bucket.max(initial=0))) > MOST_CELLS:
        newest = run / (METRICS_FILE if logged == last_step else LEDGER_FOLDER)
        said = f"step {last_step:,}, and success counts have {most} values: more than statistics are made of"
        raise InputError(f"{newest} has a {said}. Restore it from a copy.")
    return RunRecord(
        run=run,
        config=config,
        metrics=metrics,
        question_ids=question_ids,
        num_training_questions=len(training_ids),
        trajectories=born,
        scores=scores,
        events=events,
        draws=found[DRAWS],
        lives=question_lives(reader.visits(VISITED)),
        units=found[REPLAYS],
        begun=found[PREFIXES],
        last_step=last_step,
        incomplete="; ".join(_gaps(run, reader, metrics, len(training_ids))),
    )


def _require_ranges(path: Path, columns: object, last_step: int) -> None:
    """Raise InputError for a value that sizes or indexes an array and that no run has written."""
    for name, (low, high) in {**_LIMITS, "step": (0, last_step), "step_born": (0, last_step)}.items():
        values = getattr(columns, name, None)
        if values is not None and len(values) and not low <= values.min() <= values.max() <= high:
            said = f"{name} goes from {values.min()} to {values.max()} instead of {low} to {high}"
            raise InputError(f"{path}: {said}: restore the folder from a copy.")


def _gaps(run: Path, reader: LedgerReader, metrics: RunMetrics, num_questions: int) -> Iterator[str]:
    """One sentence for each part of a run that its statistics go without, or that is not as the run wrote it."""
    if reader.dropped:
        yield f"ledger read up to step {reader.last_step}; {reader.dropped}"
    path, data = run / QUESTIONS_FILE, run / QUESTIONS_FILE.parent
    if not num_questions:
        state = "has no ids" if path.is_file() else "is missing"
        yield f"{path} {state}: questions tried and unseen are not known, nor their order and texts"
    elif (data / MANIFEST).is_file() and not path.is_symlink() and (damage := find_damage(data, path.name)):
        yield f"{damage}, by {data.name}/{MANIFEST}"
    yield from changes(run, (CONFIG_FILE, METRICS_FILE))
    # The ledger is a step ahead of the journal while the step's line is being written.
    missing = np.setdiff1d(np.arange(1, max(reader.last_step, *metrics.steps, 1)), metrics.steps)
    if len(missing) and not (run / POOL_FILE).is_file():
        yield f"{run / METRICS_FILE} lacks {len(missing)} steps, step {missing[0]} first"


def changes(run: Path, among: Sequence[str] = ()) -> Iterator[str]:
    """As `find_changes`, each with the list that says so: it may be this that is damaged."""
    yield from (f"{change}, by {CHECKSUMS_FILE}" for change in find_changes(run, among))


def read_question_columns(run: Path, columns: Sequence[str], chosen: pc.Expression | None = None) -> pa.Table:
    """Some columns of the run's own questions, those it has, of the `chosen` rows; no rows where the file is gone, or
    has no ids.

    Raises InputError for a damaged file.
    """
    import pyarrow.parquet as pq

    path = run / QUESTIONS_FILE
    nothing = pa.table({name: pa.array([], pa.string()) for name in columns})
    if not path.is_file():
        return nothing
    try:
        with reading(str(path)):
            schema = pq.read_schema(path)
            names = [name for name in columns if name in schema.names and _has_type(name, schema.field(name).type)]
            return pq.read_table(path, columns=names, filters=chosen) if "id" in names else nothing
    except DamagedBytes as error:
        raise InputError(f"{error}: restore the file from a copy, or delete it.") from error


def _has_type(name: str, found: pa.DataType) -> bool:
    """Whether a column of a question file is text, that of prompts messages."""
    if name != "prompt":
        return pa.types.is_string(found) or pa.types.is_large_string(found)
    is_list = pa.types.is_list(found) or pa.types.is_large_list(found)
    return is_list and pa.types.is_struct(found.value_type) and {"role", "content"} <= {*found.value_type.names}


def question_texts(run: Path, question_ids: Sequence[str]) -> dict[str, dict[str, str]]:
    """`text` (content of the last user message), `answer` and `level` of each named question, empty where the run's own
    file is gone or has none. Raises InputError for a damaged question file."""
    found = {name: {"text": "", "answer": "", "level": ""} for name in question_ids}
    chosen = pc.field("id").isin(pa.array(question_ids, pa.string()))
    for row in read_question_columns(run, ("id", "prompt", "answer", "level"), chosen).to_pylist():
        said = [turn["content"] for turn in row.get("prompt") or [] if turn["role"] == "user"]
        words = {"text": str(said[-1]) if said else "", "answer": row.get("answer"), "level": row.get("level")}
        found[row["id"]] = {name: word or "" for name, word in words.items()}
    return found


def response_texts(run: Path, source: str, trajectory_ids: Sequence[int]) -> dict[int, str]:
    """Decoded response of each trajectory, special tokens left out; empty where the run has no tokenizer yet.

    The tokenizer is that of the run's model, before the end that of a checkpoint, before the first one that of the
    backbone's `source` where this is a folder. Raises InputError for a damaged tokenizer file or an unknown trajectory.
    """
    checkpoints = sorted((run / "checkpoints").glob(f"step-*/[ma]*/{TOKENIZER_FILE}"), reverse=True)
    places = [run / "model" / TOKENIZER_FILE, *checkpoints, Path(source) / TOKENIZER_FILE]
    path = next((path for path in places if path.is_file()), None)
    if path is None or not trajectory_ids:
        return {}
    from tokenizers import Tokenizer

    read_json(path)
    token_ids = [tokens.tolist() for tokens, _ in open_ledger(run).bodies(trajectory_ids)]
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:
        # The library raises no narrower one.
        raise InputError(f"{path} is no tokenizer ({first_line(error)}): restore it from a copy.") from error
    texts = tokenizer.decode_batch(token_ids, skip_special_tokens=True)
    return dict(zip(trajectory_ids, texts, strict=True))

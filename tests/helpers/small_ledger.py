"""A small ledger for tests: a question and two trajectories a step, a checkpoint after each."""

import subprocess
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from store_calls import candidates_of, draw, record, replay, row_of, visit_of

from exgrpo_cli.ledger.reader import LedgerReader, list_parts, steps_of
from exgrpo_cli.ledger.schemas import TABLES, LedgerIdentity
from exgrpo_cli.replay import replace, store

K = 4
IDENTITY = LedgerIdentity(
    tokenizer_hash="t", template="plain", group_size=K, questions_hash="h", logprob_source="trainer"
)
QUESTIONS = [f"q{number}" for number in range(20)]
PARQUET = [table for table in TABLES if table != "bodies"]
WRITTEN = [table for table in TABLES if table not in ("replays", "prefixes")]
"""Tables that have rows here: no unit is drawn by priority, nothing begins with a stored row."""


def one_step(buffer: store.Store, step: int, num_tokens: int = 3, *, seal: bool = True) -> None:
    """Two new trajectories of one question, and a draw once there is something to draw; in parts of their own."""
    drawn = draw(buffer, 1, step, np.random.default_rng(step))
    for question_id in drawn:
        candidates = candidates_of(buffer, question_id)
        replay(buffer, step, candidates, 0)
    rows = [row_of(*[10 * step + member] * num_tokens) for member in range(2)]
    record(buffer, visit_of(QUESTIONS[step % len(QUESTIONS)], step, rows))
    buffer.flush(step)
    if seal:
        buffer.seal()


def create(folder: Path) -> store.Store:
    return store.Store(folder, identity=IDENTITY, rules=replace.Replace(), question_ids=QUESTIONS)


def reopen(folder: Path, at_step: int, identity: LedgerIdentity = IDENTITY) -> store.Store:
    return store.Store(folder, identity=identity, rules=replace.Replace(), question_ids=QUESTIONS, at_step=at_step)


def part(folder: Path, table: str, step: int) -> Path:
    """The part of a table that holds a step."""
    return [path for path in list_parts(folder, table) if steps_of(path)[0] <= step][-1]


def num_rows(reader: LedgerReader) -> dict[str, int]:
    return {
        "trajectories": len(reader.trajectories()), "scores": len(reader.scores()), "draws": len(reader.draws()),
        "events": len(reader.events()),
    }  # fmt: skip


def in_subprocess(script: str, *arguments: object, prefix: Sequence[str] = ()) -> subprocess.Popen[str]:
    """Runs `script`, which finds this module as `small_ledger`; `prefix` is a command that starts others."""
    prelude = f"import os, sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
    prelude += "from pathlib import Path\nimport small_ledger\n"
    return subprocess.Popen(
        [*prefix, sys.executable, "-c", prelude + textwrap.dedent(script), *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


# Step 1 collects 2; each later step draws from one bucket, scores the 2 candidates, selects 1 and collects 2.
WHOLE = {"trajectories": 20, "scores": 18, "draws": 9, "events": 29}
SIX_STEPS = {"trajectories": 12, "scores": 10, "draws": 5, "events": 17}

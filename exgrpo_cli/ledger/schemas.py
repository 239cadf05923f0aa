"""The ledger's tables: their columns, the words of their events, and the identity that says who can read them.

Every table is append-only and holds plain types, so that pandas, pyarrow and duckdb read it without this package.
Rows never change: what is current (a question's bucket, a trajectory's last entropy) is the last row that says so.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import pyarrow as pa

from exgrpo_cli.base import data, errors, files

LEDGER_FORMAT = 2
"""Number in `ledger.json`; a ledger with another one is refused."""
IDENTITY_FILE = "ledger.json"
METADATA_KEY = b"exgrpo"
ROWS_END = b"exgrpo.rows_end"
"""Key of a Parquet part's own metadata, which no other program carries along: the byte at which its rows end."""

BODIES = "bodies"
TRAJECTORIES = "trajectories"
SCORES = "scores"
DRAWS = "draws"
VISITS = "visits"
REPLAYS = "replays"
PREFIXES = "prefixes"
EVENTS = "events"
TABLES = (BODIES, TRAJECTORIES, SCORES, DRAWS, VISITS, REPLAYS, PREFIXES, EVENTS)
"""In the order they are written. A part of events is the commit record of its steps, hence the last."""

NO_LOGPROBS = "none"
"""Source of the log-probs of a trajectory that came without any: they are NaN."""
WARM_START_STEP = 0
FOREIGN_WEIGHTS = -1
"""Weight version of what another run left us: older than every version of this run."""


class Event(StrEnum):
    """Kinds of change of a question or of one of its trajectories."""

    COLLECTED = "collected"
    MOVED = "moved"
    SELECTED = "selected"
    RETIRED = "retired"
    EVICTED = "evicted"
    READMITTED = "readmitted"


def _schema(columns: Mapping[str, str]) -> pa.Schema:
    """The schema of a table by the names of its columns' types."""
    lists = {"tokens": pa.list_(pa.int32()), "logprobs": pa.list_(pa.float32())}
    return pa.schema(
        pa.field(name, lists.get(kind) or pa.type_for_alias(kind.rstrip("?")), nullable=kind.endswith("?"))
        for name, kind in columns.items()
    )


SCHEMAS = {name: _schema(columns) for name, columns in data.tables(__file__, "tables.toml").items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class LedgerIdentity:
    """Identity that must agree before stored token ids and log-probs mean anything to a run: the content of
    `ledger.json`."""

    format: int = LEDGER_FORMAT
    tokenizer_hash: str
    """Hash of the tokenizer's vocabulary: token ids of another tokenizer are other words."""
    template: str
    """Prompt template: a response sampled after another prompt has other log-probs."""
    group_size: int
    """K: success counts of another K are other pass rates."""
    questions_hash: str
    """Content hash of the question file."""
    logprob_source: str
    """Who computed the behaviour log-probs: "trainer", "sampler" or "engine"."""

    @classmethod
    def read(cls, folder: Path) -> "LedgerIdentity":
        """That of the ledger in a folder. Raises InputError where there is none of this ledger format."""
        path = folder / IDENTITY_FILE
        if not path.is_file():
            raise errors.InputError(f"{folder} holds no ledger (no {IDENTITY_FILE}); name a run that keeps experience")
        stored: LedgerIdentity = files.require_shape(files.read_json(path), cls, str(path))
        if stored.format != LEDGER_FORMAT:
            raise errors.InputError(
                f"{path}: ledger format {stored.format}, this version reads {LEDGER_FORMAT}; "
                "use the toolkit version that wrote it"
            )
        return stored

    def require_match(self, stored: "LedgerIdentity", where: str, names: tuple[str, ...]) -> None:
        """Raise InputError at the first of the named fields in which this run differs from the stored ledger."""
        for name in names:
            ours, theirs = getattr(self, name), getattr(stored, name)
            if ours != theirs:
                raise errors.InputError(
                    f"{where}: {name} is {theirs!r} in the ledger but {ours!r} in this run; "
                    "its trajectories cannot be replayed here: use the same setting, or start without this ledger"
                )


RESUME_FIELDS = ("tokenizer_hash", "template", "group_size", "questions_hash", "logprob_source")
WARM_START_FIELDS = ("tokenizer_hash", "template", "group_size")
"""Another run's questions are compared one by one, and each copied trajectory keeps its own log-prob source."""

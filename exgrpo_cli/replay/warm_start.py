"""Warm start: the experience of another run's ledger as step 0 of this one.

Live trajectories of buffered questions are copied with their buckets, bodies bit for bit. Their weight version becomes
-1, older than every version of this run, so they are measured again before their entropy counts.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from jaxtyping import Float64, Int32, Int64

from exgrpo_cli.base.errors import InputError
from exgrpo_cli.ledger.reader import LedgerReader
from exgrpo_cli.ledger.schemas import (
    DRAWS,
    EVENTS,
    FOREIGN_WEIGHTS,
    NO_LOGPROBS,
    REPLAYS,
    SCHEMAS,
    SCORES,
    TRAJECTORIES,
    VISITS,
    WARM_START_FIELDS,
    WARM_START_STEP,
    Event,
    LedgerIdentity,
)
from exgrpo_cli.ledger.writer import bodies_batch
from exgrpo_cli.replay.by_question import NO_BUCKET, QuestionStates
from exgrpo_cli.replay.by_unit import PRIORITIES, UnitPlace, leaving, priorities_at_birth
from exgrpo_cli.replay.place import Place
from exgrpo_cli.replay.rows import GONE, rebuild

_BATCH = 1024
"""Trajectories per record batch: 16 MB in memory at 2,000 tokens each."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WarmStartReport:
    """Counts of what was copied and what was left out."""

    source: Path
    source_step: int
    num_trajectories: int
    num_questions: int
    """Questions in a bucket."""
    num_retired: int
    num_too_long: int
    """Trajectories dropped for their length."""
    num_incomplete: int
    """Trajectories of groups whose other rows were not stored, left out where groups are drawn."""
    num_over_limit: int
    """Trajectories that `max_per_question` evicted."""
    num_failures: int
    """Trajectories without reward, left out where neither failures nor groups are replayed."""
    num_without_logprobs: int
    """Of those taken over: the log-probs of the policy that sampled them were not recorded."""
    num_without_advantage: int
    """Of those taken over: their advantage was not recorded."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ForeignExperience:
    """Rows of step 0 that another run brings, and the report about them."""

    tables: dict[str, pa.Table]
    num_bodies: int
    report: WarmStartReport
    source_ids: Int64[np.ndarray, " trajectories"]
    reader: LedgerReader

    def bodies(self) -> Iterator[pa.RecordBatch]:
        """The bodies under their new ids."""
        for begin in range(0, self.num_bodies, _BATCH):
            yield bodies_batch(begin, self.reader.bodies(self.source_ids[begin : begin + _BATCH].tolist()))


def read_experience(
    source: Path,
    *,
    identity: LedgerIdentity,
    question_ids: Collection[str],
    rules: Place,
    max_response_tokens: int,
    with_retired: bool,
) -> ForeignExperience:
    """Experience that a run of this identity and these rules can copy from the ledger in `source`.

    Raises InputError where tokenizer, template or K differ, or where a question to be copied is unknown.
    """
    reader = LedgerReader(source)
    identity.require_match(reader.identity, str(source), WARM_START_FIELDS)
    if not with_retired and not len(reader.trajectories(["trajectory_id"])):
        raise InputError(f"{source} holds no trajectories: name a run that has stored some")
    ids = set(pc.unique(reader.events(["question_id"]).column("question_id")).to_pylist())
    rows, states = rebuild(partial(reader.table, dictionary=True), sorted(ids))
    buffered = states.success_counts != NO_BUCKET
    wanted = buffered | (states.retired & with_retired)
    _require_known([states.ids[number] for number in np.flatnonzero(wanted)], question_ids, source)

    owner = rows["question"]
    stored = (owner != GONE) & wanted[owner]
    _require_rewards(rows[stored], source)
    rewarded = stored & ((rows["reward"] > 0) | rules.replays_failures)
    short = np.flatnonzero(rewarded & (rows["num_tokens"] <= max_response_tokens))
    whole = _whole_groups(rows, short, identity.group_size) if rules.draws_groups else short
    if rules.max_per_question and rules.eviction == "lowest-priority":
        # By what this run makes of them: the source may have had another priority, or none.
        rows["priority"][whole] = _priorities(reader, whole, whole, rules)
    kept = _within_limit(rows, whole, rules)
    retired = np.flatnonzero(states.retired) if with_retired else np.empty(0, dtype=np.int64)
    trajectories = _trajectories(reader, kept, rows["group"][kept], rules)
    return ForeignExperience(
        tables={
            TRAJECTORIES: trajectories,
            EVENTS: _events(states, owner[kept], retired),
            **{table: SCHEMAS[table].empty_table() for table in (SCORES, DRAWS, VISITS, REPLAYS)},
        },
        num_bodies=len(kept),
        source_ids=kept,
        reader=reader,
        report=WarmStartReport(
            source=source,
            source_step=reader.last_step,
            num_trajectories=len(kept),
            num_questions=len(np.unique(owner[kept][buffered[owner[kept]]])),
            num_retired=len(retired),
            num_failures=int(stored.sum()) - int(rewarded.sum()),
            num_too_long=int(rewarded.sum()) - len(short),
            num_incomplete=len(short) - len(whole),
            num_over_limit=len(whole) - len(kept),
            num_without_logprobs=int(pc.sum(pc.equal(trajectories.column("logprob_source"), NO_LOGPROBS)).as_py() or 0),
            num_without_advantage=int(np.isnan(rows["advantage"][kept]).sum()),
        ),
    )


def _require_rewards(rows: np.ndarray, source: Path) -> None:
    unknown = int(np.isnan(rows["reward"]).sum())
    if unknown:
        raise InputError(
            f"{source}: {unknown} of its {len(rows)} trajectories have no reward, and a reward that was never given is "
            "not replayed; write it into the column reward of trajectories/, or name another run"
        )


def _whole_groups(
    rows: np.ndarray, wanted: Int64[np.ndarray, " wanted"], group_size: int
) -> Int64[np.ndarray, " kept"]:
    """The wanted trajectories of visits all of whose K rows are wanted."""
    _, which, counts = np.unique(rows["group"][wanted], return_inverse=True, return_counts=True)
    return wanted[counts[which] == group_size]


def _within_limit(rows: np.ndarray, wanted: Int64[np.ndarray, " wanted"], rules: Place) -> Int64[np.ndarray, " kept"]:
    """The wanted trajectories without those that `max_per_question` evicts, by the rule that the run itself follows."""
    gone = []
    for question in np.unique(rows["question"][wanted]) if rules.max_per_question else ():
        own = wanted[rows["question"][wanted] == question]
        keys = rows["priority"][own]
        excess = max(0, len(own) - rules.max_per_question)
        gone += leaving(rules.eviction, rows, own, keys, excess, groups=False).tolist()
    return np.setdiff1d(wanted, gone)


def _require_known(needed: list[str], known: Collection[str], source: Path) -> None:
    missing = [question_id for question_id in needed if question_id not in known]
    if missing:
        raise InputError(
            f"{source}: {len(missing)} of its {len(needed)} questions are not in this run's question file, "
            f"{missing[0]} first; use the question file of that run"
        )


def _trajectories(
    reader: LedgerReader,
    kept: Int64[np.ndarray, " trajectories"],
    groups: Int32[np.ndarray, " trajectories"],
    rules: Place,
) -> pa.Table:
    table = reader.trajectories().take(pa.array(kept))
    first, which = np.unique(groups, return_index=True, return_inverse=True)[1:]
    group_ids = first.astype(np.int64)[which]
    replaced = {
        "trajectory_id": np.arange(len(kept), dtype=np.int64),
        "step_born": np.full(len(kept), WARM_START_STEP, dtype=np.int32),
        "weight_version": np.full(len(kept), FOREIGN_WEIGHTS, dtype=np.int32),
        "group_id": group_ids,
        "priority": pa.array(_priorities(reader, kept, group_ids, rules), from_pandas=True),
    }
    for name, values in replaced.items():
        position = table.schema.get_field_index(name)
        table = table.set_column(position, table.schema.field(name), pa.array(values))
    return table


def _priorities(
    reader: LedgerReader,
    kept: Int64[np.ndarray, " trajectories"],
    group_ids: Int64[np.ndarray, " trajectories"],
    rules: Place,
) -> Float64[np.ndarray, " trajectories"]:
    """Weight of each unit by this run's rules; NaN where units are not drawn, or by a priority of the user's own.

    Raises InputError where a draw in proportion to it has no meaning: for rewards below 0, say.
    """
    if not isinstance(rules, UnitPlace) or rules.priority not in PRIORITIES:
        return np.full(len(kept), np.nan)
    table = reader.trajectories(["reward", "advantage"]).take(pa.array(kept))
    priorities = priorities_at_birth(
        rules.priority,
        group_ids if rules.draws_groups else np.arange(len(kept)),
        steps=np.full(len(kept), WARM_START_STEP),
        rewards=table.column("reward").to_numpy(),
        advantages=table.column("advantage").to_numpy(),
        logprobs=lambda begin, end: [logprobs for _, logprobs in reader.bodies(kept[begin:end].tolist())],
    )
    with np.errstate(over="ignore", invalid="ignore"):
        wrong = (priorities < 0) | np.isinf(priorities**rules.exponent)
    if rules.draw == "proportional" and wrong.any():
        first = int(np.flatnonzero(wrong)[0])
        raise InputError(
            f"{reader.folder}: trajectory {kept[first]} with reward {table.column('reward')[first].as_py():g} has the "
            f"priority {priorities[first]:g} by replay.priority = {rules.priority!r}, and nothing is drawn in "
            "proportion to that; use replay.draw = 'top', another priority, or a pool with other rewards"
        )
    return priorities


def _events(
    states: QuestionStates, owners: Int32[np.ndarray, " trajectories"], retired: Int64[np.ndarray, " retired"]
) -> pa.Table:
    """The collection of each trajectory, of the questions `owners`, and the retired questions."""
    buckets, members = states.success_counts[owners], states.num_members[owners]
    outside = buckets == NO_BUCKET
    nulls = [None] * len(retired)
    return pa.table(
        {
            "step": [WARM_START_STEP] * (len(owners) + len(retired)),
            "event": [Event.COLLECTED.value] * len(owners) + [Event.RETIRED.value] * len(retired),
            "question_id": [states.ids[number] for number in (*owners.tolist(), *retired.tolist())],
            "trajectory_id": [*range(len(owners)), *nulls],
            "bucket": [*pa.array(buckets, mask=outside).to_pylist(), *nulls],
            "num_members": [*pa.array(members, mask=outside).to_pylist(), *nulls],
        },
        schema=SCHEMAS[EVENTS],
    )

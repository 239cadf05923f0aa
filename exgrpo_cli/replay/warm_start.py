"""Warm start: the experience of another run's ledger as step 0 of this one.

Live trajectories of buffered questions are copied with their buckets, bodies bit for bit. Their weight version becomes
-1, older than every version of this run, so they are measured again before their entropy counts.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from jaxtyping import Int64

from exgrpo_cli.base.errors import InputError
from exgrpo_cli.ledger import schemas
from exgrpo_cli.ledger.columns import NO_BUCKET, column
from exgrpo_cli.ledger.parts import bodies_batch
from exgrpo_cli.ledger.reader import LedgerReader
from exgrpo_cli.ledger.writer import LedgerWriter
from exgrpo_cli.replay.by_unit import UnitPlace, priorities_at_birth
from exgrpo_cli.replay.place import Place
from exgrpo_cli.replay.rows import GONE, Questions, rebuild

_BATCH = 1024
"""Trajectories per record batch: 16 MB in memory at 2,000 tokens each."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WarmStartReport:
    """Counts of what was copied and what was left out."""

    num_trajectories: int
    num_questions: int
    """Questions in a bucket."""
    num_retired: int
    left_out: dict[str, int]
    """Trajectories that were not copied, by the reason."""
    num_without_logprobs: int
    """Rows taken over without log-probs of the policy that sampled them."""
    num_without_advantage: int
    """Rows taken over without an advantage."""


def copy_experience(
    source: Path, writer: LedgerWriter, question_ids: Sequence[str], rules: Place, max_response_tokens: int
) -> WarmStartReport:
    """Write what a run of these rules can use of the ledger in `source`, as step 0 of its own, still empty one.

    Raises InputError where tokenizer, template or K differ, where a question to be copied is unknown, and where a draw
    in proportion to priorities has no meaning.
    """
    reader, with_retired = LedgerReader(source), rules.warm_start_retired
    writer.identity.require_match(reader.identity, str(source), schemas.WARM_START_FIELDS)
    if not with_retired and not len(reader.trajectories(["trajectory_id"])):
        raise InputError(f"{source} holds no trajectories: name a run that has stored some")
    ids = pc.unique(reader.events(["question_id"]).column("question_id")).to_pylist()
    rows, states = rebuild(partial(reader.table, dictionary=True), ids)
    buffered, retired = states.success_counts != NO_BUCKET, np.flatnonzero(states.retired & with_retired)
    wanted = buffered | (states.retired & with_retired)
    if missing := np.setdiff1d(states.ids[wanted], question_ids).tolist():
        raise InputError(
            f"{source}: {len(missing)} of its {wanted.sum()} questions are not in this run's question file, "
            f"{missing[0]} first; use the question file of that run"
        )

    owner, reward = rows["question"], rows["reward"]
    stored = (owner != GONE) & wanted[owner]
    if unknown := int(np.isnan(reward[stored]).sum()):
        raise InputError(
            f"{source}: {unknown} of its {stored.sum()} trajectories have no reward, and a reward that was never given "
            "is not replayed; write it into the column reward of trajectories/, or name another run"
        )
    rewarded = stored & ((reward > 0) | rules.replays_failures)
    short = rewarded & (rows["num_tokens"] <= max_response_tokens)
    kept = np.flatnonzero(short)
    if rules.draws_groups:
        # Visits all of whose rows are there.
        _, which, counts = np.unique(rows["group_id"][kept], return_inverse=True, return_counts=True)
        kept = kept[counts[which] == writer.identity.group_size]
    trajectories = _trajectories(reader, kept, rules)
    bodies: Iterator[pa.RecordBatch] = (
        bodies_batch(begin, reader.bodies(kept[begin : begin + _BATCH].tolist()))
        for begin in range(0, len(kept), _BATCH)
    )
    tables = {schemas.TRAJECTORIES: trajectories, schemas.EVENTS: _events(states, owner[kept], retired)}
    writer.write(schemas.WARM_START_STEP, tables, bodies, len(kept))
    return WarmStartReport(
        num_trajectories=len(kept),
        num_questions=len(np.unique(owner[kept][buffered[owner[kept]]])),
        num_retired=len(retired),
        left_out={
            "too long": int((rewarded & ~short).sum()),
            "failures": int((stored & ~rewarded).sum()),
            "of groups that were not kept whole": int(short.sum()) - len(kept),
        },
        num_without_logprobs=trajectories.column("logprob_source").to_pylist().count(schemas.NO_LOGPROBS),
        num_without_advantage=int(np.isnan(rows["advantage"][kept]).sum()),
    )


def _trajectories(reader: LedgerReader, kept: Int64[np.ndarray, " trajectories"], rules: Place) -> pa.Table:
    """The rows of `trajectories` under their new numbers, as this run's rules weigh them."""
    table = reader.trajectories().take(pa.array(kept))
    first, which = np.unique(column(table, "group_id"), return_index=True, return_inverse=True)[1:]
    groups, rewards = first[which].astype(np.int64), column(table, "reward")

    def read(begin: int, end: int) -> list[np.ndarray]:
        return [logprobs for _, logprobs in reader.bodies(kept[begin:end].tolist())]

    advantages = column(table, "advantage")
    priorities = priorities_at_birth(rules, groups, schemas.WARM_START_STEP, rewards, advantages, read)
    if isinstance(rules, UnitPlace) and rules.draw == "proportional":
        with np.errstate(over="ignore", invalid="ignore"):
            wrong = np.flatnonzero((priorities < 0) | np.isinf(priorities**rules.exponent))
        if len(wrong):
            raise InputError(
                f"{reader.folder}: trajectory {kept[wrong[0]]} with reward {rewards[wrong[0]]:g} has the priority "
                f"{priorities[wrong[0]]:g} by replay.priority = {rules.priority!r}, and nothing is drawn in proportion "
                "to that; use replay.draw = 'top', another priority, or a pool with other rewards"
            )
    replaced = {
        "trajectory_id": np.arange(len(kept)),
        "step_born": np.full(len(kept), schemas.WARM_START_STEP),
        "weight_version": np.full(len(kept), schemas.FOREIGN_WEIGHTS),
        "group_id": groups,
        "priority": priorities,
    }
    for name, values in replaced.items():
        field = table.schema.field(name)
        own = pa.array(values, field.type, from_pandas=True)
        table = table.set_column(table.schema.get_field_index(name), field, own)
    return table


def _events(states: Questions, owners: np.ndarray, retired: Int64[np.ndarray, " retired"]) -> pa.Table:
    """The collection of each trajectory, of the questions `owners`, and the retired questions."""
    numbers = np.concatenate([owners, retired])
    buckets = states.success_counts[numbers]
    outside = buckets == NO_BUCKET
    columns = {
        "step": [schemas.WARM_START_STEP] * len(numbers),
        "event": [schemas.Event.COLLECTED.value] * len(owners) + [schemas.Event.RETIRED.value] * len(retired),
        "question_id": states.ids[numbers].tolist(),
        "trajectory_id": [*range(len(owners)), *[None] * len(retired)],
        "bucket": pa.array(buckets, mask=outside).to_pylist(),
        "num_members": pa.array(states.num_members[numbers], mask=outside).to_pylist(),
    }
    return pa.table(columns, schema=schemas.SCHEMAS[schemas.EVENTS])

"""Warm start: the experience of another run's ledger as step 0 of this one.

Live trajectories of buffered questions are copied with their buckets, bodies bit for bit. Their weight version becomes
-1, older than every version of this run, so they are measured again before their entropy counts.
"""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from jaxtyping import Int64

from exgrpo_cli.base.errors import InputError
from exgrpo_cli.config.sections.objective import ObjectiveSettings
from exgrpo_cli.ledger import schemas
from exgrpo_cli.ledger.columns import NO_BUCKET, column
from exgrpo_cli.ledger.reader import LedgerReader, read_catalogue
from exgrpo_cli.ledger.writer import bodies_batch
from exgrpo_cli.replay.by_unit import UnitPlace, priorities_at_birth
from exgrpo_cli.replay.place import Place
from exgrpo_cli.replay.prefix import Prefix
from exgrpo_cli.replay.revisit import Revisit
from exgrpo_cli.replay.rows import GONE, Questions, rebuild

if TYPE_CHECKING:
    from exgrpo_cli.replay.store import Store

_BATCH = 1024
"""Trajectories per record batch: 16 MB in memory at 2,000 tokens each."""


def warm_start(store: "Store", source: Path, objective: ObjectiveSettings, max_response_tokens: int) -> str:
    """Copy what the store's run can use of the ledger in `source` into its own, still empty one, durably, as step 0.

    Returns a line for the user. Raises InputError where tokenizer, template or K differ, where a question to be copied
    is unknown, where rows came without what the settings read, and where a draw in proportion to priorities has no
    meaning.
    """
    reader, rules, question_ids = LedgerReader(source), store.rules, store.questions.ids.tolist()
    with_retired = rules.warm_start_retired
    store.writer.identity.require_match(reader.identity, str(source), schemas.WARM_START_FIELDS)
    if not with_retired and not len(reader.trajectories(["trajectory_id"])):
        raise InputError(f"{source} holds no trajectories: name a run that has stored some")
    ids = pc.unique(reader.events(["question_id"]).column("question_id")).to_pylist()
    rows, states = rebuild(partial(reader.table, dictionary=True), ids)
    buffered, retired = states.success_counts != NO_BUCKET, np.flatnonzero(states.retired & with_retired)
    wanted = buffered | (states.retired & with_retired)
    if unknown := np.setdiff1d(states.ids[wanted], question_ids).tolist():
        raise InputError(
            f"{source}: {len(unknown)} of its {wanted.sum()} questions are not in this run's question file, "
            f"{unknown[0]} first; use the question file of that run"
        )

    owner, reward = rows["question"], rows["reward"]
    barred = np.isin(states.ids, list(store.barred))
    stored = (owner != GONE) & (wanted & ~barred)[owner]
    if num := int(np.isnan(reward[stored]).sum()):
        raise InputError(
            f"{source}: {num} of its {stored.sum()} trajectories have no reward, and a reward that was never given "
            "is not replayed; write it into the column reward of trajectories/, or name another run"
        )
    other = "successes" if rules.store == "failures" else "failures"
    of_kind = stored & ((rows["correct"] == (other == "failures")) | rules.replays_failures)
    short = of_kind & (rows["num_tokens"] <= max_response_tokens)
    kept = np.flatnonzero(short)
    if rules.draws_groups:
        # Visits all of whose rows are there.
        _, which, counts = np.unique(rows["group_id"][kept], return_inverse=True, return_counts=True)
        kept = kept[counts[which] == store.group_size]
    trajectories = _trajectories(reader, kept, rules)
    missing = {
        "log-probs": trajectories.column("logprob_source").to_pylist().count(schemas.NO_LOGPROBS),
        "an advantage": np.isnan(rows["advantage"][kept]).sum(),
    }
    for what, setting in _readers(rules, objective):
        if missing[what]:
            raise InputError(
                f"{source}: {missing[what]} of its {len(kept)} trajectories came without {what}, which {setting} "
                "reads; set it otherwise, as docs/methods.md says of rollouts logged elsewhere, or take another pool"
            )
    begins = range(0, len(kept), _BATCH)
    bodies = (bodies_batch(begin, reader.bodies(kept[begin : begin + _BATCH].tolist())) for begin in begins)
    tables = {schemas.TRAJECTORIES: trajectories, schemas.EVENTS: _events(states, owner[kept], retired)}
    store.writer.write(schemas.WARM_START_STEP, tables, bodies, len(kept))
    store.restore(read_catalogue(store.folder), question_ids)
    left_out = {
        "too long": (of_kind & ~short).sum(),
        other: (stored & ~of_kind).sum(),
        "of groups that were not kept whole": short.sum() - len(kept),
    }
    return (
        f"experience from {source.parent}: {len(kept)} trajectories of {len(np.unique(owner[kept]))} questions, "
        f"{len(retired)} retired; left out: {', '.join(f'{n} {what}' for what, n in left_out.items() if n) or 'none'}"
    )


def _readers(rules: Place, objective: ObjectiveSettings) -> Iterator[tuple[str, str]]:
    """Each setting that reads log-probs or advantages of birth, after the name of what it reads."""
    imitates = objective.surrogate == "likelihood"
    for key in ("max_drift", "ess_bound"):
        if bound := getattr(rules, key, 0):
            yield "log-probs", f"replay.{key} = {bound}"
    if isinstance(rules, UnitPlace) and rules.priority == "headroom":
        yield "log-probs", "replay.priority = 'headroom'"
    if objective.importance == "behaviour" and not (imitates or isinstance(rules, Prefix | Revisit)):
        yield "log-probs", "objective.importance = 'behaviour'"
    if isinstance(rules, UnitPlace) and rules.priority in ("advantage", "signal", "headroom"):
        yield "an advantage", f"replay.priority = {rules.priority!r}"
    if isinstance(rules, UnitPlace) and not imitates:
        yield "an advantage", f"replay.composition = {rules.composition!r}"


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
    columns = dict(zip(table.column_names, table.columns, strict=True)) | {
        "trajectory_id": np.arange(len(kept)),
        "step_born": np.full(len(kept), schemas.WARM_START_STEP),
        "weight_version": np.full(len(kept), schemas.FOREIGN_WEIGHTS),
        "group_id": groups,
        "priority": pa.array(priorities, from_pandas=True),
    }
    return pa.table(columns, schema=table.schema)


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

"""What another priority or another bound on the drift would have done where a run draws units by priority.

The priority is asked through the store that a run itself draws from, over the units that were there at each draw, for
as many as the run took. The bound is held against the drifts that the run measured. The store stays the recorded one.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Float64, Int64

from exgrpo_cli.base.errors import InputError
from exgrpo_cli.config.sections.replay import ReplaySettings
from exgrpo_cli.ledger.columns import COLLECTED, EVICTED, READMITTED, RETIRED
from exgrpo_cli.ledger.reader import LedgerReader
from exgrpo_cli.replay.drawing.priorities import PRIORITIES, priorities_at_birth
from exgrpo_cli.replay.drawing.units import UnitStore
from exgrpo_cli.replay.trajectory_index import ROW, TrajectoryIndex
from exgrpo_cli.replay_stats.record import LEDGER_FOLDER, RunRecord
from exgrpo_cli.replay_stats.replays import mean_by_step, rows_of_units
from exgrpo_cli.replay_stats.what_if.policy import REPETITIONS, priority_title


@dataclass(frozen=True, kw_only=True, slots=True)
class PriorityOutcome:
    """Units that the run took beside those of another priority."""

    own: str
    other: str
    """Both with what they depend on."""
    steps: Int64[np.ndarray, " draws"]
    """Steps that took a unit."""
    units: int
    """Taken by the run, over all steps."""
    share_same: float
    """Expected share of the other's units that the run took in the same step."""
    taken: Mapping[str, float]
    """Means over the rows of `reward`, `advantage` (absolute), `pass_rate`, `age` and `num_tokens`."""
    expected: Mapping[str, float]
    """The same of the other priority."""
    taken_by_step: Mapping[str, Float64[np.ndarray, " draws"]]
    """The means of each of `steps`."""
    expected_by_step: Mapping[str, Float64[np.ndarray, " draws"]]


@dataclass(frozen=True, kw_only=True, slots=True)
class GateOutcome:
    """Scanned units by the run's bound on their drift and by another."""

    own: float
    other: float
    scanned: int
    accepted: int
    would_accept: int
    """Of those scanned."""
    steps: int
    """Steps that took a unit."""
    steps_enough: int
    """Of these, steps whose scanned units would have given as many."""
    scans: float
    """Mean scans of these steps; NaN without any."""
    scans_needed: float
    """Mean scans until as many had been found within the other bound."""
    scan_steps: Int64[np.ndarray, " scans"]
    """Steps that scanned a unit."""
    drift_by_step: Float64[np.ndarray, " scans"]
    """Mean drift of the units that each of them scanned."""
    accepted_by_step: Int64[np.ndarray, " scans"]
    would_accept_by_step: Int64[np.ndarray, " scans"]


def require_units(record: RunRecord, *, gated: bool = False) -> None:
    """Raise InputError where the run does not draw units, or with `gated` where it measured no drift."""
    replay = record.config.replay
    if not replay.draws_units:
        raise InputError(
            f"--what-if: {record.run} draws questions (replay.composition = {replay.composition!r}): "
            "ask for another sampler or metric."
        )
    if gated and not np.isfinite(record.units.drift).any():
        raise InputError(f"--what-if: {record.run} measured no drift (replay.max_drift = {replay.max_drift:g}).")


def other_gate(record: RunRecord, bound: float) -> GateOutcome:
    """Hold the drift of every unit scanned against another bound. Raises InputError as `require_units`."""
    require_units(record, gated=True)
    units = record.units
    passes = units.drift <= bound
    scans, needed, steps = [], [], np.unique(units.step[units.accepted])
    for step in steps.tolist():
        rows = np.flatnonzero(units.step == step)
        found = np.flatnonzero(passes[rows])
        taken = int(units.accepted[rows].sum())
        if len(found) >= taken:
            scans.append(len(rows))
            needed.append(int(found[taken - 1]) + 1)
    scan_steps = np.unique(units.step)
    totals = [np.bincount(units.step[kept], minlength=record.last_step + 1) for kept in (units.accepted, passes)]
    return GateOutcome(
        own=record.config.replay.max_drift,
        other=bound,
        scanned=len(passes),
        accepted=int(units.accepted.sum()),
        would_accept=int(passes.sum()),
        steps=len(steps),
        steps_enough=len(scans),
        scans=float(np.mean(scans)) if scans else float("nan"),
        scans_needed=float(np.mean(needed)) if needed else float("nan"),
        scan_steps=scan_steps,
        drift_by_step=mean_by_step(units.step, units.drift, record.last_step)[scan_steps],
        accepted_by_step=totals[0][scan_steps],
        would_accept_by_step=totals[1][scan_steps],
    )


def other_priority(record: RunRecord, rules: ReplaySettings, rng: np.random.Generator) -> PriorityOutcome:
    """Draw by another priority at every step that took a unit, REPETITIONS times.

    `rules` are the run's with what differs. Raises InputError as `require_units`, and for a priority of groups where
    rows are drawn.
    """
    require_units(record)
    if rules.priority == "signal" and not rules.draws_groups:
        raise InputError("--what-if: priority = 'signal' is of groups, and this run draws rows.")
    units, taken_by = record.units, np.unique(record.units.step[record.units.accepted])
    index = TrajectoryIndex(len(record.question_ids), _rows(record, rules))
    # A store of everything: what leaves it is in the recorded events.
    rules = replace(rules, capacity=0, eviction="oldest", bias_correction=0.0)
    none = np.zeros(0, dtype=np.int64)
    store = UnitStore(rules, index, record.question_ids.to_pylist(), none, groups=rules.draws_groups)
    drawn: list[tuple[int, int]] = []
    same, wanted_in_all = 0.0, 0
    for step in _stores_at(record, store, index, taken_by, by_headroom=rules.priority == "headroom"):
        own = units.unit[(units.step == step) & units.accepted]
        wanted_in_all += len(own)
        for _ in range(REPETITIONS):
            found = [unit.unit_id for unit in store.draw(len(own), step, rng)]
            store.end_draw()
            same += len(set(own.tolist()) & set(found)) / REPETITIONS
            drawn += [(step, unit) for unit in found]
    others = np.array(drawn, dtype=np.int64).reshape(-1, 2)
    taken, taken_rows = _described(record, units.step[units.accepted], units.unit[units.accepted])
    expected, expected_rows = _described(record, others[:, 0], others[:, 1])
    return PriorityOutcome(
        own=priority_title(record.config.replay),
        other=priority_title(rules),
        steps=taken_by,
        units=wanted_in_all,
        share_same=same / wanted_in_all if wanted_in_all else float("nan"),
        taken=_means(taken),
        expected=_means(expected),
        taken_by_step=_by_step(record, taken, taken_rows, taken_by),
        expected_by_step=_by_step(record, expected, expected_rows, taken_by),
    )


def _rows(record: RunRecord, rules: ReplaySettings) -> np.ndarray:
    """Index rows of everything that was ever stored, as at birth, with the priorities of `rules`."""
    born = record.trajectories
    rows = np.zeros(len(born.trajectory_id), dtype=ROW)
    for name in ("question", "step_born", "num_tokens", "success_count", "reward", "advantage", "group"):
        rows[name] = getattr(born, name)
    rows["born_version"] = born.weight_version
    if rules.priority not in PRIORITIES:
        rows["priority"] = np.nan
    elif rules.priority == record.config.replay.priority:
        rows["priority"] = born.priority
    else:
        reader = LedgerReader(record.run / LEDGER_FOLDER)
        rows["priority"] = priorities_at_birth(
            rules.priority,
            born.group if rules.draws_groups else born.trajectory_id,
            steps=born.step_born,
            rewards=born.reward,
            advantages=born.advantage,
            logprobs=lambda begin, end: [
                logprobs for _, logprobs in reader.bodies(born.trajectory_id[begin:end].tolist())
            ],
        )
    return rows


def _stores_at(
    record: RunRecord,
    store: UnitStore,
    index: TrajectoryIndex,
    steps: Int64[np.ndarray, " draws"],
    *,
    by_headroom: bool,
) -> Iterator[int]:
    """Each of `steps`, with the store as it stood at its draw; one object, moved on by the recorded events.

    Of a step's own events, those before its draw count: what was re-admitted and what grew too old.
    """
    events, max_age = record.events, record.config.replay.max_age
    columns = (events.step, events.kind, events.question, events.trajectory_id)
    rows = list(zip(*(column.tolist() for column in columns), strict=True))
    live: dict[int, set[int]] = {}
    later: list[tuple[int, int, int, int]] = []
    position, measured = 0, 0
    for step in steps.tolist():
        _apply(later, store, live)
        later = []
        measured = _renew(record, store, index, measured, step, by_headroom=by_headroom)
        while position < len(rows) and rows[position][0] <= step:
            row = rows[position]
            position += 1
            over_age = row[1] == EVICTED and max_age and index.column("step_born", [row[3]])[0] < row[0] - max_age
            if row[0] < step or row[1] == READMITTED or over_age:
                _apply([row], store, live)
            else:
                later.append(row)
        yield step


def _apply(rows: list[tuple[int, int, int, int]], store: UnitStore, live: dict[int, set[int]]) -> None:
    for _, kind, question, trajectory_id in rows:
        own = live.setdefault(question, set())
        if kind == COLLECTED:
            own.add(store.unit_of(trajectory_id))
            store.add([store.unit_of(trajectory_id)])
        elif kind == EVICTED:
            own.discard(store.unit_of(trajectory_id))
            store.discard(store.unit_of(trajectory_id))
        elif kind == RETIRED:
            for unit in own:
                store.discard(unit)
        elif kind == READMITTED:
            store.add(sorted(own))


def _renew(
    record: RunRecord, store: UnitStore, index: TrajectoryIndex, position: int, step: int, *, by_headroom: bool
) -> int:
    """Let headrooms measured before `step` order their units, from row `position` of the scans on; returns the next."""
    units = record.units
    end = int(np.searchsorted(units.step, step))
    if by_headroom:
        for row in range(position, end):
            unit = int(units.unit[row])
            if np.isfinite(units.headroom[row]) and store.discard(unit):
                index.set_priorities(np.array([unit]), units.headroom[row : row + 1])
                store.add([unit])
    return end


def _described(
    record: RunRecord, steps: Int64[np.ndarray, " units"], units: Int64[np.ndarray, " units"]
) -> tuple[dict[str, np.ndarray], Int64[np.ndarray, " rows"]]:
    """What is told of each row of these units, and the step that it belongs to."""
    which, rows = rows_of_units(record, units)
    born = record.trajectories
    columns = {
        "reward": born.reward[rows],
        "advantage": np.abs(born.advantage[rows]),
        "pass_rate": born.success_count[rows] / record.config.rollout.group_size,
        "age": steps[which] - born.step_born[rows],
        "num_tokens": born.num_tokens[rows],
    }
    return columns, steps[which]


def _means(columns: Mapping[str, np.ndarray]) -> dict[str, float]:
    return {name: float(column.mean()) if len(column) else float("nan") for name, column in columns.items()}


def _by_step(
    record: RunRecord,
    columns: Mapping[str, np.ndarray],
    row_steps: Int64[np.ndarray, " rows"],
    steps: Int64[np.ndarray, " draws"],
) -> dict[str, np.ndarray]:
    return {name: mean_by_step(row_steps, column, record.last_step)[steps] for name, column in columns.items()}

"""The catalogue: which parts of a ledger belong together, and up to which step all tables are whole.

A step is complete once its part of `events` is there, for that one is renamed last and carries the number of rows that
every table has by then. Whatever is damaged, missing or beyond the last complete step is left out and counted, never
half-read.
"""

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from exgrpo_cli.replay.parts import PartInfo, UnreadablePart, inspect_part, list_parts, list_unfinished
from exgrpo_cli.replay.schemas import EVENTS, TABLES

_ATTEMPTS = 20
"""A compaction may remove listed parts; each new listing is then nearer to the end of it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Catalogue:
    """The valid prefix of a ledger."""

    parts: Mapping[str, tuple[PartInfo, ...]]
    """Per table, in order of steps, all of them complete."""
    totals: Mapping[str, int]
    """Rows per table."""
    last_step: int
    dropped: str
    """What was left out and why; empty where nothing was."""


def read_catalogue(folder: Path) -> Catalogue:
    """List and check the parts of the ledger in `folder`, also while a run writes it."""
    for _ in range(_ATTEMPTS - 1):
        try:
            return _read_once(folder)
        except FileNotFoundError:
            continue
    return _read_once(folder)


def _read_once(folder: Path) -> Catalogue:
    # Commit records first: the rows they promise were on disk before them, so a table listed later has them.
    tables = (EVENTS, *(table for table in TABLES if table != EVENTS))
    listed, problems = {}, []
    for table in tables:
        listed[table], problem = _readable_prefix(folder, table)
        problems += problem
    last_step, totals, mismatch = _last_whole_step(listed)
    kept = {table: tuple(part for part in listed[table] if part.name.last_step <= last_step) for table in TABLES}
    leftover = [part for table in TABLES for part in listed[table] if part.name.last_step > last_step]
    unfinished = [path for table in TABLES for path in list_unfinished(folder, table)]
    if leftover:
        last = max(part.name.last_step for part in leftover)
        reason = mismatch or f"of steps after {last_step} that are not complete (still being written, or cut short)"
        rows = sum(part.num_rows for part in leftover)
        problems.append(f"{len(leftover)} parts with {rows} rows up to step {last} left out: {reason}")
    if unfinished:
        problems.append(f"{len(unfinished)} unfinished files ignored")
    return Catalogue(parts=kept, totals=totals, last_step=last_step, dropped="; ".join(problems))


def _readable_prefix(folder: Path, table: str) -> tuple[list[PartInfo], list[str]]:
    """Parts up to the first unreadable one, and what is wrong with that one."""
    names, _ = list_parts(folder, table)
    readable: list[PartInfo] = []
    for position, name in enumerate(names):
        try:
            readable.append(inspect_part(table, name))
        except UnreadablePart as error:
            return readable, [f"{error}; {len(names) - position} parts of {table} from step {name.first_step} left out"]
    return readable, []


def _last_whole_step(listed: Mapping[str, list[PartInfo]]) -> tuple[int, dict[str, int], str]:
    """The last step by which every table has the rows its commit record promises, those numbers, and what is amiss."""
    whole, totals = 0, dict.fromkeys(TABLES, 0)
    reached = 0
    others = {table: _StepSums.of(parts) for table, parts in listed.items()}
    for part in listed[EVENTS]:
        if part.name.first_step > reached + 1:
            return whole, totals, f"events of steps {reached + 1}-{part.name.first_step - 1} are missing"
        reached = part.name.last_step
        counts = {table: sums.rows_by(reached) for table, sums in others.items()}
        if None in counts.values():
            # A merged part of another table reaches beyond this step; a later commit record covers all of it.
            continue
        for table, count in counts.items():
            if count != part.totals.get(table):
                return whole, totals, f"{table} has {count} rows by step {reached} instead of {part.totals.get(table)}"
        whole, totals = reached, dict(part.totals)
    return whole, totals, ""


@dataclass(frozen=True, slots=True)
class _StepSums:
    """Rows of one table by step."""

    first_steps: list[int]
    last_steps: list[int]
    cumulative: list[int]

    @classmethod
    def of(cls, parts: list[PartInfo]) -> "_StepSums":
        return cls(
            [part.name.first_step for part in parts],
            [part.name.last_step for part in parts],
            list(accumulate((part.num_rows for part in parts), initial=0)),
        )

    def rows_by(self, step: int) -> int | None:
        """Rows up to and including `step`; None where a part straddles it."""
        position = bisect_right(self.last_steps, step)
        if position < len(self.first_steps) and self.first_steps[position] <= step:
            return None
        return self.cumulative[position]

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

from exgrpo_cli.ledger.parts import Commit, PartInfo, UnreadablePart, inspect_part, list_parts, list_unfinished
from exgrpo_cli.ledger.schemas import EVENTS, TABLES

_ATTEMPTS = 20
"""A compaction may remove listed parts; each new listing is then nearer to the end of it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Catalogue:
    """The valid prefix of a ledger."""

    parts: Mapping[str, tuple[PartInfo, ...]]
    """Per table, in order of steps, all of them complete; a merged one may reach beyond `last_step`."""
    totals: Mapping[str, int]
    """Rows per table."""
    last_step: int
    dropped: str
    """What was left out and why; empty where nothing was."""

    def up_to(self, step: int) -> "Catalogue":
        """The catalogue after a cut at a `step` at which no part straddles."""
        parts = {table: tuple(part for part in own if part.name.last_step <= step) for table, own in self.parts.items()}
        commits = [commit for part in parts[EVENTS] for commit in part.commits if commit.step <= step]
        totals = dict(commits[-1].totals) if commits else dict.fromkeys(TABLES, 0)
        return Catalogue(parts=parts, totals=totals, last_step=step, dropped="")


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
    commit, mismatch = _last_whole_step(listed)
    kept = {
        table: tuple(part for part in listed[table] if commit is not None and part.name.first_step <= commit.step)
        for table in TABLES
    }
    last_step = 0 if commit is None else commit.step
    totals = {table: 0 if commit is None else commit.totals.get(table, 0) for table in TABLES}
    readable = [part for parts in listed.values() for part in parts]
    later = [part for part in readable if commit is None or part.name.last_step > last_step]
    if later:
        first = max(min(part.name.first_step for part in later), 0 if commit is None else last_step + 1)
        rows = sum(part.num_rows for part in readable) - sum(totals.values())
        reason = mismatch or "not complete (still being written, or cut short)"
        last = max(part.name.last_step for part in later)
        problems.append(f"{rows} rows of steps {first} to {last} left out: {reason}")
    unfinished = [path for table in TABLES for path in list_unfinished(folder, table)]
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


def _last_whole_step(listed: Mapping[str, list[PartInfo]]) -> tuple[Commit | None, str]:
    """The last step by which every table has the rows its commit record promises, and what is wrong after it."""
    commits, mismatch = _commits(listed[EVENTS])
    whole = len(commits)
    for table, parts in listed.items():
        num, problem = _num_kept(table, parts, commits)
        if num < whole:
            whole, mismatch = num, problem
    return (commits[whole - 1] if whole else None), mismatch


def _commits(events: list[PartInfo]) -> tuple[list[Commit], str]:
    """Commit records up to the first missing part, and which steps are missing there."""
    commits: list[Commit] = []
    reached = 0
    for part in events:
        if part.name.first_step > reached + 1:
            return commits, f"events of steps {reached + 1}-{part.name.first_step - 1} are missing"
        reached = part.name.last_step
        commits += part.commits
    return commits, ""


def _num_kept(table: str, parts: list[PartInfo], commits: list[Commit]) -> tuple[int, str]:
    """How many of the commit records a table keeps, and how it breaks the next one.

    A merged part is judged by the record of its last step. Where that is not listed, a compaction or damage came in
    between; such a part holds whole steps only, for nothing else is merged.
    """
    sums, kept = _StepSums.of(parts), 0
    for position, commit in enumerate(commits):
        count = sums.rows_by(commit.step)
        if count is None:
            continue
        # A table that the ledger's format does not have is not in its records.
        promised = commit.totals.get(table, 0)
        if count != promised:
            return kept, f"{table} has {count} rows by step {commit.step} instead of {promised}"
        kept = position + 1
    return len(commits), ""


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

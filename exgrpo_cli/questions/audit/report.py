"""The one-page report of a preparation, for people and as JSON."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from exgrpo_cli.base.types import Question
from exgrpo_cli.questions.audit.checks import Finding, total


@dataclass(frozen=True, kw_only=True, slots=True)
class PrepareReport:
    """What was read, what was kept, and why the rest was not."""

    source: str
    revision: str | None
    split: str | None
    layout: str
    """Layout recognised in the source."""
    output: Path
    questions: tuple[Question, ...]
    """Those that were kept."""
    content_hash: str
    num_read: int
    num_folded: int
    """Exact duplicates."""
    dropped: Mapping[str, Finding]
    """By reason."""
    marked: Mapping[str, Finding]
    """What was found and kept."""
    levels: Mapping[str, int]
    """Questions of each level, where levels are known."""
    seconds: float

    @property
    def num_kept(self) -> int:
        """Questions written to the file."""
        return len(self.questions)

    def counts(self) -> dict[str, Any]:
        """Counts for the file's metadata: read = kept + folded + dropped."""
        dropped = {reason: finding.count for reason, finding in self.dropped.items()}
        return {"read": self.num_read, "kept": self.num_kept, "folded": self.num_folded, "dropped": dropped}

    def to_json(self) -> dict[str, Any]:
        """The report without the questions themselves, as `prepare --json` prints it."""
        return {
            "source": self.source,
            "revision": self.revision,
            "split": self.split,
            "layout": self.layout,
            "output": str(self.output),
            "content_hash": self.content_hash,
            "counts": self.counts(),
            "dropped": {reason: finding.to_json() for reason, finding in self.dropped.items()},
            "marked": {reason: finding.to_json() for reason, finding in self.marked.items()},
            "levels": dict(self.levels),
            "seconds": round(self.seconds, 3),
        }

    def lines(self) -> list[str]:
        """The report as text."""
        where = "".join(f" {part}" for part in (self.split, self.revision and f"at {self.revision[:12]}") if part)
        lines = [
            f"{self.source}{where}: {self.layout} layout, {self.seconds:.1f} s",
            f"  {self.num_read:>8,} read",
            f"  {self.num_folded:>8,} exact duplicates folded",
            f"  {total(self.dropped.values()):>8,} dropped",
        ]
        lines += [line for reason, finding in self.dropped.items() for line in _finding_lines(reason, finding)]
        lines.append(f"  {self.num_kept:>8,} kept in {self.output}")
        lines += [line for reason, finding in self.marked.items() for line in _finding_lines(reason, finding)]
        if self.levels:
            lines.append("  levels: " + ", ".join(f"{level}: {count:,}" for level, count in self.levels.items()))
        return [*lines, f"  content hash {self.content_hash[:16]}"]


def _finding_lines(reason: str, finding: Finding) -> list[str]:
    return [f"    {finding.count:>6,} {reason}", *(f"             {example}" for example in finding.examples)]

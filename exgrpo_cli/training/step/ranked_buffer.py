"""The experience buffer under several ranks: rank 0 has it, and all make the same calls.

Rank 0 alone opens the ledger, draws and writes. A step with replay takes three exchanges, whatever it draws: what is
offered, what was chosen, and at its end how much the buffer holds and who has retired.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np

from exgrpo_cli.config.sections.replay import ReplaySettings
from exgrpo_cli.ranks.ranks import Ranks
from exgrpo_cli.replay.buffer import ExperienceBuffer
from exgrpo_cli.replay.drawing.selection import Candidates
from exgrpo_cli.replay.drawing.units import ScannedUnit
from exgrpo_cli.replay.protocol import BufferCounts, Choice, Offer, ReplayUnit
from exgrpo_cli.replay.visits import Visit
from exgrpo_cli.replay.warm_start import WarmStartReport

T = TypeVar("T")


class RankedBuffer:
    """Implements `replay.protocol.Buffer` over rank 0's ExperienceBuffer.

    The generators passed in advance on rank 0 alone, whose state is the one that checkpoints hold.
    """

    def __init__(self, buffer: ExperienceBuffer | None, rules: ReplaySettings, ranks: Ranks) -> None:
        """`buffer` is rank 0's, None on the others."""
        self._buffer = buffer
        self._rules = rules
        self._ranks = ranks
        self._newly_retired: list[str] = []
        self._renew()

    def _renew(self) -> None:
        self.retired: set[str]
        self.counts: BufferCounts
        self.retired, self.counts = self._asked(lambda own: (set(own.retired), own.counts))

    def warm_start(self, source: Path, *, max_response_tokens: int, with_retired: bool) -> WarmStartReport:
        """See `Buffer.warm_start`."""
        report = self._asked(
            lambda own: own.warm_start(source, max_response_tokens=max_response_tokens, with_retired=with_retired)
        )
        self._renew()
        return report

    def readmit(self, step: int, rng: np.random.Generator) -> Sequence[str]:
        """See `Buffer.readmit`."""
        if not self._rules.readmits_at(step):
            return ()
        returning = self._asked(lambda own: own.readmit(step, rng))
        self.retired.difference_update(returning)
        return returning

    def offer(self, num: int, step: int, weight_version: int, rng: np.random.Generator) -> Offer:
        """See `Buffer.offer`."""
        return self._asked(lambda own: own.offer(num, step, weight_version, rng))

    def offer_joining(self, question_ids: Sequence[str], step: int, weight_version: int) -> Offer:
        """See `Buffer.offer_joining`."""
        return self._asked(lambda own: own.offer_joining(question_ids, step, weight_version))

    def scan(self, num: int, step: int, rng: np.random.Generator) -> tuple[ReplayUnit, ...]:
        """See `Buffer.scan`."""
        return self._asked(lambda own: own.scan(num, step, rng))

    def end_scan(self, step: int, verdicts: Sequence[ScannedUnit]) -> None:
        """See `Buffer.end_scan`."""
        self._told(lambda own: own.end_scan(step, verdicts))

    def choose_from(self, candidates: Sequence[Candidates], rng: np.random.Generator) -> Choice:
        """See `Buffer.choose_from`."""
        return self._asked(lambda own: own.choose_from(candidates, rng))

    def record_replay(self, step: int, candidates: Sequence[Candidates], choice: Choice | None) -> None:
        """See `Buffer.record_replay`."""
        self._told(lambda own: own.record_replay(step, candidates, choice))

    def record_visits(self, visits: Sequence[Visit], *, collecting: bool) -> None:
        """See `Buffer.record_visits`."""

        def record(own: ExperienceBuffer) -> None:
            for visit in visits:
                if own.record_visit(visit, collecting=collecting).retired:
                    self._newly_retired.append(visit.question_id)

        self._told(record)

    def flush(self, step: int) -> None:
        """See `Buffer.flush`; all ranks get the counts after it."""

        def flush(own: ExperienceBuffer) -> tuple[BufferCounts, list[str]]:
            own.flush(step)
            return own.counts, self._newly_retired

        self.counts, newly_retired = self._asked(flush)
        self.retired.update(newly_retired)
        self._newly_retired = []

    def seal(self) -> None:
        """See `Buffer.seal`."""
        self._told(lambda own: own.seal())

    def _asked(self, call: Callable[[ExperienceBuffer], T]) -> T:
        """What `call` returns on rank 0, on every rank: one exchange."""

        def ask() -> T:
            assert self._buffer is not None
            return call(self._buffer)

        return self._ranks.from_main(ask)

    def _told(self, call: Callable[[ExperienceBuffer], object]) -> None:
        """A call whose result is not needed: the other ranks need not wait for it, and an error of it ends them all."""
        if self._buffer is not None:
            call(self._buffer)

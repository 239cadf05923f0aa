"""The experience buffer of a run: stored successes, buckets and retired questions (paper, section 3).

Every change is an event of the ledger, and `open` rebuilds the state from the ledger alone, so a resumed run draws
exactly as an uninterrupted one. Bodies live on disk; memory holds 76 bytes per trajectory, and up to 10 more where
units are drawn from the whole store.
"""

import math
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np

from exgrpo_cli.base.errors import InputError
from exgrpo_cli.base.files import write_text
from exgrpo_cli.base.types import Trajectory
from exgrpo_cli.config.sections.replay import ReplaySettings
from exgrpo_cli.ledger.parts import Catalogue, check_cut, cut_after, read_catalogue
from exgrpo_cli.ledger.reader import read_identity
from exgrpo_cli.ledger.schemas import RESUME_FIELDS, TABLES, WARM_START_STEP, LedgerIdentity
from exgrpo_cli.ledger.writer import IDENTITY_FILE, LedgerWriter, create_folders, lock_ledger
from exgrpo_cli.replay.buffer_state import BufferState
from exgrpo_cli.replay.collector import Collector
from exgrpo_cli.replay.drawing.question_replay import QuestionReplay
from exgrpo_cli.replay.drawing.selection import Candidates
from exgrpo_cli.replay.drawing.unit_replay import UnitReplay
from exgrpo_cli.replay.drawing.units import ScannedUnit
from exgrpo_cli.replay.protocol import BufferCounts, Choice, Offer, ReplayUnit
from exgrpo_cli.replay.question_states import BucketKey, NamedQuestions
from exgrpo_cli.replay.visits import Visit, VisitOutcome
from exgrpo_cli.replay.warm_start import WarmStartReport, read_experience


class ExperienceBuffer(AbstractContextManager):
    """Made by `create` or `open`; holds the ledger's writer lock until `close`."""

    def __init__(
        self,
        folder: Path,
        writer: LedgerWriter,
        rules: ReplaySettings,
        question_ids: Sequence[str],
        catalogue: Catalogue,
    ) -> None:
        self.folder = folder
        self.rules = rules
        self.group_size = writer.identity.group_size
        self._writer = writer
        self._question_ids = question_ids
        self._take_on(catalogue)

    def _take_on(self, catalogue: Catalogue) -> None:
        """Start from what the ledger holds."""
        self._state = BufferState(catalogue, self._writer, self._question_ids, self.rules)
        self._collector = Collector(self._state, self.rules, self.group_size)
        self.questions = QuestionReplay(self._state, self._writer, self.rules)
        """Draws by question."""
        self._units = None if self._state.units is None else UnitReplay(self._state, self._state.units)

    @classmethod
    def create(
        cls, folder: Path, *, identity: LedgerIdentity, rules: ReplaySettings, question_ids: Sequence[str]
    ) -> "ExperienceBuffer":
        """An empty buffer with a new ledger in `folder`, which must not hold one. Raises InputError."""
        if (folder / IDENTITY_FILE).exists():
            raise InputError(f"{folder} holds a ledger already; resume that run, or give another --output")
        create_folders(folder)
        lock = lock_ledger(folder)
        try:
            writer = LedgerWriter(folder, identity, lock, WARM_START_STEP, dict.fromkeys(TABLES, 0))
            buffer = cls(folder, writer, rules, question_ids, read_catalogue(folder))
            write_text(folder / IDENTITY_FILE, identity.to_json())
        except BaseException:
            lock.release()
            raise
        return buffer

    @classmethod
    def open(
        cls, folder: Path, *, identity: LedgerIdentity, rules: ReplaySettings, question_ids: Sequence[str], at_step: int
    ) -> "ExperienceBuffer":
        """The buffer as it was at the end of step `at_step`; what the ledger holds of later steps is deleted.

        Raises InputError where the ledger is another run's, is being written, is not whole up to that step or cannot be
        read; nothing is deleted then.
        """
        identity.require_match(read_identity(folder), str(folder), RESUME_FIELDS)
        lock = lock_ledger(folder)
        try:
            create_folders(folder)
            catalogue = check_cut(folder, at_step)
            writer = LedgerWriter(folder, identity, lock, at_step, catalogue.totals)
            buffer = cls(folder, writer, rules, question_ids, catalogue)
            cut_after(folder, at_step)
            return buffer
        except BaseException:
            lock.release()
            raise

    def warm_start(self, source: Path, *, max_response_tokens: int, with_retired: bool) -> WarmStartReport:
        """Copy the experience of another run's ledger into this still empty one, durably, as step 0.

        Raises InputError where tokenizer, template, K or question ids do not match.
        """
        if any(self._writer.totals.values()) or len(self._state.index):
            raise InputError(f"{self.folder}: a warm start needs an empty ledger; this one has been written to")
        experience = read_experience(
            source,
            identity=self._writer.identity,
            question_ids=frozenset(self._question_ids),
            rules=self.rules,
            max_response_tokens=max_response_tokens,
            with_retired=with_retired,
        )
        self._writer.write(WARM_START_STEP, experience.tables, experience.bodies(), experience.num_bodies)
        self._take_on(read_catalogue(self.folder))
        self._collector.trim_store(WARM_START_STEP + 1)
        return experience.report

    def close(self) -> None:
        """Release the writer lock. Rows that were not flushed are gone."""
        self._writer.close()

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def retired(self) -> NamedQuestions:
        """Ids of the retired questions; membership costs a look-up."""
        return self._state.questions.retired

    @property
    def index_nbytes(self) -> int:
        """Memory of the index of trajectories, and of the order that units are drawn by."""
        units = self._state.units
        return self._state.index.nbytes + (0 if units is None else units.nbytes)

    @property
    def counts(self) -> BufferCounts:
        """How much the buffer holds now."""
        buckets: Counter[int] = Counter()
        for key, size in self._state.questions.sizes().items():
            buckets[key.success_count] += size
        return BufferCounts(
            num_questions=self._state.questions.num_buffered,
            num_trajectories=self._state.num_trajectories,
            num_retired=len(self.retired),
            buckets=dict(buckets),
        )

    def readmit(self, step: int, rng: np.random.Generator) -> list[str]:
        """Every `readmit_every` steps, let the set fraction of the retired, rounded up, come back.

        They come to bucket K-1 where their trajectories are stored.
        """
        if not self.rules.readmits_at(step):
            return []
        retired = self.retired
        num = math.ceil(self.rules.readmit_fraction * len(retired))
        returning = (
            sorted(retired[int(rank)] for rank in rng.choice(len(retired), size=num, replace=False)) if num else []
        )
        for question_id in returning:
            key = BucketKey(self.group_size - 1, self.group_size)
            self._state.readmit(step, self._state.questions.number(question_id), key)
        return returning

    def offer(self, num: int, step: int, weight_version: int, rng: np.random.Generator) -> Offer:
        """See `Buffer.offer`."""
        return self.questions.offer(num, step, weight_version, rng)

    def offer_joining(self, question_ids: Sequence[str], step: int, weight_version: int) -> Offer:
        """See `Buffer.offer_joining`."""
        return self.questions.offer_joining(question_ids, step, weight_version)

    def choose_from(self, candidates: Sequence[Candidates], rng: np.random.Generator) -> Choice:
        """See `Buffer.choose_from`."""
        return self.questions.choose_from(candidates, rng)

    def record_replay(self, step: int, candidates: Sequence[Candidates], choice: Choice | None) -> None:
        """See `Buffer.record_replay`."""
        self.questions.record_replay(step, candidates, choice)

    def scan(self, num: int, step: int, rng: np.random.Generator) -> tuple[ReplayUnit, ...]:
        """See `Buffer.scan`."""
        assert self._units is not None
        return self._units.scan(num, step, rng)

    def end_scan(self, step: int, verdicts: Sequence[ScannedUnit]) -> None:
        """See `Buffer.end_scan`."""
        assert self._units is not None
        self._units.end_scan(step, verdicts)

    def load(self, trajectory_ids: Sequence[int]) -> list[Trajectory]:
        """Live trajectories with their bodies, bit for bit as they were recorded."""
        return self._state.trajectories(trajectory_ids)

    def record_visit(self, visit: Visit, *, collecting: bool = True) -> VisitOutcome:
        """Record one visit. See `Collector.record`."""
        return self._collector.record(visit, collecting=collecting)

    def record_visits(self, visits: Sequence[Visit], *, collecting: bool) -> None:
        """Record each visit of a step, in their order."""
        for visit in visits:
            self.record_visit(visit, collecting=collecting)

    def flush(self, step: int) -> None:
        """Let readers see the step, also where nothing happened in it. Raises RunError where the disk refuses."""
        for part in self._writer.flush(step):
            self._state.add_part(part)

    def seal(self) -> None:
        """See `Buffer.seal`."""
        for part in self._writer.seal():
            self._state.add_part(part)

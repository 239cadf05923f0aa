"""Where the fresh questions of an arm and of its baseline part.

All arms of a seed draw from one stream, so that the i-th fresh question is the same in each until a question retires,
waits for its replay to end, or is drawn in a further round of a step.
"""

import warnings
from collections.abc import Sequence
from pathlib import Path

from exgrpo_cli.base.errors import DamageWarning, InputError
from exgrpo_cli.ledger.reader import LedgerReader
from exgrpo_cli.ledger.schemas import EVENTS, VISITS, Event
from exgrpo_cli.studies.study import Study, StudyRun

FreshQuestions = Sequence[tuple[int, str]]
"""Step and id of every fresh question, in the order drawn."""
Parting = dict[str, dict[int, int | None]]
"""Arm -> seed -> the arm's first step with another fresh question than the baseline's; None where they never part."""


def parting_steps(study: Study) -> Parting:
    """Of the finished runs whose ledgers can be read in the study's folder, those of the baselines left out.

    Warns (DamageWarning) of a ledger that cannot be read.
    """
    here = {(run.arm.name, run.seed): run for run in study.runs if _ledger(run).is_dir() and run.state == "finished"}
    found: Parting = {}
    for (arm, seed), run in here.items():
        baseline = here.get((run.arm.baseline, seed))
        if baseline is None or baseline is run:
            continue
        try:
            mine, theirs = fresh_questions(run), fresh_questions(baseline)
        except InputError as error:
            warnings.warn(
                f"not said of {arm}, seed {seed}, where its questions part: {error}", DamageWarning, stacklevel=2
            )
            continue
        if mine and theirs:
            found.setdefault(arm, {})[seed] = parting_step(mine, theirs)
    return found


def parting_step(own: FreshQuestions, other: FreshQuestions) -> int | None:
    """As `Parting` has it; as far as both runs went."""
    return next((mine[0] for mine, theirs in zip(own, other, strict=False) if mine[1] != theirs[1]), None)


def fresh_questions(run: StudyRun) -> FreshQuestions:
    """Those of a run; none where an earlier version ran it. Raises InputError for a ledger that cannot be read."""
    reader = LedgerReader(_ledger(run))
    stand_in: set[tuple[int, str]] = set()
    if run.config.replay.composition == "replace":
        events = reader.table(EVENTS, ["step", "question_id", "event"]).to_pylist()
        stand_in = {(e["step"], e["question_id"]) for e in events if e["event"] == Event.SELECTED}
    visits = reader.table(VISITS, ["step", "question_id"])
    every = zip(visits.column("step").to_pylist(), visits.column("question_id").to_pylist(), strict=True)
    return [visit for visit in every if visit not in stand_in]


def _ledger(run: StudyRun) -> Path:
    return run.folder / "replay"

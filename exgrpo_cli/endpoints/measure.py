"""From a run folder to its result, computed once when the run ends: scores, spending, and what its ledger tells.

Memorising or learning: pass@1 of questions that were replayed, only rolled out, or never seen, before and after. The
training questions are a sample that was asked before and after training (`validation.train_questions`), chosen before
anything was replayed: what is replayed is chosen for having been solved, so that its success on the way would say too
much.

Valid traces: on tasks where a step can be checked exactly, whether the stored correct responses are right in every
step. A right answer may be a lucky hit. Where entropy tells the two apart, replaying the trajectory of lowest entropy
avoids the hits: the area under the ROC curve says how well.
"""

import warnings
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq
from jaxtyping import Bool, Float64, Int64

from exgrpo_cli.config.settings import Config
from exgrpo_cli.endpoints.heldout import Validation, area, collapsed, curve_of, newly_solved, read_validations
from exgrpo_cli.grading.valid_traces import sum_asked, valid_trace
from exgrpo_cli.ledger.reader import LedgerReader, LedgerWarning
from exgrpo_cli.ledger.schemas import Event
from exgrpo_cli.questions.question_file import read_questions
from exgrpo_cli.runs.folder import PHASES, TRAINED, read_metrics
from exgrpo_cli.runs.result import Memorising, PassRates, RunResult, Totals, ValidTraces, config_hash
from exgrpo_cli.show.record import LEDGER_FOLDER, QUESTIONS_FILE, keeps_experience, read_run, response_texts

MOST_TRACES = 4000
"""Trajectories whose steps are checked; of more, so many spread over the run."""


def measure(run: Path, config: Config, summary: dict[str, Any], visited: Collection[str]) -> RunResult:
    """The result of a finished run; `summary` is its `summary.json`, `visited` the questions it rolled out."""
    heldout = read_validations(run)
    curve = curve_of(heldout)
    none = np.array([], dtype=np.int64)
    seconds = summary["wall_seconds"]
    return RunResult(
        config_hash=config_hash(config),
        method=config.run.method,
        regime=config.run.regime,
        seed=config.run.seed,
        budget_amount=config.run.budget_amount,
        finished=summary["finished"],
        samples=heldout[0].samples if heldout else 0,
        before=heldout[0].correct if heldout else none,
        after=heldout[-1].correct if heldout else none,
        curve=curve,
        area=area(curve),
        newly_solved=newly_solved(heldout),
        collapsed=collapsed(heldout),
        memorising=memorising(run, visited, read_validations(run, TRAINED), heldout) if len(heldout) > 1 else None,
        valid_traces=valid_traces(run),
        totals=Totals(
            steps=summary["steps"],
            updates=summary["updates"]["applied"],
            generated=summary["tokens"]["generated"],
            trained=summary["tokens"]["trained"],
            scored=int(np.nansum(read_metrics(run).series("tokens/scored"))),
            seconds=seconds["total"],
            training_seconds=sum(seconds.get(phase, 0.0) for phase in PHASES),
        ),
        after_valid=heldout[-1].valid if heldout else None,
        second_graders={
            name: found["pass_at_1"]
            for name, found in (summary["heldout"]["after"] or {}).get("second_graders", {}).items()
        },
    )


def memorising(
    run: Path, visited: Collection[str], asked: Sequence[Validation], heldout: Sequence[Validation]
) -> Memorising:
    """Compare the questions of a run; `asked` are its validations on training questions, `visited` those rolled out."""
    replayed = replayed_questions(run)
    ids = asked[0].ids if len(asked) > 1 else ()
    was_replayed = np.array([each in replayed for each in ids], dtype=bool)
    was_visited = np.array([each in visited for each in ids], dtype=bool)
    levels = levels_of(run / "data" / "train.parquet")
    there = list(levels_of(run / "data" / "heldout.parquet").values())[: len(heldout[0].correct)]
    wanted = Counter(levels.get(each) for each in (replayed & set(ids)) or replayed)
    return Memorising(
        trained_questions=len(visited),
        replayed_questions=len(replayed),
        replayed=pass_rates(asked, was_replayed),
        rolled_out=pass_rates(asked, was_visited & ~was_replayed),
        never_seen=pass_rates(heldout, same_level_weights(there, wanted)),
        heldout=pass_rates(heldout, np.ones(len(heldout[0].correct))),
    )


def replayed_questions(run: Path) -> frozenset[str]:
    """Ids of the questions that a run replayed; none where it keeps no ledger."""
    if not (run / LEDGER_FOLDER).is_dir():
        return frozenset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LedgerWarning)  # what is damaged is told when the run is resumed or reported
        reader = LedgerReader(run / LEDGER_FOLDER)
    events = reader.events(("event", "question_id"))
    ids = events.filter(pc.equal(events["event"], Event.SELECTED.value))["question_id"]
    replays = reader.replays(("unit_id", "accepted"))
    units = replays.filter(replays["accepted"])["unit_id"].combine_chunks()
    stored = reader.trajectories(("trajectory_id", "question_id"))
    of_units = stored.filter(pc.is_in(stored["trajectory_id"], value_set=units))["question_id"]
    return frozenset(ids.to_pylist()) | frozenset(of_units.to_pylist())


def pass_rates(
    validations: Sequence[Validation], weights: Float64[np.ndarray, " questions"] | Bool[np.ndarray, " questions"]
) -> PassRates:
    """pass@1 at the first and at the last validation, with a weight for each question, or of some of them."""
    if not weights.any():
        return PassRates(questions=0, before=None, after=None)
    before, after = (
        float(np.average(each.correct / each.samples, weights=weights)) for each in (validations[0], validations[-1])
    )
    return PassRates(questions=int((weights > 0).sum()), before=before, after=after)


def levels_of(path: Path) -> Mapping[str, str | None]:
    """Level of each question of a question file, by id in its order."""
    table = pq.read_table(path, columns=["id", "level"])
    return dict(zip(table.column("id").to_pylist(), table.column("level").to_pylist(), strict=True))


def same_level_weights(
    levels: Sequence[str | None], wanted: Mapping[str | None, int]
) -> Float64[np.ndarray, " questions"]:
    """Weights that give questions of these levels the shares of `wanted`; all alike where they have none in common."""
    there = Counter(levels)
    weights = np.array([wanted.get(level, 0) / there[level] for level in levels], dtype=np.float64)
    return weights if weights.any() else np.ones(len(levels))


def valid_traces(run: Path) -> ValidTraces | None:
    """Valid shares of what a run stored; None where the task cannot tell or the run stores nothing correct."""
    questions = {question.id: question for question in read_questions(run / QUESTIONS_FILE).questions}
    # Of one task either every question can be checked or none.
    if sum_asked(next(iter(questions.values()))) is None or not keeps_experience(run):
        return None
    record = read_run(run)
    rows = np.flatnonzero(record.trajectories.reward > 0)
    rows = rows[np.unique(np.linspace(0, len(rows) - 1, min(len(rows), MOST_TRACES)).astype(np.int64))]
    entropy, of_question = record.trajectories.entropy[rows], record.trajectories.question[rows]
    ids = record.trajectories.trajectory_id[rows].tolist()
    texts = response_texts(run, record.config.backbone.source, ids)
    if not texts:
        return None
    asked = [questions[record.question_ids[int(number)].as_py()] for number in of_question]
    pairs = zip(asked, ids, strict=True)
    valid = np.array([bool(valid_trace(question, texts[each])) for question, each in pairs], dtype=bool)
    order, third = np.argsort(entropy, kind="stable"), max(1, len(rows) // 3)
    return ValidTraces(
        trajectories=len(rows),
        valid=float(valid.mean()),
        auc=auc(entropy, valid, np.zeros(len(rows), dtype=np.int64)),
        auc_within=auc(entropy, valid, of_question),
        low_entropy=float(valid[order[:third]].mean()),
        high_entropy=float(valid[order[-third:]].mean()),
    )


def auc(
    entropy: Float64[np.ndarray, " rows"], valid: Bool[np.ndarray, " rows"], group: Int64[np.ndarray, " rows"]
) -> float | None:
    """Chance that of a valid and an invalid one of a group, drawn at random, the valid one has the lower entropy.

    Mann and Whitney's U, summed over groups, over the number of pairs; ties count half. None without a pair.
    """
    wins = pairs = 0.0
    for each in np.unique(group):
        here = group == each
        low, high = np.sort(entropy[here & valid]), entropy[here & ~valid]
        below, upto = np.searchsorted(low, high, side="left"), np.searchsorted(low, high, side="right")
        wins += float((below + upto).sum()) / 2
        pairs += len(low) * len(high)
    return wins / pairs if pairs else None

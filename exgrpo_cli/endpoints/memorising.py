"""Memorising or learning: pass@1 of questions that were replayed, only rolled out, or never seen, before and after.

The training questions are a sample that was asked before and after training (`validation.train_questions`), chosen
before anything was replayed: what is replayed is chosen for having been solved, so that its success on the way would
say too much.
"""

import warnings
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import numpy as np
import pyarrow.compute as pc
from jaxtyping import Bool, Float64

from exgrpo_cli.endpoints.heldout import Validation
from exgrpo_cli.ledger.reader import LedgerReader, LedgerWarning
from exgrpo_cli.ledger.schemas import Event
from exgrpo_cli.runs.result import Memorising, PassRates
from exgrpo_cli.show.record import LEDGER_FOLDER


def memorising(
    run: Path, visited: Collection[str], asked: Sequence[Validation], heldout: Sequence[Validation]
) -> Memorising | None:
    """Compare the questions of a run; `asked` are its validations on training questions, `visited` those rolled out.

    None where the held-out questions were not asked both before and after training.
    """
    if len(heldout) < 2:
        return None
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
        replayed=rates(asked, was_replayed),
        rolled_out=rates(asked, was_visited & ~was_replayed),
        never_seen=weighted(heldout, same_level_weights(there, wanted)),
        heldout=weighted(heldout, np.ones(len(heldout[0].correct))),
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


def rates(asked: Sequence[Validation], chosen: Bool[np.ndarray, " questions"]) -> PassRates:
    """pass@1 of the chosen questions at the first and at the last validation."""
    if not chosen.any():
        return PassRates(questions=0, before=None, after=None)
    return weighted(asked, chosen.astype(np.float64))


def weighted(validations: Sequence[Validation], weights: Float64[np.ndarray, " questions"]) -> PassRates:
    """The same with a weight for each question."""
    before, after = (
        float(np.average(each.correct / each.samples, weights=weights)) for each in (validations[0], validations[-1])
    )
    return PassRates(questions=int((weights > 0).sum()), before=before, after=after)


def levels_of(path: Path) -> Mapping[str, str | None]:
    """Level of each question of a question file, by id in its order."""
    import pyarrow.parquet as pq

    table = pq.read_table(path, columns=["id", "level"])
    return dict(zip(table.column("id").to_pylist(), table.column("level").to_pylist(), strict=True))


def same_level_weights(
    levels: Sequence[str | None], wanted: Mapping[str | None, int]
) -> Float64[np.ndarray, " questions"]:
    """Weights that give questions of these levels the shares of `wanted`; all alike where they have none in common."""
    there = Counter(levels)
    weights = np.array([wanted.get(level, 0) / there[level] for level in levels], dtype=np.float64)
    return weights if weights.any() else np.ones(len(levels))

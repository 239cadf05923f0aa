"""Recovery: bringing a ledger back to the end of a step, and clearing what a dead writer left behind."""

import warnings
from pathlib import Path

from exgrpo_cli.errors import InputError
from exgrpo_cli.files import sync_folder
from exgrpo_cli.ledger.catalogue import Catalogue, read_catalogue
from exgrpo_cli.ledger.parts import PartName, list_parts, list_unfinished
from exgrpo_cli.ledger.reader import LedgerWarning
from exgrpo_cli.ledger.schemas import EVENTS, TABLES

_COMMIT_FIRST = (EVENTS, *(table for table in TABLES if table != EVENTS))
"""Deleting a commit record first turns its step into one that was never finished, whatever comes between."""


def cut_after(folder: Path, step: int) -> Catalogue:
    """Delete what the ledger holds of later steps and return what remains.

    Raises InputError, deleting nothing, where the ledger is not whole up to `step` or cannot be cut there. The caller
    holds the writer lock.
    """
    catalogue = read_catalogue(folder)
    later: dict[str, list[PartName]] = {}
    for table in TABLES:
        current, _ = list_parts(folder, table)
        later[table] = [name for name in current if name.last_step > step]
        for name in later[table]:
            if name.first_step <= step:
                raise InputError(
                    f"{name.path} holds steps {name.first_step} to {name.last_step} in one part and cannot be cut at "
                    f"step {step}; resume from a checkpoint at step {name.last_step} or later"
                )
    if catalogue.last_step < step:
        raise InputError(
            f"{folder} is whole only up to step {catalogue.last_step}, but the checkpoint is of step {step}"
            f"{': ' + catalogue.dropped if catalogue.dropped else ''}; "
            f"to resume from an earlier checkpoint, remove those after step {catalogue.last_step}"
        )
    unfinished = remove_leftovers(folder)
    if unfinished:
        warnings.warn(f"{folder}: {unfinished} unfinished files of a stopped run removed", LedgerWarning, stacklevel=3)
    if not any(later.values()):
        return catalogue
    for table in _COMMIT_FIRST:
        for name in reversed(later[table]):
            name.path.unlink()
        sync_folder(folder / table)
    return read_catalogue(folder)


def remove_leftovers(folder: Path) -> int:
    """Delete parts that a merged one has replaced, and unfinished files; returns the number of the latter."""
    unfinished = 0
    for table in TABLES:
        _, replaced = list_parts(folder, table)
        for name in replaced:
            name.path.unlink()
        for path in list_unfinished(folder, table):
            path.unlink()
            unfinished += 1
    return unfinished

"""Recovery: bringing a ledger back to the end of a step, and clearing what a dead writer left behind."""

import warnings
from pathlib import Path

from exgrpo_cli.base.errors import InputError, ToolkitWarning
from exgrpo_cli.base.files import sync_folder
from exgrpo_cli.ledger.catalogue import Catalogue, read_catalogue
from exgrpo_cli.ledger.parts import list_parts, list_unfinished
from exgrpo_cli.ledger.reader import read_rows
from exgrpo_cli.ledger.schemas import BODIES, EVENTS, SCHEMAS, TABLES

_COMMIT_FIRST = (EVENTS, *(table for table in TABLES if table != EVENTS))
"""Deleting a commit record first turns its step into one that was never finished, whatever comes between."""


def check_cut(folder: Path, step: int) -> Catalogue:
    """What a cut after `step` would leave of the ledger; deletes nothing.

    Raises InputError where the ledger is not whole up to `step` or cannot be cut there.
    """
    catalogue = read_catalogue(folder)
    for table in TABLES:
        for name in list_parts(folder, table)[0]:
            if name.first_step <= step < name.last_step:
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
    return catalogue.up_to(step)


def cut_after(folder: Path, step: int) -> None:
    """Delete what the ledger holds of later steps; the caller holds the writer lock and has let `check_cut` look."""
    unfinished = remove_leftovers(folder)
    if unfinished:
        warnings.warn(f"{folder}: {unfinished} unfinished files of a stopped run removed", ToolkitWarning, stacklevel=3)
    for table in _COMMIT_FIRST:
        later = [name for name in list_parts(folder, table)[0] if name.last_step > step]
        for name in reversed(later):
            name.path.unlink()
        if later:
            sync_folder(folder / table)


def whole_until(folder: Path) -> tuple[int, str]:
    """The last step up to which all tables can be read with their checksums right, and what is wrong after it.

    Reads every table whole, bodies apart: those are checked one by one, as they are replayed.
    """
    catalogue = read_catalogue(folder)
    last_step, problem = catalogue.last_step, catalogue.dropped
    for table in TABLES:
        for part in catalogue.parts[table] if table != BODIES else ():
            if part.name.first_step > last_step:
                break
            try:
                read_rows(table, [part], SCHEMAS[table].names)
            except InputError as error:
                last_step, problem = part.name.first_step - 1, str(error)
                break
    return last_step, problem


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

"""Whether and why a run finished: a word of `summary.json` and of a checkpoint's state."""

import warnings
from enum import StrEnum
from pathlib import Path

from exgrpo_cli.base.errors import DamageWarning, InputError
from exgrpo_cli.base.shapes import read_json


class Ending(StrEnum):
    """Reasons for which training ends by itself."""

    UNDER_WAY = ""
    """It has not ended."""
    STEPS_REACHED = "steps reached"
    """All of `run.steps`; more of them may be asked for."""
    BUDGET_SPENT = "budget spent"
    """The tokens or seconds of `run.budget_amount`."""
    ALL_RETIRED = "all questions retired"
    """No question is left to train on; no further step is possible."""

    @property
    def is_final(self) -> bool:
        """Whether a resumed run has nothing left to do, however many steps it is given."""
        return self in (Ending.ALL_RETIRED, Ending.BUDGET_SPENT)


def has_ended(run: Path, last_step: int) -> bool:
    """Whether a run has its summary and nothing left to do up to `last_step`.

    A damaged summary is none, of which a warning tells: a resumed run writes it again.
    """
    path = run / "summary.json"
    if not path.is_file():
        return False
    try:
        summary = read_json(path, {"steps": int, "finished?": str})
    except InputError as error:
        warnings.warn(f"{error} The run counts as unfinished.", DamageWarning, stacklevel=2)
        return False
    ended_early = summary.get("finished") in [ending for ending in Ending if ending.is_final]
    return ended_early or bool(summary["steps"] >= last_step)

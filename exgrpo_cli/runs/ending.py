"""Why a run finished: a word of `summary.json` and of a checkpoint's state."""

from enum import StrEnum


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

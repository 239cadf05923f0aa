"""What the pool, the supervisor and the workers send one another."""

from typing import NamedTuple


class Task(NamedTuple):
    """One answer to be graded against one gold; a plain tuple, because equal tasks are graded once."""

    gold: str
    answer: str
    audits_gold: bool = False
    """Check whether the gold verifies against itself; there is no answer."""
    asks_for_part: bool = False
    """Check instead whether a part of the gold would be read."""
    patience: int = 1
    """Times the deadline that it gets: above 1 for what is tried again, alone."""

    @property
    def judged(self) -> str:
        """The text that a time-out or a crash is held against: the answer, or the gold where that is audited."""
        return self.gold if self.audits_gold else self.answer


READY = "ready"
"""Supervisor to parent, once: everything is imported. Any other greeting is the reason why grading cannot start."""

STOP = None
"""Parent to supervisor, in place of a numbered task: kill the workers and end."""

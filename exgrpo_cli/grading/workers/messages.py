"""What the pool, the supervisor and the workers send one another."""

from typing import Literal, NamedTuple

TaskKind = Literal[
    "grade",
    "grade a text",
    "grade like Oat",
    "compare texts",
    "audit",
    "audit for parts",
    "gym",
    "whole response",
    "whole pair",
]


class Task(NamedTuple):
    """One answer to be graded against one gold; a plain tuple, because equal tasks are graded once."""

    gold: str
    answer: str
    kind: TaskKind = "grade"
    """The answer of "grade" is the content of a box, or what a user's function gets. An audit checks whether the gold
    verifies against itself, or whether only a part of it would be read; there is no answer. Of a whole response, and of
    a whole pair of texts to be compared, the answer is yet to be found."""
    metadata: str | None = None
    """Of the question, for its own verifier or a grader that asks for them; of a whole response all that says where its
    answer is."""
    patience: int = 1
    """Times the deadline that it gets: above 1 for what is tried again, alone."""

    @property
    def is_packed(self) -> bool:
        """Whether the worker is to look for the answer too."""
        return self.kind in ("whole response", "whole pair")

    @property
    def judged(self) -> str:
        """The text that a time-out or a crash is held against: the answer, or the gold where that is audited."""
        return self.gold if self.kind.startswith("audit") else self.answer


READY = "ready"
"""Supervisor to parent, once: everything is imported. Any other greeting is the reason why grading cannot start."""

STOP = None
"""Parent to supervisor, in place of a numbered task: kill the workers and end."""

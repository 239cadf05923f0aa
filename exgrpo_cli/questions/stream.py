"""The fresh stream: seeded permutations of the question set with a position that resumes (`docs/algorithm.md`, 1.1).

A pass is one permutation. Retired questions are skipped where they stand and left out of the next pass; a question of
this step's experiential set, or one already drawn in this step, waits at the head of the next step. A take costs in
proportion to what it draws: a skip is paid once per retirement, a new pass once per pass.
"""

import hashlib
from collections.abc import Container, Iterable, Sequence
from typing import Any

import numpy as np

from exgrpo_cli.base.errors import InputError


class QuestionStream:
    """Draws fresh questions; owns its generator, whose state is part of `state()`."""

    def __init__(self, ids: Sequence[str], rng: np.random.Generator) -> None:
        self._ids = tuple(ids)
        self._digest = hashlib.sha256("\n".join(self._ids).encode()).hexdigest()
        self._rng = rng
        self._order: list[str] = []
        self._position = 0
        # Ordered and without repetition: a question is owed one visit however often it was deferred.
        self._deferred: dict[str, None] = {}
        self._begin_pass(self._ids, retired=())

    def take(self, num: int, *, retired: Container[str], experiential: Container[str]) -> list[str]:
        """The next `num` questions, no two alike; fewer when too few are left, [] when none is."""
        waiting, self._deferred = list(self._deferred), {}
        batch: dict[str, None] = {}
        for index, question in enumerate(waiting):
            if len(batch) == num:
                # Those not reached keep their place, behind the ones deferred anew.
                self._deferred.update(dict.fromkeys(waiting[index:]))
                return list(batch)
            self._offer(question, batch, retired, experiential)
        while len(batch) < num:
            if self._position == len(self._order):
                self._begin_pass(self._order, retired)
                if all(question in batch or question in experiential for question in self._order):
                    break
            self._position += 1
            self._offer(self._order[self._position - 1], batch, retired, experiential)
        return list(batch)

    def _offer(
        self, question: str, batch: dict[str, None], retired: Container[str], experiential: Container[str]
    ) -> None:
        if question in retired:
            return
        if question in experiential or question in batch:
            self._deferred[question] = None
        else:
            batch[question] = None

    def _begin_pass(self, members: Sequence[str], retired: Container[str]) -> None:
        # A re-admitted question may stand twice in the pass that ends, hence dict.fromkeys.
        unretired = [question for question in dict.fromkeys(members) if question not in retired]
        self._order = [unretired[index] for index in self._rng.permutation(len(unretired))]
        self._position = 0

    def readmit(self, ids: Iterable[str]) -> None:
        """Let questions that are no longer retired return, each at a random place of what is left of this pass.

        A pass over a large set can outlast the run, so waiting for the next one could mean never. Costs in proportion
        to what is left of the pass.
        """
        ahead = {*self._order[self._position :], *self._deferred}
        for question in ids:
            if question in ahead:
                continue
            # Swapping with a uniformly chosen place keeps the rest of the pass a uniform permutation.
            place = int(self._rng.integers(self._position, len(self._order) + 1))
            self._order.append(question)
            self._order[place], self._order[-1] = self._order[-1], self._order[place]
            ahead.add(question)

    def state(self) -> dict[str, Any]:
        """Everything a resumed stream needs, as JSON types; questions by their index in `ids`."""
        index = {question: number for number, question in enumerate(self._ids)}
        return {
            "questions": self._digest,
            "order": [index[question] for question in self._order],
            "position": self._position,
            "deferred": [index[question] for question in self._deferred],
            "rng": self._rng.bit_generator.state,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on where `state()` was taken; raises InputError where the question set is another one."""
        if state["questions"] != self._digest:
            unlike = f"belongs to another question set than these {len(self._ids)} questions"
            raise InputError(f"The checkpoint's question stream {unlike}: resume with the run's own question file.")
        self._order = [self._ids[number] for number in state["order"]]
        self._position = int(state["position"])
        self._deferred = dict.fromkeys(self._ids[number] for number in state["deferred"])
        self._rng.bit_generator.state = state["rng"]

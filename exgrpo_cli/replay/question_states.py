"""The state of every question: its bucket, whether it rests after a replay, whether it is retired.

A question has a bucket exactly while it is in the buffer: it has live trajectories and is not retired. Drawable are the
buffered questions that do not rest. All draws are by rank in the order of question ids, so equal states draw equally,
however they came about.
"""

from collections import Counter, deque
from collections.abc import Iterator, Sequence, Set
from typing import NamedTuple, overload

import numpy as np
from jaxtyping import Bool, Int32

from exgrpo_cli.replay.drawing.ranked_set import RankedSet
from exgrpo_cli.replay.drawing.sampling import Bucket

_AWAKE = -1


class BucketKey(NamedTuple):
    """Latest success count, and out of how many members."""

    success_count: int
    num_members: int


class QuestionStates:
    """States by question number, the position of its id in the sorted list of all ids."""

    def __init__(self, question_ids: Sequence[str]) -> None:
        self.ids = sorted(question_ids)
        self._number = dict(zip(self.ids, range(len(self.ids)), strict=True))
        if len(self._number) != len(self.ids):
            raise ValueError(f"{len(self.ids) - len(self._number)} question ids occur twice")
        self._bucket: list[BucketKey | None] = [None] * len(self.ids)
        self._rests_until: Int32[np.ndarray, " questions"] = np.full(len(self.ids), _AWAKE, dtype=np.int32)
        self._resting: deque[tuple[int, int]] = deque()
        self._drawable: dict[BucketKey, RankedSet] = {}
        self._sizes: Counter[BucketKey] = Counter()
        self._retired = RankedSet(len(self.ids))

    def number(self, question_id: str) -> int:
        """Raises KeyError for an id that is not of this question set."""
        return self._number[question_id]

    def __contains__(self, question_id: str) -> bool:
        return question_id in self._number

    @property
    def retired(self) -> "NamedQuestions":
        """The retired questions, as a set of their ids."""
        return NamedQuestions(self.ids, self._number, self._retired)

    def bucket(self, question: int) -> BucketKey | None:
        """The bucket of a question; None where it is in none."""
        return self._bucket[question]

    def is_retired(self, question: int) -> bool:
        """Whether a question has retired."""
        return question in self._retired

    @property
    def num_buffered(self) -> int:
        """Questions in a bucket, resting ones included."""
        return self._sizes.total()

    @property
    def num_drawable(self) -> int:
        """Questions in a bucket that do not rest."""
        return sum(len(members) for members in self._drawable.values())

    def sizes(self) -> dict[BucketKey, int]:
        """Buffered questions by bucket, resting ones included."""
        return {key: size for key, size in sorted(self._sizes.items()) if size}

    def drawable(self) -> list[tuple[BucketKey, Bucket]]:
        """Non-empty buckets in ascending order, each with its drawable questions."""
        return [
            (
                key,
                Bucket(
                    success_count=key.success_count,
                    num_members=key.num_members,
                    question_ids=NamedQuestions(self.ids, self._number, members),
                ),
            )
            for key, members in sorted(self._drawable.items())
            if len(members)
        ]

    def is_drawable(self, question: int) -> bool:
        """Whether the question is in a bucket and does not rest after a replay."""
        return self._bucket[question] is not None and bool(self._rests_until[question] == _AWAKE)

    def place(self, question: int, key: BucketKey | None) -> None:
        """Put a question into a bucket, or take it out of the buffer (None)."""
        old, awake = self._bucket[question], self._rests_until[question] == _AWAKE
        if old is not None:
            self._sizes[old] -= 1
            if awake:
                self._drawable[old].discard(question)
        self._bucket[question] = key
        if key is not None:
            self._sizes[key] += 1
            if awake:
                self._members(key).add(question)

    def retire(self, question: int) -> None:
        """Take a question out of its bucket and of the stream."""
        self.place(question, None)
        self._retired.add(question)

    def unretire(self, question: int) -> None:
        """Let a question be asked again."""
        self._retired.discard(question)

    def rest(self, question: int, until: int) -> None:
        """Keep a question from being drawn up to and including step `until`."""
        key = self._bucket[question]
        if key is not None and self._rests_until[question] == _AWAKE:
            self._drawable[key].discard(question)
        self._rests_until[question] = until
        self._resting.append((until, question))

    def wake(self, step: int) -> None:
        """End the rest of the questions that may be drawn again at `step`."""
        while self._resting and self._resting[0][0] < step:
            until, question = self._resting.popleft()
            if self._rests_until[question] != until:
                continue
            self._rests_until[question] = _AWAKE
            key = self._bucket[question]
            if key is not None:
                self._members(key).add(question)

    def restore(
        self,
        *,
        success_counts: Int32[np.ndarray, " questions"],
        num_members: Int32[np.ndarray, " questions"],
        retired: Bool[np.ndarray, " questions"],
    ) -> None:
        """Set all questions at once, none resting; a success count of -1 means no bucket."""
        buffered = np.flatnonzero(success_counts >= 0)
        keys = np.stack([success_counts[buffered], num_members[buffered]], axis=1)
        distinct, which = np.unique(keys, axis=0, return_inverse=True)
        for position, (success_count, members) in enumerate(distinct.tolist()):
            key = BucketKey(success_count, members)
            inside = buffered[which.ravel() == position]
            self._drawable[key] = RankedSet(len(self.ids), inside)
            self._sizes[key] = len(inside)
            for question in inside.tolist():
                self._bucket[question] = key
        self._retired = RankedSet(len(self.ids), np.flatnonzero(retired))

    def _members(self, key: BucketKey) -> RankedSet:
        if key not in self._drawable:
            self._drawable[key] = RankedSet(len(self.ids))
        return self._drawable[key]


class NamedQuestions(Sequence[str], Set[str]):
    """A ranked set of question numbers seen as their ids, in ascending order: a sequence and a set at once."""

    def __init__(self, ids: Sequence[str], numbers: dict[str, int], members: RankedSet) -> None:
        self._ids = ids
        self._numbers = numbers
        self._members = members

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, question_id: object) -> bool:
        number = self._numbers.get(question_id) if isinstance(question_id, str) else None
        return number is not None and number in self._members

    def __iter__(self) -> Iterator[str]:
        return (self._ids[number] for number in self._members)

    @overload
    def __getitem__(self, rank: int) -> str: ...
    @overload
    def __getitem__(self, rank: slice) -> list[str]: ...
    def __getitem__(self, rank: int | slice) -> str | list[str]:
        if isinstance(rank, slice):
            return [self._ids[number] for number in self._members.at_all(range(*rank.indices(len(self))))]
        return self._ids[self._members.at(rank if rank >= 0 else rank + len(self))]

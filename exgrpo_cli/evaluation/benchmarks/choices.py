"""Multiple-choice options in a recorded order.

A source may list the right one first, and models have favourite letters.
"""

import hashlib
from dataclasses import dataclass, replace

import numpy as np

from exgrpo_cli.base.types import Message, Question
from exgrpo_cli.questions.question_file.choices import find_choices
from exgrpo_cli.questions.question_file.questions import question_id


@dataclass(frozen=True, kw_only=True, slots=True)
class ChoiceQuestion:
    """A question and its options as they are asked, A first."""

    question: Question
    options: tuple[str, ...]


def shuffle_choices(question: Question, seed: int) -> ChoiceQuestion | None:
    """The question with its options in another order and the gold's label moved along.

    The order depends on the seed and the question's text, not on its place in the file. None where the options cannot
    be told from the text, or the gold is not one of their labels: such a question is asked as it is.
    """
    choices = find_choices(question.prompt[-1].content)
    place = None if choices is None else choices.place_of(question.answer)
    if choices is None or place is None:
        return None
    order = _order(seed, choices.text, len(choices.options))
    prompt = (*question.prompt[:-1], Message(role="user", content=choices.reordered(order)))
    answer = choices.labels[order.index(place)]
    return ChoiceQuestion(
        question=replace(question, id=question_id(prompt, answer), prompt=prompt, answer=answer),
        options=tuple(choices.options[index] for index in order),
    )


def _order(seed: int, text: str, count: int) -> list[int]:
    digest = hashlib.blake2b(f"{seed}\x1f{text}".encode(), digest_size=8, person=b"exgrpo-options").digest()
    return [int(index) for index in np.random.default_rng(int.from_bytes(digest, "big")).permutation(count)]

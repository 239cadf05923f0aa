"""A held-out part of one question set: by a hash of what is asked, so that neither order nor answers matter."""

import hashlib
from collections.abc import Sequence
from pathlib import Path

from exgrpo_cli.base.errors import InputError
from exgrpo_cli.base.types import Question
from exgrpo_cli.questions.question_file.identity import normalised, question_text


def split_questions(
    questions: Sequence[Question], fraction: float, *, seed: int = 0, most: int | None = None
) -> tuple[list[Question], list[Question]]:
    """(training, held-out) questions in their order; about `fraction` of them held out, `most` of them at most.

    Questions of the same words are kept on one side, whatever their answers: the lowest hashes of (seed, last user
    message) are held out. Raises InputError where one side would be empty.
    """
    asked = [
        hashlib.sha256(f"{seed}\x1f{normalised(question_text(question))}".encode()).hexdigest()
        for question in questions
    ]
    wanted = max(1, round(fraction * len(questions)))
    chosen = set(sorted(set(asked))[: wanted if most is None else min(wanted, most)])
    heldout = [question for question, key in zip(questions, asked, strict=True) if key in chosen]
    train = [question for question, key in zip(questions, asked, strict=True) if key not in chosen]
    if not train:
        raise InputError(
            f"{len(questions)} questions cannot be split into training and held-out ones (a share of {fraction:g}): "
            "use more questions, or --heldout none."
        )
    return train, heldout


def heldout_beside(file: Path) -> Path:
    """Where the held-out part of a question file lies: `mine.parquet` has `mine-heldout.parquet`."""
    return file.with_stem(f"{file.stem}-heldout")

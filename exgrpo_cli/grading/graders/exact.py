"""The `exact` grader: the answer equals the gold, character by character, after white space is evened out."""

from exgrpo_cli.base.types import Verdict
from exgrpo_cli.grading.notation.extract import last_boxed


def grade_exact(gold: str, text: str, *, max_answer_chars: int) -> Verdict:
    """Compare the boxed content of `text`, or all of it where it has no box, with the gold."""
    boxed = last_boxed(text)
    answer = _evened(text if boxed is None else boxed)
    if not answer or len(answer) > max_answer_chars:
        return Verdict.NO_ANSWER
    return Verdict.CORRECT if answer == _evened(gold) else Verdict.WRONG


def _evened(text: str) -> str:
    return " ".join(text.split())

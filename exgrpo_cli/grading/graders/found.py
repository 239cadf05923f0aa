"""The `math` grader from the found answer on: brought to plain notation, compared as texts, then by math-verify.

Runs in workers only: of what it reads, a pattern or a parser may take any time.
"""

import re

from exgrpo_cli.base.types import Verdict
from exgrpo_cli.grading.graders import mathematics
from exgrpo_cli.grading.graders.choice import answered_letter, grade_choice
from exgrpo_cli.grading.graders.comparison import compare_texts
from exgrpo_cli.grading.notation.extract import boxed_or_all, last_boxed
from exgrpo_cli.grading.notation.notation import in_box, plain_notation, same_text, with_last_letters_in_text
from exgrpo_cli.grading.notation.units import split_unit

_OPTIONS_LETTER = re.compile(r"[A-J]")
_ANNOUNCED = re.compile(r"\banswer(?:\s+is|\s*:)\s*([^\n]+?)[.\s]*$", re.IGNORECASE)
_LAST_FORMULA = re.compile(r"(?:\$|\\[(\[])([^$]+?)(?:\$|\\[)\]])[.\s]*$")
_END_CHARS = 200
"""Of a text, in which its announced answer or last formula is looked for."""


def grade_box(gold: str, content: str) -> Verdict:
    """Verdict on the content of a box; `gold` is that of a box too."""
    # An answer of nothing but marks is still an answer.
    compared = compare_texts(plain_notation(gold), plain_notation(content) or content)
    if compared.is_same is not None:
        return Verdict.CORRECT if compared.is_same else Verdict.WRONG
    return mathematics.grade(in_box(compared.gold), in_box(compared.answer))


def grade_text(gold: str, text: str) -> Verdict:
    """Verdict on a text without a box: equal to the gold, naming its option, or holding its value somewhere."""
    plain_gold = plain_notation(boxed_or_all(gold))
    if same_text(plain_gold, plain_notation(text) or text):
        return Verdict.CORRECT
    if _OPTIONS_LETTER.fullmatch(plain_gold) and answered_letter(text, None, len(text)) is not None:
        return grade_choice(gold, text, options=None, max_answer_chars=len(text))
    end = text[-_END_CHARS:]
    announced = _ANNOUNCED.search(end)
    if announced and compare_texts(plain_gold, plain_notation(announced[1])).is_same:
        return Verdict.CORRECT
    verdict = mathematics.grade(in_box(plain_gold), with_last_letters_in_text(text))
    return Verdict.WRONG if verdict is Verdict.CORRECT and _is_misread(plain_gold, end) else verdict


def _is_misread(plain_gold: str, end: str) -> bool:
    """Whether math-verify accepts the end of a text though it differs: a formula in base or unit, a unit alone."""
    found = _LAST_FORMULA.search(end)
    content = plain_notation(found[1] if found else end)
    if found is None:
        units = split_unit(plain_gold)[1], split_unit(content)[1]
        return None not in units and units[0].dimensions != units[1].dimensions  # type: ignore[union-attr]
    differs = compare_texts(plain_gold, content).is_same is False
    return differs and mathematics.grade(in_box(plain_gold), in_box(content)) is Verdict.CORRECT


def compare_answers(first: str, second: str) -> Verdict:
    """CORRECT where two whole texts, of which at least one has no box, give the same answer."""
    return mathematics.grade(_as_found(first), _as_found(second))


def audit(gold: str) -> Verdict:
    """`mathematics.audit` of the content of a gold."""
    return mathematics.audit(in_box(plain_notation(gold)))


def reads_in_part(gold: str) -> Verdict:
    """`mathematics.reads_in_part` of the content of a gold."""
    return mathematics.reads_in_part(in_box(plain_notation(gold)))


def _as_found(text: str) -> str:
    """What a worker calls the gold may be a whole text too: math-verify finds the answer in it as in any other."""
    boxed = last_boxed(text)
    return with_last_letters_in_text(text) if boxed is None else in_box(plain_notation(boxed))

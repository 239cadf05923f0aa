"""The `math` grader: math-verify on one gold and one answer. Runs in workers only; imports math-verify and sympy.

Its own timeouts are switched off: they are built on SIGALRM, do not stop native code, and here a worker is killed from
outside instead.
"""

import logging
from functools import lru_cache
from typing import Any

from math_verify import parse, verify

from exgrpo_cli.base.types import Verdict
from exgrpo_cli.grading.graders import two_stage
from exgrpo_cli.grading.graders.disproof import same_complex_number, surely_differ
from exgrpo_cli.grading.notation.notation import in_box

_BOX = r"\boxed{"
# One of each construct that common answers have: the grammar's tables are built while parsing, and a table built before
# the workers are forked is built once.
_WARM_UP = (
    (r"\frac{3}{56}", r"\frac{3\sqrt{3}}{4}"),
    (r"\left( 3, \frac{\pi}{2} \right)", r"(3,4]"),
    (r"x^3+3x-6", r"(x-1)(x+2)"),
    (r"\begin{pmatrix} -1/3 \\ 2/3 \end{pmatrix}", r"\begin{pmatrix} 1 & 0 \\ 0 & -1 \end{pmatrix}"),
    (r"(-\infty, 2) \cup (3, \infty)", r"x \in [-2,7]"),
    (r"6 - 5i", r"-2 + 7i"),
    (r"1 \pm \sqrt{19}", r"\{1\pm\sqrt{5},-2\}"),
    (r"y = 2x + 3", r"1 < x \le 2"),
    (r"\text{east}", r"90^\circ"),
    (r"\$18.90", r"50\%"),
    (r"52_8", r"10,\!080"),
    (r"5x - 7y + 11z + 4 = 0", r"x=5"),
    (r"1\frac{4}{5}", r"\frac{17}{50}"),
    (r"(0,9) \cup (9,36)", r"\left[ \frac{\pi^2}{8}, \frac{5 \pi^2}{4} \right]"),
    (r"6.72\times 10^{-5}", r"2^{10} \cdot 3"),
    (r"\cot x", r"\frac{\sin x}{\cos x}"),
    (r"\log_2 3", r"e^{2x}"),
    (r"\sqrt[3]{4}", r"\binom{10}{3}"),
    (r"1, -2, 3", r"15\text{ cm}^2"),
    (r"x^{n+1}", r"|x - 3|"),
    (r"(3/4, -1/2)", r"n!"),
    (r"x = 1 \text{ or } x = 2", r"-\frac{1}{2} < x < 3"),
    (r"\frac{20000}{\pi}", r"2(a+b)^2 - ab"),
)


def prepare() -> None:
    """Pay the start-up costs of math-verify: to be called once, before workers are forked."""
    # It warns on every call without a timeout, and logs what it cannot parse.
    logging.getLogger("math_verify").disabled = True
    logging.disable(logging.CRITICAL)
    two_stage.install()
    for gold, answer in _WARM_UP:
        grade(in_box(gold), in_box(gold))
        grade(in_box(gold), in_box(answer))


def grade(gold: str, answer: str) -> Verdict:
    """Verdict on an answer; both are texts in which math-verify finds the answer, as a rule a `\\boxed{}` alone.

    A gold of which only the text is left is UNPARSABLE_GOLD for every answer that is not the same text.
    """
    gold_values = _parsed(gold)
    if not gold_values:
        return Verdict.UNPARSABLE_GOLD
    answer_values = _parsed(answer)
    if not answer_values:
        return Verdict.NO_ANSWER
    firsts = gold_values[0], answer_values[0]
    is_same = not surely_differ(*firsts) and verify(gold_values, answer_values, timeout_seconds=None)
    if is_same or same_complex_number(*firsts):
        return Verdict.CORRECT
    return Verdict.WRONG if _expressions(gold_values) else Verdict.UNPARSABLE_GOLD


def reads_in_part(gold: str) -> Verdict:
    """CORRECT where math-verify, left to itself, would read a part of a gold that it cannot read as a whole."""
    found = any(not isinstance(value, str) for value in parse(gold, parsing_timeout=None))
    return Verdict.CORRECT if found else Verdict.WRONG


def audit(gold: str) -> Verdict:
    """Whether a gold can serve: UNPARSABLE_GOLD, WRONG where it does not verify against itself, else CORRECT.

    math-verify keeps the text beside each expression and accepts equal texts; here only expressions count, since a gold
    that is text alone rejects every other way to write the same answer.
    """
    expressions = _expressions(_parsed(gold))
    if not expressions:
        return Verdict.UNPARSABLE_GOLD
    return Verdict.CORRECT if verify(expressions, expressions, timeout_seconds=None) else Verdict.WRONG


def _expressions(values: list[Any]) -> list[Any]:
    return [value for value in values if not isinstance(value, str)]


@lru_cache(maxsize=1024)
def _parsed(text: str) -> list[Any]:
    """math-verify's reading: expressions and their text; empty where it finds neither. Not to be changed by callers.

    A box is read as a whole or not at all: where its LaTeX does not parse, math-verify goes on to look for any number
    in it, and takes 2/3 for what `\\frac{1}{3}E_1+\\frac{2}{3}E_2` says.
    """
    if not text.startswith(_BOX):
        return parse(text, parsing_timeout=None)
    return parse(text, parsing_timeout=None, extraction_mode="first_match")

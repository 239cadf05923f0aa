"""Where math-verify alone says otherwise than the table: `PYTHONHASHSEED=0 python tests/grading_differences.py`.

A program of its own, because sympy orders terms by hash in places.
"""

import json
import logging

from grading_cases import CASES


def rows() -> list[str]:
    """The lines of docs/grading-differences.md."""
    from math_verify import parse, verify

    logging.disable(logging.CRITICAL)

    def is_said_equal(gold: str, answer: str) -> bool:
        gold_values, answer_values = (parse(rf"\boxed{{{text}}}", parsing_timeout=None) for text in (gold, answer))
        return verify(gold_values, answer_values, timeout_seconds=None)

    return [
        f"| {kind} | `{gold}` | `{answer}` | {'right' if is_right else 'wrong'} |"
        for kind, cases in CASES.items()
        for gold, right, wrong in cases
        for answer, is_right in [*((each, True) for each in right), *((each, False) for each in wrong)]
        if is_said_equal(gold, answer) is not is_right
    ]


if __name__ == "__main__":
    print(json.dumps(rows()))

"""Golds with answers that say the same and answers that do not, and what math-verify alone says of them.

`PYTHONHASHSEED=0 python tests/grading_table.py` prints, by kind and with the reason, every case that math-verify on its
own gets wrong; with `--json` it prints those of the rows as math-verify finds them now, which a test compares with the
file. A program of its own, because sympy orders terms by hash in places.
"""

import itertools
import json
import logging
import sys
from pathlib import Path
from typing import Any


def read(name: str) -> list[dict[str, Any]]:
    path = Path(__file__).with_name("grading") / name
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


ROWS = read("cases.jsonl")
"""A gold, its `right` and `wrong` answers, each the content of a box, and on which `math-verify errs`; the first row
of a kind says `why`."""
CASES = [
    (row["kind"], row["gold"], answer, is_right)
    for row in ROWS
    for is_right, answers in ((True, row["right"]), (False, row["wrong"]))
    for answer in answers
]
VERDICTS = read("verdicts.jsonl")
"""A grader, a gold, a whole response and its verdict; the options where they are not the four capitals of `choice`, and
`boxed` where the template asks for a box."""


def errors_of_math_verify() -> list[tuple[str, str, str, bool]]:
    """The cases of which math-verify, called on the two boxes, says otherwise than the table."""
    from math_verify import parse, verify

    logging.disable(logging.CRITICAL)

    def is_said_equal(gold: str, answer: str) -> bool:
        gold_values, answer_values = (parse(rf"\boxed{{{text}}}", parsing_timeout=None) for text in (gold, answer))
        return verify(gold_values, answer_values, timeout_seconds=None)

    return [case for case in CASES if is_said_equal(case[1], case[2]) is not case[3]]


def written_down() -> list[tuple[str, str, str, bool]]:
    """The same as the file has it."""
    errors = {(row["gold"], answer) for row in ROWS for answer in row.get("math-verify errs", ())}
    return [case for case in CASES if case[1:3] in errors]


if __name__ == "__main__":
    if "--json" in sys.argv:
        print(json.dumps(errors_of_math_verify()))
    else:
        reasons = {row["kind"]: row["why"] for row in ROWS if "why" in row}
        for kind, cases in itertools.groupby(written_down(), key=lambda case: case[0]):
            print(f"\n## {kind}\n\n{reasons.get(kind, '')}\n\n| gold | answer | is |\n|---|---|---|")
            for _, gold, answer, is_right in cases:
                print(f"| `{gold}` | `{answer}` | {'right' if is_right else 'wrong'} |")

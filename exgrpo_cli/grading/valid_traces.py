"""Whether a response's working holds, where the question lets every line of it be checked: what a lucky hit lacks.

A sum modulo m (`exgrpo_cli.data.made.modular`) is worked out validly when each line adds numbers that are at hand,
terms of the question not yet used or results of earlier lines, when what it says is true modulo m, and when the last
result uses up everything and is the boxed answer. The order and the grouping are free.
"""

import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

from exgrpo_cli.grading.metadata import read_metadata
from exgrpo_cli.grading.notation.extract import THINK_END, last_boxed

_LINE = re.compile(r"(\d{1,9}(?:\+\d{1,9})+)=(\d{1,9})")


def valid_trace(metadata: str | None, response: str) -> bool | None:
    """Whether the working of `response` holds, from the question's metadata; None where it cannot be checked."""
    known = read_metadata(metadata)
    if known.get("trace") != "sum":
        return None
    thinking, ended, answer = response.partition(THINK_END)
    result = _result(known, thinking) if ended else None
    return result is not None and last_boxed(answer) == str(result)


def _result(known: Mapping[str, Any], thinking: str) -> int | None:
    """What the lines come to; None where one of them does not hold, or where they leave something over."""
    at_hand = Counter(known["terms"])
    lines = thinking.strip().splitlines()
    for text in lines:
        line = _LINE.fullmatch(text.strip())
        if line is None:
            return None
        operands, result = [int(operand) for operand in line[1].split("+")], int(line[2])
        at_hand.subtract(operands)
        if min(at_hand.values()) < 0 or result != sum(operands) % known["modulus"]:
            return None
        at_hand[result] += 1
    left = list(at_hand.elements())
    return left[0] if lines and len(left) == 1 else None

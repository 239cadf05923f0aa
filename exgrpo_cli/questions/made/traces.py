"""Step-by-step solutions of arithmetic questions, with the variety and the faults of a warm-start corpus.

A derivation is first planned (which terms are added in which line) and then worked out, so that a slip in one line
carries on through the lines that use it. Plans differ in order and in grouping: two rollouts of one question are often
both right and yet different, which is what the choice among trajectories needs.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np

from exgrpo_cli.questions.made.arithmetic import Terms, expression

THINK_END = "</think>"


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """One line of a derivation: a signed sum of earlier results and of terms of the question."""

    results: tuple[tuple[int, int], ...] = ()
    """(sign, index of an earlier line)."""
    terms: Terms = ()
    swapped: bool = False
    """Written from the last operand to the first."""


Plan = tuple[Line, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceMix:
    """Shares of a warm-start corpus; what is left after the faults is sound."""

    guessed: float = 0.05
    """Right answer, no thinking."""
    slipped: float = 0.02
    """One wrong line, carried on to a wrong answer."""
    malformed: float = 0.05
    """Without `</think>`, without the box, or without an answer."""
    checked: float = 0.25
    """Sound or slipped traces that end with a check of the last line."""
    swapped: float = 0.12
    """Additions written with the new term first."""
    double: float = 0.1
    """Lines of a running derivation that take in two terms at once."""


def write_trace(terms: Terms, mix: TraceMix, rng: np.random.Generator, modulus: int | None = None) -> str:
    """A response to the question: what follows the opened `<think>` line, without EOS.

    With a `modulus` every result is taken modulo it; checks, which undo a line, would then not hold.
    """
    kinds = ("guessed", "slipped", "malformed", "sound")
    faults = (mix.guessed, mix.slipped, mix.malformed)
    kind = kinds[int(rng.choice(len(kinds), p=(*faults, 1 - sum(faults))))]
    if kind == "guessed":
        return f"{THINK_END}\n{_boxed(_reduced(sum(terms), modulus))}"
    plan = draw_plan(terms, mix, rng)
    slip = None
    if kind == "slipped":
        slip = (int(rng.integers(len(plan))), int(rng.choice((-10, -2, -1, 1, 2, 10))))
    lines, answer = work_out(plan, slip, modulus)
    if rng.random() < mix.checked:
        lines.append(_check(lines[-1]))
    thinking = "\n".join(lines)
    if kind == "malformed":
        return str(rng.choice(_MALFORMED)).format(thinking=thinking, end=THINK_END, answer=answer, box=_boxed(answer))
    return f"{thinking}\n{THINK_END}\n{_boxed(answer)}"


def draw_plan(terms: Terms, mix: TraceMix, rng: np.random.Generator) -> Plan:
    """One of the sound derivations of a question."""
    derive = _DERIVATIONS[int(rng.choice(len(_DERIVATIONS), p=_DERIVATION_SHARES))]
    plan = derive(terms, mix.double, rng)
    return tuple(replace(line, swapped=min(line.terms, default=0) > 0 and rng.random() < mix.swapped) for line in plan)


def work_out(plan: Plan, slip: tuple[int, int] | None = None, modulus: int | None = None) -> tuple[list[str], int]:
    """The written lines and the last result, modulo `modulus` where there is one.

    `slip` = (line, error) falsifies one result and what follows from it.
    """
    values: list[int] = []
    lines = []
    for index, line in enumerate(plan):
        operands = (*(sign * values[source] for sign, source in line.results), *line.terms)
        error = slip[1] if slip is not None and slip[0] == index else 0
        value = _reduced(sum(operands) + error, modulus)
        values.append(value)
        written = operands[::-1] if line.swapped else operands
        lines.append(f"{expression(written)}={value}")
    return lines, values[-1]


def _gains_first(terms: Terms, double: float, rng: np.random.Generator) -> Plan:
    """What is added before what is taken away."""
    return _running(_gains(terms) + _losses(terms), double, rng)


def _last_first(terms: Terms, double: float, rng: np.random.Generator) -> Plan:
    """The first term, then the others from the last one back, where that stays at 0 or above."""
    turned = (terms[0], *reversed(terms[1:]))
    return _running(turned if min(accumulate(turned)) >= 0 else terms, double, rng)


def _netted(terms: Terms, double: float, rng: np.random.Generator) -> Plan:
    """The sum of what is added less the sum of what is taken away."""
    gains, losses = _gains(terms), _losses(terms)
    if len(gains) < 2 or len(losses) < 2:
        return _running(terms, double, rng)
    up = _running(gains, double, rng)
    down = _running(tuple(-term for term in losses), double, rng)
    shifted = tuple(
        Line(results=tuple((sign, source + len(up)) for sign, source in line.results), terms=line.terms)
        for line in down
    )
    difference = Line(results=((1, len(up) - 1), (-1, len(up) + len(down) - 1)))
    return (*up, *shifted, difference)


def _running(terms: Terms, double: float, rng: np.random.Generator) -> Plan:
    """One running value that takes in a term a line, or two with probability `double`."""
    plan: list[Line] = []
    position = 0
    while position < len(terms):
        taken = 1 + int(rng.random() < double) + int(position == 0)
        results = ((1, len(plan) - 1),) if plan else ()
        plan.append(Line(results=results, terms=terms[position : position + taken]))
        position += taken
    return tuple(plan)


def _gains(terms: Terms) -> Terms:
    return tuple(term for term in terms if term > 0)


def _losses(terms: Terms) -> Terms:
    return tuple(term for term in terms if term < 0)


def _check(line: str) -> str:
    """The line undone: 12-2=10 as 10+2=12."""
    left, _, result = line.partition("=")
    first, *others = re.findall(r"[+-]?\d+", left)
    undone = "".join(f"{-int(term):+d}" for term in others)
    return f"{result}{undone}={first}"


def _reduced(value: int, modulus: int | None) -> int:
    return value if modulus is None else value % modulus


def _boxed(answer: int) -> str:
    return f"\\boxed{{{answer}}}"


_DERIVATIONS: tuple[Callable[[Terms, float, np.random.Generator], Plan], ...] = (
    _running,
    _gains_first,
    _last_first,
    _netted,
)
_DERIVATION_SHARES = (0.4, 0.2, 0.2, 0.2)
_MALFORMED = (
    "{thinking}\n{box}",
    "{thinking}\n{end}\n{answer}",
    "{thinking}\n{end}\n",
    "{thinking}\n",
)

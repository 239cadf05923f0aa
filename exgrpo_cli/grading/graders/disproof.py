"""Expressions whose values are far apart are not equal: found in microseconds, where a proof takes milliseconds.

Most wrong answers are another number, and math-verify spends most of its time on trying to simplify the difference of
the two to zero. Here both are evaluated to 40 digits, each symbol at a fixed generic point. A difference that is not
tiny proves that they are not the same expression; everything else is left to math-verify, and so is every kind of
expression for which it has rules of its own: percentages, words, sets, relations, matrices.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import mpmath
import sympy

_DIGITS = 40
# Within these magnitudes 40 digits survive the cancellations of anything that a person would write.
_LARGEST = mpmath.mpf(10) ** 9
_SMALLEST = mpmath.mpf(10) ** -6
_LARGEST_EXPONENT = 64
# math-verify calls decimals equal that agree to 6 places.
_FAR_APART = mpmath.mpf(10) ** -3
_CLOSE = mpmath.mpf(10) ** -30

_FUNCTIONS: dict[type, Callable[[Any], Any]] = {
    sympy.sin: mpmath.sin,
    sympy.cos: mpmath.cos,
    sympy.tan: mpmath.tan,
    sympy.cot: mpmath.cot,
    sympy.sec: mpmath.sec,
    sympy.csc: mpmath.csc,
    sympy.log: mpmath.log,
    sympy.exp: mpmath.exp,
}


class _OutOfReachError(ArithmeticError):
    """The expression is of a kind, or of a size, that is left to math-verify."""


def surely_differ(gold: Any, answer: Any) -> bool:
    """Whether two parsed values are expressions that cannot be equal; False where that is not certain."""
    if not (_is_comparable(gold) and _is_comparable(answer)):
        return False
    gold_value = _generic_value(gold)
    if gold_value is None:
        return False
    answer_value = _generic_value(answer)
    if answer_value is None:
        return False
    with mpmath.workdps(_DIGITS):
        scale = max(1, abs(gold_value), abs(answer_value))
        return bool(abs(gold_value - answer_value) > _FAR_APART * scale)


def same_complex_number(gold: Any, answer: Any) -> bool:
    """Whether two values with i for their only letter are the same number: to math-verify it is any letter.

    Equal is equal to 30 digits; False where a value is out of reach.
    """
    if not (isinstance(gold, sympy.Expr) and isinstance(answer, sympy.Expr)):
        return False
    letters = gold.free_symbols | answer.free_symbols
    if {letter.name for letter in letters} != {"i"}:
        return False
    units = dict.fromkeys(letters, sympy.I)
    gold_value, answer_value = (_generic_value(value.subs(units)) for value in (gold, answer))
    if gold_value is None or answer_value is None:
        return False
    with mpmath.workdps(_DIGITS):
        return bool(abs(gold_value - answer_value) <= _CLOSE * max(1, abs(gold_value)))


def _is_comparable(value: Any) -> bool:
    """Whether math-verify would subtract it: it compares a lone symbol as a word."""
    return isinstance(value, sympy.Expr) and not isinstance(value, sympy.Symbol)


@lru_cache(maxsize=1024)
def _generic_value(expression: Any) -> Any:
    """Value at the generic point, or None where it is out of reach."""
    with mpmath.workdps(_DIGITS):
        try:
            return _evaluate(expression)
        except (ArithmeticError, ValueError):
            return None


def _evaluate(expression: Any) -> Any:
    kind = type(expression)
    if expression.is_Integer or expression.is_Rational:
        value = _rational(expression)
    elif expression.is_Float:
        value = mpmath.mpf(str(expression))
    elif expression is sympy.pi:
        value = +mpmath.pi
    elif expression is sympy.E:
        value = +mpmath.e
    elif expression is sympy.I:
        value = mpmath.mpc(0, 1)
    elif kind is sympy.Symbol:
        value = _generic_point(expression.name)
    elif kind is sympy.Add:
        value = mpmath.fsum(_evaluate(argument) for argument in expression.args)
    elif kind is sympy.Mul:
        value = mpmath.fprod(_evaluate(argument) for argument in expression.args)
    elif kind is sympy.Pow:
        value = _power(*(_evaluate(argument) for argument in expression.args))
    elif kind in _FUNCTIONS and len(expression.args) == 1:
        value = _FUNCTIONS[kind](_evaluate(expression.args[0]))
    else:
        raise _OutOfReachError
    if value != 0 and not _SMALLEST <= abs(value) <= _LARGEST:
        raise _OutOfReachError
    return value


def _rational(number: Any) -> Any:
    if max(abs(number.p), number.q) > _LARGEST:
        raise _OutOfReachError
    return mpmath.mpf(int(number.p)) / int(number.q)


def _power(base: Any, exponent: Any) -> Any:
    if abs(exponent) > _LARGEST_EXPONENT:
        raise _OutOfReachError
    return mpmath.power(base, exponent)


def _generic_point(name: str) -> Any:
    """A number between 1 and 2 that belongs to a symbol's name and satisfies no equation that an answer would have."""
    code = sum(ord(letter) * 31**place for place, letter in enumerate(name)) % 9973
    return 1 + mpmath.frac(mpmath.sqrt(2) * code + mpmath.e)

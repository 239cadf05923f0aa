"""A line of plain mathematics as a sympy expression, read token by token.

sympy's own `parse_expr` hands the text to Python's `eval`; what a model wrote must never get there. Read are numbers,
letters, `pi`, `sqrt`, `ln`, the four operations, powers, factorials and round brackets; two things side by side are a
product, which binds like any other, so that 1/2x is half of x.
"""

import re

import sympy

_TOKEN = re.compile(r"\s*((?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:e[+-]?[0-9]+)?|sqrt|pi|ln|[^\W\d_]|\*\*|[-+*/^()!])")
_FUNCTIONS = {"sqrt": sympy.sqrt, "ln": sympy.log}
_OPERATORS = frozenset("+-*/)!^") | {"**"}
_MOST_NESTED = 60


class NotAFormulaError(ValueError):
    """The text is no formula that is read here, or nests too deeply."""


def read_formula(text: str) -> sympy.Expr:
    """The expression that `text` is.

    Raises:
        NotAFormulaError: anything else than a whole formula.
    """
    reader = _Reader(_tokens(text))
    expression = reader.sum()
    if reader.next:
        raise NotAFormulaError(text)
    return expression


def _tokens(text: str) -> list[str]:
    tokens, place, end = [], 0, len(text.rstrip())
    while place < end:
        match = _TOKEN.match(text, place)
        if match is None:
            raise NotAFormulaError(text)
        tokens.append(match[1])
        place = match.end()
    return tokens


def _integer(digits: str) -> sympy.Integer:
    try:
        return sympy.Integer(digits)
    except ValueError as error:
        # Python reads integers of at most 4,300 digits.
        raise NotAFormulaError(f"{len(digits)} digits") from error


class _Reader:
    """One method for each level of binding, weakest first."""

    def __init__(self, tokens: list[str]) -> None:
        self._left = [*reversed(tokens)]
        self._depth = 0

    @property
    def next(self) -> str:
        """The token to be read next; empty at the end."""
        return self._left[-1] if self._left else ""

    def sum(self) -> sympy.Expr:
        """Terms with + and - between them, up to the end or a closing bracket; raises NotAFormulaError."""
        value = self._product()
        while self.next in ("+", "-"):
            value = value + self._product() if self._left.pop() == "+" else value - self._product()
        return value

    def _product(self) -> sympy.Expr:
        value = self._signed()
        while self.next and self.next not in ("+", "-", ")"):
            divides = self._took("/")
            if not divides and not self._took("*") and self.next in _OPERATORS:
                raise NotAFormulaError(self.next)
            factor = self._signed()
            value = value / factor if divides else value * factor
        return value

    def _signed(self) -> sympy.Expr:
        self._depth += 1
        if self._depth > _MOST_NESTED:
            raise NotAFormulaError("too deep")
        sign = 1
        while self.next in ("+", "-"):
            sign = sign if self._left.pop() == "+" else -sign
        value = self._atom()
        if self._took("!"):
            value = sympy.factorial(value)
        if self._took("^") or self._took("**"):
            value = value ** self._signed()
        self._depth -= 1
        return sign * value

    def _atom(self) -> sympy.Expr:
        if self._took("("):
            value = self.sum()
            if not self._took(")"):
                raise NotAFormulaError("an open bracket")
            return value
        token = self._left.pop() if self._left else ""
        if token in _FUNCTIONS:
            return _FUNCTIONS[token](self._atom())
        if token == "pi":
            return sympy.pi
        if token.isalpha():
            return sympy.Symbol(token)
        if token.isdigit():
            return _integer(token)
        if token and (token[0].isdigit() or token[0] == "."):
            return sympy.Float(token)
        raise NotAFormulaError(token)

    def _took(self, token: str) -> bool:
        is_next = self.next == token
        if is_next:
            self._left.pop()
        return is_next

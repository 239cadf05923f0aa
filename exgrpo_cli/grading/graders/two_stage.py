"""LaTeX parsed in two stages, as ANTLR's authors advise: several times faster, the same trees. Runs in workers only.

ANTLR decides between rules with the whole context of the sentence (LL), recomputed on every parse, or with less of it
(SLL), from cached tables. SLL gives the tree that LL would give, or reports a syntax error; only then LL is needed.
latex2sympy always asks for LL.
"""

from typing import Any

from antlr4.atn.PredictionMode import PredictionMode
from latex2sympy2_extended import latex2sympy2
from math_verify import parser as math_verify_parser

HOLDS_FOR = {"math-verify": "0.9", "latex2sympy2_extended": "1.11"}
"""Versions whose internals `install` replaces: a method of the converter and a function of the parser's module."""


class OutOfMemoryError(BaseException):
    """An expression was too large for the worker's memory. Not an Exception: math-verify takes those for no answer."""


def install() -> None:
    """Replace math-verify's reading of one normalised LaTeX string in this process."""
    read_in_mode = math_verify_parser.parse_latex_cached
    converter = latex2sympy2._Latex2Sympy
    create_parser = converter.create_parser
    prediction_mode = PredictionMode.SLL

    def create_parser_in_mode(self: Any, latex: str) -> Any:
        parser = create_parser(self, latex)
        parser._interp.predictionMode = prediction_mode
        return parser

    def read_in_two_stages(latex: str) -> Any:
        nonlocal prediction_mode
        try:
            prediction_mode = PredictionMode.SLL
            return read_in_mode(latex)
        except Exception as error:
            # A syntax error, the one thing that LL may read otherwise, is a bare Exception; others come after parsing.
            if type(error) is not Exception:
                raise
            prediction_mode = PredictionMode.LL
            return read_in_mode(latex)

    def read(latex: str) -> Any:
        try:
            return read_in_two_stages(latex)
        except MemoryError as error:
            raise OutOfMemoryError from error

    converter.create_parser = create_parser_in_mode
    math_verify_parser.parse_latex_cached = read

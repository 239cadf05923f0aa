r"""The `math` grader in a worker: the found answer brought to plain notation, compared as texts, then by math-verify.

math-verify's own timeouts are switched off: they are built on SIGALRM, do not stop native code, and here a worker is
killed from outside instead: of what it reads, a pattern or a parser may take any time. Two things make it faster. LaTeX
is parsed in two stages, as ANTLR's authors advise: ANTLR decides between rules with the whole context of the sentence
(LL), recomputed on every parse, or with less of it (SLL), from cached tables. SLL gives the tree that LL would give, or
reports a syntax error; only then LL is needed, for which latex2sympy always asks. And expressions whose values are far
apart are found unequal in microseconds, where a proof takes milliseconds: most wrong answers are another number, and
math-verify spends most of its time on trying to simplify the difference of the two to zero.
"""

import logging
from collections.abc import Callable, Mapping
from functools import lru_cache
from random import Random
from typing import Any

import mpmath
import sympy
from math_verify import parse, verify

from exgrpo_cli.base.types import Verdict
from exgrpo_cli.grading import choice, extract, quantities
from exgrpo_cli.grading.comparison import compare_texts, has_letter
from exgrpo_cli.grading.notation import in_box, plain_notation, same_text, with_last_letters_in_text
from exgrpo_cli.grading.plain import patterns, tables, verdict_of

PATCHES_HOLD_FOR = {"math-verify": "0.9", "latex2sympy2_extended": "1.11"}
"""Versions whose internals are replaced here: a method of the converter, a function of the parser and of the grader."""
_LETTERED = choice.Options(texts=None, is_numbered=False)
_RE = patterns("mathematics")
_SHORT = 80
"""Characters of an announced answer that is read as one formula."""
_END_CHARS = 200
"""End of a text in which its announced answer or last formula is looked for."""
_BOX = r"\boxed{"


def prepare() -> str:
    """Pay the start-up costs of math-verify: to be called once, before workers are forked. Returns what is lost, in
    words, where its internals have other names than are replaced here; it then reads and compares by itself."""
    # It warns on every call without a timeout, and logs what it cannot parse.
    logging.getLogger("math_verify").disabled = True
    logging.disable(logging.CRITICAL)
    lost = []
    for replace, loss in REPLACEMENTS.items():
        try:
            replace()
        except (ImportError, AttributeError) as gone:
            lost.append(f"{loss}, for want of a part of math-verify ({gone})")
    for gold, answer in tables()["warm_up"]["pairs"]:
        _grade_parsed(in_box(gold), in_box(gold))
        _grade_parsed(in_box(gold), in_box(answer))
    return "; ".join(lost)


class OutOfMemoryError(BaseException):
    """An expression was too large for the worker's memory. Not an Exception: math-verify takes those for no answer."""


def parse_in_two_stages() -> None:
    """Replace math-verify's reading of one normalised LaTeX string in this process."""
    from antlr4.atn.PredictionMode import PredictionMode
    from latex2sympy2_extended import latex2sympy2
    from math_verify import parser as math_verify_parser

    read_in_mode = math_verify_parser.parse_latex_cached
    converter = latex2sympy2._Latex2Sympy
    create_parser = converter.create_parser
    prediction_mode = PredictionMode.SLL

    def create_parser_in_mode(self: Any, latex: str) -> Any:
        parser = create_parser(self, latex)
        parser._interp.predictionMode = prediction_mode
        return parser

    def read(latex: str) -> Any:
        nonlocal prediction_mode
        for prediction_mode in (PredictionMode.SLL, PredictionMode.LL):
            try:
                return read_in_mode(latex)
            except MemoryError as error:
                raise OutOfMemoryError from error
            except Exception as error:
                # A syntax error, the one thing that LL may read otherwise, is a bare Exception; others come after
                # parsing.
                if type(error) is not Exception or prediction_mode == PredictionMode.LL:
                    raise

    converter.create_parser = create_parser_in_mode
    math_verify_parser.parse_latex_cached = read


def compare_equations_by_their_solutions() -> None:
    """Replace math-verify's comparison of two equations in this process, for those that have no solution to compare.

    To math-verify equations without a real solution are all equal, `x^2+4=0` and `x^2+9=0`, and so are those without
    an unknown, such as limits and integrals. The first are the same where one is a multiple of the other, the second
    where both sides are.
    """
    from math_verify import grader as math_verify_grader

    same = math_verify_grader.sympy_expr_eq
    compare_relations = math_verify_grader.sympy_compare_relational
    solve_and_compare = math_verify_grader.sympy_solve_and_compare

    def compare_sides(gold: Any, answer: Any, *how: Any) -> bool:
        equations = isinstance(gold, sympy.Eq) and isinstance(answer, sympy.Eq)
        if not equations or gold.free_symbols or answer.free_symbols:
            return bool(compare_relations(gold, answer, *how))
        sides = (answer.args, answer.args[::-1])
        return any(same(gold.lhs, one, *how) and same(gold.rhs, other, *how) for one, other in sides)

    def compare_solutions(gold: Any, answer: Any, *how: Any) -> bool:
        if not solve_and_compare(gold, answer, *how):
            return False
        if not isinstance(gold, sympy.Eq) or sympy.solve(gold, gold.free_symbols):
            return True
        ratio = sympy.simplify((gold.lhs - gold.rhs) / (answer.lhs - answer.rhs))
        return bool(ratio.is_number and ratio.is_nonzero)

    math_verify_grader.sympy_compare_relational = compare_sides
    math_verify_grader.sympy_solve_and_compare = compare_solutions


REPLACEMENTS: dict[Callable[[], None], str] = {
    parse_in_two_stages: "answers take longer to read",
    compare_equations_by_their_solutions: "equations without a real solution all pass for equal",
}
"""Losses without each."""


def grade_box(gold: str, content: str) -> Verdict:
    """Verdict on the content of a box; `gold` is that of a box too."""
    # An answer of nothing but marks is still an answer.
    plain_gold, answer = plain_notation(gold), plain_notation(content) or content
    compared = compare_texts(plain_gold, answer)
    verdict = verdict_of(compared) if isinstance(compared, bool) else _grade_parsed(*map(in_box, compared))
    if verdict is Verdict.CORRECT and not same_text(plain_gold, answer) and _is_untrue(answer):
        return Verdict.WRONG
    return verdict


def _is_untrue(answer: str) -> bool:
    """Whether an equation between numbers does not hold, as `8=7`; a decimal may be the other side rounded."""
    num_equations = answer.count("=")
    if not num_equations or (num_equations == 1 and has_letter(answer)):
        return False
    for value in _parsed(in_box(answer))[:1]:
        for relation in getattr(value, "_unsorted_args", (value,)):
            if isinstance(relation, sympy.Eq) and not relation.free_symbols:
                sides: list[Any] = [_generic_value(side) for side in relation.args]
                bound = _ROUNDED if relation.atoms(sympy.Float) else _FAR_APART
                if None not in sides and abs(sides[0] - sides[1]) > bound * max(map(abs, sides)):
                    return True
    return False


def grade_text(gold: str, text: str) -> Verdict:
    """Verdict on a text without a box: equal to the gold, naming its option, or holding its value somewhere."""
    text = _RE.sign_before_money.sub(r"\1", _RE.hope.sub("", text))
    plain_gold = plain_notation(extract.boxed_or_all(gold))
    if same_text(plain_gold, plain_notation(text) or text):
        return Verdict.CORRECT
    if _RE.options_letter.fullmatch(plain_gold) and _LETTERED.answered(text, len(text)) is not None:
        return choice.grade_choice(gold, text, options=None, max_answer_chars=len(text))
    end = text[-_END_CHARS:]
    if _RE.denied.search(end):
        return Verdict.WRONG
    announced, marked = _RE.announced.match(end), _RE.marked.search(end)
    answer = plain_notation(announced[1]) if announced else ""
    said = compare_texts(plain_gold, answer) if answer else False
    if said is True:
        return verdict_of(not _is_untrue(answer))
    compared = compare_texts(plain_gold, plain_notation(marked[1])) if marked else _compared_with_unit(plain_gold, end)
    if isinstance(compared, bool):
        return verdict_of(compared)
    is_short = announced is not None and len(announced[1]) <= _SHORT
    if said and is_short and _grade_parsed(*map(in_box, said)) is Verdict.CORRECT:
        return Verdict.CORRECT
    verdict = _grade_parsed(in_box(plain_gold), with_last_letters_in_text(text))
    return Verdict.WRONG if verdict is Verdict.CORRECT and _is_misread(plain_gold, end) else verdict


def _compared_with_unit(plain_gold: str, end: str) -> bool | tuple[str, str] | None:
    """The last number of a text against the gold, where no formula is behind it and both name their units."""
    if quantities.split_unit(plain_gold)[1] is None or _RE.last_formula.search(end):
        return None
    content = plain_notation(end.rstrip(".,;:!? \n"))
    number = _RE.last_number.search(content)
    last = content[number.start() :] if number else ""
    return compare_texts(plain_gold, last) if quantities.split_unit(last)[1] else None


def _is_misread(plain_gold: str, end: str) -> bool:
    """Whether math-verify accepts the formula at the end of a text though it differs, in its base or unit."""
    found = _RE.last_formula.search(end)
    if found is None:
        return False
    content = plain_notation(found[1])
    differs = compare_texts(plain_gold, content) is False
    return differs and _grade_parsed(in_box(plain_gold), in_box(content)) is Verdict.CORRECT


def audit(gold: str) -> Verdict:
    """Whether a gold can serve: UNPARSABLE_GOLD, WRONG where it does not verify against itself, else CORRECT.

    math-verify keeps the text beside each expression and accepts equal texts; here only expressions count, since a gold
    that is text alone rejects every other way to write the same answer.
    """
    plain = plain_notation(gold)
    # Of a quantity, 81 km/hr in LaTeX, the value counts: units are compared by rules of our own.
    values = (_expressions(_parsed(in_box(text))) for text in dict.fromkeys((plain, quantities.split_unit(plain)[0])))
    expressions = next(filter(None, values), None)
    if not expressions:
        return Verdict.UNPARSABLE_GOLD
    return verdict_of(verify(expressions, expressions, timeout_seconds=None))


def _grade_parsed(gold: str, answer: str) -> Verdict:
    """Verdict on an answer; both are texts in which math-verify finds the answer, as a rule a `\\boxed{}` alone.

    A gold of which only the text is left is UNPARSABLE_GOLD for every answer that is not the same text.
    """
    gold_values = _parsed(gold)
    if not gold_values:
        return Verdict.UNPARSABLE_GOLD
    answer_values = _parsed(answer)
    if not answer_values:
        return Verdict.NO_ANSWER
    first = gold_values[0], answer_values[0]
    if not surely_differ(*first) and (
        verify(gold_values, answer_values, timeout_seconds=None) or _agree_where_real(*first)
    ):
        return Verdict.CORRECT
    return Verdict.WRONG if _expressions(gold_values) else Verdict.UNPARSABLE_GOLD


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


_DIGITS = 40
# Within these magnitudes 40 digits survive the cancellations of anything that a person would write.
_LARGEST = mpmath.mpf(10) ** 9
_SMALLEST = mpmath.mpf(10) ** -6
_LARGEST_EXPONENT = 64
# math-verify calls decimals equal that agree to 6 places.
_FAR_APART = mpmath.mpf(10) ** -3
_ROUNDED = mpmath.mpf(10) ** -2
_EQUAL = mpmath.mpf(10) ** -30
_SCALES = tuple(sign * scale for scale in (mpmath.mpf(1), mpmath.mpf(7), mpmath.mpf(1) / 7) for sign in (1, -1))
_NUM_POINTS, _MOST_LETTERS = 40, 6
_FUNCTIONS = ("sin", "cos", "tan", "cot", "sec", "csc", "log", "exp")


class _OutOfReachError(ArithmeticError):
    """The expression is of a kind, or of a size, that is left to math-verify."""


def surely_differ(gold: Any, answer: Any) -> bool:
    """Whether two parsed values are expressions that cannot be equal; False where that is not certain.

    Both are evaluated to 40 digits, each symbol at a fixed generic point: a difference that is not tiny proves that
    they are not the same expression. All else is left to math-verify, and so is every kind of expression for which it
    has rules of its own: percentages, words (lone symbols among them), sets, relations, matrices.
    """
    if isinstance(gold, sympy.Symbol) or isinstance(answer, sympy.Symbol):
        return False
    values: list[Any] = [_generic_value(value) if isinstance(value, sympy.Expr) else None for value in (gold, answer)]
    if None in values:
        return False
    with mpmath.workdps(_DIGITS):
        return bool(abs(values[0] - values[1]) > _FAR_APART * max(1, *map(abs, values)))


def _agree_where_real(gold: Any, answer: Any) -> bool:
    """Whether two expressions with roots or logarithms are equal at generic points, where all parts of both are real.

    sympy knows letters as real numbers, of which `\\ln\\frac ab` has more than `\\ln a-\\ln b`; who writes either
    means those for which there is a value. `x` and `\\sqrt{x^2}` differ: both have one below zero.
    """
    if not (isinstance(gold, sympy.Expr) and isinstance(answer, sympy.Expr)):
        return False
    letters = sorted(symbol.name for symbol in gold.free_symbols | answer.free_symbols)
    roots = [power for each in (gold, answer) for power in each.atoms(sympy.Pow) if not power.exp.is_Integer]
    if len(letters) > _MOST_LETTERS or not (roots or gold.has(sympy.log) or answer.has(sympy.log)):
        return False
    random, is_met = Random(0), False
    for _ in range(_NUM_POINTS if letters else 1):
        point = {letter: random.choice(_SCALES) for letter in letters}
        with mpmath.workdps(_DIGITS):
            try:
                values = _evaluate(gold, point), _evaluate(answer, point)
            except (ArithmeticError, ValueError):
                continue
            if abs(values[0] - values[1]) > _EQUAL * max(map(abs, values)):
                return False
        is_met = True
    return is_met


@lru_cache(maxsize=1024)
def _generic_value(expression: Any) -> Any:
    """Value at the generic point, or None where it is out of reach."""
    with mpmath.workdps(_DIGITS):
        try:
            return _evaluate(expression)
        except (ArithmeticError, ValueError):
            return None


def _evaluate(expression: Any, point: Mapping[str, Any] | None = None) -> Any:
    """Value at the generic point; at another one, by multiples for each letter, where all parts are real numbers."""
    kind = type(expression)
    if expression.is_Rational:
        if max(abs(expression.p), expression.q) > _LARGEST:
            raise _OutOfReachError
        value = mpmath.mpf(int(expression.p)) / int(expression.q)
    elif expression.is_Float:
        value = mpmath.mpf(str(expression))
    elif kind is sympy.Symbol:
        # A number between 1 and 2 that belongs to its name and satisfies no equation that an answer would have.
        code = sum(ord(letter) * 31**place for place, letter in enumerate(expression.name)) % 9973
        value = 1 + mpmath.frac(mpmath.sqrt(2) * code + mpmath.e)
        value *= 1 if point is None else point[expression.name]
    elif kind in _OPERATIONS:
        value = _OPERATIONS[kind](*(_evaluate(argument, point) for argument in expression.args))
    else:
        raise _OutOfReachError
    is_unreal = point is not None and mpmath.im(value) != 0
    if is_unreal or (value != 0 and not _SMALLEST <= abs(value) <= _LARGEST):
        raise _OutOfReachError
    return value


def _power(base: Any, exponent: Any) -> Any:
    if abs(exponent) > _LARGEST_EXPONENT:
        raise _OutOfReachError
    return mpmath.power(base, exponent)


_OPERATIONS: dict[type, Callable[..., Any]] = {
    type(sympy.pi): lambda: +mpmath.pi,
    type(sympy.E): lambda: +mpmath.e,
    type(sympy.I): lambda: mpmath.mpc(0, 1),
    sympy.Add: lambda *values: mpmath.fsum(values),
    sympy.Mul: lambda *values: mpmath.fprod(values),
    sympy.Pow: _power,
    sympy.binomial: mpmath.binomial,
    sympy.factorial: mpmath.factorial,
    **{getattr(sympy, name): getattr(mpmath, name) for name in _FUNCTIONS},
}

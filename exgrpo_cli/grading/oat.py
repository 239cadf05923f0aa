"""The `oat` grader: as lenient as the one that the paper's scores come from, written anew from what that one does.

Oat's grader takes the last box and calls it correct where any of three comparisons does: the two texts after MATH's
rules for answers and without units; their values under sympy, fraction by fraction and tuple by tuple; and math-verify
on both between dollars. The first two forgive more than math-verify: 35 % is 35, any listed unit goes, x = 7 is 7. Not
rebuilt: its time-out of one second, for workers have their own, and its refusal of long texts that repeat themselves.
"""

import ast
import operator
import re
from collections.abc import Callable
from functools import lru_cache

import sympy
from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

from exgrpo_cli.base.types import Verdict
from exgrpo_cli.grading.plain import patterns, tables, verdict_of

_LATEX_THEN_EXPRESSION = (LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig())
_UNITS = sorted(tables()["oat"]["units"].split(), key=len, reverse=True)
_UNIT_WORD = re.compile(rf"(^|\W)(?:{'|'.join(_UNITS)})s?(?=$|\W)")
_RE = patterns("oat")
_SIGNS: dict[str, str] = tables()["oat"]["signs"]


def grade(gold: str, answer: str) -> Verdict:
    """Verdict on the content of the last box; `gold` is plain text."""
    if _as_text(gold) == _as_text(answer) or _same_under_sympy(gold, answer):
        return Verdict.CORRECT
    # Not "first_match": Oat passes a list there, which math-verify takes for its default.
    how = {"fallback_mode": "no_fallback", "extraction_mode": "any_match", "parsing_timeout": None}
    texts = (text if "$" in text else f"${text}$" for text in (gold, answer))
    values = [parse(text, extraction_config=_LATEX_THEN_EXPRESSION, **how) for text in texts]
    return verdict_of(verify(*values, timeout_seconds=None))


@lru_cache(maxsize=1024)
def _as_text(answer: str) -> str:
    """MATH's rules for comparing answers as texts, with units taken away."""
    text = answer.strip()
    whole = _RE.whole_text.fullmatch(text)
    text = whole[1].strip() if whole else text
    text = _replaced(text, "before_units")
    text = _RE.last_text.sub("", text).strip() or text
    for _ in range(2):
        text = _UNIT_WORD.sub(r"\1", text) or text
    text = _replaced(text, "without_units")
    name, equals, value = text.partition("=")
    if equals and "=" not in value and len(name) <= 2:
        text = value
    return _replaced(text, "last")


def _replaced(text: str, table: str) -> str:
    """The text after the rules of a table of Oat's, in their order."""
    for pattern, replacement in tables()["oat"][table]:
        text = re.sub(pattern, replacement, text)
    return text


def _same_under_sympy(gold: str, answer: str) -> bool:
    gold, answer = _as_formula(gold), _as_formula(answer)
    if gold == answer:
        return True
    if not answer:
        return False
    golds, answers = _elements(gold), _elements(answer)
    if len(golds) != len(answers) or (len(golds) > 1 and (gold[0], gold[-1]) != (answer[0], answer[-1])):
        return False
    return bool(golds) and all(map(_same_element, golds, answers))


def _same_element(gold: str, answer: str) -> bool:
    """A fraction has to be reduced like the gold, an integer to be written as one."""
    if _RE.bare_fraction.fullmatch(gold) and _RE.bare_fraction.fullmatch(answer):
        return gold == answer
    if _is_integer(gold) != _is_integer(answer):
        return False
    difference = f"({gold})-({answer})"
    letters = {char for char in difference.replace("sqrt", "").replace("frac", "") if char.isalpha()}
    if len(letters) > 2 or _RE.too_hard.search(difference):
        return False
    try:
        return bool(sympy.simplify(read_formula(difference)) == 0)
    except NotAFormulaError:
        return False


@lru_cache(maxsize=1024)
def _as_formula(answer: str) -> str:
    """An answer as a line that sympy reads."""
    whole = _RE.whole_text.fullmatch(answer)
    text = whole[1] if whole else answer
    text = _replaced(text, "formula")
    if text.startswith("{") and text.endswith("}"):
        text = text[1:-1]
    text = re.sub(r",\\! *", "", text)
    if "," not in text and _is_integer(text):
        text = str(round(float(text)))
    text = _without_commands(text) if "\\" in text else text
    text = re.sub(r"([0-9]) +([0-9])", r"\1+\2", re.sub("- *", "-", text))
    text = text.replace(" ", "").replace("{", "").replace("}", "").lower()
    return str(int(float(text.replace(",", "")))) if _is_integer(text) else text


def _without_commands(text: str) -> str:
    """LaTeX as plain text: fractions with a slash, roots as a function, signs by name, other commands dropped."""
    text = re.sub(r"\\[dt]?frac", r" \\frac", text)
    text = re.sub(r"\\(?:text)?color\s*\{[^{}]*\}", "", text)
    group = r"\s*(?:\{((?:[^{}]|\{[^{}]*\})*)\}|([0-9A-Za-z]))"
    for _ in range(4):
        text = re.sub(rf"\\frac{group}{group}", r"\1\2/\3\4", text)
        text = re.sub(rf"\\sqrt(?:\[[^\]]*\])?{group}", r"sqrt(\1\2)", text)
    text = re.sub(r"\\([A-Za-z]+)\s?", lambda found: _SIGNS.get(found[1], ""), text)
    return re.sub(r"\\[,;:! ]", " ", text).replace("\\", "").strip()


def _elements(text: str) -> list[str]:
    """Elements of a tuple or interval without inner brackets; else the whole text."""
    text = _RE.thousands.sub("", text)
    if len(text) > 2 and text[0] in "()[]" and text[-1] in "()[]" and not any(char in "()[]" for char in text[1:-1]):
        return [element.strip() for element in text[1:-1].split(",")]
    return [text] if text else []


def _is_integer(text: str) -> bool:
    try:
        number = float(_RE.thousands.sub("", text))
    except ValueError:
        return False
    return abs(number) < 1e300 and abs(number - round(number)) <= 1e-7


# A line of plain mathematics as a sympy expression. sympy's own `parse_expr` hands the text to Python's `eval`; what a
# model wrote must never get there. Read are numbers, letters, `pi`, `sqrt()`, `ln()`, the four operations, powers,
# factorials and round brackets; two things side by side are a product, which binds like any other, so that 1/2x is half
# of x. With products written out, and a factorial as an attribute, Python's grammar binds as it should.
_FUNCTIONS = {"sqrt": sympy.sqrt, "ln": sympy.log}
_AS_PYTHON = {sign: sign for sign in ("+", "-", "*", "/", "**", "(", ")", *_FUNCTIONS)} | {"^": "**", "!": ".factorial"}
_BEFORE_OPERAND = {"+", "-", "*", "/", "**", "^", "(", *_FUNCTIONS}
_OPERATIONS: dict[type, Callable[..., sympy.Expr]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.Pow: operator.pow, ast.UAdd: operator.pos, ast.USub: operator.neg,
}  # fmt: skip
_MOST_TOKENS, _MOST_NESTED = 500, 60
"""They bound the depth of the tree, which is read by recursion."""


class NotAFormulaError(ValueError):
    """The text is no formula that is read here, or is too long or nests too deeply."""


def read_formula(text: str) -> sympy.Expr:
    """The expression that `text` is.

    Raises:
        NotAFormulaError: anything else than a whole formula.
    """
    tokens = _RE.token.findall(text)
    # A formula is nothing but its tokens and white space.
    is_whole = "".join(tokens) == "".join(text.split()) and "!!" not in text
    if not is_whole or len(tokens) > _MOST_TOKENS or sum(token in ("(", "^", "**") for token in tokens) > _MOST_NESTED:
        raise NotAFormulaError(text)
    written = ""
    for place, token in enumerate(tokens):
        begins_operand = token == "(" or token in _FUNCTIONS or token not in _AS_PYTHON
        if begins_operand and place and tokens[place - 1] not in _BEFORE_OPERAND:
            written += "*"
        written += _AS_PYTHON.get(token, f"t{place}")
    try:
        return _value(ast.parse(written, mode="eval").body, tokens)
    # Python reads integers of at most 4,300 digits.
    except (SyntaxError, ValueError) as error:
        raise NotAFormulaError(text) from error


def _value(node: ast.expr, tokens: list[str]) -> sympy.Expr:
    match node:
        case ast.Name(id=name) if name not in _FUNCTIONS:
            token = tokens[int(name[1:])]
            if token.isalpha():
                return sympy.pi if token == "pi" else sympy.Symbol(token)
            return sympy.Integer(token) if token.isdigit() else sympy.Float(token)
        case ast.BinOp() if type(node.op) in _OPERATIONS:
            return _OPERATIONS[type(node.op)](_value(node.left, tokens), _value(node.right, tokens))
        case ast.UnaryOp():
            return _OPERATIONS[type(node.op)](_value(node.operand, tokens))
        case ast.Attribute():
            return sympy.factorial(_value(node.value, tokens))
        case ast.Call(func=ast.Name(id=name), args=[argument]) if name in _FUNCTIONS:
            return _FUNCTIONS[name](_value(argument, tokens))
    raise SyntaxError(f"{type(node).__name__} is no formula")

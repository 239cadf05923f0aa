"""The `oat` grader: as lenient as the one that the paper's scores come from, written anew from what that one does.

Oat's grader takes the last box and calls it correct where any of three comparisons does: the two texts after MATH's
rules for answers and without units; their values under sympy, fraction by fraction and tuple by tuple; and math-verify
on both between dollars. The first two forgive more than math-verify: 35 % is 35, any listed unit goes, x = 7 is 7. Not
rebuilt: its time-out of one second, for workers have their own, and its refusal of long texts that repeat themselves.
"""

import re
from functools import lru_cache

import sympy
from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

from exgrpo_cli.base.types import Verdict
from exgrpo_cli.grading.plain import verdict_of

_LATEX_THEN_EXPRESSION = (LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig())
_UNIT_NAMES = (
    "a acre am apple are by c cc cent cm coin cube cubic d day decrease deg degree dm east excess feet foot ft "
    "g gain gal gallon gm h hectare hour hr inch inches increase kg km kmh kmph l lb less liter litre loss lt "
    "m man mark men meter metre mile min minute mm monkey month more mph mt mtr noon number o ohm per percent "
    "pie pm prime profit pure ratio rd rise rounds rs rupee s sec second soldier sq square st t th tile toy "
    "unit way west woman women yard year yr "
)
_UNITS = sorted(_UNIT_NAMES.split(), key=len, reverse=True)
_UNIT_WORD = re.compile(rf"(^|\W)(?:{'|'.join(_UNITS)})s?(?=$|\W)")
_LONG_UNITS = re.compile(
    r"(?:degree|centimeter|cm|meter|mile|second|minute|hour|day|week|month|year|foot|feet|inch|yard)(?:es)?s?\s*"
    r"(?:\^[0-9]+)?"
)
_WHOLE_TEXT = re.compile(r"\\text\{(.+?)\}")
_LAST_TEXT = re.compile(r"\\text\{.*?\}$")
_THOUSANDS = re.compile(r"(?<=[0-9]),(?=[0-9]{3}(?:[^0-9]|$))")
_BARE_FRACTION = re.compile(r"-?[0-9]+.?/0*[1-9][0-9]*.?")
_TOO_HARD = re.compile(r"\^[{(]|\^[0-9]+\^|\^[0-9][0-9]")
_NUMBER_WORDS = {"million": "*10^6", "billion": "*10^9", "trillion": "*10^12"}
_SIGNS = {
    "pi": "pi", "infty": "inf", "cup": "U", "cdot": "*", "times": "*", "le": "≤", "leq": "≤", "ge": "≥", "geq": "≥",
    "ne": "≠", "neq": "≠", "in": "∈", "pm": "±", "theta": "θ", "alpha": "α", "beta": "β", "sin": "sin", "cos": "cos",
    "tan": "tan", "log": "log", "ln": "ln", "circ": "∘", "ldots": "…", "dots": "…", "cap": "∩", "emptyset": "∅",
}  # fmt: skip


def grade(gold: str, answer: str) -> Verdict:
    """Verdict on the content of the last box; `gold` is plain text."""
    is_same = (
        _as_text(gold) == _as_text(answer) or _same_under_sympy(gold, answer) or _same_by_math_verify(gold, answer)
    )
    return verdict_of(is_same)


@lru_cache(maxsize=1024)
def _as_text(answer: str) -> str:
    """MATH's rules for comparing answers as texts, with units taken away."""
    text = answer.strip()
    whole = _WHOLE_TEXT.fullmatch(text)
    text = whole[1].strip() if whole else text
    text = text.replace("\n", "").replace(r"\!", "").replace("\\\\", "\\")
    text = re.sub(r"\\begin\{array\}\{.*?\}", r"\\begin{pmatrix}", text).replace(r"\end{array}", r"\end{pmatrix}")
    for written, meant in (
        ("bmatrix", "pmatrix"), ("tfrac", "frac"), ("dfrac", "frac"), (r"\neq", r"\ne"), (r"\leq", r"\le"),
        (r"\geq", r"\ge"), (r"\left", ""), (r"\right", ""),
    ):  # fmt: skip
        text = text.replace(written, meant)
    text = _LAST_TEXT.sub("", text).strip() or text
    for _ in range(2):
        text = _UNIT_WORD.sub(r"\1", text) or text
    for written in (r"^{\circ}", r"^\circ", r"\$", r"\%", "%"):
        text = text.replace(written, "")
    text = text.partition(r"\text{ ")[0]
    text = text.replace(" .", " 0.").replace("{.", "{0.")
    text = f"0{text}" if text.startswith(".") else text
    name, equals, value = text.partition("=")
    if equals and "=" not in value and len(name) <= 2:
        text = value
    text = re.sub(r"\\sqrt(?!\{)(.)", r"\\sqrt{\1}", text).replace(" ", "")
    text = re.sub(r"\\frac([^{])(?:([^{])|(?=\{))", lambda match: _braced_fraction(match[1], match[2]), text)
    if text == "0.5":
        return r"\frac{1}{2}"
    return re.sub(r"(-?(?:0|[1-9][0-9]*))/(-?(?:0|[1-9][0-9]*))", r"\\frac{\1}{\2}", text) if _is_ratio(text) else text


def _braced_fraction(numerator: str, denominator: str | None) -> str:
    return rf"\frac{{{numerator}}}" + (f"{{{denominator}}}" if denominator is not None else "")


def _is_ratio(text: str) -> bool:
    return re.fullmatch(r"-?(?:0|[1-9][0-9]*)/-?(?:0|[1-9][0-9]*)", text) is not None


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
    if _BARE_FRACTION.fullmatch(gold) and _BARE_FRACTION.fullmatch(answer):
        return gold == answer
    if _is_integer(gold) != _is_integer(answer):
        return False
    difference = f"({gold})-({answer})"
    letters = {char for char in difference.replace("sqrt", "").replace("frac", "") if char.isalpha()}
    if len(letters) > 2 or _TOO_HARD.search(difference):
        return False
    try:
        return bool(sympy.simplify(read_formula(difference)) == 0)
    except NotAFormulaError:
        return False


@lru_cache(maxsize=1024)
def _as_formula(answer: str) -> str:
    """An answer as a line that sympy reads."""
    whole = _WHOLE_TEXT.fullmatch(answer)
    text = whole[1] if whole else answer
    for mark in (r"\%", r"\$", "$", "%"):
        text = text.replace(mark, "")
    text = text.replace(" or ", " , ").replace(" and ", " , ")
    for word, factor in _NUMBER_WORDS.items():
        text = text.replace(word, factor)
    text = re.sub(r"\^ *\\circ", "", _LONG_UNITS.sub("", text))
    if text.startswith("{") and text.endswith("}"):
        text = text[1:-1]
    text = re.sub(r",\\! *", "", text)
    number = _number(text)
    if number is not None and _is_integer(text):
        text = str(round(number))
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
        text = re.sub(rf"\\frac{group}{group}", lambda found: _slashed(found), text)
        text = re.sub(rf"\\sqrt(?:\[[^\]]*\])?{group}", lambda found: f"sqrt({found[1] or found[2]})", text)
    text = re.sub(r"\\([A-Za-z]+)\s?", lambda found: _SIGNS.get(found[1], ""), text)
    return re.sub(r"\\[,;:! ]", " ", text).replace("\\", "").strip()


def _slashed(found: "re.Match[str]") -> str:
    return f"{found[1] or found[2]}/{found[3] or found[4]}"


def _elements(text: str) -> list[str]:
    """Elements of a tuple or interval without inner brackets; else the whole text."""
    text = _THOUSANDS.sub("", text)
    if len(text) > 2 and text[0] in "()[]" and text[-1] in "()[]" and not any(char in "()[]" for char in text[1:-1]):
        return [element.strip() for element in text[1:-1].split(",")]
    return [text] if text else []


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _is_integer(text: str) -> bool:
    number = _number(_THOUSANDS.sub("", text))
    return number is not None and abs(number) < 1e300 and abs(number - round(number)) <= 1e-7


def _same_by_math_verify(gold: str, answer: str) -> bool:
    values = [
        parse(
            text if "$" in text else f"${text}$",
            extraction_config=_LATEX_THEN_EXPRESSION,
            fallback_mode="no_fallback",
            # Not "first_match": Oat passes a list there, which math-verify takes for its default.
            extraction_mode="any_match",
            parsing_timeout=None,
        )
        for text in (gold, answer)
    ]
    return verify(values[0], values[1], timeout_seconds=None)


# A line of plain mathematics as a sympy expression, read token by token. sympy's own `parse_expr` hands the text to
# Python's `eval`; what a model wrote must never get there. Read are numbers, letters, `pi`, `sqrt`, `ln`, the four
# operations, powers, factorials and round brackets; two things side by side are a product, which binds like any other,
# so that 1/2x is half of x.
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

r"""Constructs of LaTeX that math-verify does not read, or reads as something else, written out as it reads them.

Arguments without braces, binomials with `\choose`, an angle in degrees under a sine, a set by its condition, a chain of
inequalities that falls, functions without a backslash, brackets that face away from what they hold, a modulus.
"""

import re

_ONE_ARGUMENT = re.compile(r"\\(vec|hat|bar|overline|tilde|mathbb|mathbf|boldsymbol)(?:\s+([A-Za-z0-9])|([0-9]))")
_TWO_ARGUMENTS = re.compile(r"\\(frac|binom)(?:\s+([A-Za-z0-9])|([0-9]))\s*([A-Za-z0-9])")
_BINOMIAL = re.compile(
    r"(?:\{\}|(?<![0-9A-Za-z}]))_(?:\{([0-9]+)\}|([0-9]))\s*C_(?:\{([0-9]+)\}|([0-9]))|"
    r"(?<![A-Za-z\\])C_(?:\{([0-9]+)\}|([0-9]))\^(?:\{([0-9]+)\}|([0-9]))"
)
_CHOOSE = re.compile(r"\{([^{}]*)\\choose(?![A-Za-z])([^{}]*)\}|^([^{}]*)\\choose(?![A-Za-z])([^{}]*)$")
_DEGREES = r"\s*([0-9.]+)\s*\^\s*(?:\\circ|\{\s*\\circ\s*\})\s*"
_OF_DEGREES = re.compile(rf"\\(sin|cos|tan|cot|sec|csc)\s*(?:\({_DEGREES}\)|\{{{_DEGREES}\}}|{_DEGREES})")
_MIXED_PERCENT = re.compile(r"([0-9]{1,9})\s*\\frac\{([0-9]{1,9})\}\{([0-9]{1,9})\}(?=\s*\\?%)")
_RELATION = r"(?:[<>]|\\(?:le|ge|leq|geq|ne|neq)(?![A-Za-z]))"
_SET = re.compile(rf"\\\{{\s*([a-z])\s*(?:\\in\s*\\mathbb\{{R\}}\s*)?[|:]\s*([^=,|:]*{_RELATION}[^=,|:]*)\\\}}")
_FALLING = re.compile(r"([^<>=,|]+?)(>|\\geq?(?![A-Za-z]))\s*([a-z])\s*(>|\\geq?(?![A-Za-z]))([^<>=,|]+)")
_RISING = {">": "<", r"\ge": r"\le ", r"\geq": r"\le "}
# What stands in text is words. `sec` alone is a unit.
_BARE_NAME = re.compile(
    r"\\(?:text[a-z]*|[mh]box|math[a-z]+|operatorname)\s*\{[^{}]*\}|\\[A-Za-z]+|(?<![A-Za-z])(?:(pi)(?![A-Za-z])|"
    r"(arcsin|arccos|arctan|sin|cos|tan|cot|sec|csc|ln|log|exp)(?=\s*[0-9(\\{^_]|\s+[A-Za-z](?![A-Za-z])))"
)
_OPERATOR_NAME = re.compile(
    r"\\(?:operatorname|mathrm(?!\{sec))\s*\{(arcsin|arccos|arctan|sin|cos|tan|cot|sec|csc|ln|log|exp)\}"
)
_POWER = re.compile(r"(?<=[0-9A-Za-z)}\]])\s*\*\*\s*([0-9]+|[A-Za-z]|(?=[({-]))")
_FRACTION_RAISED = re.compile(r"\^\s*(\\frac\{[^{}]*\}\{[^{}]*\})")
_DECIMAL_RAISED = re.compile(r"\^\{\s*(-?)([0-9]{0,3})\.([0-9]{1,3})\s*\}")
_ROW_DISTANCE = re.compile(r"(\\\\)\[\s*-?[0-9.]+\s*[a-z]{2}\s*\]")
_ONE_LINE = re.compile(
    r"\\begin\{(align|aligned|gather|gathered|equation|split)(\*?)\}((?:(?!\\\\)[^&]|&\s*=)*)\\end\{\1\2\}"
)
_IN_ANGLES = re.compile(r"<([^<>=]*,[^<>=]*)>")
_FACING = re.compile(r"([\[\]])(\s*[^\[\]({,)\s][^\[\](),]*,\s*[^\[\](),\s][^\[\](),]*)(?<!\\sqrt)([\[\]])")
_MODULUS = r"\s*(?:\{\s*([^{}]*?)\s*\}|([0-9]+|[A-Za-z]))\s*"
_MOD = r"(?:\\[bp]?mod(?![A-Za-z])|\\(?:text|mathrm|operatorname)\s*\{\s*mod\s*\}|(?<![A-Za-z\\])mod(?![A-Za-z]))"
_MODULO = re.compile(rf"\(\s*{_MOD}{_MODULUS}\)|\(\s*\\text\s*\{{\s*mod\s+()([0-9A-Za-z]+)\s*\}}\s*\)|{_MOD}{_MODULUS}")
_SAME_MEANING = (
    (re.compile(r"\\wedge(?![A-Za-z])"), r"\\land"),
    (re.compile(r"\\vee(?![A-Za-z])"), r"\\lor"),
    (re.compile(r"\\not\s*="), r"\\ne "),
    (re.compile(r"(?<=[0-9}])\s*(?:\\text\s*\{\s*to\s*\}|\bto\b)\s*(?=[0-9\\])"), ":"),
    (re.compile(r"\\\{\s*\\\}"), r"\\emptyset"),
    (re.compile(r"(?<=,)\s*(?:\.{3}|…|\\cdots(?![A-Za-z]))"), r"\\ldots"),
    (re.compile(r"\\mid(?![A-Za-z])"), "|"),
    (re.compile(r"\\dots(?![A-Za-z])"), r"\\ldots"),
    (re.compile(r"\\lg(?![A-Za-z])"), r"\\log_{10}"),
    (re.compile(r"\\text\s*\{\s*all real(?: numbers|s)\s*\}", re.IGNORECASE), r"\\mathbb{R}"),
)


def written_out(text: str) -> str:
    """The text with its constructs in the form that math-verify reads."""
    if text.isdigit():
        return text
    for pattern, replacement in _SAME_MEANING:
        text = pattern.sub(replacement, text)
    return _with_plain_relations(_with_arguments(_BARE_NAME.sub(_with_backslash, text)))


def _with_backslash(found: "re.Match[str]") -> str:
    name = found[1] or found[2]
    return rf"\{name}" if name else _OPERATOR_NAME.sub(r"\\\1", found[0])


def _with_arguments(text: str) -> str:
    text = _ONE_ARGUMENT.sub(lambda found: rf"\{found[1]}{{{found[2] or found[3]}}}", text)
    text = _TWO_ARGUMENTS.sub(lambda found: rf"\{found[1]}{{{found[2] or found[3]}}}{{{found[4]}}}", text)
    text = _CHOOSE.sub(lambda found: rf"\binom{{{found[1] or found[3]}}}{{{found[2] or found[4]}}}", text)
    text = _BINOMIAL.sub(_as_binomial, text)
    text = _OF_DEGREES.sub(lambda found: rf"\{found[1]}{{\frac{{{found[2] or found[3] or found[4]}\pi}}{{180}}}}", text)
    text = _POWER.sub(lambda found: f"^{{{found[1]}}}" if found[1] else "^", text)
    text = _FRACTION_RAISED.sub(r"^{\1}", text)
    text = _DECIMAL_RAISED.sub(
        lambda found: rf"^{{{found[1]}\frac{{{int(found[2] + found[3])}}}{{{10 ** len(found[3])}}}}}", text
    )
    return _MIXED_PERCENT.sub(
        lambda found: rf"\frac{{{int(found[1]) * int(found[3]) + int(found[2])}}}{{{found[3]}}}", text
    )


def _as_binomial(found: "re.Match[str]") -> str:
    """10 choose 3; not the square of a constant C_1."""
    above, below = filter(None, found.groups())
    return rf"\binom{{{above}}}{{{below}}}" if int(above) > int(below) else found[0]


def _with_plain_relations(text: str) -> str:
    text = _ONE_LINE.sub(lambda found: found[3].replace("&", ""), _ROW_DISTANCE.sub(r"\1", text))
    text = _MODULO.sub(lambda found: rf"\mod {{{next(filter(None, found.groups()))}}}", text)
    text = _FACING.sub(_with_round_brackets, text)
    angles = _IN_ANGLES.fullmatch(text)
    if angles:
        text = f"({angles[1]})"
    condition = _SET.fullmatch(text)
    if condition and condition[1] in condition[2]:
        text = condition[2].strip()
    falling = _FALLING.fullmatch(text)
    if falling:
        least, first, name, second, most = falling[5], _RISING[falling[4]], falling[3], _RISING[falling[2]], falling[1]
        text = f"{least.strip()}{first}{name}{second}{most.strip()}"
    return text


def _with_round_brackets(found: "re.Match[str]") -> str:
    """]1,2[ is (1,2): a bracket that faces away from the interval leaves its end out."""
    return f"{'(' if found[1] == ']' else '['}{found[2]}{')' if found[3] == '[' else ']'}"

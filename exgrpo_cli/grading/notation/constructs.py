r"""Constructs of LaTeX that math-verify does not read, or reads as something else, written out as it reads them.

Arguments without braces, binomials with `\choose`, an angle in degrees under a sine, a set by its condition, a chain of
inequalities that falls.
"""

import re

_ONE_ARGUMENT = re.compile(r"\\(vec|hat|bar|overline|tilde|mathbb)(?:\s+([A-Za-z0-9])|([0-9]))")
_TWO_ARGUMENTS = re.compile(r"\\(frac|binom)(?:\s+([A-Za-z0-9])|([0-9]))\s*([A-Za-z0-9])")
_CHOOSE = re.compile(r"\{([^{}]*)\\choose(?![A-Za-z])([^{}]*)\}|^([^{}]*)\\choose(?![A-Za-z])([^{}]*)$")
_DEGREES = r"\s*([0-9.]+)\s*\^\s*(?:\\circ|\{\s*\\circ\s*\})\s*"
_OF_DEGREES = re.compile(rf"\\(sin|cos|tan|cot|sec|csc)\s*(?:\({_DEGREES}\)|\{{{_DEGREES}\}}|{_DEGREES})")
_MIXED_PERCENT = re.compile(r"([0-9]{1,9})\s*\\frac\{([0-9]{1,9})\}\{([0-9]{1,9})\}(?=\s*\\?%)")
_RELATION = r"(?:[<>]|\\(?:le|ge|leq|geq|ne|neq)(?![A-Za-z]))"
_SET = re.compile(rf"\\\{{\s*([a-z])\s*(?:\\in\s*\\mathbb\{{R\}}\s*)?[|:]\s*([^=,|:]*{_RELATION}[^=,|:]*)\\\}}")
_FALLING = re.compile(r"([^<>=,|]+?)(>|\\geq?(?![A-Za-z]))\s*([a-z])\s*(>|\\geq?(?![A-Za-z]))([^<>=,|]+)")
_RISING = {">": "<", r"\ge": r"\le ", r"\geq": r"\le "}
_SAME_MEANING = (
    (re.compile(r"\\mid(?![A-Za-z])"), "|"),
    (re.compile(r"\\dots(?![A-Za-z])"), r"\\ldots"),
    (re.compile(r"\\lg(?![A-Za-z])"), r"\\log_{10}"),
    (re.compile(r"\\text\s*\{\s*all real(?: numbers|s)\s*\}", re.IGNORECASE), r"\\mathbb{R}"),
)


def written_out(text: str) -> str:
    """The text with its constructs in the form that math-verify reads."""
    if "\\" not in text and ">" not in text:
        return text
    for pattern, replacement in _SAME_MEANING:
        text = pattern.sub(replacement, text)
    text = _ONE_ARGUMENT.sub(lambda found: rf"\{found[1]}{{{found[2] or found[3]}}}", text)
    text = _TWO_ARGUMENTS.sub(lambda found: rf"\{found[1]}{{{found[2] or found[3]}}}{{{found[4]}}}", text)
    text = _CHOOSE.sub(lambda found: rf"\binom{{{found[1] or found[3]}}}{{{found[2] or found[4]}}}", text)
    text = _OF_DEGREES.sub(lambda found: rf"\{found[1]}{{\frac{{{found[2] or found[3] or found[4]}\pi}}{{180}}}}", text)
    text = _MIXED_PERCENT.sub(
        lambda found: rf"\frac{{{int(found[1]) * int(found[3]) + int(found[2])}}}{{{found[3]}}}", text
    )
    condition = _SET.fullmatch(text)
    if condition and condition[1] in condition[2]:
        text = condition[2].strip()
    falling = _FALLING.fullmatch(text)
    if falling:
        least, first, name, second, most = falling[5], _RISING[falling[4]], falling[3], _RISING[falling[2]], falling[1]
        text = f"{least.strip()}{first}{name}{second}{most.strip()}"
    return text

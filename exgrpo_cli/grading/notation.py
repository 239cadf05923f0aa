r"""Answers as people write them, brought to the notation that math-verify reads; what they say stays the same.

A full stop after the answer, a thin space between thousands, bold print, an integer written as 142.0, a square root in
Unicode, an argument without braces: math-verify reads all of these as something else or not at all. The rules are
tables of patterns, applied in order. Most are linear in the length of the text; a few look at every pair of places in
it, so that answers are read in workers.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any
from unicodedata import normalize

from exgrpo_cli.base.data import expanded
from exgrpo_cli.grading.plain import patterns, tables

Rule = tuple[re.Pattern[str], "str | Callable[[re.Match[str]], str]"]
"""A pattern and what stands in its place."""


def _applied(rules: Iterable[Rule], text: str) -> str:
    for pattern, replacement in rules:
        text = pattern.sub(replacement, text)
    return text


_RE = patterns("notation")
_TABLES: dict[str, Any] = tables()["notation"]
_COMMANDS: dict[str, str] = tables()["commands"]
_PIECES: dict[str, str] = _TABLES["pieces"] | {"commands": "|".join(_COMMANDS)}
# `sec` alone is a unit.
_OPERATOR_NAME = re.compile(rf"\\(?:operatorname|mathrm(?!\{{sec))\s*\{{({_PIECES['functions']})\}}")
_DIGITS_RAISED = str.maketrans("⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "-0123456789")
_DIGITS_LOWERED = str.maketrans("₀₁₂₃₄₅₆₇₈₉", "0123456789")


def _backslash(found: "re.Match[str]") -> str:
    name = found[1] or found[2]
    return rf"\{name}" if name else _OPERATOR_NAME.sub(r"\\\1", found[0])


_WRITTEN: dict[str, Callable[[re.Match[str]], str]] = {
    "one_line()": lambda found: found[3].replace("&", ""),
    "backslash()": _backslash,
    "command()": lambda found: _COMMANDS[found[1]],
    "digits()": lambda found: found[1] + re.sub("[^0-9]", "", found[2]),
    "lowered()": lambda found: f"_{{{found[0].translate(_DIGITS_LOWERED)}}}",
    "primes()": lambda found: "'" * max(1, (found[1] or "").count("prime")),
    "raised()": lambda found: f"^{{{found[0].translate(_DIGITS_RAISED)}}}",
    "without_spaces()": lambda found: found[0].replace(" ", ""),
}


def _rules(name: str) -> Sequence[Rule]:
    """The rules of a table, in order."""
    return [(re.compile(expanded(pattern, _PIECES)), _WRITTEN.get(new, new)) for pattern, new in _TABLES[name]]


_RULES = {name: _rules(name) for name in _TABLES if name != "pieces"}
_MOST_LAST_MARKS = 4
"""In one pass. Each takes a look at the whole text, so a thousand of them may not."""
_FRACTIONS = "½⅓⅔¼¾⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞"
# Of full width; fractions, whose parts stand on either side of U+2044; the rest by the table.
_CHARACTERS = str.maketrans(
    {chr(code + 0xFEE0): chr(code) for code in range(0x21, 0x7F)}
    | {sign: r"\frac{{{}}}{{{}}}".format(*normalize("NFKC", sign).split("\N{FRACTION SLASH}")) for sign in _FRACTIONS}
    | tables()["signs"]
)
_MAX_PASSES = 4


@lru_cache(maxsize=8192)
def plain_notation(content: str) -> str:
    """The content of a box, or a gold, in the notation that math-verify reads."""
    text = content if content.isascii() else _applied(_RULES["print"], content).translate(_CHARACTERS)
    # 12 dollars for \$12: the sign goes with the dollars of mathematics.
    text = _applied(_RULES["white_space"], text)
    money = _RE.money.fullmatch(text.strip())
    if money:
        text = (money[1] or money[2] or money[4]) + (money[3] or r"\text{ dollars}")
    # A full stop behind bold print hides that all of it is bold: what one pass takes away may show more.
    for _ in range(_MAX_PASSES):
        simpler = _simplified(text)
        if simpler == text:
            break
        text = simpler
    return text


def _simplified(text: str) -> str:
    if text.isdigit():
        return text
    text = _applied(_RULES["letters"], _unwrapped(_applied(_RULES["wrappers"], text).strip()))
    text = _applied(_RULES["constructs"], _RE.announcement.sub("", text, count=1)).strip()
    for _ in range(_MOST_LAST_MARKS):
        text = _RE.last_mark.sub("", text).rstrip()
    return _applied(_RULES["numbers"], text).strip()


def _unwrapped(text: str) -> str:
    """The inside of one font command or pair of braces around everything, unless it is words alone."""
    match = _RE.whole_in_font.match(text)
    opening = match.end() - 1 if match else 0
    if text[opening : opening + 1] != "{" or _closing(text, opening) != len(text) - 1:
        return text
    inside = text[opening + 1 : -1].strip()
    is_words = match and _RE.word.search(inside) and not any(char in inside for char in "\\0123456789^_=+<>")
    return inside if inside and not is_words else text


def _closing(text: str, opening: int) -> int | None:
    depth = 0
    for brace in re.finditer("[{}]", text[opening:]):
        depth += 1 if brace[0] == "{" else -1
        if depth == 0:
            return opening + brace.start()
    return None


def same_text(first: str, second: str) -> bool:
    """Whether two texts in plain notation differ in nothing but white space, where it says nothing, not between digits,
    braces around one letter or digit, and the case of words in text."""
    if _without_idle_spaces(first) == _without_idle_spaces(second):
        return True
    words = _RE.text_or_word.fullmatch(first), _RE.text_or_word.fullmatch(second)
    if words[0] is None or words[1] is None:
        return False
    both_written = _RE.written_word.fullmatch(first) and _RE.written_word.fullmatch(second)
    if not (words[0][1] or words[1][1] or both_written):
        return False
    return (words[0][1] or words[0][2]).casefold().split() == (words[1][1] or words[1][2]).casefold().split()


def _without_idle_spaces(text: str) -> str:
    return _RE.single.sub(r"\1", re.sub(r"(?<![0-9])\s+|\s+(?![0-9])", "", text))


_NO_UNITS, _OTHERS = (frozenset(tables()["words"][name].split()) for name in ("no_units", "taken_for_units"))


def in_box(content: str) -> str:
    """The form in which math-verify finds LaTeX and reads all of it; without a box or dollars it reads numbers only.

    It cuts an answer off at the first `\\text{}` where the end is a closing brace, whatever stands between. Here words
    at the very end go, where anything is left, and a space behind the last brace keeps the rest.
    """
    content = content.replace(r"\pmod {", r"\mod {")
    head = _RE.last_words.sub("", content).rstrip()
    content = _RE.fraction_of_hundred.sub(r"\1\\frac{\2}{\g<3>00}", _with_last_letters(head or content))
    return rf"\boxed{{{content}\,}}" if _RE.words_then_brace.search(content) else rf"\boxed{{{content}}}"


def _with_last_letters(content: str) -> str:
    """The same with braces around each letter at its end, unless they may be a unit behind a number.

    math-verify takes c, d, g, h, l, m, s, t, ab, bc and more at the end for units: `a^2+b^2+2ab` would be a^2+b^2+2.
    """
    last = _RE.last_letters.search(content)
    if last is None or not {last[1], last[1].removesuffix("s")} & (_NO_UNITS | _OTHERS):
        return content
    if _RE.number.fullmatch(content[: last.start()]) and last[1].removesuffix("s") not in _NO_UNITS:
        return content
    return content[: last.start(1)] + "".join(f"{{{letter}}}" for letter in last[1])


def with_last_letters_in_text(text: str) -> str:
    """The same for each formula between dollars or TeX's brackets in a text."""
    return _RE.formula.sub(lambda found: found[1] + _with_last_letters(found[2].rstrip()) + found[3], text)

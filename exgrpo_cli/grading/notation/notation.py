r"""Answers as people write them, brought to the notation that math-verify reads; what they say stays the same.

A full stop after the answer, a thin space between thousands, bold print, an integer written as 142.0, a square root in
Unicode: math-verify reads all of these as something else or not at all. Most rules are regular expressions that are
linear in the length of the text; a few look at every pair of places in it, so that answers are read in workers.
"""

import re
from functools import lru_cache

from exgrpo_cli.grading.notation.constructs import written_out

_FONTS = (
    "text|textbf|textit|textrm|textsf|textsc|textup|texttt|textnormal|emph|mathbf|mathrm|mathit|mathsf|mathtt|mathnormal|"
    "boldsymbol|bm|pmb|bold|mbox|hbox|underline|ensuremath"
)
_NUMERAL_IN_FONT = re.compile(rf"\\(?:{_FONTS})\s*(?:\{{\s*([^{{}}A-Za-z\\]*[0-9][^{{}}A-Za-z\\]*?)\s*\}}|\s?([0-9]))")
_WHOLE_IN_FONT = re.compile(
    r"\\(?:textbf|mathbf|boldsymbol|bm|pmb|bold|underline|ensuremath|mathrm|mathit|mbox|text)\s*\{"
)
_BOLD = re.compile(r"\\(?:boldsymbol|bm|pmb|bold)(?![A-Za-z])")
_TEXT = re.compile(r"\\(?:hbox|emph)(?![A-Za-z])")
# A letter on its own is a quantity, unless it may be a unit: math-verify drops what stands in \mathrm{} at the end.
_LETTER_IN_FONT = re.compile(
    r"\\(?:mathbf|boldsymbol|bm|pmb|bold|mathit)\s*\{([A-Za-z])\}|"
    r"\\mathrm\s*\{([abeijknpqruvwxyz])\}|\\(?:text|textit)\s*\{([ie])\}"
)
_ANNOUNCEMENT = re.compile(r"\\(?:text|mbox|textrm|mathrm)\s*\{[^{}]*\b(?:is|are|equals|answer)\s*:?\s*\}\s*:?\s*")
_COLOUR = re.compile(r"\\(?:textcolor|color)\s*\{[^{}]*\}")
_STYLE = re.compile(
    r"\\(?:displaystyle|textstyle|scriptstyle|normalsize|small|large|Large|LARGE|huge|Huge|bfseries|bf|rm|it|"
    r"boldmath|normalfont|limits|nolimits)(?![A-Za-z])"
)
_DELIMITER = re.compile(r"(?<!\\)\\[()\[\]]|\\?\$|(?<![\\0-9A-Za-z)}\]])\*\*(?=.)|(?<!\\)\*\*(?![0-9A-Za-z({-])")
_BRACKET_SIZE = re.compile(r"\\(?:left|right)\s*\.|\\(?:left|right|[bB]igg?[lrm]?)\s*(?=[()\[\]|]|\\[{}|])")
_THOUSANDS = re.compile(
    r"(?<![0-9.])([0-9]{1,3})((?:(?:\\[,;: ]|\{,\}|\{\\,\}|~|\\thinspace\s|(?:,\s*)?\\!\s*)[0-9]{3})+)(?![0-9])"
)
_SPACED_THOUSANDS = re.compile(r"[+-]?[0-9]{1,3}(?: [0-9]{3})+(?:\.[0-9]+)?")
_SPACE = re.compile(r"(?<!\\)\\[,;: \n]|~|\\(?:quad|qquad|enspace|thinspace)(?![A-Za-z])|\\[hv]space\*?\s*\{[^{}]*\}")
_NEGATIVE_SPACE = re.compile(r"(?<!\\)\\!")
_FRACTION = re.compile(r"\\(?:d|t|c|nice|s)frac(?![A-Za-z])")
_FIRST_MARK = re.compile(
    r"^\s*(?:\\(?:approx|implies|Rightarrow|Longrightarrow|rightarrow|longrightarrow|to|therefore)(?![A-Za-z])|=(?!=))\s*(?=\S)"
)
_LAST_MARK = re.compile(
    r"(?:(?<![.\\])\.{1,2}|(?<!\\)[,;:]|\\text\s*\{\s*[.,;:!]?\s*\}|"
    r"(?<=\S)\s*\\(?:(?:checkmark|square|blacksquare|Box|qed|hfill)(?![A-Za-z])|tag\*?\s*\{[^{}]*\}))\s*$"
)
_IDLE_POINT = re.compile(r"(?<=[0-9])(?<!\.)\.(?=[/\s}),:;\\]|$)")
_INTEGRAL_FLOAT = re.compile(r"(?<![0-9.A-Za-z_])([0-9]+)\.0+(?![0-9.])")
_FRACTION_OF_LETTER = re.compile(
    r"(?<![0-9A-Za-z.^_{}/)\\])([0-9]+)/([0-9]+)(?=\s+[A-Za-z]{1,3}(?![A-Za-z])|\s*i(?![A-Za-z]))"
)
_FRACTION_OF_HUNDRED = re.compile(r"(-?)\\frac\{([0-9]+)\}\{([0-9]+)\}\s*\\?%")
_BARE_POINT = re.compile(r"(?<![0-9.])\.(?=[0-9])")
_REPEATING = re.compile(
    r"(?<![0-9.])([0-9]{0,15})\.([0-9]{0,15})\\(?:overline|bar|dot)\s*(?:\{([0-9]{1,15})\}|([0-9]))"
)
_WORD = re.compile(r"[A-Za-z]{2}|^\(?[A-Za-z]\)?$")
_MIXED = re.compile(r"([+-]?[0-9]+)\s+([0-9]+)/([0-9]+)")
_SPACED_MIXED = re.compile(r"(?<![0-9A-Za-z.}])([0-9]+)\s+(?=\\frac\s*\{?[0-9])")
_ROOT = re.compile(r"√\s*(?:\(([^()]*)\)|\{([^{}]*)\}|([0-9]+|[A-Za-z]))")
_RAISED = re.compile(r"[⁻⁰¹²³⁴⁵⁶⁷⁸⁹]+")
_LOWERED = re.compile(r"[₀₁₂₃₄₅₆₇₈₉]+")
_SAME_MEANING = (
    (re.compile(r"\{:\}"), ":"),
    (re.compile(r":="), "="),
    (re.compile(r"(?<!\\)\{\{([^{}]*)\}\}"), r"{\1}"),
    (re.compile(r"\\[dt]binom(?![A-Za-z])"), r"\\binom"),
    (re.compile(r"\\surd(?![A-Za-z])"), r"\\sqrt"),
    (re.compile(r"\\varnothing(?![A-Za-z])"), r"\\emptyset"),
    (re.compile(r"\\leq?slant(?![A-Za-z])"), r"\\le"),
    (re.compile(r"\\geq?slant(?![A-Za-z])"), r"\\ge"),
    (re.compile(r"\\log_\s*(?:\{\s*e\s*\}|e)(?![A-Za-z])"), r"\\ln"),
    (re.compile(r"\\lbrace(?![A-Za-z])"), r"\\{"),
    (re.compile(r"\\rbrace(?![A-Za-z])"), r"\\}"),
    (re.compile(r"\\langle(?![A-Za-z])"), "("),
    (re.compile(r"\\rangle(?![A-Za-z])"), ")"),
    (re.compile(r"\^\s*\{?\s*\\(?:degree|deg)(?![A-Za-z])\s*\}?|\\(?:degree|deg)(?![A-Za-z])"), r"^\\circ"),
)
_DIGITS_RAISED = str.maketrans("⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "-0123456789")
_DIGITS_LOWERED = str.maketrans("₀₁₂₃₄₅₆₇₈₉", "0123456789")
_FULL_WIDTH = {code + 0xFEE0: chr(code) for code in range(0x21, 0x7F)}
_GREEK = "alpha beta gamma delta theta lambda mu pi rho sigma phi omega"
_CHARACTERS = str.maketrans(
    {
        **{chr(code): text for code, text in _FULL_WIDTH.items()},
        **dict.fromkeys("−–﹣", "-"),
        **dict.fromkeys("\u00a0\u2009\u202f", r"\,"),
        "×": r"\times ",
        "·": r"\cdot ",
        "⋅": r"\cdot ",
        "÷": r"\div ",
        "∞": r"\infty ",
        "≤": r"\le ",
        "≥": r"\ge ",
        "⩽": r"\le ",
        "⩾": r"\ge ",
        "≈": r"\approx ",
        "⁄": "/",
        "¢": r"\text{ cents}",
        "€": r"\text{ euros}",
        "£": r"\text{ pounds}",
        "≠": r"\ne ",
        "±": r"\pm ",
        "∪": r"\cup ",
        "∩": r"\cap ",
        "∈": r"\in ",
        "∅": r"\emptyset ",
        **{sign: rf"\{name} " for sign, name in zip("αβγδθλμπρσφω", _GREEK.split(), strict=True)},
        "°": r"^\circ ",
        "½": r"\frac{1}{2}",
        "⅓": r"\frac{1}{3}",
        "⅔": r"\frac{2}{3}",
        "¼": r"\frac{1}{4}",
        "¾": r"\frac{3}{4}",
        "⅕": r"\frac{1}{5}",
        "⅖": r"\frac{2}{5}",
        "⅗": r"\frac{3}{5}",
        "⅘": r"\frac{4}{5}",
        "⅙": r"\frac{1}{6}",
        "⅚": r"\frac{5}{6}",
        "⅛": r"\frac{1}{8}",
        "⅜": r"\frac{3}{8}",
        "⅝": r"\frac{5}{8}",
        "⅞": r"\frac{7}{8}",
    }
)
_AMOUNT = r"\s*([0-9](?:[0-9.,~]|\\[,;:! ]|\{,\})*)"
_MONEY = re.compile(rf"\$?\\\${_AMOUNT}\$?|\${_AMOUNT}|(\\text\{{ (?:euros|pounds)\}}){_AMOUNT}")
_LEFT_OVER = re.compile(r"(?<!\\)\\\s*$")
_MAX_PASSES = 4
_MOST_LAST_MARKS = 4
"""In one pass. Each takes a look at the whole text, so a thousand of them may not."""
_SPACES = re.compile(r"\s{2,}")


@lru_cache(maxsize=8192)
def plain_notation(content: str) -> str:
    """The content of a box, or a gold, in the notation that math-verify reads."""
    text = _with_named_money(_SPACES.sub(" ", _in_ascii(content)))
    # A full stop behind bold print hides that all of it is bold: what one pass takes away may show more.
    for _ in range(_MAX_PASSES):
        simpler = _simplified(text)
        if simpler == text:
            break
        text = simpler
    return text


def _simplified(text: str) -> str:
    text = _ANNOUNCEMENT.sub("", _without_wrappers(text), count=1)
    text = written_out(_with_plain_spaces(_FRACTION.sub(r"\\frac", text)))
    for pattern, replacement in _SAME_MEANING:
        text = pattern.sub(replacement, text)
    return _with_plain_numbers(_FIRST_MARK.sub("", text).strip()).strip()


def _with_named_money(text: str) -> str:
    """12 dollars for \\$12: the sign goes with the dollars of mathematics. A backslash that is left over goes too."""
    text = _LEFT_OVER.sub("", text)
    money = _MONEY.fullmatch(text.strip())
    return (money[1] or money[2] or money[4]) + (money[3] or r"\text{ dollars}") if money else text


def same_text(first: str, second: str) -> bool:
    """Whether two texts in plain notation differ in nothing but white space, where it says nothing, not between digits,
    braces around one letter or digit, and the case of words in text."""
    if _without_idle_spaces(first) == _without_idle_spaces(second):
        return True
    words = _TEXT_OR_WORD.fullmatch(first), _TEXT_OR_WORD.fullmatch(second)
    if words[0] is None or words[1] is None:
        return False
    if not (words[0][1] or words[1][1]) and not (_WRITTEN_WORD.fullmatch(first) and _WRITTEN_WORD.fullmatch(second)):
        return False
    return (words[0][1] or words[0][2]).casefold().split() == (words[1][1] or words[1][2]).casefold().split()


def in_box(content: str) -> str:
    """The form in which math-verify finds LaTeX and reads all of it; without a box or dollars it reads numbers only.

    It cuts an answer off at the first `\\text{}` where the end is a closing brace, whatever stands between. Here words
    at the very end go, where anything is left, and a space behind the last brace keeps the rest.
    """
    head = _LAST_WORDS.sub("", content).rstrip()
    content = _FRACTION_OF_HUNDRED.sub(r"\1\\frac{\2}{\g<3>00}", with_last_letters(head or content))
    return rf"\boxed{{{content}\,}}" if _WORDS_THEN_BRACE.search(content) else rf"\boxed{{{content}}}"


def with_last_letters(content: str) -> str:
    """The same with braces around each letter at its end, unless they may be a unit behind a number.

    math-verify takes c, d, g, h, l, m, s, t, ab, bc and more at the end for units: `a^2+b^2+2ab` would be a^2+b^2+2.
    """
    last = _LAST_LETTERS.search(content)
    if last is None or not {last[1], last[1].removesuffix("s")} & _TAKEN_FOR_UNITS:
        return content
    if _NUMBER.fullmatch(content[: last.start()]) and last[1].removesuffix("s") not in _NO_UNITS:
        return content
    return content[: last.start(1)] + "".join(f"{{{letter}}}" for letter in last[1])


def with_last_letters_in_text(text: str) -> str:
    """The same for each formula between dollars or TeX's brackets in a text."""
    return _FORMULA.sub(lambda found: found[1] + with_last_letters(found[2].rstrip()) + found[3], text)


_LAST_LETTERS = re.compile(r"(?:(?<=[0-9}])|(?<=\s))([A-Za-z]{1,3})$")
_NUMBER = re.compile(r"[-+]?\s*(?:[0-9][0-9.,]*|\\frac\s*\{[0-9]+\}\s*\{[0-9]+\}|[0-9]+/[0-9]+)\s*")
_TAKEN_FOR_UNITS = frozenset(
    re.findall(
        "[a-z]+",
        "c d g h l m o s t ab am bc by cc cm dm ft gm hr kg km lb lt mm mp mt pm rd rs sq st th yr are day deg gal kmh "
        "man men min mph mtr ohm per pie sec sue toy way",
    )
)
_NO_UNITS = frozenset(("c", "d", "o", "t", "ab", "bc", "by", "mp", "mt", "rd", "st"))
_FORMULA = re.compile(r"(\$|\\[(\[])([^$]{1,2000}?)(\$|\\[)\]])")
_LAST_WORDS = re.compile(
    r"\\(?:text|mbox|textrm|mathrm|textbf|textit|mathit|mathbf)\s*\{[^{}]*\}(?:\^(?:[0-9]|\{[0-9]\}))?$"
)
_WORDS_THEN_BRACE = re.compile(r"\\(?:text|mbox|math(?:rm|it|bf))[^{}]*\{[^{}]*\}.*\}$", re.DOTALL)


_SINGLE = re.compile(r"(?<!\\)\{([0-9A-Za-z])\}")
_WRITTEN_WORD = re.compile(r"[A-Za-z][a-z]{3,}")
_TEXT_OR_WORD = re.compile(r"\\text\s*\{\s*([A-Za-z ]{3,})\}|([A-Za-z ]{3,})")


def _without_idle_spaces(text: str) -> str:
    text = re.sub(r"(?<![0-9])\s+|\s+(?![0-9])", "", text)
    return _SINGLE.sub(r"\1", text)


def _in_ascii(text: str) -> str:
    if text.isascii():
        return text
    text = _ROOT.sub(lambda match: rf"\sqrt{{{match[1] or match[2] or match[3] or ''}}}", text)
    text = _RAISED.sub(lambda match: f"^{{{match[0].translate(_DIGITS_RAISED)}}}", text)
    text = _LOWERED.sub(lambda match: f"_{{{match[0].translate(_DIGITS_LOWERED)}}}", text)
    return text.translate(_CHARACTERS)


def _without_wrappers(text: str) -> str:
    text = _STYLE.sub("", _COLOUR.sub("", _DELIMITER.sub("", text)))
    text = _unwrapped(_NUMERAL_IN_FONT.sub(lambda match: match[1] or match[2], text.strip()))
    text = _TEXT.sub(r"\\text", _BOLD.sub(r"\\mathbf", text))
    return _BRACKET_SIZE.sub("", _LETTER_IN_FONT.sub(lambda match: match[1] or match[2] or match[3], text))


def _unwrapped(text: str) -> str:
    """The inside of one font command or pair of braces around everything, unless it is words alone."""
    match = _WHOLE_IN_FONT.match(text)
    opening = match.end() - 1 if match else 0
    if text[opening : opening + 1] != "{" or _closing(text, opening) != len(text) - 1:
        return text
    inside = text[opening + 1 : -1].strip()
    is_mathematics = match is None or any(char in inside for char in "\\0123456789^_=+<>") or not _WORD.search(inside)
    return inside if inside and is_mathematics else text


def _closing(text: str, opening: int) -> int | None:
    depth = 0
    for place in range(opening, len(text)):
        if text[place] == "{":
            depth += 1
        elif text[place] == "}":
            depth -= 1
            if depth == 0:
                return place
    return None


def _with_plain_spaces(text: str) -> str:
    text = _THOUSANDS.sub(lambda match: match[1] + re.sub("[^0-9]", "", match[2]), text)
    text = _NEGATIVE_SPACE.sub("", _SPACE.sub(" ", text))
    return text.replace(" ", "") if _SPACED_THOUSANDS.fullmatch(text.strip()) else text


def _with_plain_numbers(text: str) -> str:
    for _ in range(_MOST_LAST_MARKS):
        text = _LAST_MARK.sub("", text).rstrip()
    text = _FRACTION_OF_LETTER.sub(r"\\frac{\1}{\2}", text)
    text = _IDLE_POINT.sub("", _REPEATING.sub(_as_fraction, text))
    text = _SPACED_MIXED.sub(r"\1", _BARE_POINT.sub("0.", _INTEGRAL_FLOAT.sub(r"\1", text)))
    mixed = _MIXED.fullmatch(text)
    if mixed:
        text = rf"{mixed[1]}\frac{{{mixed[2]}}}{{{mixed[3]}}}"
    return text[1:].lstrip() if text.startswith("+") else text


def _as_fraction(match: "re.Match[str]") -> str:
    """0.1\\overline{6} as 15/90: the digits without their repetition taken from those with one, over 9...90...0."""
    whole, fixed, repeated = match[1] or "0", match[2], match[3] or match[4]
    numerator = int(whole + fixed + repeated) - int(whole + fixed)
    return rf"\frac{{{numerator}}}{{{'9' * len(repeated)}{'0' * len(fixed)}}}"

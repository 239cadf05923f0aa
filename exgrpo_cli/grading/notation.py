r"""Answers as people write them, brought to the notation that math-verify reads; what they say stays the same.

A full stop after the answer, a thin space between thousands, bold print, an integer written as 142.0, a square root in
Unicode, an argument without braces: math-verify reads all of these as something else or not at all. The rules are
tables of patterns, applied in order. Most are linear in the length of the text; a few look at every pair of places in
it, so that answers are read in workers.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from unicodedata import normalize

Rule = tuple[re.Pattern[str], "str | Callable[[re.Match[str]], str]"]
"""A pattern and what stands in its place."""


def _rules(*rows: "tuple[str, str | Callable[[re.Match[str]], str]]") -> Sequence[Rule]:
    return [(re.compile(pattern), replacement) for pattern, replacement in rows]


def _applied(rules: Iterable[Rule], text: str) -> str:
    for pattern, replacement in rules:
        text = pattern.sub(replacement, text)
    return text


_FONTS = (
    "text|textbf|textit|textrm|textsf|textsc|textup|texttt|textnormal|emph|mathbf|mathrm|mathit|mathsf|mathtt|mathnormal|"
    "boldsymbol|bm|pmb|bold|mbox|hbox|underline|ensuremath"
)
_WHOLE_IN_FONT = re.compile(
    r"\\(?:textbf|mathbf|boldsymbol|bm|pmb|bold|underline|ensuremath|mathrm|mathit|mbox|text)\s*\{"
)
_WORD = re.compile(r"[A-Za-z]{2}|^\(?[A-Za-z]\)?$")
_FUNCTIONS = "arcsin|arccos|arctan|sin|cos|tan|cot|sec|csc|ln|log|exp"
# What stands in text is words. `sec` alone is a unit.
_OPERATOR_NAME = re.compile(rf"\\(?:operatorname|mathrm(?!\{{sec))\s*\{{({_FUNCTIONS})\}}")
_BARE_NAME = (
    r"\\(?:text[a-z]*|[mh]box|math[a-z]+|operatorname)\s*\{[^{}]*\}|\\[A-Za-z]+|(?<![A-Za-z])(?:(pi)(?![A-Za-z])|"
    rf"({_FUNCTIONS})(?=\s*[0-9(\\{{^_]|\s+[A-Za-z](?![A-Za-z])))"
)
_DEGREES = r"\s*([0-9.]+)\s*\^\s*(?:\\circ|\{\s*\\circ\s*\})\s*"
_RELATION = r"(?:[<>]|\\(?:le|ge|leq|geq|ne|neq)(?![A-Za-z]))"
_RISING = {">": "<", r"\ge": r"\le ", r"\geq": r"\le "}
_MODULUS = r"\s*(?:\{\s*([^{}]*?)\s*\}|([0-9]+|[A-Za-z]))\s*"
_MOD = r"(?:\\[bp]?mod(?![A-Za-z])|\\(?:text|mathrm|operatorname)\s*\{\s*mod\s*\}|(?<![A-Za-z\\])mod(?![A-Za-z]))"


def _with_backslash(found: "re.Match[str]") -> str:
    name = found[1] or found[2]
    return rf"\{name}" if name else _OPERATOR_NAME.sub(r"\\\1", found[0])


def _as_binomial(found: "re.Match[str]") -> str:
    """10 choose 3; not the square of a constant C_1."""
    above, below = filter(None, found.groups())
    return rf"\binom{{{above}}}{{{below}}}" if int(above) > int(below) else found[0]


def _as_power_of_fraction(found: "re.Match[str]") -> str:
    return rf"^{{{found[1]}\frac{{{int(found[2] + found[3])}}}{{{10 ** len(found[3])}}}}}"


def _as_improper(found: "re.Match[str]") -> str:
    return rf"\frac{{{int(found[1]) * int(found[3]) + int(found[2])}}}{{{found[3]}}}"


def _with_round_brackets(found: "re.Match[str]") -> str:
    """]1,2[ is (1,2): a bracket that faces away from the interval leaves its end out."""
    return f"{'(' if found[1] == ']' else '['}{found[2]}{')' if found[3] == '[' else ']'}"


def _as_rising(found: "re.Match[str]") -> str:
    return f"{found[5].strip()}{_RISING[found[4]]}{found[3]}{_RISING[found[2]]}{found[1].strip()}"


def _as_fraction(found: "re.Match[str]") -> str:
    """0.1\\overline{6} as 15/90: the digits without their repetition taken from those with one, over 9...90...0."""
    whole, fixed, repeated = found[1] or "0", found[2], found[3] or found[4]
    numerator = int(whole + fixed + repeated) - int(whole + fixed)
    return rf"\frac{{{numerator}}}{{{'9' * len(repeated)}{'0' * len(fixed)}}}"


_WRAPPERS = _rules(
    (r"(?<!\\)\\[()\[\]]|\\?\$|(?<![\\0-9A-Za-z)}\]])\*\*(?=.)|(?<!\\)\*\*(?![0-9A-Za-z({-])", ""),
    (r"\\(?:textcolor|color)\s*\{[^{}]*\}", ""),
    (
        r"\\(?:displaystyle|textstyle|scriptstyle|normalsize|small|large|Large|LARGE|huge|Huge|bfseries|bf|rm|it|"
        r"boldmath|normalfont|limits|nolimits)(?![A-Za-z])",
        "",
    ),
    (rf"\\(?:{_FONTS})\s*(?:\{{\s*([^{{}}A-Za-z\\]*[0-9][^{{}}A-Za-z\\]*?)\s*\}}|\s?([0-9]))", r"\1\2"),
)
"""Fonts, sizes and colours that say nothing."""
_FONTS_OF_LETTERS = _rules(
    (r"\\(?:boldsymbol|bm|pmb|bold)(?![A-Za-z])", r"\\mathbf"),
    (r"\\(?:hbox|emph)(?![A-Za-z])", r"\\text"),
    # A letter on its own is a quantity, unless it may be a unit: math-verify drops what stands in \mathrm{} at the end.
    (
        r"\\(?:mathbf|boldsymbol|bm|pmb|bold|mathit)\s*\{([A-Za-z])\}|"
        r"\\mathrm\s*\{([abeijknpqruvwxyz])\}|\\(?:text|textit)\s*\{([ie])\}",
        r"\1\2\3",
    ),
    (r"\\(?:left|right)\s*\.|\\(?:left|right|[bB]igg?[lrm]?)\s*(?=[()\[\]|]|\\[{}|])", ""),
)
_ANNOUNCEMENT = re.compile(r"\\(?:text|mbox|textrm|mathrm)\s*\{[^{}]*\b(?:is|are|equals|answer)\s*:?\s*\}\s*:?\s*")
_CONSTRUCTS = _rules(
    (r"\\(?:d|t|c|nice|s)frac(?![A-Za-z])", r"\\frac"),
    # Thousands and spaces.
    (
        r"(?<![0-9.])([0-9]{1,3})((?:(?:\\[,;: ]|\{,\}|\{\\,\}|~|\\thinspace\s|(?:,\s*)?\\!\s*)[0-9]{3})+)(?![0-9])",
        lambda found: found[1] + re.sub("[^0-9]", "", found[2]),
    ),
    (r"(?<!\\)\\[,;: \n]|~|\\(?:quad|qquad|enspace|thinspace)(?![A-Za-z])|\\[hv]space\*?\s*\{[^{}]*\}", " "),
    (r"(?<!\\)\\!", ""),
    (r"\A\s*[+-]?[0-9]{1,3}(?: [0-9]{3})+(?:\.[0-9]+)?\s*\Z", lambda found: found[0].replace(" ", "")),
    # Other names of the same signs.
    (r"\\wedge(?![A-Za-z])", r"\\land"),
    (r"\\vee(?![A-Za-z])", r"\\lor"),
    (r"\\not\s*=", r"\\ne "),
    (r"(?<=[0-9}])\s*(?:\\text\s*\{\s*to\s*\}|\bto\b)\s*(?=[0-9\\])", ":"),
    (r"\\\{\s*\\\}", r"\\emptyset"),
    (r"(?<=,)\s*(?:\.{3}|…|\\cdots(?![A-Za-z]))", r"\\ldots"),
    (r"\\mid(?![A-Za-z])", "|"),
    (r"\\dots(?![A-Za-z])", r"\\ldots"),
    (r"\\lg(?![A-Za-z])", r"\\log_{10}"),
    (r"(?i)\\text\s*\{\s*all real(?: numbers|s)\s*\}", r"\\mathbb{R}"),
    # Functions without a backslash, arguments without braces, binomials, an angle in degrees under a sine.
    (_BARE_NAME, _with_backslash),
    (r"\\(vec|hat|bar|overline|tilde|mathbb|mathbf|boldsymbol)(?:\s+([A-Za-z0-9])|([0-9]))", r"\\\1{\2\3}"),
    (r"\\(frac|binom)(?:\s+([A-Za-z0-9])|([0-9]))\s*([A-Za-z0-9])", r"\\\1{\2\3}{\4}"),
    (
        r"\{([^{}]*)\\choose(?![A-Za-z])([^{}]*)\}|^([^{}]*)\\choose(?![A-Za-z])([^{}]*)$",
        r"\\binom{\1\3}{\2\4}",
    ),
    (
        r"(?:\{\}|(?<![0-9A-Za-z}]))_(?:\{([0-9]+)\}|([0-9]))\s*C_(?:\{([0-9]+)\}|([0-9]))|"
        r"(?<![A-Za-z\\])C_(?:\{([0-9]+)\}|([0-9]))\^(?:\{([0-9]+)\}|([0-9]))",
        _as_binomial,
    ),
    (
        rf"\\(sin|cos|tan|cot|sec|csc)\s*(?:\({_DEGREES}\)|\{{{_DEGREES}\}}|{_DEGREES})",
        r"\\\1{\\frac{\2\3\4\\pi}{180}}",
    ),
    # Powers of programs, of fractions, of decimals; a mixed number of per cent.
    (r"(?<=[0-9A-Za-z)}\]])\s*\*\*\s*([0-9]+|[A-Za-z])", r"^{\1}"),
    (r"(?<=[0-9A-Za-z)}\]])\s*\*\*\s*(?=[({-])", "^"),
    (r"\^\s*(\\frac\{[^{}]*\}\{[^{}]*\})", r"^{\1}"),
    (r"\^\{\s*(-?)([0-9]{0,3})\.([0-9]{1,3})\s*\}", _as_power_of_fraction),
    (r"([0-9]{1,9})\s*\\frac\{([0-9]{1,9})\}\{([0-9]{1,9})\}(?=\s*\\?%)", _as_improper),
    # Environments of one line, moduli, brackets that face away from what they hold.
    (r"(\\\\)\[\s*-?[0-9.]+\s*[a-z]{2}\s*\]", r"\1"),
    (
        r"\\begin\{(align|aligned|gather|gathered|equation|split)(\*?)\}((?:(?!\\\\)[^&]|&\s*=)*)\\end\{\1\2\}",
        lambda found: found[3].replace("&", ""),
    ),
    (
        rf"\(\s*{_MOD}{_MODULUS}\)|\(\s*\\text\s*\{{\s*mod\s+([0-9A-Za-z]+)\s*\}}\s*\)|{_MOD}{_MODULUS}",
        r"\\mod {\1\2\3\4\5}",
    ),
    (
        r"([\[\]])(\s*[^\[\]({,)\s][^\[\](),]*,\s*[^\[\](),\s][^\[\](),]*)(?<!\\sqrt)([\[\]])",
        _with_round_brackets,
    ),
    (r"\A<([^<>=]*,[^<>=]*)>\Z", r"(\1)"),
    # A set by its condition, a chain of inequalities that falls.
    (
        rf"\A\\\{{\s*([a-z])\s*(?:\\in\s*\\mathbb\{{R\}}\s*)?[|:]\s*([^=,|:]*{_RELATION}[^=,|:]*)\\\}}\Z",
        lambda found: found[2].strip() if found[1] in found[2] else found[0],
    ),
    (
        r"\A([^<>=,|]+?)(>|\\geq?(?![A-Za-z]))\s*([a-z])\s*(>|\\geq?(?![A-Za-z]))([^<>=,|]+)\Z",
        _as_rising,
    ),
    # More names of the same signs.
    (r"\{:\}", ":"),
    (r":=", "="),
    (r"(?<!\\)\{\{([^{}]*)\}\}", r"{\1}"),
    (r"\\[dt]binom(?![A-Za-z])", r"\\binom"),
    (r"\\surd(?![A-Za-z])", r"\\sqrt"),
    (r"\\varnothing(?![A-Za-z])", r"\\emptyset"),
    (r"\\leq?slant(?![A-Za-z])", r"\\le"),
    (r"\\geq?slant(?![A-Za-z])", r"\\ge"),
    (r"\\log_\s*(?:\{\s*e\s*\}|e)(?![A-Za-z])", r"\\ln"),
    (r"\\lbrace(?![A-Za-z])", r"\\{"),
    (r"\\rbrace(?![A-Za-z])", r"\\}"),
    (r"\\langle(?![A-Za-z])", "("),
    (r"\\rangle(?![A-Za-z])", ")"),
    (r"\^\s*\{?\s*\\(?:degree|deg)(?![A-Za-z])\s*\}?|\\(?:degree|deg)(?![A-Za-z])", r"^\\circ"),
    (
        r"^\s*(?:\\(?:approx|implies|Rightarrow|Longrightarrow|rightarrow|longrightarrow|to|therefore)(?![A-Za-z])|"
        r"=(?!=))\s*(?=\S)",
        "",
    ),
)
_LAST_MARK = re.compile(
    r"(?:(?<![.\\])\.{1,2}|(?<!\\)[,;:]|\\text\s*\{\s*[.,;:!]?\s*\}|"
    r"(?<=\S)\s*\\(?:(?:checkmark|square|blacksquare|Box|qed|hfill)(?![A-Za-z])|tag\*?\s*\{[^{}]*\}))\s*$"
)
_MOST_LAST_MARKS = 4
"""In one pass. Each takes a look at the whole text, so a thousand of them may not."""
_NUMBERS = _rules(
    (
        r"(?<![0-9A-Za-z.^_{}/)\\])([0-9]+)/([0-9]+)(?=\s+[A-Za-z]{1,3}(?![A-Za-z])|\s*i(?![A-Za-z]))",
        r"\\frac{\1}{\2}",
    ),
    (r"(?<![0-9.])([0-9]{0,15})\.([0-9]{0,15})\\(?:overline|bar|dot)\s*(?:\{([0-9]{1,15})\}|([0-9]))", _as_fraction),
    (r"(?<=[0-9])(?<!\.)\.(?=[/\s}),:;\\]|$)", ""),
    (r"(?<![0-9.A-Za-z_])([0-9]+)\.0+(?![0-9.])", r"\1"),
    (r"(?<![0-9.])\.(?=[0-9])", "0."),
    (r"(?<![0-9A-Za-z.}])([0-9]+)\s+(?=\\frac\s*\{?[0-9])", r"\1"),
    (r"\A([+-]?[0-9]+)\s+([0-9]+)/([0-9]+)\Z", r"\1\\frac{\2}{\3}"),
    (r"\A\+\s*", ""),
)
_DIGITS_RAISED = str.maketrans("⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "-0123456789")
_DIGITS_LOWERED = str.maketrans("₀₁₂₃₄₅₆₇₈₉", "0123456789")
_PRINT = _rules(
    (r"√\s*(?:\(([^()]*)\)|\{([^{}]*)\}|([0-9]+|[A-Za-z]))", r"\\sqrt{\1\2\3}"),
    (r"[⁻⁰¹²³⁴⁵⁶⁷⁸⁹]+", lambda found: f"^{{{found[0].translate(_DIGITS_RAISED)}}}"),
    (r"[₀₁₂₃₄₅₆₇₈₉]+", lambda found: f"_{{{found[0].translate(_DIGITS_LOWERED)}}}"),
)
_GREEK = "alpha beta gamma delta theta lambda mu pi rho sigma phi omega"
_CHARACTERS = str.maketrans(
    {
        # Full width.
        **{chr(code + 0xFEE0): chr(code) for code in range(0x21, 0x7F)},
        **dict.fromkeys("−–﹣", "-"),
        **dict.fromkeys("\u00a0\u2009\u202f", r"\,"),
        **{sign: rf"\{name} " for sign, name in zip("αβγδθλμπρσφω", _GREEK.split(), strict=True)},
        # The parts of a fraction stand on either side of U+2044.
        **{
            sign: r"\frac{{{}}}{{{}}}".format(*normalize("NFKC", sign).split("\N{FRACTION SLASH}"))
            for sign in "½⅓⅔¼¾⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞"
        },
        "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "÷": r"\div ", "∞": r"\infty ", "≤": r"\le ", "≥": r"\ge ",
        "⩽": r"\le ", "⩾": r"\ge ", "≈": r"\approx ", "⁄": "/", "¢": r"\text{ cents}", "€": r"\text{ euros}",
        "£": r"\text{ pounds}", "≠": r"\ne ", "±": r"\pm ", "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ",
        "∅": r"\emptyset ", "°": r"^\circ ",
    }
)  # fmt: skip
# A backslash that is left over goes too.
_WHITE_SPACE = _rules((r"\s{2,}", " "), (r"(?<!\\)\\\s*$", ""))
_AMOUNT = r"\s*([0-9](?:[0-9.,~]|\\[,;:! ]|\{,\})*)"
_MONEY = re.compile(rf"\$?\\\${_AMOUNT}\$?|\${_AMOUNT}|(\\text\{{ (?:euros|pounds)\}}){_AMOUNT}")
_MAX_PASSES = 4


@lru_cache(maxsize=8192)
def plain_notation(content: str) -> str:
    """The content of a box, or a gold, in the notation that math-verify reads."""
    text = content if content.isascii() else _applied(_PRINT, content).translate(_CHARACTERS)
    # 12 dollars for \$12: the sign goes with the dollars of mathematics.
    text = _applied(_WHITE_SPACE, text)
    money = _MONEY.fullmatch(text.strip())
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
    text = _applied(_FONTS_OF_LETTERS, _unwrapped(_applied(_WRAPPERS, text).strip()))
    text = _applied(_CONSTRUCTS, _ANNOUNCEMENT.sub("", text, count=1)).strip()
    for _ in range(_MOST_LAST_MARKS):
        text = _LAST_MARK.sub("", text).rstrip()
    return _applied(_NUMBERS, text).strip()


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
    for brace in re.finditer("[{}]", text[opening:]):
        depth += 1 if brace[0] == "{" else -1
        if depth == 0:
            return opening + brace.start()
    return None


_SINGLE = re.compile(r"(?<!\\)\{([0-9A-Za-z])\}")
_WRITTEN_WORD = re.compile(r"[A-Za-z][a-z]{3,}")
_TEXT_OR_WORD = re.compile(r"\\text\s*\{\s*([A-Za-z ]{3,})\}|([A-Za-z ]{3,})")


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


def _without_idle_spaces(text: str) -> str:
    return _SINGLE.sub(r"\1", re.sub(r"(?<![0-9])\s+|\s+(?![0-9])", "", text))


_TEXTS = r"\\(?:text|mbox|textrm|mathrm|textbf|textit|mathit|mathbf)"
_LAST_WORDS = re.compile(rf"{_TEXTS}\s*\{{[^{{}}]*\}}(?:\^(?:[0-9]|\{{[0-9]\}}))?$")
_WORDS_THEN_BRACE = re.compile(r"\\(?:text|mbox|math(?:rm|it|bf))[^{}]*\{[^{}]*\}.*\}$", re.DOTALL)
_FRACTION_OF_HUNDRED = re.compile(r"(-?)\\frac\{([0-9]+)\}\{([0-9]+)\}\s*\\?%")
_LAST_LETTERS = re.compile(r"(?:(?<=[0-9}])|(?<=\s))([A-Za-z]{1,3})$")
_NUMBER = re.compile(r"[-+]?\s*(?:[0-9][0-9.,]*|\\frac\s*\{[0-9]+\}\s*\{[0-9]+\}|[0-9]+/[0-9]+)\s*")
_NO_UNITS = frozenset(re.findall("[a-z]+", "c d o t ab bc by mp mt rd st"))
_TAKEN_FOR_UNITS = _NO_UNITS | frozenset(
    re.findall(
        "[a-z]+",
        "g h l m s am cc cm dm ft gm hr kg km lb lt mm pm rs sq th yr are day deg gal kmh man men min mph mtr ohm per "
        "pie sec sue toy way",
    )
)
_FORMULA = re.compile(r"(\$|\\[(\[])([^$]{1,2000}?)(\$|\\[)\]])")


def in_box(content: str) -> str:
    """The form in which math-verify finds LaTeX and reads all of it; without a box or dollars it reads numbers only.

    It cuts an answer off at the first `\\text{}` where the end is a closing brace, whatever stands between. Here words
    at the very end go, where anything is left, and a space behind the last brace keeps the rest.
    """
    head = _LAST_WORDS.sub("", content).rstrip()
    content = _FRACTION_OF_HUNDRED.sub(r"\1\\frac{\2}{\g<3>00}", _with_last_letters(head or content))
    return rf"\boxed{{{content}\,}}" if _WORDS_THEN_BRACE.search(content) else rf"\boxed{{{content}}}"


def _with_last_letters(content: str) -> str:
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
    return _FORMULA.sub(lambda found: found[1] + _with_last_letters(found[2].rstrip()) + found[3], text)

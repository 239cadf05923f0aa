"""The `choice` grader: which option of a multiple-choice question an answer names, by letter or by its text."""

import re

from exgrpo_cli.base.types import Verdict
from exgrpo_cli.grading.extract import last_boxed
from exgrpo_cli.grading.plain import verdict_of

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"

_LONGEST_LINE = 200
_LONGEST_STATEMENT = 2000

_FONT = re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf|mbox)\s*\{([^{}]*)\}")
_MARKUP = re.compile(r"[*$`_\"“”]|\\[()\[\]]|\\(?=[ ,;!])")
# The label alone, in brackets, or before its option's text: "C", "(C)", "Option C", "C.", "C) Paris", "C: Paris".
_LETTER = re.compile(
    r"(?i:(?:option|choice)\s+)?[(\[]?([A-Za-z]|[1-9])(?:[)\]]|[.:](?=\s|$)|$)[.:)]?\s*(.*)", re.DOTALL
)
# "A - Paris", "A (Paris)", "Paris (A)": the text has to be that option's.
_WITH_TEXT = re.compile(r"([A-Za-z]|[1-9])\W{1,4}(?P<behind>\w.*)|(?P<before>.*\w)\W{1,4}([A-Za-z]|[1-9])", re.DOTALL)
_ANNOUNCED = re.compile(
    r"(?<!wrong )(?<!incorrect )(?<!false )\b(?:answer|(?:correct|right|best) (?:option|choice))\b"
    r"(?:\s+(?:is|was|(?:must|should|would|will|has to) be)\b)?\s*[:：=>-]?\s*"
    r"(?:\b(?:option|choice|letter)\b\s*)?",
    re.IGNORECASE,
)
# A small letter is a label in brackets and behind "option"; elsewhere it is an article or a quantity.
_NAMED_FIRST = re.compile(r"(?:[(\[]([A-Za-z]|[1-9])[)\]]|([A-Z]|[1-9]))(?![A-Za-z0-9'’])(?!\.[0-9]|\s*\?)")
_IS_RIGHT = r"\s+is\s+(?:the\s+)?(?:correct|right|best)\b"
_STATED = re.compile(
    rf"(?:\b(?:[Oo]ption|[Cc]hoice)\s+)?(?<![A-Za-z0-9])(?:[(\[]([A-Za-z]|[1-9])[)\]]|([A-Zb-hj-z]|[1-9]))\.?{_IS_RIGHT}|"
    r"\b(?:[Oo]ption|[Cc]hoice)\s+[(\[]?([A-Za-z]|[1-9])(?![A-Za-z0-9])[)\]]?"
    r"(?=\s*(?:$|[.,;:!](?![0-9])|(?:because|since|as|for)\b))"
)
# Of a clause before what it says: "statement 2 is correct", "neither B nor C is correct", "we rule out option B".
_DENIES = re.compile(
    r"\b(?:not|cannot|neither|nor|if|whether|statements?|than|rule|excluded?|eliminated?|discard|reject|wrong|incorrect)\b"
    r"|n['’]t\b|\b(?:or|and)\s*$",
    re.IGNORECASE,
)
_CLAUSE_END = re.compile(r"[.!?,;:]\s")
_DEMANDED_LINE = re.compile(
    r"\W*(?:the\s+)?(?:final\s+)?answer(?:\s+is)?\W+(?:(?:option|choice)\W+)?[A-Z1-9]\W*(?:/answer\W*)?", re.IGNORECASE
)


def grade_choice(gold: str, text: str, *, options: tuple[str, ...] | None, max_answer_chars: int) -> Verdict:
    """Compare the option that `text` names with the gold, which is a letter or the text of an option.

    The answer is looked for in this order: the box; the last line that says "answer" ("ANSWER: C", "the answer is
    (C)"), and there after the last "answer" that names an option; the whole text, where it is nothing but a label or
    an option; the last line that says "C is correct" or "option C". Two options named at once are no answer.

    Where the gold is a digit the options are numbered: 2 and B are the second of them. Else a digit names no option.
    """
    is_numbered = gold.strip().strip("()").isdigit()
    gold_letter = named_letter(gold, options, is_numbered=is_numbered)
    if gold_letter is None:
        return Verdict.UNPARSABLE_GOLD
    answer_letter = answered_letter(text, options, max_answer_chars, is_numbered=is_numbered)
    return Verdict.NO_ANSWER if answer_letter is None else verdict_of(answer_letter == gold_letter)


def ends_in_demanded_form(text: str) -> bool:
    """Whether the last line is "ANSWER: C": what prompts of multiple-choice sets demand, in place of a box."""
    return _DEMANDED_LINE.fullmatch(_without_markup(text.rstrip().rpartition("\n")[2][-_LONGEST_LINE:])) is not None


def named_letter(text: str, options: tuple[str, ...] | None, *, is_numbered: bool = False) -> str | None:
    """Upper-case letter of the option that `text` is: a label, an option's text, or both; None for anything else."""
    plain = _without_markup(text)
    match = _LETTER.fullmatch(plain)
    letter = None if match is None else _letter(match.group(1), options, is_numbered=is_numbered)
    if letter is not None and match is not None and not match[2] and (is_numbered or match[1].isupper()):
        # Of options that are letters or numbers themselves the label is meant.
        return letter
    by_text = _letter_of_option(plain, options)
    if by_text is not None:
        return by_text
    if letter is None or match is None:
        return _letter_with_text(plain, options, is_numbered=is_numbered)
    rest = match.group(2)
    return None if rest and options is not None and _letter_of_option(rest, options) != letter else letter


def _letter_with_text(plain: str, options: tuple[str, ...] | None, *, is_numbered: bool) -> str | None:
    match = _WITH_TEXT.fullmatch(plain.strip("()[]."))
    if match is None or options is None:
        return None
    letter = _letter(match[1] or match[4], options, is_numbered=is_numbered)
    return letter if letter == _letter_of_option(match["behind"] or match["before"], options) else None


def answered_letter(
    text: str, options: tuple[str, ...] | None, max_answer_chars: int, *, is_numbered: bool = False
) -> str | None:
    """Letter of the option that a graded text ends up naming; None where it names none, or several."""
    boxed = last_boxed(text)
    if boxed is not None:
        return named_letter(boxed, options, is_numbered=is_numbered) if len(boxed) <= max_answer_chars else None
    plain = _without_markup(text)
    line_end = None
    for announced in reversed(list(_ANNOUNCED.finditer(plain))):
        end = plain.find("\n", announced.end(), announced.end() + max_answer_chars + 1)
        if end < 0:
            end = len(plain)
        rest = plain[announced.end() : end] if end - announced.end() <= max_answer_chars else ""
        if not rest.strip(" .:!>}"):
            continue
        if line_end not in (None, end):
            break
        line_end = end
        letter = named_letter(rest.strip(" .:"), options, is_numbered=is_numbered)
        letter = letter or _first_letter(rest, options, is_numbered=is_numbered)
        if letter is not None:
            return letter
    if line_end is None and len(text) <= max_answer_chars:
        letter = named_letter(text, options, is_numbered=is_numbered)
        if letter is not None:
            return letter
    return _stated_letter(plain, options, is_numbered=is_numbered)


def _stated_letter(plain: str, options: tuple[str, ...] | None, *, is_numbered: bool) -> str | None:
    """The one option that the last line with "C is correct" or "option C" names."""
    for line in reversed(plain[-_LONGEST_STATEMENT:].splitlines()):
        stated = [found for found in _STATED.finditer(line) if not _denied(line[: found.start()])]
        named = {_letter(found[1] or found[2] or found[3], options, is_numbered=is_numbered) for found in stated}
        if stated:
            return named.pop() if len(named) == 1 else None
    return None


def _denied(before: str) -> bool:
    """Whether a clause that begins like this says the contrary, or something else."""
    return _DENIES.search(_CLAUSE_END.split(before)[-1]) is not None


def _letter(label: str, options: tuple[str, ...] | None, *, is_numbered: bool) -> str | None:
    """Letter of the option with this label; None where there are not so many, or a digit labels none."""
    if label.isdigit() and not is_numbered:
        return None
    place = int(label) - 1 if label.isdigit() else LETTERS.index(label.upper())
    return LETTERS[place] if place < len(options or LETTERS) else None


def _first_letter(line: str, options: tuple[str, ...] | None, *, is_numbered: bool) -> str | None:
    """The label a line begins with, as in "C because ..."; not the article of "A good guess", nor "B or C"."""
    match = _NAMED_FIRST.match(line)
    if match is None:
        return None
    rest = line[match.end() :].lstrip(" )].,:")
    if re.match(r"(?:and|or|/|&)?\s*[(\[]?(?:[A-Z]|[1-9])\b(?![A-Za-z'’])", rest):
        return None
    label = match[1] or match[2]
    is_article = match[2] in ("A", "I") and re.match(r" [a-z]", line[match.end() :]) is not None
    # "A is correct" names an option all the same.
    if is_article and not re.match(r" is (?:the )?(?:correct|right|best)\b", line[match.end() :]):
        return None
    return _letter(label, options, is_numbered=is_numbered)


def _letter_of_option(text: str, options: tuple[str, ...] | None) -> str | None:
    """Letter of the one option whose text this is, whatever its case and white space."""
    wanted = _evened(text)
    matches = [letter for letter, option in zip(LETTERS, options or (), strict=False) if _evened(option) == wanted]
    return matches[0] if len(matches) == 1 else None


def _evened(text: str) -> str:
    return " ".join(_without_markup(text).casefold().rstrip(". ").split())


def _without_markup(text: str) -> str:
    return _MARKUP.sub("", _FONT.sub(r"\1", text)).strip()
